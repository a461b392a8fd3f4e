# SPDX-License-Identifier: Apache-2.0
"""An evaluation refuses wrong settings, and its report holds the settings that it ran with."""

import pytest
from naive_twin import QA, RECONSTRUCTION, ROWS, SUMMARIZATION

from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.held_out import compare_sources
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.evaluation.samples import EvaluationDataset, Sample
from context_compressors.evaluation.settings import EvaluationSettings


def test_a_task_runs_on_the_data_sets_that_have_its_columns(model, tokenizer):
    datasets = [EvaluationDataset("qa", ROWS), EvaluationDataset("text", [{"text": "plain text"}], "out")]
    settings = EvaluationSettings(tasks=(QA, RECONSTRUCTION), max_new_tokens={QA: 2, SUMMARIZATION: 2}, ratios=(4,))
    report = evaluate_model(model, tokenizer, datasets, settings, progress=False)
    assert report.datasets(QA) == ["qa"]
    assert report.datasets(RECONSTRUCTION) == ["qa", "text"]
    assert report.datasets(RECONSTRUCTION, "out") == ["text"]
    assert report.ratios(QA) == [4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("reconstrution",)}, "did you mean 'reconstruction'"),
        ({"tasks": ()}, "tasks must not be empty"),
        ({"ratios": (0,)}, "ratios at least 1"),
        ({"truncation_side": "lef"}, "did you mean 'left'"),
        ({"memory_dtype": "int3"}, "memory_dtype"),
    ],
)
def test_settings_refuse_impossible_values(options, message):
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**options)


def test_documents_that_trained_or_chose_are_refused_by_name_or_named_in_the_report(model, tokenizer):
    rows = [{**ROWS[number % 3], "id": f"q{number}", "question": f"{number}?"} for number in range(6)]
    datasets, seen = [EvaluationDataset("tiny", rows)], [document_id(row["context"].upper()) for row in ROWS[:2]]
    records = {"ours": TrainingDocuments(trained={*seen, "0" * 12}, chose=set(seen[:1])), "reader": None}

    def evaluate(**options):
        settings = EvaluationSettings(tasks=(RECONSTRUCTION,), ratios=(4,), **options)
        return evaluate_model(model, tokenizer, datasets, settings, progress=False, records=records)

    # A window of a text is of the text.
    with pytest.raises(
        ValueError, match=r"2 of 3 documents of 'tiny' trained ours \(samples q0, q1\); 1 of 3 .* chose"
    ):
        evaluate(context_tokens=5)
    report = evaluate(allow_trained_documents=True)
    shared = {"tiny": {"trained": 2, "chose": 1}}
    assert report.held_out["ours"] == {"record": "whole", "trained": 3, "chose": 1, "shared": shared}
    # Each task may have drawn other documents.
    texts = {place: Sample([1], [], [1], ["a"], source_ids=(document_id(ROWS[place]["context"]),)) for place in (0, 1)}
    both = compare_sources({"tiny": list(texts.values())}, {"ours": records["ours"]}, allow_shared=True)
    assert both["ours"]["shared"] == {"tiny": {"trained": 2, "chose": 1}}
    text = report_markdown(report)
    assert "**Not held out**" in text
    assert "2 of tiny trained, 1 of tiny chose" in text
    assert "Whether reader was trained on these documents is unknown" in text
    assert set(report.documents["tiny"].split()) == {document_id(row["context"]) for row in ROWS}
    records = {"ours": TrainingDocuments({"0" * 12}, is_whole=False)}
    text = report_markdown(evaluate())
    assert "no document here is among the 1 that trained ours and the 0 that chose it, as far" in text
