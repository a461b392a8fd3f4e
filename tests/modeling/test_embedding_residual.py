# SPDX-License-Identifier: Apache-2.0
"""Slots that start as pooled embeddings: z_k = |S_k|^(-1/2) sum_i E(x_i) + W s_k rms(E(x)) / rms(s_k), with W = 0."""

import pytest
import torch
from tiny_bases import ids_of

IDS = ids_of(11)
METHODS = {
    "mean_pooling": {"linear_after_pooling": False},
    "compression_tokens": {},
    "icae": {"chunk_size": 6},
    "autocompressor": {"chunk_size": 6},
    "comprexit": {},
    "gmsa": {},
    "tcp_autoencoder": {},
    "pcc": {},
}


def pooled_embeddings(model, ratio):
    """Windows of r tokens of each chunk; the last is short, and divided by the root of its own length."""
    chunks = IDS.split(model.config.chunk_size or IDS.shape[1], dim=1)
    windows = [window for chunk in chunks for window in model.get_input_embeddings()(chunk)[0].split(ratio)]
    return torch.stack([window.sum(dim=0) / len(window) ** 0.5 for window in windows])


@pytest.mark.parametrize("name", METHODS)
def test_slots_start_as_pooled_embeddings_and_the_method_adds_to_them(name, method_cases):
    case = method_cases[name]
    torch.manual_seed(0)
    model = case.method.causal_lm_class(case.config(embedding_residual=True, **METHODS[name])).train()
    for ratio in (2, 3):
        memory = model.compress(IDS, ratio=ratio)
        torch.testing.assert_close(memory.embeddings[0], pooled_embeddings(model, ratio))
    model(input_ids=ids_of(4, seed=1), labels=ids_of(4, seed=1), memory=memory).loss.backward()
    backbone = model.model
    zero = backbone.slot_projection if backbone.residual_map is None else backbone.residual_map
    assert not zero.weight.any()
    assert zero.weight.grad.abs().max() > 0


@torch.no_grad()
@pytest.mark.parametrize("layout", ["default", "enhanced"])
@pytest.mark.parametrize("ratios", [[2], [3, 2]])
def test_memory_tokens_whose_keys_and_values_are_kept_start_as_pooled_embeddings(layout, ratios, method_cases):
    case = method_cases["five_hundred_x"]
    fields = {"chunk_size": 6, "position_layout": layout, "embedding_residual": True}
    model = case.method.causal_lm_class(case.config(**fields)).eval()
    read, pooled = [], [pooled_embeddings(model, ratio) for ratio in ratios]
    model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    model.compress(IDS, ratio=ratios)
    rows = torch.cat(read)
    assert not model.model.memory_embeddings.any()
    for slot in torch.cat(pooled):
        assert ((rows - slot).abs().amax(dim=-1) < 1e-5).any(), "a memory token is not its window's pooled embedding"


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_what_the_method_adds_is_what_it_makes_without_the_residual(name, method_cases):
    model = method_cases[name].build(embedding_residual=True, **METHODS[name])
    backbone = model.model
    slots = model.compress(IDS, ratio=3).embeddings[0] - pooled_embeddings(model, 3)
    residual_map, backbone.residual_map = backbone.residual_map, None
    model.config.embedding_residual = False
    try:
        made = model.compress(IDS, ratio=3).embeddings[0]
    finally:
        backbone.residual_map, model.config.embedding_residual = residual_map, True
    if residual_map is not None:
        chunks = IDS.split(model.config.chunk_size or IDS.shape[1], dim=1)
        sizes = [
            model.get_input_embeddings()(chunk).square().mean().sqrt().expand(-(-chunk.shape[1] // 3))
            for chunk in chunks
        ]
        made = made / (made.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * torch.cat(sizes)[:, None]
        made = made @ residual_map.weight.T
    torch.testing.assert_close(slots, made, atol=1e-4, rtol=1e-4)
