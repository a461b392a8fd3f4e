# SPDX-License-Identifier: Apache-2.0
"""The comparison's answers at toy size: verdicts, equal bytes, and the page."""

import json
import re
from pathlib import Path

import pytest
import torch
from comparison_files import ask, write_answers, write_member
from safetensors.torch import save_file


@pytest.mark.slow
def test_the_page_says_what_holds_what_does_not_and_what_cannot_be_told(script, comparison, tokenizer, tmp_path: Path):
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
    write_answers(systems.times("bm25").parent, "bm25", 2, right, systems.table)
    content = results.gather(systems)
    ordering = next(entry for entry in content["orderings"] if entry["second"] == "longllmlingua")
    assert [entry["verdict"] for entry in ordering["ratios"]] == ["holds", "does not", "cannot be told"]
    assert {entry["verdict"] for entry in content["orderings"][0]["ratios"]} == {"not run"}
    row = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 2, "mean"))
    assert (row["scores"]["f1"], row["scores"]["exact_match"], row["num_questions"]) == (100, 100, 48)
    squad = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 2, "squad"))
    assert squad["scores"]["retention"] == 100
    # It picks by the question: the whole text is kept.
    assert row["costs"]["memory_bytes"] == pytest.approx(len(json.loads(text.splitlines()[0])["context"]), abs=2)
    # Seconds are those that were measured apart.
    other = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 4, "mean"))
    assert (row["costs"]["answer_seconds"], other["costs"].get("answer_seconds")) == (0.2, None)
    page.write(content, tmp_path / "page")
    written = (tmp_path / "page" / "README.md").read_text()
    assert re.search(
        r"\| BM25 sentences > LongLLMLingua +\| holds: \+\d.*\| does not: -\d.*\| cannot be told: ", written
    )
    assert "cannot be told: +0.0 [" in written
    # The title's question; nothing is made once.
    assert "- Made anew for each question with BM25 sentences (not trained), 100.0 at 2x, 91.7 at 8x; Long" in written
    assert "- Made once" not in written
    assert "medians over the first 3 questions of squad" in written
    # In short: the best at 4x first, and what is paired with cut text beside it.
    short = written[written.index("## In short") : written.index("## Is it so?")]
    assert [line.split("|")[1].strip() for line in short.splitlines() if line.startswith("| ")][1:] == [
        "LongLLMLingua",
        "BM25 sentences",
    ]
    assert "No context: 0.0 [0.0, 0.0]. Full text: 100.0 [100.0, 100.0]." in short
    assert "| answer, s |" in written
    # An ordering that is not run is named below the others.
    first, second = content["orderings"][0]["first"], content["orderings"][0]["second"]
    titles = {name: entry["title"] for part in ("family", "peers") for name, entry in systems.table[part].items()}
    assert f"Not run, or not on the same questions: {titles[first]} > {titles[second]}" in written
    assert f"| {titles[first]} > {titles[second]} " not in written
    assert all((tmp_path / "page" / name).is_file() for name in re.findall(r"\]\(([^):]+)\)", written))
    committed = (Path(page.__file__).parent / "README.md").read_text()
    results_file = Path(page.__file__).parent / "comparison.json"
    page.write(script("comparison.plan").read_results(results_file), tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == committed


@pytest.mark.slow
def test_a_system_that_has_not_answered_all_is_paired_on_what_it_has_and_not_ranked(
    script, comparison, tokenizer, tmp_path: Path
):
    results, page, systems = script("comparison.results"), script("comparison.page"), comparison(tmp_path)
    ask(systems, tokenizer)
    right, wrong = [f"Nora Zill {number}" for number in range(12)], ["bees"] * 12
    for ratio in (2, 4, 8):
        write_answers(systems.peers, "cut", ratio, [*right[:2], *wrong[2:6], *right[6:]], systems.table)
        write_answers(systems.peers, "llmlingua", ratio, [*right[:2], *wrong[2:6]], systems.table)
        write_answers(systems.peers, "bm25", ratio, right, systems.table)
    content = results.gather(systems)
    page.write(content, tmp_path / "page")
    written = (tmp_path / "page" / "README.md").read_text()
    short = written.partition("## In short")[2].partition("\n![")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in short.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines] == ["system", "BM25 sentences", "Text cut"]
    assert [cell[:4] for cell in lines[2][3:6]] == ["66.7"] * 3
    assert lines[1][6] == "above"
    assert re.search(r"\| LLMLingua > Text cut +\| cannot be told: [^|]*, n 24 +\|", written)
    assert re.search(r"\| BM25 sentences > Text cut +\| holds: [^|n]* \|", written)
    assert re.search(r"\| LLMLingua +\| 2x +\| 33.3 [^|]*, n 6 +\|", written)
    assert "Of these 48 questions some systems have answered fewer: LLMLingua 24. " in written
    assert "- Above text cut to as many positions at every ratio are BM25 sentences." in short


