# SPDX-License-Identifier: Apache-2.0
"""Joining memories: of several documents into one (EPL, sections 3.1.1 and 3.2.2), or row under row into a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..parts.position_layout import moved_pairs
from .carriers import PAIR_FIELDS, carrier_tensors, map_carrier, scale_tensors
from .memory_quantization import quantization_of
from .memory_validation import is_memory

# A CompressedContext. Its file imports this one, so this one cannot name the class.
Memory = Any


def concatenate_memories(values: Iterable[Memory]) -> Memory:
    """See `CompressedContext.concatenate`."""
    memories = _checked("concatenate", values)
    first = memories[0]
    if len(memories) == 1:
        return first
    joined = torch.cat([memory.attention_mask for memory in memories], dim=1)
    num_slots = int(joined.sum(dim=1).max()) if joined.numel() else 0
    order = joined.argsort(dim=1, descending=True, stable=True)[:, :num_slots]
    mask = joined.gather(1, order)
    context_counts = torch.stack([memory.num_context_tokens for memory in memories])
    offsets = context_counts.cumsum(dim=0) - context_counts
    is_moved = first.position_layout == "enhanced" or (
        first.position_layout == "uniform" and first.carrier == "key_values"
    )
    if first.carrier == "embeddings" and not is_moved:
        position_ids = (mask.cumsum(dim=1) - 1) * mask
    else:
        ids = [
            memory.position_ids + offset[:, None] * is_moved for memory, offset in zip(memories, offsets, strict=True)
        ]
        position_ids = torch.cat(ids, dim=1).gather(1, order) * mask
    if first.carrier == "key_values" and is_moved:
        memories = _moved(memories, offsets)
    columns = zip(*(carrier_tensors(memory) + scale_tensors(memory) for memory in memories), strict=True)
    is_pad = (mask == 0)[:, :, None]

    def packed(column: Sequence[Tensor]) -> Tensor:
        """Return slots `(batch_size, num_slots, ...)` or `(batch_size, num_heads, num_slots, ...)` in their order."""
        tensor = torch.cat(list(column), dim=-2)
        index, pads = (order[:, :, None], is_pad) if tensor.dim() == 3 else (order[:, None, :, None], is_pad[:, None])
        return tensor.take_along_dim(index, dim=-2).masked_fill(pads, 0)

    carrier = map_carrier(first, lambda tensor: packed(next(columns))) | _of_pairs(memories, packed)
    total_tokens = context_counts.sum(dim=0)
    return replace(
        first,
        **carrier,
        attention_mask=mask,
        position_ids=position_ids,
        num_context_tokens=total_tokens,
        ratio=_common_ratio(memories, total_tokens, mask.sum(dim=1)),
        source="",
        maker=_maker(memories),
    )


def stack_memories(values: Iterable[Memory]) -> Memory:
    """See `CompressedContext.stack`."""
    memories = _checked("stack", values, keeps_keys=True)
    first = memories[0]
    if len(memories) == 1:
        return first
    length = max(memory.attention_mask.shape[1] for memory in memories)
    columns = zip(*(carrier_tensors(memory) + scale_tensors(memory) for memory in memories), strict=True)
    joined = (torch.cat([pad(t, (0, 0, 0, length - t.shape[-2])) for t in column]) for column in columns)
    fields = map_carrier(first, lambda tensor: next(joined))
    for name in ("attention_mask", "position_ids"):
        rows = [vars(memory)[name] for memory in memories]
        fields[name] = torch.cat([pad(tensor, (0, length - tensor.shape[1])) for tensor in rows])
    fields |= _of_pairs(memories, lambda each: torch.cat([pad(t, (0, 0, 0, length - t.shape[1])) for t in each]))
    for name in ("num_context_tokens", "question_fingerprints"):
        if vars(first)[name] is not None:
            fields[name] = torch.cat([vars(memory)[name] for memory in memories])
    ratios = [memory.ratio for memory in memories]
    if not all(isinstance(ratio, int) and ratio == ratios[0] for ratio in ratios):
        each = [torch.as_tensor(memory.ratio, device=first.device).expand(len(memory)) for memory in memories]
        fields["ratio"] = torch.cat(each)
    return replace(first, **fields, source="", maker=_maker(memories))


def _of_pairs(memories: Sequence[Memory], joined: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor | None]:
    """Join the fields with an entry for each pair; `None` where a memory has none."""
    fields = {name: [vars(memory)[name] for memory in memories] for name in PAIR_FIELDS}
    return {name: None if any(t is None for t in each) else joined(each) for name, each in fields.items()}


def _maker(memories: Sequence[Memory]) -> Any:
    return next((memory.maker for memory in memories if memory.maker is not None), None)


def _in_one_form(memories: Sequence[Memory], keeps_keys: bool) -> Sequence[Memory]:
    """Dequantise memories whose forms differ; with `keeps_keys`, quantised key/values of one form stay as they are."""
    dtypes = dict.fromkeys(memory.dtype for memory in memories)
    quantized = [dtype for dtype in dtypes if quantization_of(dtype)]
    if (
        not quantized
        or len(memories) == 1
        or (len(dtypes) == 1 and (keeps_keys or memories[0].carrier == "embeddings"))
    ):
        return memories
    dtype = next((dtype for dtype in dtypes if dtype not in quantized), torch.float32)
    return [memory.to(dtype=dtype) if memory.dtype in quantized else memory for memory in memories]


def _checked(how: str, values: Any, keeps_keys: bool = False) -> Sequence[Memory]:
    """Return memories to "concatenate" or "stack" in one form; `TypeError` or `ValueError` unless they fit."""
    memories: Sequence[Memory] = list(values) if isinstance(values, Iterable) else [None]
    if not all(map(is_memory, memories)):
        raise TypeError(f"{how} takes CompressedContext objects, got {values!r}")
    if not memories:
        raise ValueError(f"{how} needs at least one memory")
    makers = [memory.maker() for memory in memories if memory.maker is not None and not memory.model_id]
    # Another thread's twin of a model shares its weights.
    if len({id(next(maker.parameters())) for maker in makers if maker is not None}) > 1:
        raise ValueError(f"cannot {how} memories of different models, made in training mode")
    memories = _in_one_form(memories, keeps_keys)
    first, *others = (_kind(memory, how) for memory in memories)
    for other in others:
        for name, value in first.items():
            if value != other[name]:
                raise ValueError(f"cannot {how} memories of different {name}: {value} and {other[name]}")
    return memories


def _kind(memory: Memory, how: str) -> dict[str, Any]:
    """Return facts that are the same in all memories that are joined."""
    questions, by_row = memory.question_fingerprints, {}
    if how == "stack":
        questions = "none" if questions is None else "one for each row"
    else:
        questions, by_row = None if questions is None else questions.tolist(), {"batch sizes": memory.batch_size}
    return {
        "models": memory.model_id,
        "carriers": memory.carrier_name,
        "position layouts": memory.position_layout,
        "dtypes": memory.dtype,
        "kinds of heads": "shared places" if memory.head_ids is None else "places of their own",
        "devices": memory.device,
        **by_row,
        "questions": questions,
    }


def _moved(memories: Sequence[Memory], offsets: Tensor) -> list[Memory]:
    """Return memories of key/values, those behind the first with their keys moved on by `offsets`, `(num_memories,
    batch_size)`."""
    frequencies = memories[0].inverse_frequencies
    if any(memory.inverse_frequencies is None for memory in memories):
        raise ValueError("key/values move to later positions here, which needs inverse_frequencies in each memory")
    if not all(torch.equal(frequencies.cpu(), memory.inverse_frequencies.cpu()) for memory in memories):
        raise ValueError("memories of different inverse_frequencies cannot be concatenated")
    pairs = [moved_pairs(m.key_values, by, frequencies) for m, by in zip(memories[1:], offsets[1:], strict=True)]
    later = [replace(m, check=False, key_values=own) for m, own in zip(memories[1:], pairs, strict=True)]
    return [memories[0], *later]


def _common_ratio(memories: Sequence[Memory], num_tokens: Tensor, num_slots: Tensor) -> int | Tensor:
    ratios = [memory.ratio for memory in memories]
    if all(isinstance(ratio, int) for ratio in ratios) and len(set(ratios)) == 1:
        return ratios[0]
    rows = [torch.as_tensor(ratio, device=num_tokens.device).expand_as(num_tokens) for ratio in ratios]
    if all(torch.equal(rows[0], other) for other in rows[1:]):
        return rows[0]
    num_slots = num_slots.clamp(min=1)
    return ((num_tokens + num_slots - 1) // num_slots).clamp(min=1)
