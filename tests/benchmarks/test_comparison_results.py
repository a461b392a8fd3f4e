# SPDX-License-Identifier: Apache-2.0
"""The comparison's results and page, at toy size."""

import json
import re
from pathlib import Path

import pytest
from comparison_files import ask, write_answers


@pytest.mark.slow
def test_the_page_has_scores_and_verdicts(script, comparison, tokenizer, tmp_path: Path):
    results, page, systems = script("comparison.results"), script("comparison.page"), comparison(tmp_path)
    text = ask(systems, tokenizer)
    right, wrong = [f"Nora Zill {number}" for number in range(12)], ["bees"] * 12
    write_answers(systems.peers, "no_context", 0, wrong, systems.table)
    write_answers(systems.peers, "full_context", 1, right, systems.table)
    for ratio, better, worse in (
        (2, right, wrong),
        (4, wrong, right),
        (8, ["bees", *right[1:]], [right[0], "bees", *right[2:]]),
    ):
        write_answers(systems.peers, "bm25", ratio, better, systems.table)
        write_answers(systems.peers, "longllmlingua", ratio, worse, systems.table)
    for ratio in (2, 4, 8):
        write_answers(systems.peers, "cut", ratio, [*right[:2], *wrong[2:6], *right[6:]], systems.table)
        # A system that has not answered all questions is paired on those that it has.
        write_answers(systems.peers, "llmlingua", ratio, [*right[:2], *wrong[2:6]], systems.table)
    write_answers(systems.times("bm25").parent, "bm25", 2, right, systems.table)
    content = results.gather(systems)
    ordering = next(entry for entry in content["orderings"] if entry["second"] == "longllmlingua")
    assert [entry["verdict"] for entry in ordering["ratios"]] == ["higher", "lower", "inconclusive"]
    assert {entry["verdict"] for entry in content["orderings"][0]["ratios"]} == {"not run"}
    row = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 2, "mean"))
    assert (row["scores"]["f1"], row["scores"]["exact_match"], row["num_questions"]) == (100, 100, 48)
    squad = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 2, "squad"))
    assert squad["scores"]["retention"] == 100
    # It selects by the question: the whole text is kept.
    assert row["costs"]["memory_bytes"] == pytest.approx(len(json.loads(text.splitlines()[0])["context"]), abs=2)
    # Seconds are those that were measured apart.
    other = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 4, "mean"))
    assert (row["costs"]["answer_seconds"], other["costs"].get("answer_seconds")) == (0.2, None)
    page.write(content, tmp_path / "page")
    written = (tmp_path / "page" / "README.md").read_text()
    assert re.search(r"\| No context +\| 0.0 \[0.0, 0.0\] +\|\n\| Full text +\| 100.0 \[100.0, 100.0\] \|", written)
    assert "Fewer than 48 questions: LLMLingua 24." in written
    scores = written[written.index("| system") : written.index("## Paired differences")]
    assert [line.split("|")[1].strip() for line in scores.splitlines() if line.startswith("| ")][1:] == [
        "LongLLMLingua",
        "Truncated text",
        "LLMLingua",
        "BM25 sentences",
    ]
    assert re.search(r"\| BM25 sentences +\| text, question seen +\|.*\| higher, lower, higher +\|", scores)
    assert re.search(
        r"\| BM25 sentences +\| LongLLMLingua +\| higher: \+\d.*\| lower: -\d.*\| inconclusive: \+0.0 \[", written
    )


def test_the_committed_page_is_that_of_the_committed_file(script, tmp_path: Path):
    page, plan = script("comparison.page"), script("comparison.plan")
    page.write(plan.read_results(plan.PUBLISHED), tmp_path)
    for name in ("README.md", "comparison.json", "by_question.json"):
        assert (tmp_path / name).read_text() == (plan.HERE / name).read_text(), name


def test_the_documents_of_the_committed_file_are_apart(script):
    plan = script("comparison.plan")
    content = plan.read_results(plan.PUBLISHED)
    documents = content.get("documents_apart", {}).get("documents", {})
    parts = {name: set(documents.pop(name, "").split()) for name in ("trained", "chose")}
    parts["reported"] = {id_ for ids in documents.values() for id_ in ids.split()}
    assert sum(map(len, parts.values())) == len(set().union(*parts.values()))


def test_what_is_published_is_not_done_again_unless_that_is_asked_for(
    script, comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(script("comparison.plan"), "PUBLISHED", tmp_path / "comparison.json")
    table = comparison(tmp_path).table
    rows = [
        {"system": name, "ratio": ratio, **of_set}
        for of_set in ({"set": "mean", "num_questions": 8}, {"set": "squad", "by_question": [[100.0]]})
        for name in ("cut", "snapkv", "mean_pooling", "snap_kv")
        for ratio in ((2, 4) if name == "snapkv" else (2, 4, 8))
    ]
    content = {"settings": {**table, "budget": {}}, "reader": "base", "rows": rows}
    (tmp_path / "comparison.json").write_text(json.dumps(content))

    def systems(*options: str) -> set[str]:
        jobs = [job.name for stage in comparison(tmp_path, *options).stages() for jobs in stage for job in jobs]
        return {name.removeprefix("peers/").partition("/")[0] for name in jobs}

    everything = systems("--again")
    # Memories of mean pooling are to be rounded, too: its checkpoint is needed.
    assert everything - systems() == {"cut", "snap_kv"}
    assert {"cut", "snapkv", "mean_pooling", "mean_pooling_int4", "snap_kv"} <= everything
    # Of more seeds there is nothing, and another reader's answers are others.
    assert systems("--seeds", "1", "2") == everything
    assert systems("--reader", "other") - {"reader"} == everything
