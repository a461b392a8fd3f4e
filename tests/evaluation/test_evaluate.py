# SPDX-License-Identifier: Apache-2.0
"""The evaluation against a naive twin: one sample at a time, no padding, no batch."""

import json
import math

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from context_compressors.evaluation import metrics
from context_compressors.evaluation.evaluate import evaluate_model, model_label
from context_compressors.evaluation.evaluate_command import main
from context_compressors.evaluation.metrics import squad_scores
from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder, load_dataset_source
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.evaluation.task_text import text_ids
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.collators import CompressionCollator
from context_compressors.training.data import task_start_ids
from context_compressors.training.prompts import load_prompts
from context_compressors.training.task_tokens import add_task_tokens, text_tokenizer

QA, RECONSTRUCTION, CONTINUATION, SUMMARISATION = (
    "question_answering",
    "reconstruction",
    "continuation",
    "summarisation",
)
ROWS = [
    {
        "context": "Ada keeps a cat named Tom in Rome.",
        "question": "Who keeps a cat?",
        "answers": ["Ada", "Ada herself"],
    },
    {"context": "The box holds 7 pens.", "question": "How many pens?", "answers": ["7"]},
    {
        "context": "A ferry leaves Bern at noon, and another one at six.",
        "question": "When?",
        "answers": ["noon", "six"],
    },
]
CONDITIONS = ["no_context", "full_context", "ratio=2", "ratio=4"]


def make_tokenizer():
    """One token per byte, and three special ones."""
    tokens = ["<bos>", "<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=10_000
    )


def make_base(tokenizer, seed, max_position_embeddings=512):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A compressor with adapters that matter, a teacher, and the base of the compressor, as folders."""
    root = tmp_path_factory.mktemp("models")
    make_base(tokenizer, 0).save_pretrained(root / "base")
    make_base(tokenizer, 1).save_pretrained(root / "teacher")
    model = MeanPoolingForCausalLM.from_base(str(root / "base"), compression_ratios=(2, 4))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(root / "tiny-compressor")
    for name in ("tiny-compressor", "teacher"):
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def model(folders):
    return MeanPoolingForCausalLM.from_pretrained(folders / "tiny-compressor").eval()


@pytest.fixture(scope="module")
def teacher(folders):
    return LlamaForCausalLM.from_pretrained(folders / "teacher").eval()


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def naive_inputs(model, tokenizer, condition, context, prompt, start=None):
    """Keyword arguments and the text's ids for one sample under one condition; `start` is the task token, if any."""
    is_compressed = condition.startswith("ratio=")
    context_ids = encode(tokenizer, context)
    text = [tokenizer.bos_token_id if start is None or not is_compressed else start]
    if condition.endswith("full_context"):
        text = text + context_ids
    if is_compressed:
        ratio = int(condition.removeprefix("ratio="))
        return {"memory": model.compress(torch.tensor([context_ids]), ratio=ratio)}, text + encode(tokenizer, prompt)
    return {}, text + encode(tokenizer, prompt)


@torch.no_grad()
def naive_scores(model, tokenizer, condition, triples, reader=None, start=None):
    """Token accuracy and perplexity over (context, prompt, target) triples."""
    nll, hits, count = 0.0, 0, 0
    for context, prompt, target in triples:
        extra, text = naive_inputs(model, tokenizer, condition, context, prompt, start)
        target_ids = [*encode(tokenizer, target), tokenizer.eos_token_id]
        logits = (reader or model)(input_ids=torch.tensor([text + target_ids]), **extra).logits[0]
        for place, token in enumerate(target_ids, start=len(text) - 1):
            nll -= float(logits[place].float().log_softmax(-1)[token])
            hits += int(logits[place].argmax()) == token
            count += 1
    return {"token_accuracy": 100 * hits / count, "perplexity": math.exp(nll / count)}


@torch.no_grad()
def naive_answers(model, tokenizer, condition, rows, max_new_tokens, template="\nQuestion: {}\nAnswer:", start=None):
    """Greedy answers, one token after another, with no cache and no `generate`."""
    answers = []
    for row in rows:
        prompt = template.format(row.get("question"))
        extra, text = naive_inputs(model, tokenizer, condition, row["context"], prompt, start)
        first = len(text)
        while len(text) < first + max_new_tokens:
            token = int(model(input_ids=torch.tensor([text]), **extra).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            text = [*text, token]
        answers.append(tokenizer.decode(text[first:], skip_special_tokens=True).strip())
    return answers


def run(model, tokenizer, rows=ROWS, teacher=None, **options):
    options = {"batch_size": 2, "max_new_tokens": {QA: 6, SUMMARISATION: 6}, **options}
    data = [EvaluationDataset("tiny", rows)]
    return evaluate_model(model, tokenizer, data, EvaluationSettings(**options), teacher=teacher, progress=False)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_reconstruction_equals_the_naive_twin_under_every_condition(model, tokenizer, batch_size):
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), batch_size=batch_size)
    assert report.conditions(RECONSTRUCTION) == CONDITIONS
    triples = [(row["context"], "\nRepeat the text above:", row["context"]) for row in ROWS]
    for condition in CONDITIONS:
        for metric, expected in naive_scores(model, tokenizer, condition, triples).items():
            assert report.score("tiny", RECONSTRUCTION, condition, metric) == pytest.approx(expected, rel=1e-4), (
                condition
            )


