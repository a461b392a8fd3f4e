# SPDX-License-Identifier: Apache-2.0
"""Windows, receivers and masses of ComprExIT: what holds for any lengths, ratio and window."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.modeling.modeling_comprexit import Transmission, WindowAttention, WindowMean

WIDTH = 5


@st.composite
def batches(draw):
    """Row lengths, columns beyond the longest row, ratio, window size, and whether receivers are shuffled."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    spare = draw(st.integers(0 if max(lengths) else 1, 5))
    return lengths, spare, draw(st.integers(1, 9)), draw(st.integers(1, 20)), draw(st.booleans())


def aggregations(window_size, is_shuffled):
    torch.manual_seed(0)
    config = ComprExITConfig(metric_size=4, window_size=window_size, shuffled_receivers=is_shuffled)
    transmission = Transmission(WIDTH, config)
    with torch.no_grad():
        transmission.sender_score[1].weight.normal_()
    return {"transport": transmission, "attention": WindowAttention(WIDTH, 4), "mean": WindowMean()}


def rows_of(lengths, spare):
    """Left-aligned rows; whatever stands at pads must not matter."""
    mask = torch.arange(max(lengths) + spare) < torch.tensor(lengths)[:, None]
    vectors = torch.randn(*mask.shape, WIDTH, generator=torch.Generator().manual_seed(1))
    return vectors.masked_fill(~mask[:, :, None], float("nan")), mask


@pytest.mark.parametrize("kind", ["transport", "attention", "mean"])
@settings(max_examples=12, deadline=None)
@given(batch=batches())
@torch.no_grad()
def test_windows_hold_every_token_once_and_in_order(kind, batch):
    lengths, spare, ratio, window_size, is_shuffled = batch
    module = aggregations(window_size, is_shuffled)[kind]
    vectors, mask = rows_of(lengths, spare)
    tokens, token_mask = module.windows(vectors, mask, ratio)
    longest = module.window_length(ratio)
    assert tokens.shape[2] % ratio == 0
    assert tokens.shape[2] <= longest
    for i, length in enumerate(lengths):
        assert tokens[i][token_mask[i]].equal(vectors[i, :length])
        # Full windows in front, then the short one, then none; tokens stand first in their window.
        counts = token_mask[i].sum(dim=1).tolist()
        assert counts == [max(0, min(longest, length - start)) for start in range(0, longest * len(counts), longest)]
        assert all(bits == sorted(bits, reverse=True) for bits in token_mask[i].tolist())
    assert not tokens[~token_mask].any()


@pytest.mark.parametrize("kind", ["transport", "attention", "mean"])
@settings(max_examples=12, deadline=None)
@given(batch=batches())
@torch.no_grad()
def test_a_row_has_a_slot_for_every_r_tokens_whatever_stands_beside_it(kind, batch):
    lengths, spare, ratio, window_size, is_shuffled = batch
    module = aggregations(window_size, is_shuffled)[kind]
    vectors, mask = rows_of(lengths, spare)
    slots, slot_mask = module(vectors, mask, ratio)
    assert slot_mask.sum(dim=1).tolist() == [-(-length // ratio) for length in lengths]
    assert all(bits == sorted(bits, reverse=True) for bits in slot_mask.tolist())
    for i, length in enumerate(lengths):
        if length:
            alone, alone_mask = module(vectors[i : i + 1, :length], mask[i : i + 1, :length], ratio)
            torch.testing.assert_close(slots[i][slot_mask[i].bool()], alone[0], atol=1e-5, rtol=1e-4)
            assert alone_mask.all()


@settings(max_examples=20, deadline=None)
@given(batch=batches())
@torch.no_grad()
def test_masses_are_those_of_the_tokens_that_there_are(batch):
    lengths, spare, ratio, window_size, is_shuffled = batch
    module = aggregations(window_size, is_shuffled)["transport"]
    tokens, mask = module.windows(*rows_of(lengths, spare), ratio)
    counts = mask.sum(dim=2)
    mass = module.sender_mass(tokens, mask)
    torch.testing.assert_close(mass.sum(dim=2), (counts > 0).float())
    assert not mass[~mask].any()
    assert (mass + 1e-7 >= 0.05 * mask / counts.clamp(min=1)[:, :, None]).all()
    # Every receiver of a token has the same mass, 1 where it is divided by it, and none has any without a token.
    weights = module.weights(tokens, mask, ratio)
    assert (weights >= 0).all()
    num_receivers = -(-counts // ratio)
    has_token = torch.arange(weights.shape[3]) < num_receivers[:, :, None]
    torch.testing.assert_close(weights.sum(dim=2), has_token.float(), atol=1e-4, rtol=0)
    assert not weights[~mask].any()


@settings(max_examples=12, deadline=None)
@given(batch=batches())
@torch.no_grad()
def test_an_allocation_stays_within_its_window_and_sums_up_to_1(batch):
    lengths, spare, ratio, window_size, is_shuffled = batch
    module = aggregations(window_size, is_shuffled)["transport"]
    vectors, mask = rows_of(lengths, spare)
    allocation = module.allocation(vectors, mask, ratio)
    longest = module.window_length(ratio)
    assert allocation.shape[2] == mask.shape[1]
    for i, length in enumerate(lengths):
        num_slots = -(-length // ratio)
        torch.testing.assert_close(allocation[i, :num_slots].sum(dim=1), torch.ones(num_slots))
        assert not allocation[i, num_slots:].any()
        assert not allocation[i, :, length:].any()
        slot_windows = torch.arange(allocation.shape[1]) * ratio // longest
        token_windows = torch.arange(mask.shape[1]) // longest
        assert not allocation[i][slot_windows[:, None] != token_windows].any()
