# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what a decoder forgot, with tiny models, against scores of one sample at a time."""

import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from byte_tokenizers import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM

pytestmark = pytest.mark.slow  # three checkpoints are made and loaded again
ROWS = [
    {"context": f"Ann has {i} pens and buys {i} more.", "question": "How many has she?", "answers": [str(2 * i)]}
    for i in range(3, 7)
]


@pytest.fixture
def forgetting(script):
    return script("forgetting.measure")


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A language model, a compressor on it before the second stage, and one whose decoder has changed."""
    root = tmp_path_factory.mktemp("checkpoints")
    tokenizer = byte_tokenizer(**SPECIAL)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=258, max_position_embeddings=256, bos_token_id=256, eos_token_id=257, **sizes)
    LlamaForCausalLM(config).save_pretrained(root / "base")
    for name, stage in (("first", "autoencoding"), ("second", "keft")):
        fields = {"encoder_layers": 1, "training_stage": stage}
        model = GMSAForCausalLM.from_base(str(root / "base"), compression_ratios=(4,), **fields)
        if stage == "keft":
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
    for name in ("base", "first", "second"):
        tokenizer.save_pretrained(root / name)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), root / "qa_gsm8k_test.parquet")
    return {path.name: path for path in root.iterdir()} | {"data": root}


@torch.no_grad()
def answer_perplexity(folder: Path) -> float:
    """The language model's own, of the answers to the questions about the texts in words."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder).eval(), byte_tokenizer(**SPECIAL)
    nll, count = 0.0, 0
    for row in ROWS:
        text = f"{row['context']}\nQuestion: {row['question']}\nAnswer:"
        prompt = [256, *tokenizer(text).input_ids]
        target = [*tokenizer(f" {row['answers'][0]}").input_ids, 257]
        logits = model(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
        nll -= float(logits.log_softmax(-1)[range(len(target)), target].sum())
        count += len(target)
    return math.exp(nll / count)


def run(forgetting, tmp_path: Path, before: Path, after: Path, *more: str) -> list[dict]:
    output = tmp_path / "forgetting.json"
    arguments = [str(before), str(after), "--samples", "4", "--document-tokens", "100", "--new-tokens", "2", *more]
    assert forgetting.main([*arguments, "--batch-size", "2", "--device", "cpu", "--output", str(output)]) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert str(before.parent) not in output.read_text(encoding="utf-8")
    assert (content["settings"]["before"], content["settings"]["after"]) == (before.name, after.name)
    return content["rows"]


def test_decoders_are_scored_as_language_models_without_a_memory(
    forgetting, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = run(forgetting, tmp_path, folders["first"], folders["second"], "--data", str(folders["data"]))
    assert [(row["dataset"], row["num_samples"], row["num_truncated"]) for row in rows] == [
        ("gsm8k", 4, 0),
        ("generated", 4, 0),
    ]
    # The first stage leaves the decoder as it was.
    assert rows[0]["before"]["answer_perplexity"] == pytest.approx(answer_perplexity(folders["base"]), rel=2e-4)
    for row in rows:
        assert abs(row["after"]["answer_perplexity"] - row["before"]["answer_perplexity"]) > 0.1
        assert all(0 <= row["after"][metric] <= 100 for metric in ("exact_match", "f1"))
    assert "| gsm8k" in capsys.readouterr().out


@torch.no_grad()
def test_mmlu_is_answered_with_the_likeliest_letter(forgetting, folders: dict[str, Path], tmp_path: Path):
    """A few rows as the data set is published; the second decoder's answers differ from the first one's."""
    choices, subject = ["a cell", "an atom", "ice"], "high_school_biology"
    rows = [
        {"subject": subject, "question": f"What is {i}?", "choices": [*choices, str(i)], "answer": i % 4}
        for i in range(6)
    ]
    (folders["data"] / "mmlu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--data", str(folders["data"]), "--mmlu", "mmlu.jsonl", "--samples", "6"]
    *_, row = run(forgetting, tmp_path, folders["base"], folders["second"], *more)
    assert (row["dataset"], row["num_samples"]) == ("mmlu", 6)
    tokenizer = byte_tokenizer(**SPECIAL)
    for side, model in (
        ("before", LlamaForCausalLM.from_pretrained(folders["base"])),
        ("after", GMSAForCausalLM.from_pretrained(folders["second"])),
    ):
        right = 0
        for question in rows:
            choices = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", question["choices"], strict=True))
            prompt = "The following are multiple choice questions (with answers) about high school biology.\n\n"
            prompt += f"{question['question']}\n{choices}\nAnswer: "
            ids = torch.tensor([[256, *tokenizer(prompt).input_ids]])
            scores = [float(model(ids).logits[0, -1, tokenizer.convert_tokens_to_ids(letter)]) for letter in "ABCD"]
            right += scores.index(max(scores)) == question["answer"]
        assert row[side] == {"accuracy": pytest.approx(100 * right / 6, abs=0.01)}


def test_the_same_decoder_has_forgotten_nothing(forgetting, folders: dict[str, Path], tmp_path: Path):
    (row,) = run(forgetting, tmp_path, folders["base"], folders["first"])
    assert row["after"] == pytest.approx(row["before"], rel=1e-3)


def test_what_cannot_be_compared_is_refused(
    forgetting, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "other"
    LlamaForCausalLM.from_pretrained(folders["base"]).save_pretrained(other)
    swapped = byte_tokenizer(behind=["extra"], **SPECIAL)
    swapped.save_pretrained(other)
    for arguments, message in (
        ([str(folders["base"]), str(other)], "must have one vocabulary, they have two"),
        ([str(folders["base"]), str(tmp_path)], "there is no checkpoint"),
        ([str(folders["base"])] * 2 + ["--data", str(tmp_path)], "there is no file"),
    ):
        assert forgetting.main([*arguments, "--device", "cpu"]) == 1
        assert message in capsys.readouterr().err