def test_continuation_equals_the_naive_twin(model, tokenizer):
    rows = [{"text": "abcdefghijkl"}, {"text": "The cat sat "}]
    report = run(model, tokenizer, rows, tasks=(CONTINUATION,), context_tokens=8, continuation_tokens=4)
    triples = [(row["text"][:8], "", row["text"][8:]) for row in rows]
    for condition in CONDITIONS:
        expected = naive_scores(model, tokenizer, condition, triples)["perplexity"]
        assert report.score("tiny", CONTINUATION, condition, "perplexity") == pytest.approx(expected, rel=1e-4)


def test_answers_equal_the_naive_twin(model, tokenizer, monkeypatch):
    written = []
    monkeypatch.setattr(
        "context_compressors.evaluation.scoring.squad_scores",
        lambda predictions, references: (
            written.append((predictions, references)) or squad_scores(predictions, references)
        ),
    )
    report = run(model, tokenizer, tasks=(QA,))
    assert set(report.metric_names(QA)) >= {"exact_match", "f1", "substring_accuracy", "rouge1", "rouge2", "rougeL"}
    for condition, (predictions, references) in zip(CONDITIONS, written, strict=True):
        answers = naive_answers(model, tokenizer, condition, ROWS, 6)
        order = [next(row for row in ROWS if row["answers"] == accepted) for accepted in references]
        assert predictions == [answers[ROWS.index(row)] for row in order], condition


def test_full_and_no_context_come_from_the_teacher_when_there_is_one(model, teacher, tokenizer):
    report = run(model, tokenizer, teacher=teacher, tasks=(RECONSTRUCTION,))
    assert report.bounds == "teacher"
    assert run(model, tokenizer, tasks=(RECONSTRUCTION,)).bounds == "own_decoder"
    triples = [(row["context"], "\nRepeat the text above:", row["context"]) for row in ROWS]
    for condition in CONDITIONS:
        reader = None if condition.startswith("ratio") else teacher
        expected = naive_scores(model, tokenizer, condition, triples, reader)["perplexity"]
        assert report.score("tiny", RECONSTRUCTION, condition, "perplexity") == pytest.approx(expected, rel=1e-4)


def test_a_plain_language_model_has_full_and_no_context(teacher, tokenizer):
    report = run(teacher, tokenizer, tasks=(RECONSTRUCTION, QA))
    assert report.conditions(RECONSTRUCTION) == report.conditions(QA) == ["no_context", "full_context"]
    triples = [(row["context"], "\nRepeat the text above:", row["context"]) for row in ROWS]
    for condition in ("no_context", "full_context"):
        for metric, expected in naive_scores(teacher, tokenizer, condition, triples).items():
            assert report.score("tiny", RECONSTRUCTION, condition, metric) == pytest.approx(expected, rel=1e-4)
    assert report.num_parameters == teacher.num_parameters()
    assert report.settings["ratios"] == []
    assert "| full_context" in report.to_markdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratios": (4,)}, "LlamaForCausalLM is a plain language model, .*: it takes no ratios"),
        ({"zero_shot": True, "ratios": (2,)}, "takes no ratios and no zero shot"),
    ],
)
def test_a_plain_language_model_refuses_what_a_compressor_takes(teacher, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        run(teacher, tokenizer, **options)
    with pytest.raises(ValueError, match="it takes no teacher"):
        run(teacher, tokenizer, teacher=teacher)


def test_zero_shot_is_the_base_with_the_adapters_off(model, tokenizer, folders):
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), zero_shot=True)
    base = LlamaForCausalLM.from_pretrained(folders / "base").eval()
    triples = [(row["context"], "\nRepeat the text above:", row["context"]) for row in ROWS]
    for condition in ("zero_shot_no_context", "zero_shot_full_context"):
        expected = naive_scores(model, tokenizer, condition, triples, base)["perplexity"]
        assert report.score("tiny", RECONSTRUCTION, condition, "perplexity") == pytest.approx(expected, rel=1e-4)
    own = report.score("tiny", RECONSTRUCTION, "no_context", "perplexity")
    assert abs(own / report.score("tiny", RECONSTRUCTION, "zero_shot_no_context", "perplexity") - 1) > 1e-3


def test_reconstruction_bleu_is_there_when_asked_for(model, tokenizer):
    assert run(model, tokenizer, tasks=(RECONSTRUCTION,)).metric_names(RECONSTRUCTION) == [
        "token_accuracy",
        "perplexity",
    ]
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), reconstruction_bleu=True)
    assert 0 <= report.score("tiny", RECONSTRUCTION, "ratio=2", "bleu") <= 100


