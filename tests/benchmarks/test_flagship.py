# SPDX-License-Identifier: Apache-2.0
"""How heads and chunks share a budget of ranked key/values, against plain loops."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest
import torch

from context_compressors import RankedKeyValuesForCausalLM
from context_compressors.modeling.memory import headwise_pairs


@pytest.fixture(scope="module")
def budgets(script):
    return script("flagship.budgets")


@pytest.fixture
def model(base):
    torch.manual_seed(0)
    made = RankedKeyValuesForCausalLM.from_base(str(base)).eval()
    for scorer in made.model.scorers:
        torch.nn.init.normal_(scorer.weight)
    return made


def highest_of(scores, number):
    """Places of the highest, in a plain sort."""
    return set(sorted(range(len(scores)), key=lambda place: -scores[place])[:number])


def pairs_of(memory, head):
    """Keys and values that one head of the only layer keeps."""
    (keys, values), heads = memory.key_values[0], memory.head_ids[0].T
    both = torch.cat([keys, values], dim=-1)[0]
    return [pair.tolist() for pair in both[heads == head]]


def test_heads_with_fixed_shares_keep_their_highest_and_as_many_together(budgets):
    scores, mask = (
        torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0)),
        torch.ones(2, 12, dtype=torch.long),
    )
    mask[1, 9:] = 0
    shares, totals = torch.tensor([0.55, 0.3, 0.1, 0.05]), torch.tensor([16, 24])
    is_kept = budgets.by_shares(shares)(scores, mask, totals)
    # Of 24 the first head wants 13 and has 9 places, as has the second: the others get what these cannot keep.
    assert is_kept.sum(dim=2).tolist() == [[8, 5, 2, 1], [9, 9, 4, 2]]
    for row, head in [(row, head) for row in range(2) for head in range(4)]:
        real = scores[row, head][mask[row] == 1].tolist()
        kept = is_kept[row, head].nonzero().flatten().tolist()
        assert set(kept) == highest_of(real, len(kept))
    assert budgets.shares_of(is_kept)[0].tolist() == [8 / 16, 5 / 16, 2 / 16, 1 / 16]


def test_chunks_with_one_budget_keep_the_highest_pairs_of_the_document(budgets, model):
    model.config.chunk_size = 8
    ids, seen = torch.arange(20).tolist(), []

    def noted(scores, mask, num_kept):
        seen.append(scores.masked_fill(mask[:, None] == 0, -torch.inf))
        return budgets.of_all_chunks(scores, mask, num_kept)

    shipped = (headwise_pairs.highest, headwise_pairs.gather_pairs)
    with torch.inference_mode():
        ways = [shipped, shipped, (noted, budgets.gathered_of_all)]
        memories, kept = budgets.compressed(model, [ids], [1, 4, 4], ways)
    # Nothing stays changed.
    assert (headwise_pairs.highest, headwise_pairs.gather_pairs) == shipped
    whole, of_each, of_all = ([pairs_of(memory, head) for head in range(2)] for memory in memories)
    # Chunks of 8, 8 and 4 tokens keep 2, 2 and 1 of each head on average, or together 10 pairs.
    assert kept[1].sum(dim=(1, 2)).tolist() == [4, 4, 2]
    assert sum(map(len, of_all)) == sum(map(len, of_each)) == 10
    assert of_all != of_each
    scores = [seen[0][:, head].flatten() for head in range(2)]
    wanted = highest_of(torch.cat(scores).tolist(), 10)
    for head, pairs in enumerate(of_all):
        places = sorted(place - 24 * head for place in wanted if place // 24 == head)
        assert pairs == [whole[head][place] for place in places]


@pytest.mark.slow
def test_questions_are_asked_once_and_differences_are_paired(budgets, model, tokenizer, tmp_path, capsys):
    rows = [
        {"context": f"Mill {i} stands by a river.", "question": f"Which mill is {i}?", "answers": [f"number {i}"]}
        for i in range(96)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "squad.parquet")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    answers, output = tmp_path / "answers.jsonl", tmp_path / "result.json"
    command = [str(tmp_path / "model"), "--data", str(tmp_path / "squad.parquet"), "--documents", "3", "--ratios", "2"]
    command += ["4", "--chunk-sizes", "32", "--new-tokens", "2", "--answers", str(answers), "--output", str(output)]
    assert budgets.main(command) == 0
    header, *lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["part"] for line in lines] == ["shares"] + ["heads", "chunks of 32"] * 3
    assert [sum(shares) for shares in lines[0]["shares"]] == pytest.approx([1, 1])
    documents = budgets.drawn(str(tmp_path / "squad.parquet"), 0, 11, 0, tokenizer)[8:]
    for line in lines[1:]:
        # The second way of sharing alone is right: at 2x, about the last document.
        right = [known[0] for known in documents[line["document"]].answers]
        first, second, *others = line["texts"]
        assert (first[-2:], second[-2:], len(others)) == ("2x", "2x", 2)
        line["texts"] |= dict.fromkeys(line["texts"], ["wrong"] * 8)
        line["texts"] |= {second: right} if line["document"] == 2 else {}
    # A kill leaves an unfinished line.
    answers.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]) + '{"part": "hea')
    assert budgets.main(command) == 0
    # Nothing is asked again.
    assert len(answers.read_text().splitlines()) == 1 + len(lines)
    assert budgets.main([*command, "--seed", "1"]) == 1
    assert re.search(r"error: .* has answers to .*'seed': 0.*, not to .*'seed': 1", capsys.readouterr().err)
    assert budgets.main([*command, "--documents", "5"]) == 1
    assert "has 96 contexts from row 0 on, and 104 are needed" in capsys.readouterr().err
    heads, chunks = (json.loads(output.read_text())["rows"][start : start + 4] for start in (0, 4))
    for of_part in (heads, chunks):
        assert [row["f1"] for row in of_part] == [0, 33.33, 0, 0]
        assert [row["difference"] for row in of_part] == [0, 33.33, 0, 0]
        assert 0 <= of_part[1]["moved"] <= 1
    # A paragraph by itself has a memory of its own, and eight questions about a document share one.
    low, high = heads[1]["difference_interval"]
    assert 10 < low < 25 < 45 < high < 60
    assert chunks[1]["difference_interval"] == [0, 100]
