# SPDX-License-Identifier: Apache-2.0
"""An evaluation that was stopped goes on where it stopped, and with no other."""

import copy
from dataclasses import replace

import pytest
import torch
from naive_twin import QA, RECONSTRUCTION, ROWS, SUMMARISATION, run

from context_compressors import AutoCompressorForCausalLM
from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.evaluation.benchmark_metrics import BenchmarkMetric
from context_compressors.evaluation.evaluate import evaluate_model, weights_and_configuration
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.results import samples_digest
from context_compressors.evaluation.samples import EvaluationDataset, Sample
from context_compressors.evaluation.scoring import Scorer
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.reporting.result_files import rounded

LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj"]}


def comparable(report):
    """A report but for the seconds that it took."""
    content = rounded(report.to_dict())
    for row in content["rows"]:
        assert row.pop("seconds")
    return content


def test_an_evaluation_goes_on_where_it_stopped(model, tokenizer, tmp_path):
    datasets = [EvaluationDataset("qa", ROWS), EvaluationDataset("text", [{"text": "plain text"}, {"text": "more"}])]
    # More digits than a file has.
    settings = EvaluationSettings(
        tasks=(QA, RECONSTRUCTION), max_new_tokens={QA: 2, SUMMARISATION: 2}, ratios=(4,), repetition_penalty=1.23456
    )
    whole = evaluate_model(model, tokenizer, datasets, settings, progress=False)

    def stop(report):
        report.save(tmp_path / "report.json")
        if len(report.rows) == 6:
            raise KeyboardInterrupt

    path = tmp_path / "report.json.progress"
    with pytest.raises(KeyboardInterrupt):
        evaluate_model(model, tokenizer, datasets, settings, progress=False, on_result=stop, progress_file=path)
    earlier = EvaluationReport.load(tmp_path / "report.json")
    assert [(row.dataset, row.task) for row in earlier.rows[::3]] == [("qa", QA), ("qa", RECONSTRUCTION)]
    scored = []
    again = evaluate_model(
        model,
        tokenizer,
        datasets,
        settings,
        progress=False,
        resume_from=earlier,
        progress_file=path,
        on_result=lambda report: scored.append((report.rows[-1].dataset, report.rows[-1].task)),
    )
    assert scored == [("text", RECONSTRUCTION)]
    assert comparable(again) == comparable(whole)
    assert again.averages(RECONSTRUCTION, "token_accuracy")["intervals_from"] == "resamples"
    # A finished one is taken over as it is.
    done = evaluate_model(
        *(model, tokenizer, datasets, settings), progress=False, resume_from=EvaluationReport.load(again.save(path))
    )
    assert not done.answers
    assert comparable(done) == comparable(whole)


