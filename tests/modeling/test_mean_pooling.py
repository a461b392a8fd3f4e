# SPDX-License-Identifier: Apache-2.0
"""Mean pooling beside a naive loop: the paper's equations, start values and ablations."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.parts.pooling import mean_pool

IDS = torch.arange(5, 16)[None]


def windows(states, ratio):
    return torch.stack([window.mean(dim=0) for window in states[0].split(ratio)])[None]


@torch.no_grad()
def test_slots_start_as_the_mean_of_the_bases_bidirectional_states(tiny_base_config, tmp_path):
    """The linear map is the identity at the start, and LoRA adds nothing yet."""
    base = AutoModelForCausalLM.from_config(tiny_base_config()).eval()
    base.save_pretrained(tmp_path)
    model = MeanPoolingForCausalLM.from_base(tmp_path, compression_ratios=(4, 3))
    states = base.base_model(IDS, is_causal=False).last_hidden_state
    for ratio in (3, 4):
        torch.testing.assert_close(model.compress(IDS, ratio=ratio).embeddings, windows(states, ratio))
    assert model.model.slot_projection.weight.equal(torch.eye(model.config.hidden_size))


@torch.no_grad()
def test_the_linear_map_follows_the_pooling(mean_pooling):
    model = mean_pooling.model.model
    outputs = model.encoder_outputs(IDS, torch.ones_like(IDS), torch.arange(11)[None], is_causal=False)
    expected = functional.linear(windows(outputs.last_hidden_state, 3), model.slot_projection.weight)
    torch.testing.assert_close(model.compress(IDS, ratio=3).embeddings, expected)


def test_the_papers_ablations_are_configuration_values(mean_pooling):
    """Table 3: which parts each of them has and trains."""

    def parts(**fields):
        names = {name for name, p in mean_pooling.build(**fields).named_parameters() if p.requires_grad}
        found = {"encoder": ".encoder.", "decoder": ".decoder.", "linear": "slot_projection"}
        return {part for part, mark in found.items() if any(mark in name for name in names)}

    assert parts() == {"encoder", "decoder", "linear"}
    assert parts(decoder_lora=None) == {"encoder", "linear"}
    assert parts(encoder_lora=None) == {"decoder", "linear"}
    assert parts(encoder_type="embeddings", encoder_lora=None) == {"decoder", "linear"}
    assert parts(linear_after_pooling=False) == {"encoder", "decoder"}


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


paddings = pytest.mark.parametrize("padding", ["right", "left", "strewn"])


def padding_mask(padding, lengths, width):
    """The mask of rows of these lengths, padded right, left, or with pads strewn among the tokens."""
    index, lengths = torch.arange(width), torch.as_tensor(lengths)[:, None]
    if padding == "strewn":
        draws = torch.rand(len(lengths), width, generator=torch.Generator().manual_seed(0))
        index = draws.argsort(dim=1).argsort(dim=1)
    return (index >= width - lengths if padding == "left" else index < lengths).long()


@paddings
@pytest.mark.parametrize("ratio", [1, 3, 9, torch.arange(41) % 9 + 1], ids=["1", "3", "9", "by_row"])
def test_equals_the_naive_loop_for_all_lengths(ratio, padding):
    attention_mask, hidden_states = padding_mask(padding, range(41), 40), torch.randn(41, 40, 3, dtype=torch.float64)
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


@paddings
@pytest.mark.parametrize("ratio", [4, torch.tensor([4, 4, 3])])
def test_what_stands_at_a_pad_never_leaks(padding, ratio):
    attention_mask = padding_mask(padding, [5, 0, 9], 9)
    hidden_states = torch.randn(3, 9, 2)
    hidden_states[attention_mask == 0] = float("nan")
    hidden_states.requires_grad_()
    slots, slot_mask = mean_pool(hidden_states, attention_mask, ratio)
    slots.sum().backward()
    assert torch.isfinite(slots).all()
    assert torch.isfinite(hidden_states.grad).all()
    assert (hidden_states.grad[attention_mask == 0] == 0).all()
    assert slot_mask.sum(dim=1).tolist() == [2, 0, 3]
