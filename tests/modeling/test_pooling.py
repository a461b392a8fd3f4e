# SPDX-License-Identifier: Apache-2.0
"""Mean pooling against a naive loop, and the worked numbers of the mean pooling paper's equations 3 and 4."""

import pytest
import torch

from context_compressors.modeling.parts.pooling import mean_pool


def naive_mean_pool(hidden_states, attention_mask, ratio):
    """Equations 3 and 4 row by row and window by window."""
    batch_size, _, hidden_size = hidden_states.shape
    ratios = [ratio] * batch_size if isinstance(ratio, int) else ratio.tolist()
    rows = []
    for states, mask, row_ratio in zip(hidden_states, attention_mask, ratios, strict=True):
        real = [state for state, bit in zip(states, mask.tolist(), strict=True) if bit]
        windows = [real[start : start + row_ratio] for start in range(0, len(real), row_ratio)]
        rows.append([sum(window) / len(window) for window in windows])
    length = max(len(row) for row in rows)
    zero = hidden_states.new_zeros(hidden_size)
    slots = torch.stack([torch.stack([*row, *[zero] * (length - len(row)), zero])[:length] for row in rows])
    slot_mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return slots, slot_mask


paddings = pytest.mark.parametrize("padding", ["right", "left", "both", "strewn"])


def padding_masks(lengths, width):
    """The same lengths padded right, left, on both sides, and with pads strewn among the tokens."""
    index = torch.arange(width)
    lengths = torch.as_tensor(lengths)[:, None]
    shift = (width - lengths) // 2
    generator = torch.Generator().manual_seed(0)
    strewn = torch.rand(len(lengths), width, generator=generator).argsort(dim=1).argsort(dim=1) < lengths
    return {
        "right": (index < lengths).long(),
        "left": (index >= width - lengths).long(),
        "both": ((index >= shift) & (index < shift + lengths)).long(),
        "strewn": strewn.long(),
    }


def assert_like_the_loop(hidden_states, attention_mask, ratio):
    expected_states = hidden_states.clone().requires_grad_()
    expected_slots, expected_mask = naive_mean_pool(expected_states, attention_mask, ratio)
    states = hidden_states.clone().requires_grad_()
    slots, slot_mask = mean_pool(states, attention_mask, ratio)
    torch.testing.assert_close(slots, expected_slots, rtol=1e-9, atol=1e-12)
    assert torch.equal(slot_mask, expected_mask)
    weights = torch.randn_like(slots)
    expected_gradient = torch.autograd.grad((expected_slots * weights).sum(), expected_states)[0]
    gradient = torch.autograd.grad((slots * weights).sum(), states)[0]
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@paddings
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 9])
def test_equals_the_naive_loop_for_all_lengths(ratio, padding):
    lengths = list(range(41))
    attention_mask = padding_masks(lengths, 40)[padding]
    hidden_states = torch.randn(len(lengths), 40, 3, dtype=torch.float64)
    assert_like_the_loop(hidden_states, attention_mask, ratio)


@paddings
def test_equals_the_naive_loop_with_a_ratio_for_each_row(padding):
    lengths = list(range(41)) * 3
    ratio = torch.arange(len(lengths)) % 9 + 1
    attention_mask = padding_masks(lengths, 40)[padding]
    hidden_states = torch.randn(len(lengths), 40, 3, dtype=torch.float64)
    assert_like_the_loop(hidden_states, attention_mask, ratio)


@pytest.mark.parametrize("ratio", [1, 3, 8, 50])
def test_equals_the_naive_loop_without_padding(ratio):
    for length in (1, 7, 8, 9, 40):
        assert_like_the_loop(torch.randn(2, length, 3, dtype=torch.float64), torch.ones(2, length).long(), ratio)


def test_windows_of_ten_tokens_at_ratio_four():
    hidden_states = torch.arange(1.0, 11.0)[None, :, None]
    slots, slot_mask = mean_pool(hidden_states, torch.ones(1, 10, dtype=torch.long), 4)
    assert slots.flatten().tolist() == [2.5, 6.5, 9.5]
    assert slot_mask.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("ratio", [3, torch.tensor([3, 3, 3, 3]), torch.tensor([3, 3, 5, 3])])
