# SPDX-License-Identifier: Apache-2.0
"""One fact in running text: what is hidden where, and how the grid counts what was found."""

import json
import random
import re
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
from naive_twin import encode

from context_compressors import cli
from context_compressors.cli.evaluate_needles import main
from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.data.synthetic_documents import generate_document, split_of
from context_compressors.evaluation import needles
from context_compressors.evaluation.answers_file import read_answers
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.metrics import substring_accuracy
from context_compressors.evaluation.needles import (
    KINDS,
    NeedleGrid,
    draw_needle,
    evaluate_needles,
    needle_examples,
    needle_interval,
    wilson_interval,
)
from context_compressors.evaluation.paired import paired_difference
from context_compressors.evaluation.plots import plot_needles
from context_compressors.evaluation.progress_file import ProgressFile
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.rows import SampleAnswers
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.scoring import Scorer
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.reporting.result_files import rounded

# Running text whose sentences tell where they stand.
TEXTS = [" ".join(f"This is sentence {number} of text {text}." for number in range(60)) for text in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_needle_says_its_answer_and_its_question_does_not(kind):
    drawn = {draw_needle(kind, random.Random(seed)) for seed in range(300)}
    assert len(drawn) > 200
    for needle in drawn:
        assert needle.answers[0] in needle.sentence
        assert needle.town in needle.sentence
        assert needle.town in needle.question
        assert not any(answer in needle.question for answer in needle.answers)
        assert needle.question.endswith("?")
        assert "{" not in needle.sentence + needle.question
        # Either way of saying it counts.
        assert substring_accuracy([f"It is {needle.answers[-1]}."], [needle.answers]) == 100


def test_needles_are_about_names_that_training_documents_never_say():
    names = {*needles._TOWNS, *needles._LAST_NAMES}
    assert len(names) == len(needles._TOWNS) + len(needles._LAST_NAMES)
    assert {split_of(name) for name in names} == {"test"}
    assert {split_of(draw_needle("numbers", random.Random(n)).answers[0]) for n in range(50)} == {"test"}
    seen = " ".join(generate_document(seed, num_tokens=400).text for seed in range(50))
    assert not [name for name in names if name in seen]


@pytest.mark.parametrize("num_tokens", [120, 300, 1200])
def test_contexts_have_their_length_and_one_needle_between_sentences(tokenizer, num_tokens):
    examples = needle_examples(TEXTS, tokenizer, num_tokens, 30)
    assert [example["id"] for example in examples] == [f"{KINDS[n % 3]}/{n}" for n in range(30)]
    for number, example in enumerate(examples):
        needle = draw_needle(KINDS[number % 3], random.Random(f"0/needle/{number}"))
        assert (example["question"], example["answers"]) == (needle.question, list(needle.answers))
        context = example["context"]
        assert num_tokens - 8 <= len(encode(tokenizer, context)) <= num_tokens
        assert context.count(needle.sentence) == context.count(needle.town) == 1
        before, after = context.split(needle.sentence)
        assert before == "" or before.endswith(". ")
        assert " This".startswith(after[:5])


@pytest.mark.slow
def test_needles_stand_anywhere_with_the_same_chance(tokenizer):
    examples = needle_examples(TEXTS, tokenizer, 1500, 300)
    depths = []
    for number, example in enumerate(examples):
        needle = draw_needle(KINDS[number % 3], random.Random(f"0/needle/{number}"))
        before, after = example["context"].split(needle.sentence)
        depths.append(len(before) / (len(before) + len(after)))
    for quarter in range(4):
        assert 50 <= sum(quarter / 4 <= depth < (quarter + 1) / 4 or depth == quarter / 3 for depth in depths) <= 100


def test_needles_are_the_same_at_every_length_and_change_with_the_seed(tokenizer):
    asked = [
        [(example["question"], example["answers"]) for example in needle_examples(TEXTS, tokenizer, length, 9, seed)]
        for length, seed in ((150, 0), (600, 0), (150, 1))
    ]
    assert asked[0] == asked[1] != asked[2]
    again = needle_examples(TEXTS, tokenizer, 150, 9, 0)
    assert again == needle_examples(TEXTS, tokenizer, 150, 9, 0)


def test_running_text_leaves_out_sentences_that_would_answer_too(tokenizer):
    needle = draw_needle("numbers", random.Random("0/needle/0"))
    spoilt = [
        f"{text} {needle.sentence} In {needle.town}, all is well. {needle.answers[0]} is a number." for text in TEXTS
    ]
    (example,) = needle_examples(spoilt, tokenizer, 5000, 1)
    assert example["context"].count(needle.town) == example["context"].count(needle.answers[0]) == 1


def test_contexts_go_on_in_the_next_text_and_behind_the_last_one_in_the_first(tokenizer):
    num_tokens = sum(len(text) for text in TEXTS)
    for example in needle_examples(TEXTS, tokenizer, num_tokens, 9):
        assert all(f"sentence 30 of text {number}." in example["context"] for number in range(4))
    for example in needle_examples(TEXTS[:1], tokenizer, len(TEXTS[0]), 9):
        assert sum(f"sentence {number} of" in example["context"] for number in range(60)) >= 57
    with pytest.raises(ValueError, match=r"the texts have \d+ tokens, and a context of running text takes \d+"):
        needle_examples(TEXTS, tokenizer, 20_000, 1)
    with pytest.raises(ValueError, match="a context of 20 tokens has no room for"):
        needle_examples(TEXTS, tokenizer, 20, 1)


def test_wilson_intervals_are_those_of_the_textbook():
    assert wilson_interval(81, 263) == pytest.approx((25.5289, 36.6206), abs=0.01)
    assert wilson_interval(0, 10) == pytest.approx((0, 27.7533), abs=0.01)
    assert wilson_interval(10, 10) == pytest.approx((72.2467, 100), abs=0.01)


def test_needles_in_one_document_are_drawn_together():
    rng = np.random.default_rng(0)
    # Of each of eight documents, all five needles are found or none is: as much is told as by eight needles.
    found = [document < 4 for document in range(8) for _ in range(5)]
    documents = [document for document in range(8) for _ in range(5)]
    low, high = needle_interval(found, documents, 4000)
    drawn = 100 * rng.binomial(8, 0.5, 40_000) / 8
    assert (low, high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.1)
    assert high - low > 1.5 * np.diff(wilson_interval(20, 40))[0]
    # One needle of each: Wilson's, which says more than nothing where all are found, as where documents do not differ.
    assert needle_interval(found, range(40)) == wilson_interval(20, 40)
    assert needle_interval([True] * 40, documents) == wilson_interval(40, 40)
    assert needle_interval([True, False] * 8, sorted([*range(8)] * 2)) == wilson_interval(8, 16)
    assert needle_interval([True], [3]) == wilson_interval(1, 1)
    assert np.isnan(needle_interval([True, False], [3, 3])).all()


def found(id, condition_scores, dataset="256 tokens"):
    scores = {
        name: {"substring_accuracy": contained, "exact_match": exact}
        for name, (contained, exact) in condition_scores.items()
    }
    number = int(id.partition("/")[2])
    return SampleAnswers(dataset, "question_answering", id, number, "?", ["1"], {}, scores)


@pytest.fixture
def grid():
    report = EvaluationReport("tiny", settings={"seed": 0})
    for dataset, right in (("256 tokens", 100.0), ("512 tokens", 0.0)):
        for number, kind in enumerate((*KINDS, "names")):
            contained = right if kind == "names" else 0.0
            scores = {"full_context": (100.0, right), "ratio=4": (contained, 0.0)}
            report.answers.append(found(f"{kind}/{number}", scores, dataset))
    return NeedleGrid.from_report(report)


def test_cells_count_each_kind_apart(grid):
    assert (grid.lengths(), grid.conditions()) == ([256, 512], ["full_context", "ratio=4"])
    assert grid.cell(256, "ratio=4").accuracy == 50
    assert grid.cell(256, "ratio=4").interval == wilson_interval(2, 4)
    assert (grid.cell(256, "ratio=4", "names").accuracy, grid.cell(256, "ratio=4", "names").number) == (100, 2)
    assert (grid.cell(256, "ratio=4", "dates").accuracy, grid.cell(256, "ratio=4", "dates").number) == (0, 1)
    assert grid.cell(512, "full_context").accuracy == 100
    assert grid.cell(512, "full_context", metric="exact_match").accuracy == 0
    with pytest.raises(ValueError, match=r"no cell .* = \(1024, 'ratio=4', 'all', 'substring_accuracy'\)"):
        grid.cell(1024, "ratio=4")


@pytest.mark.slow
def test_a_grid_is_saved_printed_and_drawn(grid, tmp_path):
    loaded = NeedleGrid.load(grid.save(tmp_path / "new" / "grid.json"))
    assert not loaded.answers
    assert rounded(asdict(loaded)) == rounded(asdict(replace(grid, answers=[])))
    table = grid.to_markdown()
    assert "## Answer contained in the output: names (2 a cell)" in table
    assert "| 256    | 100 [51, 100] | 50 [15, 85] |" in table
    assert "in percent, with 95 % Wilson intervals." in table
    assert plot_needles(grid, tmp_path / "grid.png").stat().st_size > 10_000
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json is not a grid of needles"):
        NeedleGrid.load(tmp_path / "other.json")


def test_a_grid_of_an_earlier_version_is_read(grid, tmp_path):
    content = json.loads(grid.save(tmp_path / "grid.json").read_text())
    for name in ("bounds", "num_parameters", "documents", "held_out"):
        del content[name]
    for cell in content["cells"]:
        del cell["num_documents"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = NeedleGrid.load(tmp_path / "old.json")
    assert (old.cell(256, "ratio=4").accuracy, old.documents, old.num_parameters) == (50, {}, None)
    assert "with 95 % Wilson intervals." in old.to_markdown()


def test_a_grid_says_what_its_intervals_are(grid, tmp_path):
    report = EvaluationReport("tiny", settings={"seed": 3, "num_resamples": 50})
    for number in range(6):
        scores = dict.fromkeys(grid.conditions(), (100.0 * (number < 3), 100.0 * (number > 0)))
        sample = found(f"{KINDS[number % 3]}/{number}", scores, "128 tokens")
        report.answers.append(replace(sample, document=number // 3))
    more = NeedleGrid.from_report(report, grid)
    cell = more.cell(128, "ratio=4")
    assert (cell.accuracy, cell.number, cell.num_documents, cell.interval) == (50, 6, 2, (0, 100))
    said = "with 95 % bootstrap intervals over documents, Wilson's where each needle has its own"
    assert f"{said}." in more.to_markdown()
    earlier = replace(more, cells=[replace(cell, num_documents=None) for cell in grid.cells] + more.cells)
    assert f"{said}, and at lengths that an earlier version asked." in earlier.to_markdown()
    # Of several needles in one document nothing is told.
    report.answers = [replace(sample, document=0) for sample in report.answers]
    alone = NeedleGrid.load(NeedleGrid.from_report(report).save(tmp_path / "alone.json"))
    assert np.isnan(alone.cell(128, "ratio=4").interval).all()
    assert re.search(r"\| 128 +\| 50 +\| 50 +\|", alone.to_markdown())


@pytest.mark.slow
def test_needles_are_asked_as_any_question(model, tokenizer):
    settings = EvaluationSettings(max_new_tokens={"question_answering": 4, "summarisation": 4}, ratios=(2,))
    seen = []
    options = {"lengths": (100, 160), "num_needles": 6, "settings": settings, "progress": False}
    grid = evaluate_needles(model, tokenizer, TEXTS, **options, on_result=lambda grid: seen.append(grid.lengths()))
    assert seen == [[100], [100, 160]]
    assert grid.conditions() == ["no_context", "full_context", "ratio=2"]
    assert {cell.number for cell in grid.cells if cell.kind == "all"} == {6}
    assert {cell.number for cell in grid.cells if cell.kind != "all"} == {2}
    data = [EvaluationDataset("160 tokens", needle_examples(TEXTS, tokenizer, 160, 6))]
    report = evaluate_model(
        model,
        tokenizer,
        data,
        EvaluationSettings(tasks=("question_answering",), max_new_tokens=settings.max_new_tokens),
        progress=False,
    )
    for condition in grid.conditions():
        expected = report.score("160 tokens", "question_answering", condition, "substring_accuracy")
        assert grid.cell(160, condition).accuracy == pytest.approx(expected)
    with pytest.raises(ValueError, match="num_needles must be at least 3"):
        evaluate_needles(model, tokenizer, TEXTS, num_needles=2)
    with pytest.raises(ValueError, match="lengths must be one or more different numbers"):
        evaluate_needles(model, tokenizer, TEXTS, lengths=(100, 100))


@pytest.mark.slow
def test_a_killed_grid_goes_on_inside_a_length(model, tokenizer, tmp_path, monkeypatch):
    settings = EvaluationSettings(
        max_new_tokens={"question_answering": 2, "summarisation": 2}, ratios=(2,), batch_size=2
    )
    options = {"lengths": (100, 160), "num_needles": 4, "settings": settings, "progress": False}
    whole, path, add = evaluate_needles(model, tokenizer, TEXTS, **options), tmp_path / "needles.progress", []

    def killed(file, digest, rows):
        add.append(sorted(rows))
        kept_add(file, digest, rows)
        if len(add) == 3:
            raise KeyboardInterrupt

    kept_add = ProgressFile.add
    monkeypatch.setattr(ProgressFile, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate_needles(model, tokenizer, TEXTS, **options, progress_file=path)
    again = evaluate_needles(model, tokenizer, TEXTS, **options, progress_file=path)
    # The second length's second half was left.
    assert len(add) == 4
    assert [asdict(cell) for cell in again.cells] == [asdict(cell) for cell in whole.cells]
    assert not path.exists()


@pytest.mark.slow
def test_command_writes_table_file_and_picture(folders, tmp_path, capsys):
    (tmp_path / "books.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    output, plot = tmp_path / "needles.json", tmp_path / "needles.png"
    argv = [str(folders / "tiny-compressor"), "--text", str(tmp_path / "books.jsonl"), "--device", "cpu"]
    argv += ["--lengths", "100", "--needles", "3", "--max-new-tokens", "2", "--teacher", str(folders / "teacher")]
    with pytest.raises(ValueError, match="--resume goes on with what is in --output: name it"):
        main([*argv, "--resume"])
    with pytest.raises(ValueError, match="seed must be a whole number from 0 on, got -1"):
        main([*argv, "--seed", "-1"])
    output.with_name("needles.json.progress").write_text("of another run")
    assert main([*argv, "--output", str(output), "--plot", str(plot)]) == 0
    assert not output.with_name("needles.json.progress").exists()
    grid = NeedleGrid.load(output)
    assert (grid.model, grid.settings["teacher"]) == ("tiny-compressor", "teacher")
    assert grid.conditions() == ["no_context", "full_context", "ratio=2", "ratio=4"]
    printed = capsys.readouterr().out
    assert "# Needles: tiny-compressor" in printed
    assert "Whether tiny-compressor was trained on these documents is unknown" in printed
    assert f"wrote {plot}" in printed
    assert plot.exists()


@pytest.mark.slow
def test_a_grid_keeps_its_answers_and_documents_and_says_when_it_is_done(folders, tmp_path, capsys, monkeypatch):
    (tmp_path / "books.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    output, answers = tmp_path / "needles.json", tmp_path / "needles.jsonl"
    shared = ["--text", str(tmp_path / "books.jsonl"), "--device", "cpu", "--needles", "3", "--max-new-tokens", "2"]
    argv = [str(folders / "tiny-compressor"), *shared, "--ratios", "2", "--output", str(output)]
    argv += ["--keep-answers", str(answers), "--lengths", "100"]
    assert main(argv) == 0
    grid, kept = NeedleGrid.load(output), read_answers(answers)
    ids = set(grid.documents["100 tokens"].split())
    sources = ids & {document_id(text) for text in TEXTS}
    assert sources
    # The others are the contexts' own.
    assert len(ids - sources) == 3
    assert [sample.id for sample in kept] == ["numbers/0", "names/1", "dates/2"]
    assert all(sample.answers.keys() == sample.scores.keys() == set(grid.conditions()) for sample in kept)
    right = sum(sample.scores["ratio=2"]["substring_accuracy"] > 0 for sample in kept)
    assert grid.cell(100, "ratio=2").accuracy == pytest.approx(100 * right / 3, rel=1e-3)

    written, kept_write = [], Scorer._write
    monkeypatch.setattr(Scorer, "_write", lambda self, *given: written.append(given) or kept_write(self, *given))
    before = output.read_text(), answers.read_text()
    capsys.readouterr()
    assert main([*argv, "--resume"]) == 0
    printed = capsys.readouterr().out
    assert f"{output} is done: nothing was left to score" in printed
    assert "# Needles: tiny-compressor" in printed
    assert not written
    assert (output.read_text(), answers.read_text()) == before
    # Lengths may be added, and are the only ones that are asked.
    assert main([*argv, "160", "--resume"]) == 0
    assert "is done" not in capsys.readouterr().out
    more = NeedleGrid.load(output)
    assert more.lengths() == [100, 160]
    assert more.cells[: len(grid.cells)] == grid.cells
    assert more.documents.keys() == {"100 tokens", "160 tokens"}
    assert len(written) == len(grid.conditions())
    assert [sample.dataset for sample in read_answers(answers)] == ["100 tokens"] * 3 + ["160 tokens"] * 3
    for other, message in (("--seed", "it differs in seed"), ("--batch-size", "it differs in batch_size")):
        with pytest.raises(ValueError, match=f"is of another evaluation; {message}"):
            main([*argv, other, "5", "--resume"])
    # Fewer texts are others.
    argv[2] += "#1"
    with pytest.raises(ValueError, match="is of another evaluation; it differs in texts"):
        main([*argv, "--resume"])
    assert main([*argv, "--overwrite"]) == 0
    ids = set(NeedleGrid.load(output).documents["100 tokens"].split())
    assert len(ids & {document_id(text) for text in TEXTS}) == 1
    answers.write_text("")
    with pytest.raises(ValueError, match=r"does not have the answers of \[\('100 tokens', 'question_answering'\)"):
        main([*argv, "--resume"])


@pytest.mark.slow
def test_two_grids_are_paired_needle_by_needle(folders, tmp_path, capsys):
    (tmp_path / "books.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    files = [tmp_path / f"{name}.jsonl" for name in ("ours", "theirs")]
    shared = ["--text", str(tmp_path / "books.jsonl"), "--device", "cpu", "--needles", "6", "--max-new-tokens", "2"]
    for file, model in zip(files, ("tiny-compressor", "teacher"), strict=True):
        assert main([str(folders / model), *shared, "--lengths", "100", "--keep-answers", str(file)]) == 0
    ours, theirs = map(read_answers, files)
    found = paired_difference(ours, theirs, "substring_accuracy", "full_context")
    # Needles whose contexts begin in one text are drawn together.
    assert (found.num_samples, found.num_documents) == (6, 4)
    capsys.readouterr()
    assert cli.main(["compare", *map(str, files), "--metric", "substring_accuracy"]) == 0
    assert "| 100 tokens | substring_accuracy | ours full_context | theirs full_context |" in capsys.readouterr().out


@pytest.mark.slow
def test_text_that_a_model_was_trained_on_hides_no_needle_unless_that_is_said(folders, tmp_path, capsys):
    compressor = shutil.copytree(folders / "tiny-compressor", tmp_path / "tiny-compressor")
    TrainingDocuments(trained={document_id(text) for text in TEXTS}).save(compressor)
    (tmp_path / "books.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    argv = [str(compressor), "--text", str(tmp_path / "books.jsonl"), "--device", "cpu", "--ratios", "2"]
    argv += ["--lengths", "100", "--needles", "3", "--max-new-tokens", "2"]
    with pytest.raises(ValueError, match=r"documents of '100 tokens' trained tiny-compressor"):
        main(argv)
    assert main([*argv, "--allow-trained-documents", "--output", str(tmp_path / "needles.json")]) == 0
    assert "**Not held out**: among the" in capsys.readouterr().out
    grid = NeedleGrid.load(tmp_path / "needles.json")
    assert grid.held_out["tiny-compressor"]["shared"]["100 tokens"]["trained"]
    assert grid.settings["sources"] == {"books": {"path": "books.jsonl"}}
    # Nor does text of a grid that the model was chosen by, here or where questions are asked.
    (compressor / "training_documents.json").unlink()
    chosen = ["--chosen-by", str(tmp_path / "needles.json")]
    with pytest.raises(ValueError, match=r"documents of '100 tokens' chose tiny-compressor, by needles\.json"):
        main([*argv, *chosen])
    asked = ["evaluate", str(compressor), "--data", str(tmp_path / "books.jsonl"), "--tasks", "reconstruction"]
    assert cli.main([*asked, "--context-tokens", "8", "--device", "cpu", *chosen]) == 1
    assert "documents of 'books' chose tiny-compressor, by needles.json" in capsys.readouterr().err
    for content, message in (("[]", "is no result file with the documents"), ("{}", "does not say which documents")):
        (tmp_path / "needles.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            main([*argv, *chosen])
    # Of windows it would not be known what they are from.
    (tmp_path / "books.jsonl").write_text(json.dumps({"text": TEXTS[0], "source_texts": TEXTS}))
    with pytest.raises(ValueError, match="--text takes whole texts, and rows name source_texts"):
        main(argv)
