# SPDX-License-Identifier: Apache-2.0
"""The evaluation against a naive twin: one sample at a time, no padding, no batch."""

import math

import pytest
import torch
from naive_twin import (
    CONDITIONS,
    CONTINUATION,
    QA,
    RECONSTRUCTION,
    ROWS,
    encode,
    make_tokenizer,
    naive_answers,
    naive_inputs,
    naive_scores,
    run,
)
from transformers import LlamaForCausalLM

from context_compressors.data.task_tokens import add_task_tokens, task_start_ids
from context_compressors.evaluation.bootstrap import (
    mean_statistic,
    paired_difference,
    percentile_interval,
    resampled_scores,
)
from context_compressors.evaluation.metrics import squad_scores, teacher_normalized
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.modeling.memory.key_value_memory import position_bytes
from context_compressors.modeling.parts.text_ids import text_tokenizer
from context_compressors.training.objectives.compression_collator import CompressionCollator

TOKEN_TEMPLATE = "\n### Question:\n{}\n### Answer:\n"


REPEATED = [(row["context"], "\nRepeat the text above:", row["context"]) for row in ROWS]
TEXTS = [{"text": "abcdefghijkl"}, {"text": "The cat sat "}]
CONTINUED = [(row["text"][:8], "", row["text"][8:]) for row in TEXTS]
WINDOWS = {"tasks": (CONTINUATION,), "context_tokens": 8, "continuation_tokens": 4}


def assert_naive(report, task, model, tokenizer, triples, conditions=CONDITIONS, **options):
    """Compare the report's scores with the naive twin's."""
    for condition in conditions:
        for metric, expected in naive_scores(model, tokenizer, condition, triples, **options).items():
            if metric in report.metric_names(task):
                found = report.score("tiny", task, condition, metric)
                assert found == pytest.approx(expected, rel=1e-4), (condition, metric)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_reconstruction_equals_the_naive_twin_under_every_condition(model, tokenizer, batch_size):
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), batch_size=batch_size)
    assert report.conditions(RECONSTRUCTION) == CONDITIONS
    assert_naive(report, RECONSTRUCTION, model, tokenizer, REPEATED)


def test_continuation_equals_the_naive_twin(model, tokenizer):
    report = run(model, tokenizer, TEXTS, **WINDOWS)
    assert_naive(report, CONTINUATION, model, tokenizer, CONTINUED, ends=True)


@pytest.mark.slow
def test_answers_equal_the_naive_twin(model, tokenizer):
    report = run(model, tokenizer, tasks=(QA,))
    assert set(report.metric_names(QA)) >= {"exact_match", "f1", "substring_accuracy", "rouge1", "rouge2", "rougeL"}
    assert [sample.references for sample in report.answers] == [row["answers"] for row in ROWS]
    for condition in CONDITIONS:
        answers = naive_answers(model, tokenizer, condition, ROWS, 6)
        assert [sample.answers[condition] for sample in report.answers] == answers, condition
        expected = squad_scores(answers, [row["answers"] for row in ROWS])
        assert {name: report.score("tiny", QA, condition, name) for name in expected} == pytest.approx(expected)


@pytest.mark.slow
def test_a_repetition_penalty_sees_what_was_written_and_not_the_prompt(model, token_model, tokenizer):
    for one, template, start in ((model, "\nQuestion: {}\nAnswer:", None), (token_model, TOKEN_TEMPLATE, "[LM]")):
        start = one.config.task_token_ids.get(start)
        reports = [run(one, tokenizer, tasks=(QA,), repetition_penalty=penalty) for penalty in (None, 1.3)]
        changed = False
        for condition in CONDITIONS:
            expected = naive_answers(one, tokenizer, condition, ROWS, 6, template, start, penalty=1.3)
            plain, found = ([sample.answers[condition] for sample in report.answers] for report in reports)
            assert found == expected, condition
            changed |= found != plain
        assert changed