def test_padding_on_either_side_changes_nothing(ratio):
    rows = [[9, 9, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 9, 9], list(range(9)), [5, 8, 8, 8, 8, 8, 8, 8, 8]]
    masks = [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0], [0] * 9, [1] + [0] * 8]
    slots, slot_mask = mean_pool(torch.tensor(rows).float()[:, :, None], torch.tensor(masks), ratio)
    assert slots[:, :, 0].tolist() == [[2, 5, 7], [2, 5, 7], [0, 0, 0], [5, 0, 0]]
    assert slot_mask.dtype == torch.long
    assert slot_mask.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1024, [256, 128, 64, 32, 16, 8]),
        (1000, [250, 125, 63, 32, 16, 8]),
        (375, [94, 47, 24, 12, 6, 3]),
        (1, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_slot_counts_of_the_papers_ratios(num_tokens, expected):
    ratios = [4, 8, 16, 32, 64, 128]
    hidden_states, attention_mask = torch.ones(1, num_tokens, 1), torch.ones(1, num_tokens, dtype=torch.long)
    pooled = [mean_pool(hidden_states, attention_mask, ratio)[1] for ratio in ratios]
    assert [int(slot_mask.sum()) for slot_mask in pooled] == expected
    assert [slot_mask.shape[1] for slot_mask in pooled] == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ratio", [128, torch.tensor([128, 64])])
def test_half_types_are_summed_in_float32(dtype, ratio):
    hidden_states = (torch.randn(2, 256, 8) + 100).to(dtype).requires_grad_()
    attention_mask = torch.ones(2, 256, dtype=torch.long)
    slots, _ = mean_pool(hidden_states, attention_mask, ratio)
    expected, _ = naive_mean_pool(hidden_states.double(), attention_mask, ratio)
    assert slots.dtype == dtype
    # Half of the type's spacing: correctly rounded up to the float32 sum's own error.
    torch.testing.assert_close(slots.double(), expected, rtol=torch.finfo(dtype).eps * 0.51, atol=0)
    slots.float().sum().backward()
    assert hidden_states.grad.dtype == dtype


def test_a_float16_window_whose_sum_overflows_keeps_its_mean():
    hidden_states = torch.full((1, 64, 2), 30000.0, dtype=torch.float16)
    slots, _ = mean_pool(hidden_states, torch.ones(1, 64, dtype=torch.long), 32)
    assert slots.tolist() == [[[30000.0, 30000.0]] * 2]


@paddings
@pytest.mark.parametrize("ratio", [4, torch.tensor([4, 4, 3])])
def test_what_stands_at_a_pad_never_leaks(padding, ratio):
    attention_mask = padding_masks([5, 0, 9], 9)[padding]
    hidden_states = torch.randn(3, 9, 2)
    hidden_states[attention_mask == 0] = float("nan")
    hidden_states.requires_grad_()
    slots, slot_mask = mean_pool(hidden_states, attention_mask, ratio)
    slots.sum().backward()
    assert torch.isfinite(slots).all()
    assert torch.isfinite(hidden_states.grad).all()
    assert (hidden_states.grad[attention_mask == 0] == 0).all()
    assert slot_mask.sum(dim=1).tolist() == [2, 0, 3]


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 5, 3), (0, 5, 3)])
@pytest.mark.parametrize("per_row", [False, True])
def test_contexts_without_tokens_give_no_slots(shape, per_row):
    ratio = torch.arange(2, 2 + shape[0]) if per_row else 4
    hidden_states = torch.randn(shape, requires_grad=True)
    slots, slot_mask = mean_pool(hidden_states, torch.zeros(shape[:2], dtype=torch.long), ratio)
    assert slots.shape == (shape[0], 0, 3)
    assert slot_mask.shape == (shape[0], 0)
    slots.sum().backward()
    assert hidden_states.grad.abs().sum() == 0


def test_a_row_alone_equals_the_row_in_a_batch():
    hidden_states = torch.randn(6, 30, 4)
    attention_mask = padding_masks([30, 17, 8, 3, 1, 0], 30)["left"]
    slots, slot_mask = mean_pool(hidden_states, attention_mask, 4)
    for row in range(6):
        alone, alone_mask = mean_pool(hidden_states[row : row + 1], attention_mask[row : row + 1], 4)
        real = slot_mask[row].bool()
        torch.testing.assert_close(alone[0][alone_mask[0].bool()], slots[row][real], rtol=0, atol=1e-6)
        assert (slots[row][~real] == 0).all()


def test_a_bool_mask_is_as_good_as_an_integer_one():
    hidden_states = torch.randn(2, 6, 3)
    attention_mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
    assert torch.equal(
        mean_pool(hidden_states, attention_mask.bool(), 2)[0], mean_pool(hidden_states, attention_mask, 2)[0]
    )


def test_a_huge_ratio_needs_no_more_memory_than_the_context():
    slots, _ = mean_pool(torch.arange(4.0)[None, :, None], torch.ones(1, 4, dtype=torch.long), 2**62)
    assert slots.tolist() == [[[1.5]]]
