# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller gives: ids, masks, ratios and memories. Functions behind them trust their callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ...configuration.configuration_compressor import max_positions
from ...configuration.nearest_names import nearest_name
from ..memory.compressed_context import CompressedContext
from ..memory.memory_validation import is_memory

logger = logging.get_logger(__name__)

_KEYWORDS = (
    *("input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "labels"),
    *("context_input_ids", "context_attention_mask", "context_chunk_lengths", "memory", "ratio"),
    *("text_position_offset", "logits_to_keep"),
)


@dataclass
class TokenRows:
    """Token ids with their mask.

    Args:
        name: what errors call the ids.
        input_ids, attention_mask: `(batch_size, num_tokens)`.
        vocab_size: ids below it are known; `None` leaves the ids unchecked.
        task_token_ids: the method's own special tokens, which are known, too.
        needs_tokens: whether every row must have a token.
        passages: tokens of each passage of each row; `None`: the rows are not made of passages.
        lengths: real tokens of each row, which [`measure_rows`] counts.
    """

    name: str
    input_ids: Tensor
    attention_mask: Tensor
    vocab_size: int | None = None
    task_token_ids: Mapping[str, int] = field(default_factory=dict)
    needs_tokens: bool = False
    passages: list[list[int]] | None = None
    lengths: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """True where the rows are known to have no pads."""
        return bool(self.lengths) and all(length == self.input_ids.shape[1] for length in self.lengths)


def token_rows(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    name: str = "input_ids",
    *,
    vocab_size: int | None = None,
    task_token_ids: Mapping[str, int] | None = None,
    needs_tokens: bool = False,
    chunk_lengths: Any = None,
) -> TokenRows:
    """Check the shapes of ids, mask and passages; a mask that is not given is one of ones."""
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or not shape[0]:
        raise ValueError(f"`{name}` must have shape (batch_size, num_tokens) with at least one row, got {shape}")
    mask = input_ids.new_ones(shape, dtype=torch.long)
    if attention_mask is not None:
        if tuple(attention_mask.shape) != shape:
            name = name.replace("input_ids", "attention_mask")
            raise ValueError(f"`{name}` must have the shape of the ids, {shape}, got {tuple(attention_mask.shape)}")
        mask = (attention_mask != 0).long().to(input_ids.device)
    passages = None
    if chunk_lengths is not None:
        rows = chunk_lengths.tolist() if isinstance(chunk_lengths, Tensor) else chunk_lengths
        passages = [[length for length in row if length] for row in rows]
        if len(passages) != shape[0]:
            name = name.replace("input_ids", "chunk_lengths")
            raise ValueError(f"`{name}` must have {shape[0]} rows, as many as the ids, got {len(passages)}")
    return TokenRows(name, input_ids, mask, vocab_size, task_token_ids or {}, needs_tokens, passages)


def measure_rows(*inputs: TokenRows, also: Sequence[Tensor] = ()) -> list[int]:
    """Check the values of all inputs by one wait for the device, and note the lengths of their rows.

    Afterwards ids are 0 at pads: a tokenizer's pad id may lie outside the model's table.

    Returns:
        the values of `also`.
    """
    facts, unknown = [], []
    for rows in inputs:
        ids, real = rows.input_ids, rows.attention_mask.bool()
        is_unknown = real & ((ids < 0) | (ids >= (rows.vocab_size or torch.iinfo(ids.dtype).max)))
        for task_id in rows.task_token_ids.values():
            is_unknown = is_unknown & (ids != task_id)
        unknown.append(is_unknown)
        facts += [rows.attention_mask.sum(dim=1), is_unknown.any()[None]]
        rows.input_ids = ids.masked_fill(~real, 0)
    facts += [tensor[None] for tensor in also]
    values = torch.cat([tensor.to(device=facts[0].device, dtype=torch.long) for tensor in facts]).tolist()
    for rows, is_unknown in zip(inputs, unknown, strict=True):
        num_rows = len(rows.input_ids)
        rows.lengths, has_unknown, values = values[:num_rows], values[num_rows], values[num_rows + 1 :]
        if rows.needs_tokens and 0 in rows.lengths:
            raise ValueError(f"`{rows.name}` has no token in row {rows.lengths.index(0)}: give one, such as BOS")
        if has_unknown:
            first = int(rows.input_ids[is_unknown][0])
            own = f" or one of the task tokens {dict(rows.task_token_ids)}" if rows.task_token_ids else ""
            raise ValueError(
                f"`{rows.name}` has the token id {first}, which is outside the vocabulary of {rows.vocab_size} tokens"
                f"{own}; is the tokenizer the one of this checkpoint?"
            )
        for row, lengths in enumerate(rows.passages or ()):
            if sum(lengths) != rows.lengths[row] or min(lengths, default=0) < 0:
                name = rows.name.replace("input_ids", "chunk_lengths")
                raise ValueError(f"`{name}` must add up to the {rows.lengths[row]} tokens of row {row}, got {lengths}")
    return values


def cached_text_mask(mask: Tensor | None, input_ids: Tensor, num_cached: int) -> Tensor:
    """Return the caller's mask of a text, `(batch_size, num_cached + num_new_tokens)`, whose first tokens are in a
    cache; `generate` drops a mask of ones."""
    shape = (len(input_ids), num_cached + input_ids.shape[1])
    if mask is None:
        return input_ids.new_ones(shape, dtype=torch.long)
    if tuple(mask.shape) != shape:
        raise ValueError(
            "with a cache, `attention_mask` must cover the text in the cache and the new text, "
            f"(batch_size, num_text_tokens) = {shape}, got {tuple(mask.shape)}"
        )
    return (mask != 0).long()


def resolve_ratios(
    ratios: Sequence[Any], trained: Sequence[int], input_ids: Tensor, allow_untrained: bool
) -> list[Any]:
    """Return ratios as ints or LongTensors `(batch_size,)`; `None` becomes the first trained one."""
    checked: list[Any] = []
    for ratio in ratios:
        ratio = trained[0] if ratio is None else ratio
        if isinstance(ratio, Tensor) and ratio.dim():
            if tuple(ratio.shape) != (len(input_ids),):
                raise ValueError(
                    f"`ratio` must be an int or have {len(input_ids)} rows, got shape {tuple(ratio.shape)}"
                )
            ratio = ratio.to(device=input_ids.device, dtype=torch.long)
            values = set(ratio.tolist())
        else:
            ratio = ratio.item() if isinstance(ratio, Tensor) else ratio
            values = {ratio}
        for value in values:
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`ratio` must be an int of at least 1, got {value!r}")
            if value not in trained and not allow_untrained:
                raise ValueError(
                    f"this checkpoint was not trained for the ratio {value}; it has {sorted(trained)} "
                    "(compress(..., allow_untrained_ratio=True) goes on nevertheless)"
                )
        checked.append(ratio)
    return checked


def check_context_length(config: Any, num_positions: int) -> None:
    """Raise `ValueError`, with both lengths, unless a context or chunk fits the encoder's positions."""
    limit, chunk_size = max_positions(config.get_encoder_config()), config.chunk_size
    if limit is None or num_positions <= limit or config.encoder_limit is None:
        return
    hint = "cut the context"
    if config.has_chunks and chunk_size is None:
        hint = "set `chunk_size` in the configuration, or cut the context"
    elif config.has_chunks and num_positions < 2 * chunk_size:
        # A single chunk is too long.
        hint = f"set a `chunk_size` below {chunk_size} in the configuration, or cut the context"
    raise ValueError(
        f"the context needs {num_positions} positions, the encoder has {limit} (max_position_embeddings): {hint}"
    )


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise `TypeError` for misspelt keywords of `forward`, which the language model would swallow."""
    if torch.compiler.is_compiling():
        # Dynamo would trace the search for near names line by line.
        return
    for name in keywords:
        nearest = None if name in _KEYWORDS else nearest_name(name.lower(), _KEYWORDS, similarity=0.8)
        if nearest is not None:
            raise TypeError(f"unexpected argument {name!r}; did you mean {nearest!r}?")


def check_source(
    context_input_ids: Tensor | None,
    memory: CompressedContext | None,
    ratio: Any,
    mask: Any,
    chunk_lengths: Any = None,
) -> None:
    """Check that there is a context or a memory and not both, and that a context's arguments come with one."""
    if context_input_ids is not None:
        if memory is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        return
    for name, value in (("context_attention_mask", mask), ("context_chunk_lengths", chunk_lengths), ("ratio", ratio)):
        if value is not None:
            advice = "; `memory.at_ratio(ratio)` makes some memories coarser" if name == "ratio" and memory else ""
            raise ValueError(f"`{name}` belongs to `context_input_ids`, which are not given: leave it out{advice}")


def fitted_memory(memory: Any, model: Any, input_ids: Tensor) -> CompressedContext:
    """Return the memory with a row for each row of `input_ids`, on the model's device and of its dtype."""
    if not is_memory(memory):
        raise TypeError(f"`memory` must be a CompressedContext, as `compress` returns it, got {type(memory).__name__}")
    if not model.is_own_memory(memory):
        maker = f"the model {memory.model_id}" if memory.model_id else "another model, in training mode"
        raise ValueError(f"`memory` was made by {maker}, not by this one, {model.model_id}")
    num_texts = len(input_ids)
    if memory.batch_size not in (1, num_texts):
        raise ValueError(f"`memory` has {memory.batch_size} rows, `input_ids` has {num_texts}")
    if (memory.device, memory.dtype) != (input_ids.device, model.dtype):
        # Checks that no value is beyond what the model's type can hold.
        memory = memory.to(device=input_ids.device, dtype=model.dtype)
    return memory if memory.batch_size == num_texts else memory.repeat_interleave(num_texts)


def fitted_text_and_memory(text: TokenRows, memory: Any, model: Any) -> tuple[CompressedContext, bool, int]:
    """Check a text and the memory in front of it by one wait for the device, and return the memory, whether all of its
    slots are real, and the slots and text tokens of the longest row."""
    memory = fitted_memory(memory, model, text.input_ids)
    longest = (memory.num_slots + text.attention_mask.sum(dim=1)).max()
    all_real, longest = measure_rows(text, also=[memory.attention_mask.all(), longest])
    return memory, bool(all_real), longest


def warn_about_positions(decoder_config: Any, num_slots: int, num_text_tokens: int) -> None:
    """Warn once of slots and text that need more positions than the decoder has."""
    limit = max_positions(decoder_config)
    if limit is not None and num_slots + num_text_tokens > limit:
        logger.warning_once(
            f"slots and text need more positions than the {limit} of the decoder (max_position_embeddings), and it "
            "may not read what lies behind them: take a higher ratio, or join fewer memories"
        )