def test_full_and_no_context_come_from_the_teacher_when_there_is_one(model, teacher, tokenizer):
    report = run(model, tokenizer, teacher=teacher, tasks=(RECONSTRUCTION,))
    assert report.bounds == "teacher"
    assert run(model, tokenizer, tasks=(RECONSTRUCTION,)).bounds == "own_decoder"
    assert_naive(report, RECONSTRUCTION, model, tokenizer, REPEATED, CONDITIONS[:2], reader=teacher)
    assert_naive(report, RECONSTRUCTION, model, tokenizer, REPEATED, CONDITIONS[2:])


def test_a_plain_language_model_has_full_and_no_context(teacher, tokenizer):
    report = run(teacher, tokenizer, tasks=(RECONSTRUCTION, QA))
    assert report.conditions(RECONSTRUCTION) == report.conditions(QA) == CONDITIONS[:2]
    assert_naive(report, RECONSTRUCTION, teacher, tokenizer, REPEATED, CONDITIONS[:2])
    assert report.num_parameters == teacher.num_parameters()
    assert report.settings["ratios"] == []
    assert "| full_context" in report_markdown(report)


def test_zero_shot_is_the_base_with_the_adapters_off(model, tokenizer, folders):
    report = run(model, tokenizer, tasks=(RECONSTRUCTION,), zero_shot=True)
    base = LlamaForCausalLM.from_pretrained(folders / "base").eval()
    bounds = [f"zero_shot_{name}" for name in CONDITIONS[:2]]
    assert_naive(report, RECONSTRUCTION, model, tokenizer, REPEATED, bounds, reader=base)
    own = report.score("tiny", RECONSTRUCTION, "no_context", "perplexity")
    assert abs(own / report.score("tiny", RECONSTRUCTION, bounds[0], "perplexity") - 1) > 1e-3


def test_zero_shot_refuses_a_checkpoint_whose_base_trained(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model.get_output_embeddings().weight, "requires_grad", True)
    with pytest.raises(ValueError, match=r"trained weights of the base itself.* --teacher BASE"):
        run(model, tokenizer, tasks=(RECONSTRUCTION,), zero_shot=True)


@torch.no_grad()
def naive_recovered_perplexity(model, tokenizer, condition, rows):
    """Perplexity of what the model writes by itself, token after token, EOS included where it wrote one."""
    nll, count = 0.0, 0
    for row in rows:
        extra, text = naive_inputs(model, tokenizer, condition, row["context"], "\nRepeat the text above:")
        for _ in row["context"]:
            scores = model(input_ids=torch.tensor([text]), **extra).logits[0, -1].float().log_softmax(-1)
            token = int(scores.argmax())
            nll, count, text = nll - float(scores[token]), count + 1, [*text, token]
            if token == tokenizer.eos_token_id:
                break
    return math.exp(nll / count)


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["full_context", "ratio=2"])
def test_restoration_scores_are_of_what_the_model_writes(model, tokenizer, condition):
    rows = [{"context": "A ferry leaves"}, {"context": "7 pens"}]
    report = run(model, tokenizer, rows, tasks=(RECONSTRUCTION,), reconstruction_bleu=True, batch_size=1)
    names = {"bleu", "rouge1", "rouge2", "rougeL", "prefix_exact_match", "recovered_perplexity"}
    assert names < set(report.metric_names(RECONSTRUCTION))
    expected = naive_recovered_perplexity(model, tokenizer, condition, rows)
    score = report.score("tiny", RECONSTRUCTION, condition, "recovered_perplexity")
    assert score == pytest.approx(expected, rel=1e-4)
    assert score < report.score("tiny", RECONSTRUCTION, condition, "perplexity")
    for row, sample in zip(rows, report.answers, strict=True):
        assert sample.references == [row["context"]]
        limit = len(row["context"])
        (answer,) = naive_answers(model, tokenizer, condition, [row], limit, "\nRepeat the text above:")
        assert sample.answers[condition] == answer


