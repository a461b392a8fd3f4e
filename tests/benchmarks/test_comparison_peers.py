# SPDX-License-Identifier: Apache-2.0
"""Peers of the comparison answer as `generate` does, and resume; those of other libraries where these are installed.

`KVPRESS_PYTHON` and `LLMLINGUA_PYTHON` name interpreters of environments that have the libraries.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparison_files import questions_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]


def answers_of(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]


def test_peers_answer_as_generate_does_and_go_on_where_they_stopped(script, base: Path, tokenizer, tmp_path: Path):
    peers, file, output = script("comparison.peers"), questions_file(tmp_path, tokenizer), tmp_path / "cut.jsonl"
    options = ["--reader", str(base), "--base", str(base), "--dtype", "float32", "--questions", f"{file}#2"]
    peers.main(["--system", "cut", "--ratios", "1", "4", "--output", str(output), *options])
    found = answers_of(output)
    assert [(line["id"], line["ratio"]) for line in found] == [("q0", 1), ("q0", 4), ("q1", 1), ("q1", 4)]
    model, question = AutoModelForCausalLM.from_pretrained(base), json.loads(file.read_text().splitlines()[0])
    for line, kept in zip(found, (None, -(-len(question["context_ids"]) // 4)), strict=False):
        context = question["context_ids"][:kept]
        row = torch.tensor([[*question["head_ids"], *context, *question["prompt_ids"]]])
        output_ids = model.generate(row, max_new_tokens=4, do_sample=False, eos_token_id=257, pad_token_id=257)
        assert line["answer"] == tokenizer.decode(output_ids[0, row.shape[1] :], skip_special_tokens=True).strip()
        assert (line["kept_positions"], line["memory_bytes"]) == (len(context), len(tokenizer.decode(context)))
    # Killed in the middle of the third line.
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:2]) + whole[2][:20])
    peers.main(["--system", "cut", "--ratios", "1", "4", "--output", str(output), *options])
    assert answers_of(output) == found
    peers.main(
        ["--system", "self_information", "--ratios", "1", "4", "--output", str(tmp_path / "own.jsonl"), *options]
    )
    whole, quarter, *_ = answers_of(tmp_path / "own.jsonl")
    assert whole == found[0]
    assert quarter["kept_positions"] == found[1]["kept_positions"]
    states = [*question["head_ids"][:1], *question["context_ids"]]
    logits = model(torch.tensor([states])).logits[0, :-1].log_softmax(-1)
    nll = -logits[range(len(states) - 1), states[1:]]
    kept = sorted(nll.topk(quarter["kept_positions"]).indices.tolist())
    assert quarter["memory_bytes"] == len(
        tokenizer.decode([question["context_ids"][place] for place in kept]).encode()
    )
    peers.main(["--system", "no_context", "--ratios", "0", "--output", str(tmp_path / "none.jsonl"), *options])
    assert [line["kept_positions"] for line in answers_of(tmp_path / "none.jsonl")] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "system", "ratio"),
    [("kvpress", "snapkv", 1), ("kvpress", "tova_aware", 2), ("llmlingua", "llmlingua", 2)],
)
def test_a_library_keeps_a_share_of_the_context_and_is_answered_from(
    library: str, system: str, ratio: int, base: Path, tokenizer, tmp_path: Path
):
    name = f"{library.upper()}_PYTHON"
    python = os.environ.get(name) or (importlib.util.find_spec(library) and sys.executable)
    if not python:
        pytest.skip(f"{library} is not installed here, and {name} names no environment")
    file, output = questions_file(tmp_path, tokenizer, 1), tmp_path / "answers.jsonl"
    options = ["--reader", base, "--base", base, "--dtype", "float32", "--questions", file, "--output", output]
    command = [python, "-m", "benchmarks.comparison.peers", "--system", system, "--ratios", ratio, *options]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT)
    (line,), question = answers_of(output), json.loads(file.read_text())
    num_tokens = len(question["context_ids"])
    assert 0 < line["kept_positions"] < num_tokens + (ratio == 1)
    if ratio == 1:
        # Nothing is dropped, and the answer is that of the full text.
        model = AutoModelForCausalLM.from_pretrained(base)
        row = torch.tensor([[*question["head_ids"], *question["context_ids"], *question["prompt_ids"]]])
        written = model.generate(row, max_new_tokens=4, do_sample=False, eos_token_id=257, pad_token_id=257)
        assert line["kept_positions"] == num_tokens
        assert line["answer"] == tokenizer.decode(written[0, row.shape[1] :], skip_special_tokens=True).strip()