def test_sources_stand_in_a_report_and_decide_nothing(model, tokenizer, tmp_path):
    first, second = (EvaluationDataset(name, ROWS, source={"path": f"{name}.jsonl"}) for name in "ab")
    settings = EvaluationSettings(tasks=(QA,), max_new_tokens={QA: 2, SUMMARISATION: 2}, ratios=(4,), ratios_only=True)

    def evaluate(datasets, **options):
        return evaluate_model(model, tokenizer, datasets, settings, progress=False, **options)

    earlier = EvaluationReport.load(evaluate([first]).save(tmp_path / "report.json"))
    assert earlier.settings["sources"] == {"a": {"path": "a.jsonl"}}
    both = evaluate([second], resume_from=earlier)
    assert both.settings["sources"] == {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl"}}
    # A report of an earlier version has none, and the same samples may lie in another file.
    del earlier.settings["sources"]
    moved = replace(first, source={"path": "moved.jsonl"})
    again = evaluate([moved, second], resume_from=EvaluationReport.load(earlier.save(tmp_path / "old.json")))
    assert [sample.dataset for sample in again.answers] == ["b"] * len(ROWS)
    assert again.settings["sources"]["a"] == {"path": "moved.jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize("task", [QA, RECONSTRUCTION])
def test_an_evaluation_goes_on_inside_a_data_set(model, tokenizer, tmp_path, monkeypatch, task):
    rows = [{**ROWS[number % 3], "question": f"{number}?"} for number in range(7)]
    datasets = [EvaluationDataset("tiny", rows)]
    options = {"tasks": (task,), "max_new_tokens": {QA: 3, SUMMARISATION: 3}, "batch_size": 2}
    settings = EvaluationSettings(**options, reconstruction_bleu=True, alternatives=("cut",))
    whole = evaluate_model(model, tokenizer, datasets, settings, progress=False)
    path, prompts, write = tmp_path / "out.progress", [], Scorer._write

    def counted(self, model, batch, *others):
        if len(prompts) == limit:
            raise KeyboardInterrupt
        prompts.append(len(batch))
        return write(self, model, batch, *others)

    monkeypatch.setattr(Scorer, "_write", counted)
    conditions = 6 if task == QA else 4
    limit = conditions + 1
    for _ in range(3):
        # A batch is done under all conditions or not at all.
        with pytest.raises(KeyboardInterrupt):
            evaluate_model(model, tokenizer, datasets, settings, progress=False, progress_file=path)
        done = len(path.read_text().splitlines()) - 1
        limit += conditions
        if done == 2 or (task == RECONSTRUCTION and done == 1):
            break
    path.write_text(path.read_text() + '{"of": "half a li')
    limit, before = 1000, len(prompts)
    again = evaluate_model(model, tokenizer, datasets, settings, progress=False, progress_file=path)
    assert comparable(again) == comparable(whole)
    assert [sample.answers for sample in again.answers] == [sample.answers for sample in whole.answers]
    batches = 4 if task == QA else 2
    assert len(prompts) - before == (batches - done) * conditions
    assert not path.exists()
    path.write_text('{"evaluation": "another"}\n')
    with pytest.raises(ValueError, match="cannot be gone on with: it is of another evaluation; delete it"):
        evaluate_model(model, tokenizer, datasets, settings, progress=False, progress_file=path)


def test_more_tasks_and_data_sets_leave_all_documents_in_the_report(model, tokenizer):
    rows = [{**ROWS[number % 3], "context": f"Text {number} about a mill.", "question": "?"} for number in range(6)]
    record = TrainingDocuments(trained={document_id(row["context"]) for row in rows[:3]})
    clean = [{"text": "Nobody has seen this text of some more words."}]

    def evaluate(datasets, task, earlier=None, **options):
        settings = EvaluationSettings(tasks=(task,), ratios=(4,), max_samples=2, ratios_only=True, **options)
        return evaluate_model(
            *(model, tokenizer, datasets, settings),
            **{"progress": False, "records": {"ours": record}, "resume_from": earlier, "model_name": "ours"},
        )

    limits = {"max_new_tokens": {QA: 2, SUMMARISATION: 2}, "allow_trained_documents": True}
    first = evaluate([EvaluationDataset("tiny", rows)], QA, **limits)
    ids = set(first.documents["tiny"].split())
    alone = evaluate([EvaluationDataset("tiny", rows)], RECONSTRUCTION, **limits)
    both = evaluate([EvaluationDataset("tiny", rows)], RECONSTRUCTION, first, **limits)
    assert ids != set(alone.documents["tiny"].split())
    assert set(both.documents["tiny"].split()) == ids | set(alone.documents["tiny"].split())
    seen = len(record.trained.intersection(both.documents["tiny"].split()))
    assert both.held_out["ours"]["shared"] == {"tiny": {"trained": seen}}
    assert both.settings["tasks"] == [QA, RECONSTRUCTION]
    more = evaluate([EvaluationDataset("clean", clean)], RECONSTRUCTION, both, **limits)
    assert more.held_out["ours"]["shared"] == {"tiny": {"trained": seen}}
    assert set(more.documents) == {"tiny", "clean"}
    with pytest.raises(ValueError, match="differs in the domain of tiny"):
        evaluate([EvaluationDataset("tiny", rows, "out")], QA, first, **limits)


def test_all_that_a_sample_is_scored_by_tells_it_from_another():
    sample = Sample([1, 2, 3], [4], [5], ["a"])
    others = [
        replace(sample, passages=[[1, 2], [3]]),
        replace(sample, max_new_tokens=3),
        replace(sample, metric=BenchmarkMetric("trec", ("a",))),
        replace(sample, head_ids=[7]),
        replace(sample, references=["b"]),
    ]
    assert len({samples_digest([one]) for one in (sample, *others)}) == 6


def test_another_evaluation_is_not_gone_on_with(model, tokenizer, folders):
    options = {"tasks": (RECONSTRUCTION,), "ratios": (4,)}
    report = run(model, tokenizer, **options)
    other = MeanPoolingForCausalLM.from_base(str(folders / "teacher"), compression_ratios=(2, 4))
    # The same weights, read otherwise.
    cut, ends = copy.deepcopy(model), copy.deepcopy(model)
    cut.config.chunk_size = 8
    ends.generation_config.eos_token_id = [tokenizer.eos_token_id, 5]
    for changed, rows, change, message in (
        (model, ROWS, {"seed": 1}, "seed"),
        (model, ROWS, {"ratios": (2,)}, "ratios"),
        (model, ROWS, {"batch_size": 3}, "batch_size"),
        (model, ROWS[:2], {}, "tiny, reconstruction"),
        (other, ROWS, {}, "(num_parameters, )?weights"),
        (cut, ROWS, {}, "configuration"),
        (ends, ROWS, {}, "eos_token_id"),
    ):
        given = {"batch_size": 2, "max_new_tokens": {QA: 6, SUMMARISATION: 6}, **options, **change}
        data, settings = [EvaluationDataset("tiny", rows)], EvaluationSettings(**given)
        with pytest.raises(ValueError, match=f"is of another evaluation; it differs in {message}"):
            evaluate_model(changed, tokenizer, data, settings, resume_from=report, model_name=report.model)


def test_a_reader_that_has_trained_on_is_another_model(tokenizer, folders):
    """LLoCO's own adapter changes no memory, and every answer."""
    reader = AutoCompressorForCausalLM.from_base(
        str(folders / "teacher"), chunk_size=8, encoder_lora=LORA, decoder_lora=LORA, training_stage="reader"
    )
    before, memories = weights_and_configuration(reader), reader.model_id
    assert before == weights_and_configuration(reader)
    with torch.no_grad():
        next(p for p in reader.parameters() if p.requires_grad).add_(0.1)
    assert reader.model_id == memories
    assert weights_and_configuration(reader)["weights"] != before["weights"]
