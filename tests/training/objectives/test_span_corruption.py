# SPDX-License-Identifier: Apache-2.0
"""Span corruption against T5's own length arithmetic, fixtures and rules."""

import copy
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_compressors.data.task_tokens import add_sentinel_tokens
from context_compressors.training.objectives.denoising import SpanCorruption, SpanCorruptionCollator, corrupt

SENTINELS = list(range(900, 1000))


@pytest.mark.parametrize(
    ("inputs_length", "raw", "targets", "noise", "spans"),
    [
        (64, 70, 14, 10, 3),
        (114, 126, 26, 19, 6),
        (256, 284, 58, 43, 14),
        (512, 568, 114, 85, 28),
        (1024, 1137, 229, 171, 57),
        (2048, 2274, 456, 341, 114),
        (4096, 4550, 910, 682, 227),
    ],
)
def test_lengths_are_t5s(inputs_length, raw, targets, noise, spans):
    corruption = SpanCorruption()
    assert corruption.raw_length(inputs_length) == raw
    assert corruption.lengths(raw) == (inputs_length, targets)
    assert corruption.counts(raw) == (noise, spans)


@pytest.mark.parametrize(("mean_span", "raw", "targets"), [(2.0, 70, 22), (1.0, 63, 27)])
def test_lengths_are_those_of_t5s_own_tests(mean_span, raw, targets):
    corruption = SpanCorruption(noise_density=0.2, mean_span_length=mean_span)
    assert corruption.raw_length(64) == raw
    assert corruption.lengths(raw) == (64, targets)


def test_a_text_of_1024_tokens_gives_less():
    assert SpanCorruption().lengths(1024) == (922, 206)
    assert SpanCorruption().counts(1024) == (154, 51)


def test_spans_become_sentinels_and_targets_say_what_they_were():
    inputs, targets = corrupt([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 0, 1], [32099, 32098], 1)
    assert inputs == [10, 11, 32099, 14, 32098, 1]
    assert targets == [32099, 12, 13, 32098, 15, 1]


@settings(deadline=None)
@given(st.integers(2, 700), st.floats(0.01, 0.6), st.floats(1, 6), st.integers(0, 10))
def test_every_mask_has_the_counts_and_loses_nothing(num_tokens, density, mean_span, seed):
    corruption = SpanCorruption(density, mean_span)
    noise, spans = corruption.counts(num_tokens)
    mask = corruption.noise_mask(num_tokens, random.Random(seed))
    assert len(mask) == num_tokens
    assert sum(mask) == noise
    assert mask[0] is False
    assert mask[-1] is True
    starts = sum(after and not before for before, after in itertools.pairwise(mask))
    assert starts == spans
    tokens = list(range(num_tokens))
    sentinels = list(range(-1, -spans - 1, -1))
    inputs, targets = corrupt(tokens, mask, sentinels, 10**6)
    assert (len(inputs), len(targets)) == corruption.lengths(num_tokens)
    # Each sentinel of the input, in order, stands for what follows it in the target.
    pieces, current = {}, None
    for token in targets[:-1]:
        if token < 0:
            current = pieces.setdefault(token, [])
        else:
            current.append(token)
    restored = [part for token in inputs[:-1] for part in (pieces[token] if token < 0 else [token])]
    assert restored == tokens
    assert list(pieces) == sentinels


def test_spans_are_cut_at_random_and_evenly():
    corruption = SpanCorruption(noise_density=0.5, mean_span_length=2.0)
    masks = Counter(tuple(corruption.noise_mask(8, random.Random(seed))) for seed in range(3000))
    # 4 kept and 4 noise tokens in 2 spans each: 3 x 3 masks.
    assert len(masks) == 9
    assert all(240 < count < 430 for count in masks.values())


def test_wrong_values_are_named():
    with pytest.raises(ValueError, match=r"noise_density must be between 0 and 1, got 1\.5"):
        SpanCorruption(noise_density=1.5)
    with pytest.raises(ValueError, match=r"mean_span_length must be at least 1, got 0\.5"):
        SpanCorruption(mean_span_length=0.5)
    with pytest.raises(ValueError, match="inputs_length must be at least 3, got 2"):
        SpanCorruption().raw_length(2)
    with pytest.raises(ValueError, match="more noise spans than there are sentinels, 1"):
        corrupt([1, 2, 3, 4], [0, 1, 0, 1], [99], 1)


def test_sentinels_are_special_tokens_that_are_added_once(tokenizer):
    mine = copy.deepcopy(tokenizer)
    before = len(mine)
    ids = add_sentinel_tokens(mine, 5)
    assert len(set(ids)) == 5
    assert len(mine) == before + 5
    assert add_sentinel_tokens(mine, 5) == ids
    assert mine.convert_ids_to_tokens(ids[0]) == "<extra_id_0>"
    assert mine("a<extra_id_3>b", add_special_tokens=False).input_ids.count(ids[3]) == 1


def test_batches_hold_the_corrupted_text_and_the_target():
    collator = SpanCorruptionCollator(0, 7, [5], sentinel_ids=SENTINELS, end_id=1, with_metadata=True, seed=3)
    texts = [list(range(100, 170)), list(range(200, 230))]
    examples = [{"token_ids": text, "id": str(i), "index": i} for i, text in enumerate(texts)]
    batch = collator(examples)
    assert batch["context_input_ids"].shape == (2, 64)
    assert batch["context_attention_mask"].sum(dim=1).tolist() == [64, SpanCorruption().lengths(30)[0]]
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 1 + 14)
    assert batch["input_ids"][:, 0].tolist() == [7, 7]
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    assert batch["labels"][0, 1:].equal(batch["input_ids"][0, 1:])
    assert batch["example_ids"] == ["0", "1"]
    # Noise depends on the example alone, and changes when a text comes again, or under another seed.
    alone = collator(examples[:1])
    assert alone["context_input_ids"][0].equal(batch["context_input_ids"][0])
    again = collator([{**examples[0], "index": 9}])
    assert not again["context_input_ids"].equal(alone["context_input_ids"])
    other = SpanCorruptionCollator(0, 7, sentinel_ids=SENTINELS, end_id=1, seed=4)(examples[:1])
    assert not other["context_input_ids"].equal(alone["context_input_ids"])