@torch.no_grad()
def naive_recovered_perplexity(model, tokenizer, condition, rows):
    """Perplexity of what the model writes by itself, token after token, EOS included."""
    nll, count = 0.0, 0
    for row in rows:
        extra, text = naive_inputs(model, tokenizer, condition, row["context"], "\nRepeat the text above:")
        for _ in range(len(row["context"]) + 1):
            scores = model(input_ids=torch.tensor([text]), **extra).logits[0, -1].float().log_softmax(-1)
            token = int(scores.argmax())
            nll, count, text = nll - float(scores[token]), count + 1, [*text, token]
            if token == tokenizer.eos_token_id:
                break
    return math.exp(nll / count)


@pytest.mark.parametrize("condition", ["full_context", "ratio=2"])
def test_restoration_scores_are_of_what_the_model_writes(model, tokenizer, condition, monkeypatch):
    written = []
    monkeypatch.setattr(
        "context_compressors.evaluation.scoring.prefix_exact_match",
        lambda *ids: written.append(ids) or metrics.prefix_exact_match(*ids),
    )
    rows = [{"context": "A ferry leaves"}, {"context": "7 pens"}]
    report = run(model, tokenizer, rows, tasks=(RECONSTRUCTION,), reconstruction_bleu=True, batch_size=1)
    names = {"bleu", "rouge1", "rouge2", "rougeL", "prefix_exact_match", "recovered_perplexity"}
    assert names < set(report.metric_names(RECONSTRUCTION))
    expected = naive_recovered_perplexity(model, tokenizer, condition, rows)
    score = report.score("tiny", RECONSTRUCTION, condition, "recovered_perplexity")
    assert score == pytest.approx(expected, rel=1e-4)
    assert score < report.score("tiny", RECONSTRUCTION, condition, "perplexity")
    predictions, references = written[CONDITIONS.index(condition)]
    assert [tokenizer.decode(ids) for ids in references] == [row["context"] for row in rows]
    for row, ids in zip(rows, predictions, strict=True):
        limit = len(row["context"]) + 1
        (answer,) = naive_answers(model, tokenizer, condition, [row], limit, "\nRepeat the text above:")
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == answer


def test_restoration_at_several_lengths_takes_whole_windows(model, tokenizer):
    rows = [{"text": "abcdefghijklmnop"}, {"text": "a short one"}, {"text": "0123456789" * 4}]
    report = run(model, tokenizer, rows, tasks=(RECONSTRUCTION, CONTINUATION), restoration_lengths=(8, 16))
    assert report.datasets(RECONSTRUCTION) == ["tiny, 8 tokens", "tiny, 16 tokens"]
    assert report.datasets(CONTINUATION) == ["tiny"]
    samples = {row.dataset: row.num_samples for row in report.rows if row.task == RECONSTRUCTION}
    assert samples == {"tiny, 8 tokens": 3, "tiny, 16 tokens": 2}
    data = EvaluationDataset("tiny", rows)
    work = builder(tokenizer).build_by_length(data, RECONSTRUCTION, (8, 16))
    assert [{len(sample.context_ids) for sample in built} for _, _, built in work] == [{8}, {16}]
    with pytest.raises(ValueError, match="data set 'tiny, 64 tokens' has no text of 64 tokens for reconstruction"):
        run(model, tokenizer, rows, tasks=(RECONSTRUCTION,), restoration_lengths=(64,))


def test_restorations_are_drawn_from_texts_that_are_long_enough(tokenizer, caplog):
    long = ["0123456789" * 4, "9876543210" * 4]
    data = EvaluationDataset("tiny", [{"text": text} for text in [*(f"short {n}" for n in range(20)), *long]])
    ((_, _, samples),) = builder(tokenizer).build_by_length(data, RECONSTRUCTION, (32,), max_samples=2)
    texts = [tokenizer.decode(sample.context_ids) for sample in samples]
    assert [text in source for text, source in zip(texts, long, strict=True)] == [True, True]
    assert "20 texts of less than 32 tokens left out" in caplog.text


def test_answers_are_scored_token_by_token_when_asked_for(model, tokenizer):
    assert "answer_perplexity" not in run(model, tokenizer, tasks=(QA,)).metric_names(QA)
    report = run(model, tokenizer, tasks=(QA,), answer_perplexity=True)
    triples = [(row["context"], f"\nQuestion: {row['question']}\nAnswer:", f" {row['answers'][0]}") for row in ROWS]
    for condition in CONDITIONS:
        expected = naive_scores(model, tokenizer, condition, triples)["perplexity"]
        assert report.score("tiny", QA, condition, "answer_perplexity") == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def token_model(tokenizer, folders):
    """A compressor with task tokens, whose embeddings matter."""
    tokens = {"[AE]": len(tokenizer), "[LM]": len(tokenizer) + 1}
    base = str(folders / "base")
    model = MeanPoolingForCausalLM.from_base(base, compression_ratios=(2, 4), task_token_ids=tokens)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_a_task_token_starts_the_text_behind_slots_and_needs_no_words(token_model, tokenizer):
    report = run(token_model, tokenizer, tasks=(RECONSTRUCTION,))
    assert report.settings["prompts"] == "memory_tokens"
    triples = [(row["context"], "", row["context"]) for row in ROWS]
    for condition in CONDITIONS:
        start = token_model.config.reconstruction_token_id
        for metric, expected in naive_scores(token_model, tokenizer, condition, triples, start=start).items():
            assert report.score("tiny", RECONSTRUCTION, condition, metric) == pytest.approx(expected, rel=1e-4)
    rows = [{"text": "abcdefghijkl"}, {"text": "The cat sat "}]
    report = run(token_model, tokenizer, rows, tasks=(CONTINUATION,), context_tokens=8, continuation_tokens=4)
    triples = [(row["text"][:8], "", row["text"][8:]) for row in rows]
    for condition in CONDITIONS:
        start = token_model.config.continuation_token_id
        expected = naive_scores(token_model, tokenizer, condition, triples, start=start)["perplexity"]
        assert report.score("tiny", CONTINUATION, condition, "perplexity") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("task", [QA, RECONSTRUCTION])
