# SPDX-License-Identifier: Apache-2.0
"""The demo on a tiny checkpoint, and its documents."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from context_compressors import demo
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.task_tokens import add_task_tokens

TEXTS = sorted(demo.DOCUMENTS.glob("*.txt"))


@pytest.fixture(scope="module", params=["mean_pooling", "icae"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny compressor with one token a byte, saved as a checkpoint is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    llama = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )
    torch.manual_seed(0)
    if request.param == "icae":
        add_task_tokens(tokenizer)
        layout = {"chunk_size": 128, "position_layout": "enhanced"}
        model = ICAEForCausalLM(ICAEConfig(decoder_config=llama, compression_ratios=(4, 16), **layout))
    else:
        model = MeanPoolingForCausalLM(MeanPoolingConfig(decoder_config=llama, compression_ratios=(4, 16)))
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_without_a_checkpoint_the_demo_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert demo.main(["--checkpoint", str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "there is no checkpoint in" in error
    assert "--checkpoint" in error
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_no_compressor_is_refused(checkpoint: Path, tmp_path: Path):
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM, not a context compressor"):
        demo.load(str(tmp_path))


def test_steps_below_one_are_refused():
    with pytest.raises(SystemExit) as exit_info:
        demo.main(["--steps", "0"])
    assert exit_info.value.code == 2


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_every_document_is_of_the_length_trained_on_and_answers_its_questions(path: Path):
    text = path.read_text(encoding="utf-8")
    questions = json.loads((demo.DOCUMENTS / "questions.json").read_text(encoding="utf-8"))[path.stem]
    recipe = yaml.safe_load((demo.CHECKPOINT / "recipe.yaml").read_text(encoding="utf-8"))
    tokens = AutoTokenizer.from_pretrained(demo.CHECKPOINT).tokenize(text.strip())
    assert recipe["min_context_tokens"] <= len(tokens) <= recipe["max_context_tokens"]
    for question in questions:
        assert any(answer in text for answer in question["answers"]), question["question"]


def test_all_questions_belong_to_a_document():
    questions = json.loads((demo.DOCUMENTS / "questions.json").read_text(encoding="utf-8"))
    assert sorted(questions) == [path.stem for path in TEXTS]


@pytest.mark.slow
def test_the_demo_runs_from_end_to_end_with_remote_code(checkpoint: Path, tmp_path: Path):
    # A process of its own, as `make demo` starts it: here the package's classes are registered, there they are not.
    threads = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
    result = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "context_compressors.demo"),
            *("--checkpoint", str(checkpoint), "--output", "out", "--steps", "2"),
        ],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", **threads},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Do you wish to run" not in result.stdout
    tables = result.stdout[result.stdout.index("6. results") :]
    for cell in ("| no context", "| full context", "| 4 ", "| 16 ", "answers right", "of 14"):
        assert cell in tables
    assert "loaded it again: it writes the same" in result.stdout
    assert "2/2" in result.stderr  # the progress bar of the fine-tuning
    out = tmp_path / "out"
    assert (out / "quality_by_ratio.png").read_bytes().startswith(b"\x89PNG")
    assert {row["condition"] for row in json.loads((out / "results.json").read_text())["rows"]} == {
        "no_context",
        "full_context",
        "ratio=4",
        "ratio=16",
    }
    files = {path.name for path in (out / "model").iterdir()}
    method = json.loads((checkpoint / "config.json").read_text())["model_type"].removesuffix("_compressor")
    assert {"README.md", "config.json", "model.safetensors", f"modeling_{method}.py", "tokenizer.json"} <= files
    # Nothing that belongs to this machine is in what could be published.
    assert not files & {"training_args.bin", "optimizer.pt"}
