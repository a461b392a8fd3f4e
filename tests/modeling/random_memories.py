# SPDX-License-Identifier: Apache-2.0
"""Memories with random content, and whether two are the same."""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from context_compressors.modeling.memory.carriers import PAIR_FIELDS, scale_tensors
from context_compressors.modeling.memory.compressed_context import CompressedContext

NUM_HEADS, HEAD_DIM, NUM_LAYERS, HIDDEN_SIZE = 2, 8, 3, 24


def rotary():
    config = LlamaConfig(hidden_size=NUM_HEADS * HEAD_DIM, num_attention_heads=NUM_HEADS, head_dim=HEAD_DIM)
    return LlamaRotaryEmbedding(config)


def make_memory(num_slots=(3, 5, 0), carrier="embeddings", dtype=torch.float32, layout="default", ratio=4, **fields):
    """A memory of ragged rows with random content, four context tokens to a slot."""
    counts = torch.tensor(num_slots)
    length = int(counts.max())
    attention_mask = (torch.arange(length) < counts[:, None]).long()
    if carrier == "embeddings":
        content = {"embeddings": torch.randn(len(counts), length, HIDDEN_SIZE).to(dtype)}
    else:
        shape = (len(counts), NUM_HEADS, length, HEAD_DIM)
        pairs = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(NUM_LAYERS)]
        content = {"key_values": tuple(pairs), "inverse_frequencies": rotary().inv_freq}
    return CompressedContext(
        **content,
        **{
            "attention_mask": attention_mask,
            "position_ids": torch.arange(length).expand(len(counts), -1) * attention_mask,
            "num_context_tokens": counts * 4,
            "ratio": ratio,
            "model_id": "me/compressor",
            "position_layout": layout,
            **fields,
        },
    )


def tensors_of(memory):
    names = ("embeddings", "attention_mask", "position_ids", "num_context_tokens", "ratio", "inverse_frequencies")
    names += PAIR_FIELDS
    tensors = {name: getattr(memory, name) for name in names if isinstance(getattr(memory, name), torch.Tensor)}
    for layer, (keys, values) in enumerate(memory.key_values or ()):
        tensors[f"{layer}.keys"], tensors[f"{layer}.values"] = keys, values
    return tensors | {f"scales.{place}": tensor for place, tensor in enumerate(scale_tensors(memory))}


def assert_same(left, right):
    tensors, others = tensors_of(left), tensors_of(right)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name
    assert isinstance(left.ratio, torch.Tensor) or left.ratio == right.ratio
    assert (left.model_id, left.position_layout) == (right.model_id, right.position_layout)
