# SPDX-License-Identifier: Apache-2.0
"""An evaluation that was stopped goes on where it stopped, and with no other."""

import pytest
from naive_twin import QA, RECONSTRUCTION, ROWS, SUMMARISATION, run

from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.scoring import Scorer
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.reporting.result_files import rounded


def comparable(report):
    """A report but for the seconds that it took."""
    content = rounded(report.to_dict())
    for row in content["rows"]:
        assert row.pop("seconds")
    return content


def test_an_evaluation_goes_on_where_it_stopped(model, tokenizer, tmp_path):
    datasets = [EvaluationDataset("qa", ROWS), EvaluationDataset("text", [{"text": "plain text"}, {"text": "more"}])]
    settings = EvaluationSettings(tasks=(QA, RECONSTRUCTION), max_new_tokens={QA: 2, SUMMARISATION: 2}, ratios=(4,))
    whole = evaluate_model(model, tokenizer, datasets, settings, progress=False)

    def stop(report):
        report.save(tmp_path / "report.json")
        if len(report.rows) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_model(model, tokenizer, datasets, settings, progress=False, on_result=stop)
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
        on_result=lambda report: scored.append((report.rows[-1].dataset, report.rows[-1].task)),
    )
    assert scored == [("text", RECONSTRUCTION)]
    assert comparable(again) == comparable(whole)


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


def test_another_evaluation_is_not_gone_on_with(model, tokenizer, folders):
    options = {"tasks": (RECONSTRUCTION,), "ratios": (4,)}
    report = run(model, tokenizer, **options)
    other = MeanPoolingForCausalLM.from_base(str(folders / "teacher"), compression_ratios=(2, 4))
    for changed, rows, change, message in (
        (model, ROWS, {"seed": 1}, "seed"),
        (model, ROWS, {"ratios": (2,)}, "ratios"),
        (model, ROWS, {"batch_size": 3}, "batch_size"),
        (model, ROWS[:2], {}, "tiny, reconstruction"),
        (other, ROWS, {}, "(num_parameters, )?weights"),
    ):
        given = {"batch_size": 2, "max_new_tokens": {QA: 6, SUMMARISATION: 6}, **options, **change}
        data, settings = [EvaluationDataset("tiny", rows)], EvaluationSettings(**given)
        with pytest.raises(ValueError, match=f"is of another evaluation; it differs in {message}"):
            evaluate_model(changed, tokenizer, data, settings, resume_from=report, model_name=report.model)
