# SPDX-License-Identifier: Apache-2.0
"""Span corruption against T5's own length arithmetic, fixtures and rules."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_compressors.training.objectives.denoising import SpanCorruption, corrupt


@pytest.mark.parametrize(("mean_span", "raw", "targets"), [(2.0, 70, 22), (1.0, 63, 27)])
def test_lengths_are_those_of_t5s_own_tests(mean_span, raw, targets):
    corruption = SpanCorruption(noise_density=0.2, mean_span_length=mean_span)
    assert corruption.raw_length(64) == raw
    assert corruption.lengths(raw) == (64, targets)


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