def test_what_is_not_above_no_context_and_what_is_below_it_is_named(script, comparison, tokenizer, tmp_path: Path):
    results, short, systems = script("comparison.results"), script("comparison.page_short"), comparison(tmp_path)
    ask(systems, tokenizer)
    write_member(systems, "mean_pooling", "mean_pooling", {2: (12, 400), 4: (0, 200), 8: (3, 100)})
    write_member(systems, "gmsa", "gmsa", {2: (0, 400), 4: (3, 200), 8: (3, 100)})
    content = results.gather(systems)
    assert content["against_no_context"] == {}, "it is not answered"
    of_none = [f"Nora Zill {number}" if number < 3 else "bees" for number in range(12)]
    write_answers(systems.peers, "no_context", 0, of_none, systems.table)
    content = results.gather(systems)
    found = content["against_no_context"]
    assert set(found) == {"mean_pooling", "gmsa"}
    assert [(at["ratio"], at["difference"]) for at in found["gmsa"]] == [(2, -25), (4, 0), (8, 0)]
    titles = {"mean_pooling": "Mean pooling", "gmsa": "GMSA"}
    nothing, below = short.not_found({**content, "family": titles}, titles)
    assert "the slots of GMSA tell the decoder nothing yet" in nothing
    assert below.endswith("below zero: Mean pooling at 4x; GMSA at 2x.")
    # A file from before says nothing.
    del content["against_no_context"]
    assert short.not_found({**content, "family": titles}, titles) == []


def test_where_the_full_text_is_no_better_than_none_there_is_no_retention(
    script, comparison, tokenizer, tmp_path: Path
):
    results, systems = script("comparison.results"), comparison(tmp_path)
    ask(systems, tokenizer)
    right, wrong = [f"Nora Zill {number}" for number in range(12)], ["bees"] * 12
    write_answers(systems.peers, "no_context", 0, [*right[:6], *wrong[6:]], systems.table)
    for title, answers in (("squad", [*right[:3], *wrong[3:]]), ("nq", right)):
        of_set = {"sets": {title: systems.table["sets"][title]}}
        write_answers(systems.peers, "full_context", 1, answers, of_set)
    write_answers(systems.peers, "cut", 4, right, systems.table)
    found = {row["set"]: row["scores"] for row in results.gather(systems)["rows"] if row["system"] == "cut"}
    assert [title for title, scores in found.items() if "retention" in scores] == ["nq"]
    assert found["nq"]["retention"] == 100


