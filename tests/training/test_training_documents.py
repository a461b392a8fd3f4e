# SPDX-License-Identifier: Apache-2.0
"""The ids of the documents that trained a checkpoint and chose it, which it carries beside its weights."""

import json
import shutil
from types import SimpleNamespace

import pytest
from small_recipes import write_recipe

from context_compressors import cli
from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.log_answers import add_sample_answers
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.denoising import DenoisingDataset
from context_compressors.training.objectives.joint_pretraining import JointDataset
from context_compressors.training.objectives.packed_texts import PackedTexts
from context_compressors.training.objectives.segments import SegmentDataset
from context_compressors.training.objectives.windows import WindowDataset
from context_compressors.training.train import main

TEXTS = [
    f"Report {n}. " + " ".join(f"The mill of town {n} ground {n + k} sacks in year {k}." for k in range(6))
    for n in range(12)
]


def write_texts(path, first, last):
    # Two questions share each context, and one of them writes it with other spaces.
    rows = []
    for number in range(first, last):
        for context in (TEXTS[number], TEXTS[number].replace(" ", "  ")):
            rows.append({"context": context, "question": f"Which report, {number}?", "answers": [str(number)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


@pytest.mark.slow
@pytest.mark.parametrize(("first", "shared"), [(2, 1), (3, 0)])
def test_documents_that_train_and_choose_are_warned_of_once(tmp_path, base_folder, caplog, first, shared):
    fields = {
        "sources": [{"path": write_texts(tmp_path / "train.jsonl", 0, 3), "tasks": ["question_answering"]}],
        "eval_sources": [{"path": write_texts(tmp_path / "choose.jsonl", first, 5), "tasks": ["question_answering"]}],
        "data_dir": str(tmp_path),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "method_config": {"compression_ratios": [2]},
        "max_steps": 6,
    }
    main([write_recipe(tmp_path, base=str(base_folder), **fields)])
    assert caplog.text.count("documents of eval_sources are trained on, too") == shared


@pytest.mark.slow
def test_a_checkpoint_knows_what_trained_it_and_what_chose_in_all_of_its_stages(tmp_path, base_folder, capsys):
    tasks = ["question_answering", "continuation"]
    fields = {
        "sources": [{"path": write_texts(tmp_path / "train.jsonl", 0, 6), "tasks": tasks, "rows": [0, 8]}],
        "eval_sources": [{"path": write_texts(tmp_path / "choose.jsonl", 6, 9), "tasks": tasks}],
        "data_dir": str(tmp_path),
        "num_eval_examples": 40,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "method_config": {"compression_ratios": [2]},
        "max_steps": 16,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 8,
    }
    main([write_recipe(tmp_path, base=str(base_folder), **fields)])
    expected = {"trained": set(map(document_id, TEXTS[:4])), "chose": set(map(document_id, TEXTS[6:9]))}
    found = TrainingDocuments.of(tmp_path / "out")
    assert found == TrainingDocuments(**expected)
    # A run that goes on from its first steps has read the same as one that was never stopped.
    early = TrainingDocuments.of(tmp_path / "out" / "checkpoint-2")
    assert early.trained < found.trained
    for step in range(4, 18, 2):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    main([str(tmp_path / "recipe.yaml"), "--resume_from_checkpoint", "latest"])
    assert TrainingDocuments.of(tmp_path / "out") == found

    # What is reported is neither.
    write_texts(tmp_path / "report.jsonl", 9, 12)

    def evaluate(name):
        data = ["--data", str(tmp_path / f"{name}.jsonl"), "--tasks", "reconstruction", "--context-tokens", "8"]
        return cli.main(["evaluate", str(tmp_path / "out"), *data, "--device", "cpu"])

    assert [evaluate(name) for name in ("train", "choose", "report")] == [1, 1, 0]
    shown = capsys.readouterr()
    assert "4 of 6 documents of 'train' trained out (samples 0, 2, 4, ...)" in shown.err
    assert "3 of 3 documents of 'choose' chose out" in shown.err
    assert "Held out: no document here is among the 4 that trained out and the 3 that chose it." in shown.out

    # A second stage has read what the first one had; one that starts from a checkpoint without a record says so.
    first = tmp_path / "first"
    (tmp_path / "out").rename(first)
    second = {
        "sources": [{"path": write_texts(tmp_path / "more.jsonl", 9, 12), "tasks": tasks}],
        "data_dir": str(tmp_path),
        "checkpoint": str(first),
        "max_steps": 12,
    }
    for is_whole in (True, False):
        main([write_recipe(tmp_path, **second), "--overwrite", "true"])
        trained = set(map(document_id, TEXTS[9:] + TEXTS[:4] * is_whole))
        chose = expected["chose"] if is_whole else set()
        assert TrainingDocuments.of(tmp_path / "out") == TrainingDocuments(trained, chose, is_whole)
        (first / "training_documents.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (CompressionDataset, {"tasks": ["question_answering"]}),
        (CompressionDataset, {"tasks": ["question_answering"], "contexts_per_document": 3}),
        (CompressionDataset, {"tasks": ["summarisation"]}),
        (CompressionDataset, {"tasks": ["reconstruction", "continuation"]}),
        (DenoisingDataset, {"tasks": ["continuation"]}),
        (JointDataset, {"tasks": ["reconstruction", "continuation"]}),
    ],
)
def test_a_window_counts_as_its_document_too(tmp_path, tokenizer, kind, source):
    whole = " ".join(TEXTS[:6])
    row = {"question": "Which mill?", "answers": ["one"], "summary": "Mills.", "source_texts": [whole]}
    rows = [{"context": text, **row} for text in TEXTS[:6]] + [{"context": TEXTS[6], **row, "source_texts": None}]
    (tmp_path / "windows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"max_context_tokens": 600, "min_context_tokens": 16, "min_document_tokens": 16}
    data = DataArguments(sources=[{"path": "windows.jsonl", **source}], data_dir=str(tmp_path), **limits)
    examples = kind(data, tokenizer, 12)
    found = set()
    for names in (set(examples[index]["documents"]) for index in range(12)):
        # Its own id stays: a row that does not name the document has the same.
        own = names & set(map(document_id, TEXTS[:7]))
        assert own
        assert names - own == ({document_id(whole)} if own - {document_id(TEXTS[6])} else set())
        found |= names
    assert document_id(whole) in found


@pytest.mark.parametrize(
    ("kind", "tasks", "name"),
    [
        (CompressionDataset, ["continuation"], "target_ids"),
        (CompressionDataset, ["reconstruction"], "target_ids"),
        (WindowDataset, ["continuation"], "target_ids"),
        (JointDataset, ["reconstruction", "continuation"], "continuation_ids"),
    ],
)
@pytest.mark.parametrize("column", ["text", "context"])
def test_a_window_ends_only_where_its_document_does(tmp_path, tokenizer, kind, tasks, name, column):
    whole = " ".join(TEXTS[:3])
    sources = {TEXTS[0]: [whole], TEXTS[1]: [TEXTS[0], whole], TEXTS[2]: [TEXTS[0], f"{whole}\n"], TEXTS[3]: None}
    rows = [{column: text, "id": row, "source_texts": texts} for row, (text, texts) in enumerate(sources.items())]
    # Questions about one text share its tokens.
    rows = [{**row, "question": "Which?"} for row in rows] if column == "context" else rows
    (tmp_path / "windows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shortest = min(len(encode(tokenizer, text)) for text in sources) - 1
    limits = {"min_context_tokens": shortest, "min_document_tokens": shortest, "max_target_tokens": 600}
    source = {"path": "windows.jsonl", "tasks": tasks}
    examples = kind(DataArguments(sources=[source], data_dir=str(tmp_path), **limits), tokenizer, 60)
    ended = {
        examples[index]["id"].rpartition("/")[2]
        for index in range(60)
        if examples[index][name][-1] == tokenizer.eos_token_id
    }
    # What is repeated is all that was read, and ends with it.
    assert ended == ({"0", "1", "2", "3"} if tasks == ["reconstruction"] else {"2", "3"})


@pytest.mark.parametrize("kind", [PackedTexts, SegmentDataset])
def test_streams_are_of_texts_that_end(tmp_path, tokenizer, kind):
    whole = " ".join(TEXTS[:2])
    rows = [{"text": TEXTS[1], "source_texts": [whole]}, {"text": TEXTS[2], "source_texts": None}]
    file = tmp_path / "windows.jsonl"
    data = DataArguments(sources=[{"path": file.name, "tasks": ["continuation"]}], data_dir=str(tmp_path))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = kind(data, tokenizer, 8)
    found = set().union(*(examples[index]["documents"] for index in range(8)))
    assert found == set(map(document_id, (whole, *TEXTS[1:3])))
    # EOS behind it would say that the document ends there.
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": TEXTS[0], "source_texts": [whole]}]))
    with pytest.raises(ValueError, match=r"1 rows are cut from .* longer ones, such as windows\.jsonl/2: give"):
        kind(data, tokenizer, 8)


def test_documents_of_questions_that_are_looked_at_choose(tmp_path, tokenizer):
    rows = [{"context": text, "question": "?", "answers": ["1"], "source_texts": [f"{text} More."]} for text in TEXTS]
    (tmp_path / "windows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "windows.jsonl"), "tasks": ["question_answering"]}
    trainer = SimpleNamespace(args=SimpleNamespace(seed=0), documents=TrainingDocuments(), processing_class=tokenizer)
    trainer.add_callback = lambda callback: None
    add_sample_answers(trainer, DataArguments(sources=[source], eval_sources=[source]), 2)
    assert trainer.documents.chose == {document_id(text + more) for text in TEXTS[:4] for more in ("", " More.")}


def test_a_document_has_one_id_and_another_file_is_refused(tmp_path):
    assert document_id("The  Mill\nburned.") == document_id("the mill burned.") != document_id("The mill burned")
    assert TrainingDocuments.of(tmp_path) is TrainingDocuments.of("") is None
    (tmp_path / "training_documents.json").write_text("{}")
    with pytest.raises(ValueError, match="is no record of training documents: KeyError"):
        TrainingDocuments.of(tmp_path)
