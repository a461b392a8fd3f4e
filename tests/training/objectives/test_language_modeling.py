# SPDX-License-Identifier: Apache-2.0
import json
import random
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.nn import functional

from context_compressors.data.document_ids import document_id
from context_compressors.data.sources import DataSource
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.language_modeling import (
    LanguageModelingBatches,
    LanguageModelingCollator,
    LanguageModelingRows,
    LanguageModelingTrainer,
    _deal,
)


@pytest.fixture(scope="module")
def rows(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    documents = [generate_document(seed, num_tokens=40 + 10 * seed) for seed in range(12)]
    texts = [{"text": document.text} for document in documents]
    questions = [
        {"context": document.text, "question": question.question, "answers": [question.answer]}
        for document in documents
        for question in document.questions
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), folder / "text.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(questions), folder / "qa.parquet")
    sources = [
        DataSource(path="text.parquet", tasks=("continuation", "reconstruction"), weight=3),
        DataSource(path="qa.parquet", tasks=("question_answering",)),
        DataSource(generated=True, tasks=("question_answering", "reconstruction"), weight=2),
    ]
    same = {"sources": sources, "data_dir": str(folder), "canonical_prompts": True}
    return lambda **fields: LanguageModelingRows(DataArguments(**same, **fields), tokenizer)


def make(rows, mixture):
    return rows(row_mixture=mixture)


def test_blank_texts_and_contexts_are_passed_over(tokenizer, tmp_path):
    for name, rows in (
        ("text", [{"text": text} for text in ("", " ", "Bees hum.")]),
        ("qa", [{"context": text, "question": "?", "answers": ["!"]} for text in ("", "Bees hum.")]),
        ("blank", [{"text": " ", "context": " ", "question": "?", "answers": ["!"]}]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = ("continuation", "reconstruction")

    def maker(name, tasks, **mixture):
        data = DataArguments(
            sources=[DataSource(path=f"{name}.jsonl", tasks=tasks)], data_dir=str(tmp_path), row_mixture=mixture
        )
        return LanguageModelingRows(data, tokenizer)

    questions = ("question_answering",)
    for kind, name, tasks in (("text", "text", both), ("copy", "text", both), (questions[0], "qa", questions)):
        made = maker(name, tasks, **{kind: 1})
        assert made.document_ids == {document_id("Bees hum.")}
        assert all(len(made.row(40, random.Random(seed))[0]) > 8 for seed in range(9))
        with pytest.raises(ValueError, match=r"source 'blank.jsonl' has no (text|context) that is not blank"):
            maker("blank", tasks, **{kind: 1})


def test_text_rows_learn_every_token(rows, tokenizer):
    ids, labels = make(rows, {"text": 1}).row(40, random.Random(0))
    assert ids == labels
    assert ids[0] == tokenizer.bos_token_id
    # A window is cut out of its text: nothing says that it ends.
    assert tokenizer.eos_token_id not in ids


def test_copy_rows_learn_the_second_copy(rows, tokenizer):
    maker = make(rows, {"copy": 1})
    prompt = tokenizer("\nRepeat the text above:", add_special_tokens=False).input_ids
    for seed in range(20):
        ids, labels = maker.row(60, random.Random(seed))
        target = [token for token in labels if token != -100]
        assert target[-1] == tokenizer.eos_token_id
        assert ids == [tokenizer.bos_token_id, *target[:-1], *prompt, *target]
        assert labels[-len(target) :] == target


@pytest.mark.parametrize("kind", ["generated", "question_answering"])
def test_question_rows_learn_the_answers(rows, tokenizer, kind):
    maker = rows(row_mixture={kind: 1}, max_questions=4)
    most = 0
    for seed in range(20):
        ids, labels = maker.row(90, random.Random(seed))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        context, *turns = text.split("\nQuestion: ")
        learned = tokenizer.decode([token for token in labels if token != -100])
        answers = [turn.split("\nAnswer: ")[1] for turn in turns]
        assert learned == "".join(f" {answer}{tokenizer.eos_token}" for answer in answers)
        assert all(answer in context for answer in answers)
        assert 1 <= len(turns) <= 4
        most = max(most, len(turns))
    assert most == 4


@pytest.mark.parametrize(("prompts", "learned"), [("default", " Nora"), ("memory_tokens", "Nora")])
def test_an_answer_follows_its_prompt_as_that_of_a_compressor_does(tokenizer, tmp_path, prompts, learned):
    row = {"context": "Berth 4 belongs to Nora.", "question": "Whose is it?", "answers": [" Nora "]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    sources = [DataSource(path="rows.jsonl", tasks=("question_answering",))]
    data = DataArguments(
        sources=sources, data_dir=str(tmp_path), prompts=prompts, row_mixture={"question_answering": 1}
    )
    _, labels = LanguageModelingRows(data, tokenizer).row(60, random.Random(0))
    target = CompressionDataset(replace(data, row_mixture=None), tokenizer)[0]["target_ids"]
    assert [label for label in labels if label != -100] == target
    assert tokenizer.decode(target) == learned + tokenizer.eos_token


def test_question_rows_of_real_text_fit_the_limit(rows, tokenizer):
    source = make(rows, {"question_answering": 1}).sources["question_answering"][0][1]
    limit = source.lengths[4]
    drawn = {len(source.draw(limit, random.Random(seed))[0]) for seed in range(60)}
    assert drawn == set(source.lengths[:5])
    assert len(source.draw(1, random.Random(0))[0]) == source.lengths[0]


def test_batches_are_a_function_of_index_and_seed(rows):
    def batches(seed):
        return LanguageModelingBatches(
            rows(), 12, 300, batches_per_step=3, length_schedule=[(0, 32), (1, 90)], seed=seed
        )

    forwards = [batches(0)[index] for index in range(12)]
    again = batches(0)
    assert [again[index] for index in reversed(range(12))] == forwards[::-1]
    assert forwards != [batches(1)[index] for index in range(12)]


def test_a_step_holds_its_tokens_with_little_padding(rows):
    batches = LanguageModelingBatches(rows(), 40, 600, batches_per_step=4, length_schedule=[(0, 90)])
    real = padded = 0
    for step in range(10):
        sizes = [[len(ids) for ids, *_ in batches[4 * step + i]] for i in range(4)]
        assert sum(map(sum, sizes)) >= 4 * 600
        real += sum(map(sum, sizes))
        padded += sum(len(batch) * max(batch) for batch in sizes)
    assert padded < 1.15 * real


def test_dealing_has_the_least_padding_of_all_ways_to_cut():
    lengths = [1, 2, 2, 5, 6, 9, 9]
    made = _deal([([0] * n, [0] * n) for n in lengths], 3)

    def padded(parts):
        return sum(len(part) * max(part) for part in parts)

    best = min(
        padded([lengths[:i], lengths[i:j], lengths[j:]])
        for i in range(1, len(lengths))
        for j in range(i + 1, len(lengths))
    )
    assert padded([[len(ids) for ids, _ in part] for part in made]) == best
    assert [len(part) for part in _deal([([0], [0])], 3)] == [1, 1, 1]


def test_length_limit_grows_by_schedule(rows):
    batches = LanguageModelingBatches(rows(), 100, 10, length_schedule=[(0, 32), (0.5, 132), (1, 132)])
    assert [batches.length_limit(index) for index in (0, 25, 50, 99)] == [32, 82, 132, 132]


def test_overlong_rows_are_cut_and_counted(rows):
    batches = LanguageModelingBatches(rows(), 4, 300, length_schedule=[(0, 200)], max_length=50)
    made = [row for index in range(4) for row in batches[index]]
    assert max(len(ids) for ids, *_ in made) == 50
    cut = [number for *_, number in made]
    assert cut == LanguageModelingCollator(0)([batches[index] for index in range(4)])["num_cut"]
    assert all(len(ids) == 50 for ids, _, number in made if number)
    assert sum(cut) > 0
    assert all(any(label != -100 for label in labels) for _, labels, _ in made)


def test_rows_without_a_label_in_front_of_the_cut_are_refused(tokenizer, tmp_path):
    # Passages are one text to a language model.
    row = {"context": ["Nora keeps bees. " * 40, "Olaf does not."], "question": "Who?", "answers": ["Nora"]}
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n")
    source = DataSource(path=str(tmp_path / "long.jsonl"), tasks=("question_answering",), weight=1)
    data = DataArguments(row_mixture={"question_answering": 1}, sources=[source])
    made = LanguageModelingRows(data, tokenizer)
    assert len(LanguageModelingBatches(made, 1, 300, max_length=2000)[0]) == 1
    with pytest.raises(ValueError, match="100 rows in a row had nothing to learn within the model's 50 positions"):
        LanguageModelingBatches(made, 4, 300, max_length=50)[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_mixture": {"txt": 1}}, "did you mean 'text'"),
        ({"row_mixture": {"text": -1}}, "the share of text must be a number from 0 on, got -1"),
        ({"row_mixture": {"text": "a"}}, "the share of text must be a number from 0 on, got 'a'"),
        ({"row_mixture": {"text": 0}}, "at least one share"),
    ],
)
def test_wrong_mixtures_are_refused(rows, fields, message):
    with pytest.raises(ValueError, match=message):
        rows(**fields)


def test_a_kind_of_row_needs_a_source(tokenizer):
    with pytest.raises(ValueError, match="row_mixture asks for text rows"):
        LanguageModelingRows(
            DataArguments(sources=[DataSource(generated=True, tasks=("reconstruction",))], row_mixture={"text": 1}),
            tokenizer,
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length_schedule": [(0, 8)]}, "at least 32 tokens"),
        ({"tokens_per_batch": 0}, "at least 1"),
        ({"num_batches": 0}, "at least 1"),
    ],
)
def test_wrong_batches_are_refused(rows, fields, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelingBatches(rows(), **{"num_batches": 2, "tokens_per_batch": 100, **fields})


def test_loss_and_gradients_equal_a_plain_forward_pass(rows, language_model, tokenizer, make_config):
    batches = LanguageModelingBatches(rows(), 4, 200, batches_per_step=2, length_schedule=[(0, 60)])
    collator = LanguageModelingCollator(tokenizer.pad_token_id)
    args = make_config(objective="language_modeling", per_device_train_batch_size=1)
    trainer = LanguageModelingTrainer(model=language_model, args=args, train_dataset=batches, data_collator=collator)
    parts = [collator([batches[index]]) for index in range(2)]
    count = sum((part["labels"][:, 1:] != -100).sum() for part in parts)

    def gradients():
        found = {name: parameter.grad.clone() for name, parameter in language_model.named_parameters()}
        language_model.zero_grad()
        return found

    total = 0.0
    for part in parts:
        logits = language_model(input_ids=part["input_ids"]).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.item()
    plain = gradients()
    losses = [trainer.compute_loss(language_model, part, num_items_in_batch=count) for part in parts]
    for loss in losses:
        loss.backward()
    assert sum(loss.item() for loss in losses) == pytest.approx(total, rel=1e-5)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_lowers_the_loss_and_moves_every_parameter(rows, language_model, tokenizer, make_config, optimizer):
    args = make_config(
        objective="language_modeling",
        optimizer=optimizer,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=12,
    )
    before = {name: parameter.detach().clone() for name, parameter in language_model.named_parameters()}
    trainer = LanguageModelingTrainer(
        model=language_model,
        args=args,
        train_dataset=LanguageModelingBatches(rows(), 24, 300, batches_per_step=2, length_schedule=[(0, 60)]),
        data_collator=LanguageModelingCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    for name, parameter in language_model.named_parameters():
        assert not torch.equal(parameter.detach(), before[name]), name