@pytest.mark.slow
def test_published_rows_stay_until_as_much_is_answered_again(
    script, comparison, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    results, page = script("comparison.results"), script("comparison.page")
    first, second = (comparison(tmp_path / name) for name in ("first", "second"))
    right, wrong = [f"Nora Zill {number}" for number in range(12)], ["bees"] * 12
    for systems in (first, second):
        ask(systems, tokenizer)
        systems.table["orderings"] = [["bm25", "cut"], ["bm25", "longllmlingua"]]
    for name, answers in (("bm25", right), ("longllmlingua", wrong)):
        for ratio in (2, 4, 8):
            write_answers(first.peers, name, ratio, answers, first.table)
    write_answers(first.peers, "no_context", 0, wrong, first.table)
    write_answers(first.peers, "full_context", 1, right, first.table)
    write_answers(first.times("bm25").parent, "bm25", 2, right, first.table)
    page.write(results.gather(first), tmp_path)
    published = script("comparison.plan").read_results(tmp_path / "comparison.json")
    assert all("by_question" in row for row in published["rows"] if row["set"] != "mean")
    monkeypatch.setattr(script("comparison.plan"), "PUBLISHED", tmp_path / "comparison.json")
    for ratio in (2, 4, 8):
        write_answers(second.peers, "cut", ratio, [*right[:6], *wrong[6:]], second.table)
    # Not all of what is published.
    write_answers(second.peers, "bm25", 2, wrong, second.table)
    content = results.gather(second)
    assert [row for row in content["rows"] if row["system"] != "cut"] == published["rows"]
    found = {entry["second"]: entry["ratios"][0] for entry in content["orderings"] if entry["first"] == "bm25"}
    assert (found["cut"]["difference"], found["cut"]["verdict"]) == (50, "holds")
    assert found["longllmlingua"] == published["orderings"][1]["ratios"][0]
    row = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("cut", 4, "squad"))
    assert row["scores"]["retention"] == 50, "from published bounds"

    # A file without scores by question: its rows stay, and cannot be paired.
    for row in published["rows"]:
        row.pop("by_question", None)
    (tmp_path / "comparison.json").write_text(json.dumps(published))
    (tmp_path / "by_question.json").unlink()
    again = comparison(tmp_path / "second")
    again.table["orderings"] = second.table["orderings"]
    content = results.gather(again)
    assert [row for row in content["rows"] if row["system"] != "cut"] == published["rows"]
    assert [entry["ratios"][0]["verdict"] for entry in content["orderings"]][:2] == ["not run"] * 2

    for ratio in (4, 8):
        write_answers(second.peers, "bm25", ratio, wrong, second.table)
    content = results.gather(again)
    row = next(row for row in content["rows"] if (row["system"], row["set"]) == ("bm25", "mean"))
    assert row["scores"]["f1"] == 0, "all of it is answered again"
    assert row["costs"]["answer_seconds"] == 0.2, "not timed again"