def test_a_task_token_starts_the_text_behind_slots_and_needs_no_words(token_model, tokenizer):
    report, config = run(token_model, tokenizer, tasks=(RECONSTRUCTION,)), token_model.config
    assert report.settings["prompts"] == "memory_tokens"
    wordless = [(context, "", target) for context, _, target in REPEATED]
    assert_naive(report, RECONSTRUCTION, token_model, tokenizer, wordless, start=config.reconstruction_token_id)
    report = run(token_model, tokenizer, TEXTS, **WINDOWS)
    start = {"start": config.continuation_token_id, "ends": True}
    assert_naive(report, CONTINUATION, token_model, tokenizer, CONTINUED, **start)


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
        example = {"context_ids": ids, "prompt_ids": [], "target_ids": ids}
        batch = collator([{**example, "task": RECONSTRUCTION}])
        assert starts[RECONSTRUCTION] in batch["input_ids"][0].tolist()
        with torch.no_grad():
            loss = token_model(**batch).loss
        total, count = total + float(loss) * len(ids), count + len(ids)
    assert report.score("tiny", RECONSTRUCTION, mode, "perplexity") == pytest.approx(math.exp(total / count), rel=1e-4)


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


@pytest.mark.slow
def test_a_context_is_compressed_once_whatever_the_number_of_its_questions(model, tokenizer, monkeypatch):
    rows = [{**row, "question": f"{row['question']} {number}"} for number in range(5) for row in ROWS]
    seen, compress = [], model.compress

    def spy(input_ids, attention_mask, **options):
        seen.extend(tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True))
        return compress(input_ids, attention_mask, **options)

    monkeypatch.setattr(model, "compress", spy)
    for batch_size in (2, 4, 8, 100):
        seen.clear()
        report = run(model, tokenizer, rows, tasks=(QA,), batch_size=batch_size)
        assert sorted(seen) == sorted(tuple(encode(tokenizer, row["context"])) for row in ROWS)
        assert {(row.num_samples, row.num_documents) for row in report.rows} == {(15, 3)}
    monkeypatch.undo()
    answers = naive_answers(model, tokenizer, "ratio=4", rows, 6)
    assert [sample.answers["ratio=4"] for sample in report.answers] == answers


def test_rows_say_what_the_conditions_cost(model, tokenizer):
    rows = [*ROWS, {**ROWS[0], "question": "Where is the cat?"}]
    report = run(model, tokenizer, rows, tasks=(QA,))
    prompts = [1 + len(f"\nQuestion: {row['question']}\nAnswer:") for row in rows]
    lengths = [len(row["context"]) for row in rows]
    costs = {row.condition: row.costs for row in report.rows}
    width = position_bytes(model.config.decoder_config, model.dtype)
    assert {name: cost.pop("cache_bytes") / width for name, cost in costs.items()} == pytest.approx(
        {name: cost["decoder_positions"] for name, cost in costs.items()}
    )
    assert costs["no_context"] == {"decoder_positions": sum(prompts) / 4}
    assert costs["full_context"] == {
        "memory_bytes": pytest.approx(sum(lengths[:3]) / 3),
        "decoder_positions": (sum(prompts) + sum(lengths)) / 4,
    }
    for ratio in (2, 4):
        slots = [math.ceil(length / ratio) for length in lengths]
        # Of three documents, one of which is asked about twice.
        assert costs[f"ratio={ratio}"] == {
            "slots": pytest.approx(sum(slots[:3]) / 3),
            "memory_bytes": pytest.approx(sum(slots[:3]) / 3 * 32 * 4),
            "decoder_positions": pytest.approx((sum(prompts) + sum(slots)) / 4),
        }