def test_texts_written_from_task_tokens_equal_the_naive_twin(token_model, tokenizer, monkeypatch, task):
    written = []
    name = {QA: "squad_scores", RECONSTRUCTION: "bleu"}[task]
    score = getattr(metrics, name)
    monkeypatch.setattr(
        f"context_compressors.evaluation.scoring.{name}",
        lambda predictions, references: written.append(sorted(predictions)) or score(predictions, references),
    )
    rows = ROWS[:2]
    run(token_model, tokenizer, rows, tasks=(task,), reconstruction_bleu=True, batch_size=1)
    config = token_model.config
    template, start = "### Question: {}\n### Answer:", config.continuation_token_id
    if task == RECONSTRUCTION:
        template, start = "", config.reconstruction_token_id
    for condition, predictions in zip(CONDITIONS, written, strict=True):
        expected = []
        for row in rows:
            limit = 6 if task == QA else len(row["context"]) + 1
            expected += naive_answers(token_model, tokenizer, condition, [row], limit, template, start)
        assert predictions == sorted(expected), condition


def test_a_text_that_says_a_task_token_is_only_a_text(token_model):
    tokenizer = make_tokenizer()
    assert add_task_tokens(tokenizer) == token_model.config.task_token_ids
    rows = [{"text": "say [AE] and [LM] and <eos> twice"}]
    # 33 characters and EOS: as special tokens, [AE] and [LM] would be no tokens of the encoder's.
    report = run(token_model, tokenizer, rows, tasks=(RECONSTRUCTION,), ratios=(2,))
    triples = [(rows[0]["text"], "", rows[0]["text"])]
    start = token_model.config.reconstruction_token_id
    expected = naive_scores(token_model, text_tokenizer(tokenizer), "ratio=2", triples, start=start)
    assert report.score("tiny", RECONSTRUCTION, "ratio=2", "perplexity") == pytest.approx(expected["perplexity"], 1e-4)


def test_bounds_alone_are_the_bounds(model, tokenizer):
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), bounds_only=True)
    assert report.conditions(RECONSTRUCTION) == ["no_context", "full_context"]
    assert report.settings["ratios"] == []
    whole = run(model, tokenizer, tasks=(RECONSTRUCTION,))
    for row in report.rows:
        expected = whole.score("tiny", RECONSTRUCTION, row.condition, "perplexity")
        assert row.metrics["perplexity"] == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["no_context", "full_context"])
def test_bounds_whose_task_tokens_were_trained_read_what_training_reads(token_model, mode):
    tokenizer = make_tokenizer()
    add_task_tokens(tokenizer)
    report = run(token_model, tokenizer, tasks=(RECONSTRUCTION,), bounds_only=True, task_tokens_in_bounds=True)
    assert report.settings["task_tokens_in_bounds"]
    plain, starts = text_tokenizer(tokenizer), task_start_ids(token_model.config)
    collator = CompressionCollator.from_tokenizer(plain, mode=mode, task_start_ids=starts)
    total, count = 0.0, 0
    for row in ROWS:
        ids = encode(plain, row["context"])
        example = {"context_ids": ids, "prompt_ids": [], "target_ids": [*ids, tokenizer.eos_token_id]}
        batch = collator([{**example, "task": RECONSTRUCTION}])
        assert starts[RECONSTRUCTION] in batch["input_ids"][0].tolist()
        with torch.no_grad():
            loss = token_model(**batch).loss
        total, count = total + float(loss) * (len(ids) + 1), count + len(ids) + 1
    assert report.score("tiny", RECONSTRUCTION, mode, "perplexity") == pytest.approx(math.exp(total / count), rel=1e-4)


def test_task_tokens_in_bounds_need_a_model_that_has_them(model, token_model, tokenizer):
    message = "task_tokens_in_bounds .* is for a compressor with task tokens, without a teacher"
    for teacher, reader in ((None, model), (make_base(tokenizer, 1), token_model), (None, make_base(tokenizer, 1))):
        with pytest.raises(ValueError, match=message):
            run(reader, tokenizer, teacher=teacher, tasks=(RECONSTRUCTION,), task_tokens_in_bounds=True)