def test_rounded_memories_of_a_checkpoint_that_was_trained_anew_are_not_kept(
    script, comparison, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    results, plan, page = (script(f"comparison.{name}") for name in ("results", "plan", "page"))
    first, second = (comparison(tmp_path / name) for name in ("first", "second"))
    found = {2: (12, 400), 4: (6, 200), 8: (3, 100), 16: (3, 50), 18: (3, 50), 32: (3, 50), 37: (3, 50)}
    members = {"mean_pooling": "mean_pooling", "ranked_key_values_fitted": "ranked_key_values"}
    rounded = {"mean_pooling_int4": "mean_pooling", "ranked_key_values_fitted_int2": "ranked_key_values"}
    for systems, names in ((first, members | rounded), (second, members)):
        ask(systems, tokenizer)
        for name, model_type in names.items():
            write_member(systems, name, model_type, found)
    page.write(results.gather(first), tmp_path)
    monkeypatch.setattr(plan, "PUBLISHED", tmp_path / "comparison.json")
    assert {row["system"] for row in second.published["rows"]} == {*members, *rounded}
    # What is fitted gives the same checkpoint again.
    assert {row["system"] for row in results.gather(second)["rows"]} == {*members, "ranked_key_values_fitted_int2"}


@pytest.mark.slow
def test_keys_and_values_stand_beside_embeddings_of_as_many_bytes(script, comparison, tokenizer, tmp_path: Path):
    results, page, systems = script("comparison.results"), script("comparison.page"), comparison(tmp_path)
    tokens = len(json.loads(ask(systems, tokenizer).splitlines()[0])["context_ids"])
    write_member(systems, "mean_pooling", "mean_pooling", {2: (12, 400), 4: (0, 200), 8: (0, 100)})
    write_member(systems, "comprexit", "comprexit", {2: (0, 400), 4: (6, 200), 8: (0, 100)})
    write_member(systems, "mean_pooling_int4", "mean_pooling", {2: (12, 110), 4: (0, 60), 8: (0, 30)})
    more = {4: (12, 9000), 8: (12, 4000), 16: (12, 190), 32: (0, 150)}
    write_member(systems, "ranked_key_values_int4", "ranked_key_values", more)
    write_member(systems, "ranked_key_values", "ranked_key_values", {2: (12, 90_000), **more})
    trained = systems.checkpoint("mean_pooling", 1)
    for rate, folder in systems.trials("mean_pooling").items():
        folder.mkdir()
        (folder / "trial.json").write_text(json.dumps({"steps": 1, "eval_loss": 1000 * rate}))
    save_file({"decoder.lora_A": torch.zeros(3, 2), "lm_head.weight": torch.zeros(5)}, trained / "model.safetensors")
    log = [{"loss": 3.0}, {"loss": 2.0}, {"train_runtime": 1.0}]
    counts = {"steps": 7, "input_tokens": 90, "context_tokens": 80, "hours": 0.5}
    (trained / "training_summary.json").write_text(json.dumps({**counts, "log": log}))
    systems.table["orderings"] = [["ranked_key_values_int4=16", "mean_pooling=4"], ["mean_pooling", "comprexit"]]

    content = results.gather(systems)
    assert content["family"] == {
        "mean_pooling": {
            "trials": {"0.0005": 0.5, "0.0015": 1.5},
            "learning_rate": 0.0005,
            "seeds": 1,
            "trainable_parameters": 6,
            **counts,
            "loss": 2.0,
        }
    }
    # Answers of the table's ratios and of its own are in two files.
    in_nq = [row["ratio"] for row in content["rows"] if (row["system"], row["set"]) == ("ranked_key_values", "nq")]
    assert in_nq == [2, 4, 8, 16, 32]
    found = {(entry["system"], entry["ratio"]): entry for entry in content["against_embeddings"]}
    assert set(found) == {("ranked_key_values", ratio) for ratio in (2, *more)} | {
        ("ranked_key_values_int4", ratio) for ratio in more
    }

    def against(ratio: int) -> dict:
        entry = found["ranked_key_values_int4", ratio]
        names = ("system", "ratio", "verdict", "difference")
        return {
            side: [entry[side][name] for name in names] for side in ("fewer", "more", "positions") if side in entry
        }

    # Of no less bytes two are equally near: the better one. Of no more the best, and not the nearest.
    best, near = ["mean_pooling_int4", 2], ["comprexit", 4]
    assert against(16) == {"fewer": [*best, "cannot be told", 0], "more": [*near, "holds", 50]}
    assert against(32) == {"fewer": [*best, "does not", -100], "more": [*near, "does not", -50]}
    assert against(8)["fewer"] == ["mean_pooling", 2, "cannot be told", 0]
    assert against(8)["positions"][2:] == ["holds", 100]
    assert against(4)["positions"] == ["comprexit", 4, "holds", 50]
    assert "more" not in against(8), "no embeddings store as much"
    first, second, *_ = content["orderings"]
    assert [(at["ratio"], at["second_ratio"], at["verdict"]) for at in first["ratios"]] == [(16, 4, "holds")]
    assert [(at["ratio"], at["verdict"]) for at in second["ratios"]] == [
        (2, "holds"), (4, "does not"), (8, "cannot be told"),
    ]  # fmt: skip
    for ratio, right in ((2, 0), (4, 12), (8, 0)):
        answers = [f"Nora Zill {number}" if number < right else "bees" for number in range(12)]
        write_answers(systems.peers, "cut", ratio, answers, systems.table)
    content = results.gather(systems)
    page.write(content, tmp_path / "page")
    written = (tmp_path / "page" / "README.md").read_text()
    assert "With this budget" not in written
    assert "is above every memory of vectors that was paired with it at 4x." in written
    # A column that no row fills is left out.
    assert "| answer, s |" not in written
    assert "Of vectors with Mean pooling (trained, above cut text), 100.0 at 2x; ComprExIT" in written
    assert "- Above text cut to as many positions at 2x are Mean pooling." in written
    assert "No memory of vectors is told above text cut to as many positions at 8x." in written
    assert re.search(r"\| Mean pooling +\| vectors +\|.*\| above, below, \? +\|", written)
    assert re.search(r"\| Ranked key/values +\| keys, values +\|.*\| above, \?, above +\|", written)
    part = written[written.index("## At equal stored bytes") : written.index("## By set of questions")]
    sizes = [float(size.replace(",", "")) for size in re.findall(r"^\| *([\d,.]+) *\|", part, re.MULTILINE)]
    assert sizes == sorted(sizes)
    assert sizes[0] == round(30 / tokens, 1)
    assert re.search(r"key/values, int4 +\| 16x +\| 48 +\| 100.*\| holds: \+50.0 \[.*\] \(ComprExIT, 4x\)", written)
    assert re.search(r"\| Ranked key/values, int4, 16x > Mean pooling, 4x \| holds: \+100.0", written)


@pytest.mark.slow
def test_ratios_of_a_systems_own_and_those_that_texts_select_have_rows_and_orderings(
    script, comparison, tokenizer, tmp_path: Path
):
    results, page, systems = script("comparison.results"), script("comparison.page"), comparison(tmp_path)
    ask(systems, tokenizer)
    selecting = {2: (12, 400), 4: (6, 200), 8: (0, 100), "auto": (12, 150)}
    write_member(systems, "mean_pooling_semi_dynamic", "mean_pooling", selecting)
    write_member(systems, "mean_pooling", "mean_pooling", {2: (12, 400), 4: (12, 200), 8: (0, 100)})
    write_member(systems, "mean_pooling_4x", "mean_pooling", {4: (0, 200)})
    write_member(systems, "xrag", "xrag", {180: (12, 50)})
    write_member(
        systems, "kv_zip", "kv_zip", {2: (12, 9000), 4: (12, 4000), 8: (12, 1000), 16: (12, 500), 32: (0, 300)}
    )
    write_answers(systems.peers, "no_context", 0, ["bees"] * 12, systems.table)
    for ratio in (2, 4, 8):
        write_answers(systems.peers, "cut", ratio, ["bees"] * 12, systems.table)
    content = results.gather(systems)
    means = [row for row in content["rows"] if row["set"] == "mean"]
    assert [row["ratio"] for row in means if row["system"] == "mean_pooling_semi_dynamic"] == [2, 4, 8, "auto"]
    found = {(entry["first"], entry["second"]): entry["ratios"] for entry in content["orderings"]}
    # At those ratios that a system has.
    for name, ratios in (("mean_pooling_semi_dynamic", [2, 4, 8]), ("mean_pooling_4x", [4])):
        assert [(at["ratio"], at["second_ratio"]) for at in found[name, "cut"]] == [(ratio, ratio) for ratio in ratios]
    assert ("xrag", "cut") not in found
    page.write(content, tmp_path / "page")
    written = (tmp_path / "page" / "README.md").read_text()
    short, _, rest = written.partition("## Is it so?")
    assert re.search(r"\| Mean pooling, 4x alone +\| vectors +\|[^|]*\| +\| 0.0 [^|]*\| +\| \? +\|", short)
    assert "xRAG" not in short
    assert re.search(r"\| Mean pooling > Mean pooling, 4x alone +\| +\| holds: \+100.0 [^|]*\| +\|", rest)
    assert re.search(r"\| Mean pooling, semi-dynamic, auto > Mean pooling, semi-dynamic, 4x +\| holds: \+50.0", rest)
    assert re.search(r"\| xRAG, 180x > No context +\| holds: \+100.0", rest)
    assert re.search(r"\| Mean pooling, semi-dynamic +\| auto +\| 48 +\| 5 +\| 150 +\|", rest)
    assert re.search(
        r"\| KVzip +\| 16x .*\(Mean pooling, semi-dynamic, 2x\)|\| KVzip +\| 16x .*\(Mean pooling, 2x\)", rest
    )
    assert (tmp_path / "page" / "f1_by_memory_bytes.png").is_file()
    # As published rows they are paired as before.
    scores = script("comparison.scores")
    published = script("comparison.plan").read_results(tmp_path / "page" / "comparison.json")["rows"]
    again = scores.published_scores(
        [row for row in published if row["system"] == "mean_pooling_semi_dynamic"], scores.questions_of(systems)
    )
    assert set(again) == {2, 4, 8, "auto"}


@pytest.mark.slow
def test_steps_to_a_loss_are_told_of_the_trial_that_went_on(script, comparison, tokenizer, tmp_path: Path):
    results, page, systems = script("comparison.results"), script("comparison.page"), comparison(tmp_path)
    ask(systems, tokenizer)
    (systems.questions / "budget.json").write_text(json.dumps({"trial_steps": 45}))
    write_answers(systems.peers, "cut", 4, ["bees"] * 12, systems.table)
    counts = {"steps": 75, "input_tokens": 90, "context_tokens": 80, "hours": 0.5}
    # Of every five steps: the mean of twenty is below 3 at step 25, and below 2 at step 40.
    values = [4.0, 3.5, 3.0, 2.5, 2.5, 1.5, 1.5, 1.5, 1.5]
    log = [[5 * number, value] for number, value in enumerate(values, start=1)]
    for name, losses in (("gmsa", log), ("tcp_autoencoder", None)):
        folder = systems.checkpoint(name, 1)
        folder.mkdir(parents=True)
        (folder / "training_summary.json").write_text(json.dumps({**counts, "log": [{"loss": 2.0}]}))
        save_file({"decoder.lora_A": torch.zeros(3, 2)}, folder / "model.safetensors")
        for rate, of_trial in systems.trials(name).items():
            of_trial.mkdir()
            trial = {"steps": 45, "eval_loss": 1000 * rate}
            # The other trial's are not read.
            trial |= {"losses": losses if rate == 5e-4 else [[5, 0.1]] * 4} if losses else {}
            (of_trial / "trial.json").write_text(json.dumps(trial))
    content = results.gather(systems)
    assert content["family"]["gmsa"]["steps_to_loss"] == {"3": 25, "2": 40, "1": None}
    assert "steps_to_loss" not in content["family"]["tcp_autoencoder"]
    page.write(content, tmp_path / "page")
    written = (tmp_path / "page" / "README.md").read_text()
    assert re.search(r"\| rate +\| steps to 3 +\| steps to 2 +\| steps to 1 +\| last loss", written)
    assert re.search(r"\| GMSA .*\| 0.0005 +\| 25 +\| 40 +\| > 45 +\| 2.000 ", written)
    assert re.search(r"\| TCP-AE .*\| 0.0005 +\| +\| +\| +\| 2.000 ", written)
    # Where no run has kept any there are no columns, and nothing is said of them.
    del content["family"]["gmsa"]
    page.write(content, tmp_path / "page")
    assert (
        "teps to"
        not in (tmp_path / "page" / "README.md").read_text().partition("## What was trained")[2].partition("## How")[0]
    )
