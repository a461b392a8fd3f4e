# SPDX-License-Identifier: Apache-2.0
"""Slot origins are the tokens and layers that each method computes its slots from."""

import pytest
import torch
from byte_tokenizers import SHAPE, byte_tokenizer, tiny_llama

from context_compressors import (
    ComprExITForCausalLM,
    ICAEForCausalLM,
    MeanPoolingForCausalLM,
    RankedKeyValuesForCausalLM,
    SnapKVForCausalLM,
    StreamingLLMForCausalLM,
)
from context_compressors.evaluation.slot_origins import attention_by_head, information_flow, one_chunk, slot_origins
from context_compressors.modeling.parts.base_pass import CACHE

TEXT = "The mill\nstands by the river, for $3 a day or $4."


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, and BOS in front of a document."""
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return byte_tokenizer([*names.values()], **names)


def build(model_class, tokenizer, **fields):
    torch.manual_seed(0)
    llama = tiny_llama(tokenizer, **{**SHAPE, "num_hidden_layers": 3}, initializer_range=0.3)
    return model_class(model_class.config_class(decoder_config=llama, **fields)).eval()


def test_origins_of_slots_are_what_each_method_makes_them_of(tokenizer):
    both = {"compression_ratios": (4, 8)}
    comprexit = build(ComprExITForCausalLM, tokenizer, window_size=16, gate_size=8, **both)
    icae = build(ICAEForCausalLM, tokenizer, chunk_size=64, **both)
    ids = tokenizer(2 * TEXT).input_ids
    rows = torch.tensor([ids])

    # The windows, of two chunks: without an encoder a slot is the mean of its tokens' embeddings.
    fields = {"encoder_type": "embeddings", "linear_after_pooling": False, "chunk_size": 63}
    pooling = build(MeanPoolingForCausalLM, tokenizer, **fields)
    origins = slot_origins(pooling, ids, 4)
    assert (origins.kind, [tuple(chunk.shape) for chunk in origins.chunks]) == ("windows", [(16, 63), (9, 35)])
    embeddings = pooling.get_input_embeddings()(rows)[0].split(63)
    slots = torch.cat([weights @ part for weights, part in zip(origins.chunks, embeddings, strict=True)])
    torch.testing.assert_close(slots, pooling.compress(rows, ratio=4).embeddings[0])
    strongest = origins.strongest(8)
    assert strongest[1] == [(place, 0.25) for place in range(4, 8)]
    assert strongest[15] == [(place, pytest.approx(1 / 3)) for place in range(60, 63)]
    assert strongest[16] == [(place, 0.25) for place in range(63, 67)]

    # The plan, and the attention in each chunk.
    layers, shares = information_flow(comprexit.model, rows, ratio=8)
    assert layers.shape == (1, len(ids), 4)
    torch.testing.assert_close(shares.sum(dim=2), torch.ones(1, 13))
    assert slot_origins(comprexit, ids, 8).kind == "plan"
    torch.testing.assert_close(slot_origins(comprexit, ids, 8).chunks[0], shares[0])
    origins = slot_origins(icae, ids)
    last = attention_by_head(icae.model, rows[:, 64:])[-1][0].mean(dim=0)
    # The rest of a row is attention to memory tokens, of which each sees itself at least.
    assert ((last.sum(dim=-1) > 0) & (last.sum(dim=-1) < 1)).all()
    assert origins.kind == "attention"
    torch.testing.assert_close(origins.chunks[1], last / last.sum(dim=1, keepdim=True))

    # What stays: values of the first layer are the base's own, wherever their tokens stand.
    for model_class in (StreamingLLMForCausalLM, SnapKVForCausalLM):
        model = build(model_class, tokenizer, compression_ratios=(4,))
        origins = slot_origins(model, ids)
        assert (origins.kind, origins.chunks[0].shape) == ("kept", (25, 98))
        torch.testing.assert_close(origins.chunks[0].sum(dim=1), torch.ones(25))
        if model_class is StreamingLLMForCausalLM:
            values = model.model.language_model(rows, use_cache=True)[CACHE].layers[0].values[0]
            kept = model.compress(rows).key_values[0][1][0]
            torch.testing.assert_close(origins.chunks[0] @ values, kept)

    # Heads that keep unlike numbers of them: pairs of a layer's places may be another layer's.
    ranked = build(RankedKeyValuesForCausalLM, tokenizer, compression_ratios=(4,))
    origins, memory = slot_origins(ranked, ids), ranked.compress(rows)
    assert (origins.kind, origins.chunks[0].shape) == ("kept", (25, 98))
    chunks, _ = one_chunk(ranked.model, rows, None, 4)
    tokens = torch.cat(list(ranked.model.kept_tokens(chunks, 4)), dim=1)[0]
    whole = ranked.compress(rows, ratio=1, allow_untrained_ratio=True)
    values, of_all = (torch.cat([pair[1] for pair in found.key_values], dim=1)[0] for found in (memory, whole))
    torch.testing.assert_close(of_all[memory.head_ids[0].T.long(), tokens], values)
    torch.testing.assert_close(
        origins.chunks[0].sum(dim=0) * len(tokens), torch.bincount(tokens.flatten(), minlength=98).float()
    )

    # A method that says nothing of all this has no origins.
    pooling.model.slot_origin = None
    assert slot_origins(pooling, ids) is None
    with pytest.raises(ValueError, match=r"1 to 64 tokens \(one chunk\), got 98"):
        attention_by_head(icae.model, rows)
