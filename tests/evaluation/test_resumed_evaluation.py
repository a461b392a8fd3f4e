# SPDX-License-Identifier: Apache-2.0
"""An evaluation that was stopped goes on where it stopped, and with no other."""

import copy

import pytest
from naive_twin import QA, RECONSTRUCTION, ROWS, SUMMARIZATION, answers_of, run

from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.rows import AnswersFile, read_answers
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.reporting.result_files import rounded

LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj"]}


def comparable(report):
    """A report but for the seconds that it took."""
    content = rounded(report.to_dict())
    # They follow from the rows, of which a file has four digits.
    del content["averages"]
    for row in content["rows"]:
        assert row.pop("seconds")
    return content


def test_an_evaluation_goes_on_where_it_stopped(model, tokenizer, tmp_path):
    datasets = [EvaluationDataset("qa", ROWS), EvaluationDataset("text", [{"text": "plain text"}, {"text": "more"}])]
    # More digits than a file has.
    settings = EvaluationSettings(
        tasks=(QA, RECONSTRUCTION), max_new_tokens={QA: 2, SUMMARIZATION: 2}, ratios=(4,), repetition_penalty=1.23456
    )
    whole = evaluate_model(model, tokenizer, datasets, settings, progress=False)

    def stop(report):
        report.save(tmp_path / "report.json")
        if len(report.rows) == 6:
            raise KeyboardInterrupt

    path = tmp_path / "again.json"
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
    # A finished one is taken over as it is.
    done = evaluate_model(
        *(model, tokenizer, datasets, settings), progress=False, resume_from=EvaluationReport.load(again.save(path))
    )
    assert not done.answers
    assert comparable(done) == comparable(whole)


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
        given = {"batch_size": 2, "max_new_tokens": {QA: 6, SUMMARIZATION: 6}, **options, **change}
        data, settings = [EvaluationDataset("tiny", rows)], EvaluationSettings(**given)
        with pytest.raises(ValueError, match=f"is of another evaluation; it differs in {message}"):
            evaluate_model(changed, tokenizer, data, settings, resume_from=report, model_name=report.model)


def test_answers_are_appended_and_read_back(tmp_path):
    path, report = tmp_path / "new" / "answers.jsonl", EvaluationReport("tiny")
    file = AnswersFile(path)
    report.answers += answers_of([1.0, 2.0])
    file.write_new(report.answers)
    report.answers += answers_of([3.0], "nq")
    file.write_new(report.answers)
    assert read_answers(path) == report.answers
    # An evaluation that stopped in the middle of "nq" scores it again.
    path.write_text(path.read_text() + '{"dataset": "nq", "ta')
    before = path.read_text()
    again = AnswersFile(path, {("squad", QA)})
    # Nothing is lost where an evaluation is refused.
    assert path.read_text() == before
    report.answers = report.answers[2:]
    again.write_new(report.answers)
    assert [answers.dataset for answers in read_answers(path)] == ["squad", "squad", "nq"]
    with pytest.raises(ValueError, match=r"does not have the answers of \[\('qed', 'question_answering'\)\]"):
        AnswersFile(path, {("qed", QA)})
    path.write_text("[1]\n")
    for read in (lambda: AnswersFile(path, {("squad", QA)}), lambda: read_answers(path)):
        with pytest.raises(ValueError, match="is no file of answers"):
            read()