def test_learned_tokens_of_a_prefix_reach_the_full_context_and_documents_have_none(token_model, monkeypatch):
    tokenizer = make_tokenizer()
    ae, lm = add_task_tokens(tokenizer).values()
    read, generate = [], token_model.generate
    monkeypatch.setattr(
        token_model, "generate", lambda **inputs: read.append(inputs["input_ids"].tolist()) or generate(**inputs)
    )
    rows = [{"context": "say [AE]", "question": "[LM]?", "answers": ["yes"]}]
    options = {"tasks": (QA,), "context_prefix": "[LM][AE]# ", "prompts": "default"}
    run(token_model, tokenizer, rows, **options, bounds_only=True)
    plain = text_tokenizer(tokenizer)
    question = encode(plain, "\nQuestion: [LM]?\nAnswer:")
    context = [lm, ae, *encode(plain, "# "), *encode(plain, "say [AE]")]
    assert read == [[[0, *question]], [[0, *context, *question]]]
    message = r"context_prefix has learned tokens, \[AE\], \[LM\], which only the compressor's own decoder reads"
    for more in ({}, {"bounds_only": True, "zero_shot": True}):
        with pytest.raises(ValueError, match=message):
            run(token_model, tokenizer, rows, **options, **more)
    with pytest.raises(ValueError, match=message):
        run(token_model, tokenizer, rows, make_base(tokenizer, 1).eval(), **options, bounds_only=True)


def test_prompts_can_be_named(model, token_model, tokenizer):
    report = run(token_model, tokenizer, tasks=(RECONSTRUCTION,), prompts="default")
    triples = [(row["context"], "\nRepeat the text above:", row["context"]) for row in ROWS]
    start = token_model.config.reconstruction_token_id
    expected = naive_scores(token_model, tokenizer, "ratio=2", triples, start=start)["perplexity"]
    assert report.score("tiny", RECONSTRUCTION, "ratio=2", "perplexity") == pytest.approx(expected, rel=1e-4)
    assert run(model, tokenizer, tasks=(RECONSTRUCTION,)).settings["prompts"] is None
    with pytest.raises(ValueError, match=r"no prompts 'memory_token'.*did you mean 'memory_tokens'"):
        run(model, tokenizer, tasks=(RECONSTRUCTION,), prompts="memory_token")


def test_the_text_of_a_task_is_its_start_and_its_first_prompt(model, token_model, tokenizer):
    ae, lm = token_model.config.task_token_ids.values()
    question = encode(tokenizer, "### Question: Who?\n### Answer:")
    assert text_ids(token_model.config, tokenizer, RECONSTRUCTION) == [ae]
    assert text_ids(token_model.config, tokenizer, CONTINUATION) == [lm]
    assert text_ids(token_model.config, tokenizer, QA, "Who?") == [lm, *question]
    plain = encode(tokenizer, "\nQuestion: Who?\nAnswer:")
    assert text_ids(token_model.config, tokenizer, QA, "Who?", "default") == [lm, *plain]
    assert text_ids(model.config, tokenizer, QA, "Who?") == [tokenizer.bos_token_id, *plain]


def test_several_summaries_of_a_context_are_references_of_one_sample(tokenizer, model):
    rows = [
        {"context": "a b c", "summary": "a"},
        {"context": "d e f", "summary": "d"},
        {"context": "a b c", "summary": "b"},
    ]
    report = run(model, tokenizer, rows, tasks=(SUMMARISATION,))
    assert {row.num_samples for row in report.rows} == {2}
    samples = builder(tokenizer).build(EvaluationDataset("tiny", rows), SUMMARISATION)
    assert [sample.references for sample in samples] == [["a", "b"], ["d"]]


def test_a_task_runs_on_the_data_sets_that_have_its_columns(model, tokenizer):
    datasets = [EvaluationDataset("qa", ROWS), EvaluationDataset("text", [{"text": "plain text"}], "out")]
    settings = EvaluationSettings(tasks=(QA, RECONSTRUCTION), max_new_tokens={QA: 2, SUMMARISATION: 2}, ratios=(4,))
    report = evaluate_model(model, tokenizer, datasets, settings, progress=False)
    assert report.datasets(QA) == ["qa"]
    assert report.datasets(RECONSTRUCTION) == ["qa", "text"]
    assert report.datasets(RECONSTRUCTION, "out") == ["text"]
    assert report.ratios(QA) == [4]


def test_settings_model_and_hardware_are_in_the_report(model, tokenizer):
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), seed=3)
    assert report.model == "tiny-compressor"
    assert report.settings["ratios"] == [2, 4]
    assert report.settings["seed"] == 3
    assert {row.seed for row in report.rows} == {3}
    assert report.num_parameters == model.num_parameters()
    assert report.environment["versions"]["torch"] == torch.__version__


def test_model_is_left_in_the_mode_it_was_in(model, tokenizer):
    try:
        model.train()
        run(model, tokenizer, tasks=(RECONSTRUCTION,))
        assert model.training
    finally:
        model.eval()


def builder(tokenizer, max_positions=512, **options):
    options = {"max_new_tokens": {QA: 6, SUMMARISATION: 6}, "context_tokens": 8, "continuation_tokens": 4, **options}
    return SampleBuilder(tokenizer, max_positions, **options)


