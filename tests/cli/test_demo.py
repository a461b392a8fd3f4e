# SPDX-License-Identifier: Apache-2.0
"""The demo on a tiny checkpoint, and its pages."""

import os
import subprocess
import sys

import pytest
import torch
from byte_tokenizers import CHAT_TEMPLATE, byte_tokenizer, tiny_llama

from context_compressors import demo
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.evaluation.metrics import holds_answer, normalize_answer
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.parts.text_ids import opening_ids

PAGES = demo.read_pages()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny compressor with one token a byte, saved as a checkpoint is."""
    tokenizer = byte_tokenizer(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>")
    llama = tiny_llama(tokenizer, max_position_embeddings=8192)
    torch.manual_seed(0)
    tokenizer.chat_template = CHAT_TEMPLATE
    fields = {"decoder_config": llama, "compression_ratios": (4, 16), "chunk_size": 512}
    fields |= {"prompt_format": "chat", "slots_after_ids": opening_ids(tokenizer)}
    model = MeanPoolingForCausalLM(MeanPoolingConfig(**fields))
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# --- pages ---


def test_every_page_has_150_to_600_words_and_holds_the_answers_to_its_questions():
    for page in PAGES:
        assert 150 <= len(page.text.split()) <= 600, page.name
        assert 4 <= len(page.questions) == len(page.answers) <= 6, page.name
        for question, answers in zip(page.questions, page.answers, strict=True):
            assert question.endswith("?")
            assert normalize_answer(answers[0]) in normalize_answer(page.text), question
            # What counts as right is short: a model that repeats a sentence has found it all the same.
            assert all(len(answer.split()) <= 10 for answer in answers), question


def test_an_answer_is_right_if_it_holds_an_accepted_one_as_whole_words():
    assert holds_answer("2,310 pounds", ["2310 Pounds"])
    assert not holds_answer("in 19611", ["1961"])


# --- reading ---


@pytest.mark.slow
def test_the_full_text_and_every_ratio_are_asked(checkpoint):
    pipe, page = demo.load(checkpoint, dtype=torch.float32), PAGES[0]
    readings = demo.read_page(pipe, page)
    assert [reading.name for reading in readings] == ["full text", "4x", "16x"]
    for reading, ratio in zip(readings, (None, 4, 16), strict=True):
        memory = None if ratio is None else pipe.compress(page.text, ratio=ratio)
        source = {"context": page.text, "full_text": True} if memory is None else {"memory": memory}
        asked = [pipe(question, **source, max_new_tokens=demo.NEW_TOKENS)["answer"] for question in page.questions]
        assert reading.answers == asked
        if memory is not None:
            assert (reading.num_places, reading.num_bytes) == (int(memory.num_slots[0]), memory.nbytes)


def test_the_faster_of_two_types_is_taken(monkeypatch):
    for seconds, dtype in (((2.0, 1.0), torch.bfloat16), ((1.0, 2.0), torch.float32)):
        times = dict(zip((torch.float32, torch.bfloat16), seconds, strict=True))
        monkeypatch.setattr(demo, "_seconds", lambda kind, device, times=times: times[kind])
        assert demo.fastest_dtype("cpu") is dtype


# --- the command ---


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no checkpoint in .*none"):
        demo.run(tmp_path / "none")


@pytest.mark.release
@pytest.mark.slow
def test_the_demo_runs_from_end_to_end_with_remote_code(checkpoint, tmp_path):
    # A process of its own, as `make demo` starts it: here the package's classes are registered, there they are not.
    threads = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
    code = f"from pathlib import Path; from context_compressors import demo; demo.run(Path({str(checkpoint)!r}), 2)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", **threads},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    for page in PAGES:
        assert (f"\n{page.title} (" in result.stdout) == (page in PAGES[:2])
    assert "--pages N reads fewer" in result.stdout
    num_questions = sum(len(page.questions) for page in PAGES[:2])
    rows = result.stdout[result.stdout.index("all pages") :].splitlines()
    for name in ("full text", "4x", "16x"):
        assert any(row.startswith(f"| {name} ") and f" of {num_questions} " in row for row in rows)
