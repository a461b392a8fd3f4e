# SPDX-License-Identifier: Apache-2.0
"""Ten questions about a page at toy size: cached readings write what `generate` writes, and the result files."""

import json
from pathlib import Path

import pytest
import torch
from byte_tokenizers import CHAT_TEMPLATE
from transformers import PreTrainedTokenizerFast

from context_compressors.data.task_tokens import add_task_tokens
from context_compressors.demo import load
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.parts.text_ids import opening_ids, question_ids

QUESTIONS = ["How long does a full charge take?", "How many years is the guarantee?"]


@pytest.fixture(scope="module", params=["chat", "icae"])
def checkpoint(
    request: pytest.FixtureRequest,
    base: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A tiny compressor on the base that reads 1,024 positions."""
    folder = tmp_path_factory.mktemp("checkpoint")
    own = type(tokenizer).from_pretrained(base)
    torch.manual_seed(0)
    fields = {"compression_ratios": [4, 8], "chunk_size": 128}
    if request.param == "icae":
        ids = add_task_tokens(own)
        model = ICAEForCausalLM.from_base(base, **fields, position_layout="enhanced", task_token_ids=ids)
    else:
        own.chat_template = CHAT_TEMPLATE
        model = MeanPoolingForCausalLM.from_base(
            base, **fields, prompt_format="chat", slots_after_ids=opening_ids(own)
        )
    model.save_pretrained(folder, include_base=True)
    own.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [None, 4])
def test_answers_from_a_kept_cache_are_those_of_generate(script, checkpoint: Path, ratio: int | None):
    benchmark, pipe = script("answer_ten_questions.measure"), load(checkpoint, torch.float32, torch.device("cpu"))
    model, config, tokenizer = pipe.model, pipe.model.config, pipe.tokenizer
    page = benchmark.page_of(pipe, 300, QUESTIONS, 6)
    memory, asked = None, {}
    if ratio is None:
        rows = [question_ids(config, tokenizer, question, document_ids=page) for question in QUESTIONS]
    else:
        memory = model.compress(torch.tensor([page]), ratio=ratio)
        rows, asked = [question_ids(config, tokenizer, question) for question in QUESTIONS], {"memory": memory}
    reader = benchmark.Reader(model, rows, memory)
    reader.read()
    expected = []
    for row in rows:
        output = model.generate(
            torch.tensor([row]), **asked, max_new_tokens=6, do_sample=False, pad_token_id=257, eos_token_id=-1
        )
        expected.append(output[0, len(row) :].tolist())
    # Twice, and in another order: an answer leaves nothing behind.
    assert [reader.answer(index, 6) for index in (0, 1, 1, 0)] == [expected[index] for index in (0, 1, 1, 0)]
    # One layer's keys and values of two heads of eight numbers.
    places = len(page) if memory is None else int(memory.num_slots[0])
    assert 0 < reader.num_bytes // (2 * 2 * 8 * 4) - places < 60


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["chat"], indirect=True)
def test_every_length_has_a_row_for_the_text_and_each_ratio_and_too_long_a_page_is_cut(
    script, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "results" / "ten.json"
    arguments = ["--checkpoint", str(checkpoint), "--lengths", "200", "2000", "--ratios", "4", "8", "--questions", "3"]
    arguments += ["--new-tokens", "2", "--repeats", "2", "--device", "cpu", "--output", str(output)]
    assert script("answer_ten_questions.measure").main(arguments) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    rows = content["rows"]
    assert content["settings"]["dtype"] in ("float32", "bfloat16")
    assert content["settings"]["checkpoint"] == checkpoint.name
    fits = rows[-1]["num_tokens"]
    assert 850 < fits < 1024
    assert [(row["asked_tokens"], row["num_tokens"], row["read_as"], row["places"]) for row in rows] == [
        (200, 200, "text", 200),
        (200, 200, "4x", 50),
        (200, 200, "8x", 25),
        (2000, fits, "text", fits),
        (2000, fits, "4x", _slots(fits, 4)),
        (2000, fits, "8x", _slots(fits, 8)),
    ]
    for row in rows:
        assert [len(sample["answers"]) for sample in row["samples"]] == [3, 3]
        assert all((sample["compression"] == 0) is (row["read_as"] == "text") for sample in row["samples"])
        # A text is kept as its keys and values, a memory as its slots: 16 numbers of 4 or 2 bytes each.
        size = 4 if content["settings"]["dtype"] == "float32" else 2
        kept = row["cache_bytes"] if row["read_as"] == "text" else row["places"] * 16 * size
        assert row["kept_bytes"] == kept
    assert f"| {fits:,} (of 2,000) | 8x " in capsys.readouterr().out
    assert str(checkpoint.parent) not in output.read_text(encoding="utf-8")


def _slots(num_tokens: int, ratio: int) -> int:
    """Slots of chunks of 128 tokens."""
    chunks = [128] * (num_tokens // 128) + [num_tokens % 128]
    return sum(-(-chunk // ratio) for chunk in chunks)