def test_every_condition_gets_the_first_template(tokenizer):
    sample = builder(tokenizer).build(EvaluationDataset("tiny", ROWS[:1]), QA)[0]
    template = load_prompts()[QA][0]
    assert tokenizer.decode(sample.prompt_ids) == template.replace("{question}", ROWS[0]["question"])
    assert tokenizer.decode(sample.context_ids) == ROWS[0]["context"]


def test_a_prefix_stands_in_front_of_contexts_with_questions_only(tokenizer):
    data = EvaluationDataset("tiny", ROWS[:1])
    with_prefix = builder(tokenizer, context_prefix="# Text\n")
    assert tokenizer.decode(with_prefix.build(data, QA)[0].context_ids) == f"# Text\n{ROWS[0]['context']}"
    assert tokenizer.decode(with_prefix.build(data, RECONSTRUCTION)[0].context_ids) in ROWS[0]["context"]


def test_samples_are_drawn_by_the_seed(tokenizer):
    data = EvaluationDataset("tiny", [{"text": f"text number {index}"} for index in range(50)])
    drawn = [builder(tokenizer, seed=seed).build(data, RECONSTRUCTION, 5) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 5


def test_short_texts_are_divided_for_continuation(tokenizer):
    data = EvaluationDataset("tiny", [{"text": "abcdef"}, {"text": "xy"}, {"text": "z"}])
    samples = builder(tokenizer).build(data, CONTINUATION)
    parts = [(tokenizer.decode(sample.context_ids), tokenizer.decode(sample.target_ids)) for sample in samples]
    assert parts == [("abcd", "ef<eos>"), ("x", "y<eos>")]


def test_contexts_that_do_not_fit_are_refused(model, tokenizer):
    rows = [*ROWS, {"context": "x" * 600, "question": "What?", "answers": ["x"]}]
    with pytest.raises(ValueError, match=r"a context of 600 tokens.*positions leave \d+ .*--truncate-context"):
        run(model, tokenizer, rows, tasks=(QA,))


def test_truncation_is_counted(model, tokenizer):
    rows = [*ROWS, {"context": "x" * 600, "question": "What?", "answers": ["x"]}]
    report = run(model, tokenizer, rows, tasks=(QA,), truncate_context=True)
    assert {(row.num_samples, row.num_truncated) for row in report.rows} == {(4, 1)}


@pytest.mark.parametrize("task", [QA, RECONSTRUCTION, CONTINUATION])
def test_truncated_samples_fill_the_positions_exactly(tokenizer, task):
    text = "0123456789" * 30
    data = EvaluationDataset("tiny", [{"context": text, "question": "?", "answers": ["1"]}])
    cut = builder(tokenizer, 100, context_tokens=200, truncate_context=True).build(data, task)[0]
    tail = max(len(cut.target_ids), 6 if task == QA else 0)
    used = 1 + len(cut.context_ids) + len(cut.prompt_ids) + tail
    # A reconstruction grows by two tokens for one of context.
    assert used in ((99, 100) if task == RECONSTRUCTION else (100,))
    assert cut.truncated
    if task == RECONSTRUCTION:
        assert cut.target_ids == [*cut.context_ids, tokenizer.eos_token_id]
        assert cut.references == [tokenizer.decode(cut.context_ids)]


def test_contexts_keep_within_the_encoder(tokenizer):
    data = EvaluationDataset("tiny", ROWS[:1])
    with pytest.raises(ValueError, match="leave 10 tokens for the context"):
        builder(tokenizer, None, max_context_tokens=10).build(data, QA)
    cut = builder(tokenizer, 512, max_context_tokens=10, truncate_context=True).build(data, QA)[0]
    assert tokenizer.decode(cut.context_ids) == ROWS[0]["context"][:10]


@pytest.mark.parametrize("prefix", ["", "# Text\n"])
def test_contexts_lose_their_beginning_on_request_behind_the_prefix(tokenizer, prefix):
    rows = [{**ROWS[0], "summary": "Ada's cat."}]
    data = EvaluationDataset("tiny", rows)
    options = {"max_context_tokens": 10 + len(prefix), "context_prefix": prefix, "truncate_context": True}
    for side, kept in (("right", rows[0]["context"][:10]), ("left", rows[0]["context"][-10:])):
        for task in (QA, SUMMARISATION):
            cut = builder(tokenizer, 512, truncation_side=side, **options).build(data, task)[0]
            assert (tokenizer.decode(cut.context_ids), cut.truncated) == (prefix + kept, True)
    # Of a text, the end is continued and the beginning repeated, whichever side is cut.
    options = {"max_context_tokens": 4, "truncate_context": True}
    for side in ("right", "left"):
        cut = builder(tokenizer, 512, truncation_side=side, **options).build(data, RECONSTRUCTION)[0]
        window = builder(tokenizer).build(data, RECONSTRUCTION)[0]
        assert (cut.context_ids, cut.target_ids[:-1]) == (window.context_ids[:4], window.context_ids[:4])
        cut = builder(tokenizer, 512, truncation_side=side, **options).build(data, CONTINUATION)[0]
        assert cut.context_ids == builder(tokenizer).build(data, CONTINUATION)[0].context_ids[-4:]


def test_a_longest_context_is_kept_under_every_condition_and_counted(model, tokenizer):
    options = {"tasks": (QA,), "max_context_tokens": 21}
    with pytest.raises(ValueError, match=r"max_context_tokens and the model's positions leave 21 tokens"):
        run(model, tokenizer, **options)
    report = run(model, tokenizer, **options, truncate_context=True, truncation_side="left")
    assert {(row.num_samples, row.num_truncated) for row in report.rows} == {(3, 2)}
    short = [{**row, "context": row["context"][-21:]} for row in ROWS]
    expected = run(model, tokenizer, short, tasks=(QA,))
    assert [row.metrics for row in report.rows] == [row.metrics for row in expected.rows]


def test_answers_may_be_a_list_a_string_or_a_squad_mapping(tokenizer):
    forms = (["a", "b"], "a", {"text": ["a", "b"], "answer_start": [0, 1]})
    data = EvaluationDataset("tiny", [{"context": "a b", "question": "?", "answers": form} for form in forms])
    assert [sample.references for sample in builder(tokenizer).build(data, QA)] == [["a", "b"], ["a"], ["a", "b"]]
    for empty in ([], {"text": []}, None):
        data = EvaluationDataset("tiny", [{"context": "a b", "question": "?", "answers": empty}])
        with pytest.raises(ValueError, match="data set 'tiny' has a question without answers"):
            builder(tokenizer).build(data, QA)


def test_prompts_that_leave_no_room_are_refused_even_with_truncation(tokenizer):
    data = EvaluationDataset("tiny", ROWS)
    with pytest.raises(ValueError, match="ask for fewer new tokens"):
        builder(tokenizer, 20, truncate_context=True).build(data, QA)


def test_untrained_ratios_are_refused_unless_allowed(model, tokenizer):
    with pytest.raises(ValueError, match=r"not trained for the ratios \[3\], only for \[2, 4\]"):
        run(model, tokenizer, tasks=(RECONSTRUCTION,), ratios=(2, 3))
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), ratios=(2, 3), allow_untrained_ratio=True)
    assert report.ratios(RECONSTRUCTION) == [2, 3]