@pytest.mark.slow
def test_rounded_memories_answer_in_place_of_exact_ones(model, tokenizer, monkeypatch):
    exact, compress = run(model, tokenizer, tasks=(QA,), answer_perplexity=True), model.compress
    # 32 values of a slot, each in a byte or two in one, and a scale of two bytes.
    for dtype, slot_bytes in (("int8", 34), ("int4", 18)):
        report = run(model, tokenizer, tasks=(QA,), answer_perplexity=True, memory_dtype=dtype)

        def rounding(*args, dtype=dtype, **options):
            return [memory.quantize(dtype) for memory in compress(*args, **options)]

        with monkeypatch.context() as patch:
            patch.setattr(model, "compress", rounding)
            expected = run(model, tokenizer, tasks=(QA,), answer_perplexity=True)
        for row, twin, whole in zip(report.rows, expected.rows, exact.rows, strict=True):
            assert (row.metrics, row.costs) == (twin.metrics, twin.costs)
            assert (row.metrics == whole.metrics) == (row.condition in ("no_context", "full_context"))
            if "slots" in row.costs:
                assert row.costs["memory_bytes"] == pytest.approx(row.costs["slots"] * slot_bytes)
        assert f"rounded to {dtype}" in report_markdown(report)


@pytest.mark.slow
def test_every_score_has_an_interval_over_documents_and_retention_one_of_its_own(model, tokenizer):
    rows = [{"context": f"{word} cat", "question": f"Who {n}?"} for word in "abcd" for n in "12"]
    # What is right is what one of the conditions writes, so that each of them is sometimes right.
    for row, writer in zip(rows, (1, 1, 2, 1, 3, 0, 2, 3), strict=True):
        row["answers"] = naive_answers(model, tokenizer, CONDITIONS[writer], [row], 6)
    report = run(model, tokenizer, rows, tasks=(QA,), num_resamples=200, seed=4)
    assert report.score("tiny", QA, "full_context", "f1") > report.score("tiny", QA, "no_context", "f1")
    statistics = {name: mean_statistic([of.scores[name]["f1"] for of in report.answers]) for name in CONDITIONS}
    resampled = resampled_scores(statistics, [of.document for of in report.answers], 200, 4)
    none, full = (resampled[name] for name in CONDITIONS[:2])
    for row in report.rows:
        assert set(row.intervals) - {"retention"} == set(row.metrics)
        assert row.intervals["f1"] == pytest.approx(percentile_interval(resampled[row.condition]))
        if row.condition in ("no_context", "full_context"):
            assert row.retention is None
            continue
        bounds = [report.score("tiny", QA, name, "f1") for name in ("full_context", "no_context")]
        assert row.retention == pytest.approx(100 * teacher_normalized(row.metrics["f1"], *bounds), nan_ok=True)
        expected = percentile_interval(100 * teacher_normalized(resampled[row.condition], full, none))
        assert row.intervals["retention"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.slow
def test_rows_say_how_slots_compare_with_as_much_text(model, tokenizer):
    rows = [*ROWS, {**ROWS[0], "question": "Where?", "answers": ["Rome"]}]
    report = run(model, tokenizer, rows, tasks=(QA,), alternatives=("cut", "bm25"), num_resamples=200)
    for row in report.rows:
        assert set(row.seconds) == ({"compress", "answer"} if row.condition[:5] == "ratio" else {"answer"})
        assert all(seconds > 0 for seconds in row.seconds.values())
        if row.condition[:5] != "ratio":
            assert row.differences == {}
            continue
        for kind in ("cut", "bm25"):
            other = row.condition.replace("ratio", kind)
            expected = paired_difference(report.answers, report.answers, "f1", row.condition, other, 200)
            found = row.differences[other]
            assert found["difference"] == pytest.approx(expected.difference)
            assert found["interval"] == pytest.approx(expected.interval)
    text = report_markdown(report)
    assert "Slots less text at the same number of positions, on the same questions" in text
    assert "inconclusive" in text
