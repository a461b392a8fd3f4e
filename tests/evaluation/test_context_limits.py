# SPDX-License-Identifier: Apache-2.0
"""Contexts are as long as the encoder can read: what is beyond is cut, or refused before anything is scored."""

import pytest
import torch
from naive_twin import QA, RECONSTRUCTION, make_base, make_tokenizer, run
from tokenizers import processors

from context_compressors import (
    CompressionTokensForCausalLM,
    ComprExITForCausalLM,
    GMSAForCausalLM,
    ICAEForCausalLM,
    MeanPoolingForCausalLM,
    TCPAutoencoderForCausalLM,
)
from context_compressors.evaluation.evaluate import _max_context_tokens as most_tokens
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder
from context_compressors.evaluation.settings import EvaluationSettings

POSITIONS = 256
LONG = {"context": "0123456789" * 60, "question": "?", "answers": ["1"]}


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_base(tokenizer, 0, POSITIONS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bos_tokenizer():
    """One whose documents start with BOS."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_contexts_beyond_the_limit_are_left_out_before_samples_are_drawn_and_counted(base, tokenizer):
    # A letter is a token. LongBench-E, as mean pooling's Table 2 has it:
    builder = SampleBuilder(tokenizer, EvaluationSettings(max_context_tokens=8192, leave_out_long=True))
    longest = [{"context": "a" * number, "question": "?", "answers": ["1"]} for number in (8192, 8193)]
    (kept,) = builder.build(EvaluationDataset("qasper_e", longest), QA)
    assert (len(kept.context_ids), builder.left_out) == (8192, {f"qasper_e, {QA}": 1})
    texts = {"fits": "a" * 48, "exact": "b" * 50, "long": "c" * 51}
    rows = [
        {"context": text, "question": "?", "answers": ["1"], "id": f"{name}/{number}"}
        for name, text in texts.items()
        for number in range(4)
    ]
    model = make_base(tokenizer, 0, POSITIONS)
    how = {"tasks": (QA,), "max_context_tokens": 50, "max_samples": 6, "max_new_tokens": {QA: 2, "summarization": 2}}
    report = run(model, tokenizer, rows, leave_out_long=True, **how)
    assert report.settings["left_out"] == {f"tiny, {QA}": 4}
    ids = [answers.id for answers in report.answers]
    assert (len(ids), {name.partition("/")[0] for name in ids}) == (6, {"fits", "exact"})
    assert {(row.num_samples, row.num_truncated) for row in report.rows} == {(6, 0)}
    assert f"Left out, with contexts of more than 50 tokens: 4 of tiny, {QA}." in report_markdown(report)
    with pytest.raises(ValueError, match=r"nothing to score for .* all rows are contexts of more than 47 tokens"):
        run(model, tokenizer, rows, leave_out_long=True, **{**how, "max_context_tokens": 47})
    with pytest.raises(ValueError, match=r"a context of 51 tokens .* does not fit"):
        run(model, tokenizer, rows, **{**how, "max_samples": None})


@pytest.mark.parametrize(
    ("method", "fields", "ratio", "expected"),
    [
        (MeanPoolingForCausalLM, {}, 2, 256),
        (MeanPoolingForCausalLM, {"chunk_size": 40}, 2, None),
        (MeanPoolingForCausalLM, {"chunk_size": 40, "position_layout": "enhanced"}, 2, 255),
        (MeanPoolingForCausalLM, {"encoder_type": "embeddings"}, 2, None),
        (ComprExITForCausalLM, {}, 2, 256),
        # n + ceil(n / r) positions.
        (CompressionTokensForCausalLM, {}, 2, 170),
        (CompressionTokensForCausalLM, {"position_layout": "uniform"}, 2, 255),
        (ICAEForCausalLM, {"chunk_size": 200}, 2, 170),
        (ICAEForCausalLM, {"chunk_size": 200, "memory_tokens": "fixed"}, 2, 156),
        # Of 10 memory tokens, each for one token.
        (ICAEForCausalLM, {"chunk_size": 20}, 1, 10),
        (GMSAForCausalLM, {"encoder_layers": 1}, 2, 256),
        (TCPAutoencoderForCausalLM, {"encoder_layers": 1, "appended_tokens": 200}, 2, 170),
    ],
)
def test_the_encoder_reads_as_much_as_it_is_said_to_and_no_more(base, method, fields, ratio, expected):
    model = method.from_base(str(base), compression_ratios=[2, 4], **fields).eval()
    assert model.config.max_context_tokens(ratio) == expected
    ids = torch.full((1, 700), 5)
    if expected is None:
        model.compress(ids, ratio=ratio)
        return
    model.compress(ids[:, :expected], ratio=ratio, allow_untrained_ratio=True)
    with pytest.raises(ValueError, match="the context needs"):
        model.compress(ids[:, : expected + 1], ratio=ratio, allow_untrained_ratio=True)


def test_start_tokens_and_the_lowest_ratio_count(base, tokenizer, bos_tokenizer):
    def limit(model, tokenizer, ratios):
        return most_tokens(model, tokenizer, ratios, EvaluationSettings())

    model = CompressionTokensForCausalLM.from_base(str(base), compression_ratios=[2, 4])
    assert limit(model, tokenizer, [4, 2]) == 170
    assert limit(model, bos_tokenizer, [4, 2]) == 169
    assert limit(model, bos_tokenizer, [4]) == 203
    assert most_tokens(model, tokenizer, [4], EvaluationSettings(max_context_tokens=9)) == 9


def test_contexts_that_nothing_reads_in_words_may_be_longer_than_the_decoders_positions(base, tokenizer):
    model = MeanPoolingForCausalLM.from_base(str(base), compression_ratios=[4, 8], chunk_size=64)
    options = {"tasks": (QA, RECONSTRUCTION), "context_tokens": 150}
    cut = run(model, tokenizer, [{**LONG, "context": "a" * 90}], ratios_only=True, alternatives=("cut",), **options)
    assert cut.conditions(QA) == ["ratio=4", "ratio=8", "cut=4", "cut=8"]
    report = run(model, tokenizer, [LONG], ratios_only=True, **options)
    assert {(row.task, row.condition, row.num_truncated) for row in report.rows} == {
        (task, ratio, 0) for task in (QA, RECONSTRUCTION) for ratio in ("ratio=4", "ratio=8")
    }
    assert report.rows[0].costs["slots"] == 150
    for rows, given in (([LONG], {}), ([{**LONG, "context": "a" * 1200}], {"ratios_only": True})):
        with pytest.raises(ValueError, match=r"a context of \d+ tokens with its prompt and target does not fit"):
            run(model, tokenizer, rows, **given, **options)