def test_wrong_inputs_are_refused(model, teacher, tokenizer):
    with pytest.raises(TypeError, match="must be a compressor or a causal language model, got LlamaModel"):
        run(teacher.model, tokenizer)
    with pytest.raises(ValueError, match="no data set has the columns for"):
        run(model, tokenizer, [{"text": "text"}], tasks=(QA,))
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate_model(model, tokenizer, [])
    with pytest.raises(ValueError, match=r"\['same'\] more than once"):
        evaluate_model(model, tokenizer, [EvaluationDataset("same", ROWS), EvaluationDataset("same", ROWS)])
    config = LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="teacher's vocabulary of 10 tokens"):
        run(model, tokenizer, teacher=LlamaForCausalLM(config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("reconstrution",)}, "did you mean 'reconstruction'"),
        ({"tasks": ()}, "tasks must be one or more"),
        ({"ratios": (0,)}, "ratios must be"),
        ({"ratios": (4, 4)}, "ratios must be"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_samples": 0}, "max_samples must be at least 1, got 0"),
        ({"context_tokens": 0}, "context_tokens must be at least 1, got 0"),
        ({"max_new_tokens": {}}, "max_new_tokens must be at least 1"),
        ({"restoration_lengths": (1,)}, "restoration_lengths must be one or more different numbers of at least 2"),
        ({"bert_score_layer": 3}, "bert_score_layer needs a bert_score_model, got layer 3"),
        ({"max_context_tokens": 0}, "max_context_tokens must be at least 1, got 0"),
        ({"truncation_side": "lef"}, "did you mean 'left'"),
        ({"bounds_only": True, "ratios": (4,)}, r"bounds_only compresses nothing: leave out the ratios, got \(4,\)"),
    ],
)
def test_settings_refuse_impossible_values(options, message):
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**options)


@pytest.fixture
def qa_file(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "qa_rows.parquet")
    return tmp_path / "qa_rows.parquet"


def test_sources_are_files_and_generated_documents(tokenizer, qa_file, tmp_path):
    data = load_dataset_source("qa_rows.parquet", tokenizer, data_dir=str(tmp_path), domain="out")
    assert (data.name, data.domain, list(data.examples)) == ("qa_rows", "out", ROWS)
    assert data.tasks() == (QA, CONTINUATION, RECONSTRUCTION)
    (tmp_path / "plain.jsonl").write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "two"}) + "\n")
    named = load_dataset_source("books=plain.jsonl", tokenizer, data_dir=str(tmp_path))
    assert (named.name, named.tasks()) == ("books", (CONTINUATION, RECONSTRUCTION))


def test_generated_documents_come_from_the_test_split_by_hops(tokenizer):
    options = {"num_documents": 3, "document_tokens": 300}
    both = load_dataset_source("generated", tokenizer, **options)
    one, two = (load_dataset_source(f"generated:{hops}_hop", tokenizer, **options) for hops in ("one", "two"))
    assert len(both.examples) == len(one.examples) + len(two.examples)
    assert two.name == "generated:two_hop"
    assert len({example["context"] for example in both.examples}) == 3
    for example in both.examples:
        assert example["answers"][0] in example["context"]
        assert len(encode(tokenizer, example["context"])) <= 300
    again = load_dataset_source("generated", tokenizer, seed=1, **options)
    assert again.examples != both.examples


def test_generated_documents_pass_over_seeds_that_do_not_fit(tokenizer):
    # At one token per byte, many first sentences are longer than 50 tokens.
    data = load_dataset_source("generated", tokenizer, num_documents=20, document_tokens=50)
    assert len({example["context"] for example in data.examples}) <= 20
    assert max(len(encode(tokenizer, example["context"])) for example in data.examples) <= 50
    with pytest.raises(ValueError, match="num_tokens must be"):
        load_dataset_source("generated", tokenizer, document_tokens=5)


def test_sources_that_are_not_there_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        load_dataset_source("none.parquet", tokenizer, data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="is a folder: name its files"):
        load_dataset_source(tmp_path.name, tokenizer, data_dir=str(tmp_path.parent))
    with pytest.raises(ValueError, match="did you mean 'one_hop'"):
        load_dataset_source("generated:onehop", tokenizer)


def test_names_of_models_are_ids_or_the_last_part_of_a_folder(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert model_label(str(tmp_path / "my-model")) == "my-model"
    assert model_label(f"{tmp_path}/my-model/") == "my-model"
    assert model_label("organisation/some-model") == "organisation/some-model"


def test_command_writes_report_table_and_plots(folders, qa_file, tmp_path, capsys):
    output, plots = tmp_path / "out" / "results.json", tmp_path / "plots"
    argv = [str(folders / "tiny-compressor"), "--data", "generated", "--out-of-domain", "qa_rows.parquet"]
    argv += ["--data-dir", str(tmp_path), "--tasks", QA, CONTINUATION, "--ratios", "2", "4", "--max-samples", "2"]
    argv += ["--documents", "2", "--document-tokens", "150", "--max-new-tokens", "3", "--batch-size", "2"]
    argv += ["--context-tokens", "8", "--continuation-tokens", "4", "--device", "cpu"]
    argv += ["--teacher", str(folders / "teacher"), "--output", str(output), "--plots", str(plots), "--seed", "5"]
    assert main(argv) == 0
    content = json.loads(output.read_text())
    assert content["model"] == "tiny-compressor"
    assert content["bounds"] == "teacher"
    assert content["settings"]["seed"] == 5
    assert content["settings"]["document_tokens"] == 150
    rows = {(row["dataset"], row["domain"], row["task"], row["condition"]) for row in content["rows"]}
    assert len(rows) == 2 * 2 * 4
    assert ("qa_rows", "out", QA, "ratio=4") in rows
    assert str(tmp_path) not in output.read_text()
    names = {f"{task}_{kind}.png" for task in (QA, CONTINUATION) for kind in ("by_ratio", "domain_gap")}
    assert {path.name for path in plots.iterdir()} == names
    printed = capsys.readouterr().out
    assert "| qa_rows" in printed
    assert f"wrote {output}" in printed

    # A second run draws the first one's report beside its own.
    more = [*argv[: argv.index("--output")], "--compare-with", str(output), "--plots", str(tmp_path / "more")]
    assert main(more) == 0
    assert (tmp_path / "more" / f"{QA}_by_model_size.png").exists()


def test_command_refuses_wrong_options_with_the_nearest_right_one(capsys):
    for argv, message in (
        (["m", "--data", "generated", "--ratio", "4"], "unknown option --ratio; did you mean '--ratios'?"),
        (["m"], "give at least one data set with --data or --out-of-domain"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


def test_command_reports_wrong_values_without_a_traceback(folders, tmp_path, capsys):
    model = str(folders / "tiny-compressor")
    assert main([model, "--data", "none.parquet", "--data-dir", str(tmp_path)]) == 1
    assert "error: source 'none.parquet'" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--tasks", "qa"]) == 1
    assert "unknown task 'qa'" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--ratios", "3"]) == 1
    assert "not trained for the ratios [3]" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--bounds-only", "--plots", str(tmp_path)]) == 1
    assert "--plots draws quality by ratio, of which --bounds-only leaves none" in capsys.readouterr().err


def test_command_scores_a_plain_language_model(folders, tmp_path, capsys):
    output = tmp_path / "results.json"
    argv = [str(folders / "teacher"), "--data", "generated", "--documents", "2", "--document-tokens", "150"]
    argv += ["--tasks", CONTINUATION, "--context-tokens", "8", "--continuation-tokens", "4", "--device", "cpu"]
    assert main([*argv, "--output", str(output)]) == 0
    assert {row["condition"] for row in json.loads(output.read_text())["rows"]} == {"no_context", "full_context"}
    assert main([*argv, "--ratios", "4"]) == 1
    assert "plain language model, scored without context and with full context only" in capsys.readouterr().err
    assert main([*argv, "--plots", str(tmp_path)]) == 1
    assert "--plots draws quality by ratio, and teacher is a plain language model" in capsys.readouterr().err


def test_command_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    assert "examples:\n" in capsys.readouterr().out
