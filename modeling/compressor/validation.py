# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller gives: ids, masks, ratios, labels and memories. Functions behind them trust their callers.

Values of tensors are checked by one wait for the device, see [`check_together`].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from ...configuration.nearest_names import nearest_name
from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import key_value_shape
from ..memory.memory_quantization import width_of
from ..memory.memory_validation import is_memory, refuse_values, value_flags

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.get_logger(__name__)

_KEYWORDS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "labels",
    "context_input_ids",
    "context_attention_mask",
    "context_chunk_lengths",
    "memory",
    "ratio",
    "use_cache",
    "text_position_offset",
    "logits_to_keep",
)
# Some methods ask for memory by the ratio, however short the context is.
_MAX_RATIO = 65_536


def check_ids(name: str, ids: Tensor) -> None:
    """Token ids must be rows of int64 or int32; whether the vocabulary has them is for [`check_together`].

    Raises:
        TypeError: no tensor, or one of another type.
        ValueError: it is not two-dimensional, or has no rows.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        found = getattr(ids, "dtype", type(ids).__name__)
        raise TypeError(f"`{name}` must be a tensor of integer token ids, int64 or int32, got {found}")
    if ids.dim() != 2:
        raise ValueError(f"`{name}` must have shape (batch_size, num_tokens), got {tuple(ids.shape)}")
    if not len(ids):
        raise ValueError(f"`{name}` is an empty batch, of shape {tuple(ids.shape)}: give at least one row")


@dataclass
class TokenRows:
    """Token ids with their mask; `lengths` and checked values come with [`check_together`].

    Args:
        name: what errors call the ids.
        input_ids: `(batch_size, num_tokens)`.
        attention_mask: same shape, int64; -1 where the caller's mask held neither one nor zero.
        vocab_size: ids below it are known; `None` leaves the ids unchecked.
        task_token_ids: the method's own special tokens, which are known, too.
        needs_tokens: whether every row must have a token.
        lengths: number of real tokens of each row.
        borders: `(batch_size, num_passages)`, how many of a row's tokens are in each of its passages; `None`: the rows
            are not made of passages.
        passages: the same without zeros, known on the host.
        targets: labels that go with the rows, of any shape; `None`: there are none.
    """

    name: str
    input_ids: Tensor
    attention_mask: Tensor
    vocab_size: int | None = None
    task_token_ids: Mapping[str, int] = field(default_factory=dict)
    needs_tokens: bool = False
    lengths: list[int] = field(default_factory=list)
    borders: Tensor | None = None
    passages: list[list[int]] | None = None
    targets: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are no pads."""
        return all(length == self.input_ids.shape[1] for length in self.lengths)

    def unknown(self) -> Tensor:
        """Where a real token is neither in the vocabulary nor a task token, bool of the ids' shape."""
        ids = self.input_ids
        if self.vocab_size is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        unknown = ((ids < 0) | (ids >= self.vocab_size)) & self.attention_mask.bool()
        for task_id in self.task_token_ids.values():
            unknown = unknown & (ids != task_id)
        return unknown

    def has_wrong_targets(self) -> Tensor:
        """Whether a label is neither in the vocabulary nor -100, without dimensions."""
        if self.targets is None or self.vocab_size is None:
            return torch.zeros((), dtype=torch.bool, device=self.input_ids.device)
        return _wrong_targets(self.targets, self.vocab_size).any()


def token_rows(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    name: str = "input_ids",
    *,
    vocab_size: int | None = None,
    task_token_ids: Mapping[str, int] | None = None,
    needs_tokens: bool = False,
) -> TokenRows:
    """Check types and shapes of ids and mask; a mask of ones where none is given.

    Raises:
        TypeError: as [`check_ids`].
        ValueError: as [`check_ids`], or the mask has another shape.
    """
    check_ids(name, input_ids)
    mask, mask_name = attention_mask, name.replace("input_ids", "attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids, dtype=torch.long)
    elif tuple(mask.shape) != tuple(input_ids.shape):
        raise ValueError(
            f"`{mask_name}` must have the shape of `{name}`, {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
        )
    elif mask.dtype == torch.bool:
        mask = mask.long().to(input_ids.device)
    else:
        mask = torch.where((mask == 0) | (mask == 1), (mask == 1).long(), -1).to(input_ids.device)
    return TokenRows(name, input_ids, mask, vocab_size, task_token_ids or {}, needs_tokens)


def check_together(*inputs: TokenRows, also: Sequence[Tensor] = ()) -> list[int]:
    """Check the values of all inputs by one wait for the device, and note the lengths of their rows.

    Every real id must be in the vocabulary, or one of the task tokens. Afterwards ids are 0 at pads: a tokenizer's pad
    id may lie outside the model's table.

    Args:
        inputs: ids and masks.
        also: further integers or truth values to be read by the same wait, each a tensor without dimensions.

    Returns:
        the values of `also`.

    Raises:
        ValueError: a mask of other values than ones and zeros, a row without tokens that needs one, the first unknown
            id, or the first label outside of the vocabulary.
    """
    device = inputs[0].input_ids.device
    facts = [tensor[None] for tensor in also]
    for rows in reversed(inputs):
        mask = rows.attention_mask
        borders = [] if rows.borders is None else [rows.borders.reshape(-1)]
        flags = [rows.unknown().any()[None], (mask < 0).any()[None], rows.has_wrong_targets()[None]]
        facts = [mask.sum(dim=1), *flags, *borders, *facts]
    values = torch.cat([tensor.to(device=device, dtype=torch.long) for tensor in facts]).tolist()
    for rows in inputs:
        num_rows = len(rows.input_ids)
        rows.lengths, (has_unknown, is_wrong, has_wrong_target) = values[:num_rows], values[num_rows : num_rows + 3]
        values = values[num_rows + 3 :]
        if rows.borders is not None:
            size = rows.borders.shape[1]
            given = [values[row * size : (row + 1) * size] for row in range(len(rows.input_ids))]
            values = values[rows.borders.numel() :]
            rows.passages = _checked_passages(rows, given)
        if is_wrong:
            raise ValueError(
                f"`{rows.name.replace('input_ids', 'attention_mask')}` must hold ones for real tokens and zeros for "
                "pads, and it holds other values (an additive mask, with -inf at pads, is none of these)"
            )
        if rows.needs_tokens and 0 in rows.lengths:
            raise ValueError(
                f"`{rows.name}` has no token in row {rows.lengths.index(0)}: the text needs at least one token, such "
                "as BOS"
            )
        if has_unknown:
            found, own = int(rows.input_ids[rows.unknown()][0]), dict(rows.task_token_ids)
            also_known = f" or one of the task tokens {own}" if own else ""
            raise ValueError(
                f"`{rows.name}` has the token id {found}, which is outside the vocabulary of {rows.vocab_size} tokens"
                f"{also_known}; is the tokenizer the one of this checkpoint?"
            )
        if has_wrong_target and rows.targets is not None and rows.vocab_size is not None:
            check_targets(rows.targets, rows.vocab_size)
        rows.input_ids = rows.input_ids.masked_fill(rows.attention_mask == 0, 0)
    return values


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Check labels by a wait for the device of their own, where they do not go with rows of [`check_together`].

    Args:
        targets: labels of any shape.
        vocab_size: ids below it are known.

    Raises:
        ValueError: the first that is neither in the vocabulary nor -100.
    """
    wrong = targets[_wrong_targets(targets, vocab_size)].tolist()
    if wrong:
        raise ValueError(f"`labels` must be -100 or ids of the vocabulary of {vocab_size} tokens, and hold {wrong[0]}")


def _wrong_targets(targets: Tensor, vocab_size: int) -> Tensor:
    return ((targets < 0) & (targets != -100)) | (targets >= vocab_size)


def _checked_passages(rows: TokenRows, given: list[list[int]]) -> list[list[int]]:
    name = rows.name.replace("input_ids", "chunk_lengths")
    for row, (lengths, num_tokens) in enumerate(zip(given, rows.lengths, strict=True)):
        if min(lengths, default=0) < 0 or sum(lengths) != num_tokens:
            raise ValueError(
                f"`{name}` must be 0 or more and say where each token of a context is, got {lengths} in row {row}, "
                f"which has {num_tokens} tokens"
            )
    return [[length for length in lengths if length] for lengths in given]


def passage_borders(name: str, chunk_lengths: Any, input_ids: Tensor) -> Tensor | None:
    """Lengths of passages as a tensor on the device of the contexts; `None` where there are none.

    Args:
        name: what errors call the lengths.
        chunk_lengths: `(batch_size, num_passages)`, or a list of lengths for each row.
        input_ids: the contexts.

    Raises:
        ValueError: another number of rows.
    """
    if chunk_lengths is None:
        return None
    if not isinstance(chunk_lengths, Tensor):
        width = max(map(len, chunk_lengths), default=0)
        chunk_lengths = torch.tensor([[*row, *[0] * (width - len(row))] for row in chunk_lengths], dtype=torch.long)
    if chunk_lengths.dim() != 2 or len(chunk_lengths) != len(input_ids):
        raise ValueError(
            f"`{name}` must have shape (batch_size, num_passages) with {len(input_ids)} rows, got "
            f"{tuple(chunk_lengths.shape)}"
        )
    return chunk_lengths.to(input_ids.device)


def check_cached_mask(mask: Tensor | None, input_ids: Tensor, num_cached: int) -> Tensor:
    """The mask of a text whose first tokens are in the cache, as a LongTensor; all ones where none is given.

    Args:
        mask: `(batch_size, num_cached + num_new_tokens)`, or `None`: `generate` drops a mask of ones.
        input_ids: the new tokens `(batch_size, num_new_tokens)`.
        num_cached: how many places of the text are in the cache.

    Raises:
        TypeError: as [`check_ids`].
        ValueError: the mask has another shape.
    """
    check_ids("input_ids", input_ids)
    shape = (input_ids.shape[0], num_cached + input_ids.shape[1])
    if mask is None:
        return torch.ones(shape, dtype=torch.long, device=input_ids.device)
    if tuple(mask.shape) != shape:
        raise ValueError(
            "with a cache, `attention_mask` must cover the text in the cache and the new text, "
            f"(batch_size, num_text_tokens) = {shape}, got {tuple(mask.shape)}"
        )
    return (mask != 0).long()


def check_no_new_pads(mask: Tensor, num_new: int) -> None:
    """Refuse pads among the new tokens behind a filled cache: they would stand between two of a row's tokens.

    Args:
        mask: of the text in the cache and the new tokens, see [`check_cached_mask`].
        num_new: how many tokens are new.

    Raises:
        ValueError: a pad among them.
    """
    if not bool(mask[:, -num_new:].all()):
        raise ValueError(
            f"pads among the {num_new} tokens behind a filled cache would stand between two tokens of a row: give all "
            "rows as many, each row with a cache of its own, or the whole text without a cache"
        )


def check_ratios(ratios: Sequence[Any], trained: Sequence[int], input_ids: Tensor, allow_untrained: bool) -> list[Any]:
    """Ratios as ints or LongTensors `(batch_size,)`; `None` becomes the first trained one.

    Args:
        ratios: of the caller.
        trained: of the checkpoint.
        input_ids: what is compressed, `(batch_size, num_tokens)`.
        allow_untrained: whether it may be another one than those.

    Raises:
        ValueError: no ratio, one below 1 or above 65,536, one that the checkpoint was not trained for, or a tensor of
            another shape.
        TypeError: a ratio that is no number.
    """
    if not ratios:
        raise ValueError(f"`ratio` is an empty list; the checkpoint has the ratios {sorted(trained)}")
    return [_check_ratio(ratio, trained, input_ids, allow_untrained) for ratio in ratios]


def _check_ratio(ratio: Any, trained: Sequence[int], input_ids: Tensor, allow_untrained: bool) -> int | Tensor:
    if ratio is None:
        return trained[0]
    if isinstance(ratio, Tensor) and ratio.dim():
        if tuple(ratio.shape) != (input_ids.shape[0],):
            raise ValueError(
                f"`ratio` must be an int or have one value for each of the {input_ids.shape[0]} rows, got shape "
                f"{tuple(ratio.shape)}"
            )
        ratio = ratio.to(device=input_ids.device, dtype=torch.long)
        values = set(ratio.tolist())
    else:
        ratio = ratio.item() if isinstance(ratio, Tensor) else ratio
        if not isinstance(ratio, int):
            raise TypeError(
                "`ratio` must be an int, a LongTensor or a list of ints ('auto' needs a checkpoint with a ratio "
                f"selector), got {ratio!r}"
            )
        values = {ratio}
    for value in sorted(values):
        if not 1 <= value <= max(_MAX_RATIO, *trained):
            raise ValueError(f"`ratio` must be from 1 to {_MAX_RATIO}, got {value}")
        if value not in trained and not allow_untrained:
            raise ValueError(
                f"this checkpoint was not trained for the ratio {value}; it has {sorted(trained)} "
                "(compress(..., allow_untrained_ratio=True) goes on nevertheless)"
            )
    return ratio


def check_context_length(
    encoder_config: PreTrainedConfig, num_positions: int, chunk_size: int | None, has_chunks: bool = True
) -> None:
    """A context, or chunk, must fit into the encoder's positions.

    Raises:
        ValueError: with both lengths.
    """
    limit = getattr(encoder_config, "max_position_embeddings", None)
    if limit is not None and num_positions > limit:
        hint = "cut the context"
        if not has_chunks:
            pass
        elif chunk_size is None:
            hint = "set `chunk_size` in the configuration, or cut the context"
        elif num_positions < 2 * chunk_size:
            # A single chunk is too long.
            hint = f"set a `chunk_size` below {chunk_size} in the configuration, or cut the context"
        raise ValueError(
            f"the context needs {num_positions} positions, the encoder has {limit} (max_position_embeddings): {hint}"
        )


def check_labels(labels: Tensor | None, text_ids: Tensor | None) -> Tensor | None:
    """The labels of a text as a LongTensor, or `None` where there are none.

    Args:
        labels: `(batch_size, num_text_tokens)`.
        text_ids: the text, same shape; `None` where the labels are all that there is of it.

    Raises:
        ValueError: another shape than the text's.
    """
    if labels is not None and text_ids is not None and labels.shape != text_ids.shape:
        raise ValueError(f"`labels` must have shape {tuple(text_ids.shape)}, got {tuple(labels.shape)}")
    return None if labels is None else labels.long()


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that are nearly one that `forward` reads: the language model would swallow them.

    Raises:
        TypeError: with the nearest right name.
    """
    for name in keywords:
        found = nearest_name(name.lower(), _KEYWORDS, similarity=0.8)
        if found is not None and name not in _KEYWORDS:
            raise TypeError(f"unexpected argument {name!r}; did you mean {found!r}?")


def check_source(
    context_input_ids: Tensor | None,
    memory: CompressedContext | None,
    ratio: Any,
    context_attention_mask: Tensor | None,
    chunk_lengths: Any = None,
) -> None:
    """What stands in front of a text is a context or a memory, and all else is the context's: where none is compressed
    a ratio must be that of the memory, and a mask has no ids.

    Args:
        context_input_ids, ratio, context_attention_mask: the caller's.
        memory: what is read, or `None`.
        chunk_lengths: the caller's `context_chunk_lengths`.

    Raises:
        ValueError: context and memory together; without a context a mask, lengths, a ratio without a memory, "auto",
            or another one than the memory's, with both.
    """
    if context_input_ids is not None:
        if memory is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        return
    if context_attention_mask is not None:
        raise ValueError("`context_attention_mask` is the mask of `context_input_ids`, which are not given")
    if chunk_lengths is not None:
        raise ValueError("`context_chunk_lengths` are those of `context_input_ids`, which are not given")
    if ratio is None:
        return
    if memory is None:
        raise ValueError(f"`ratio` is {ratio}, but no context is compressed: give `context_input_ids`")
    if not is_memory(memory):
        return
    if isinstance(ratio, str) or not bool((torch.as_tensor(memory.ratio).cpu() == torch.as_tensor(ratio).cpu()).all()):
        coarser = "" if memory.coarsest_ratios is None else ", or give `memory.at_ratio(ratio)` if it is coarser"
        raise ValueError(
            f"`memory` was compressed at ratio {memory.ratio}, `ratio` is {ratio}: leave `ratio` out{coarser}"
        )


def check_memory(memory: Any, model: Any, input_ids: Tensor) -> CompressedContext:
    """The memory, one row for each text row, on the model's device and of its dtype.

    Args:
        memory: what `compress` or `CompressedContext.load` returned.
        model: the compressor's backbone.
        input_ids: the texts `(batch_size, num_text_tokens)`.

    Raises:
        TypeError: it is no `CompressedContext`.
        ValueError: it comes from another model, has another width or carrier, another number of rows, or values
            such as the model's floating-point type cannot hold. That they are finite is for `value_flags`.
    """
    if not is_memory(memory):
        raise TypeError(f"`memory` must be a CompressedContext, as `compress` returns it, got {type(memory).__name__}")
    _check_carrier(memory, model)
    if not model.made(memory):
        maker = f"the model {memory.model_id}" if memory.model_id else "another model, in training mode"
        raise ValueError(f"`memory` was made by {maker}, not by this one, {model.model_id}")
    num_texts = input_ids.shape[0]
    if memory.batch_size not in (1, num_texts):
        raise ValueError(f"`memory` has {memory.batch_size} rows, `input_ids` has {num_texts}")
    if (memory.device, memory.dtype) != (input_ids.device, model.dtype):
        # Checks that no value is beyond what the model's type can hold.
        memory = memory.to(device=input_ids.device, dtype=model.dtype)
    return memory if memory.batch_size == num_texts else memory.repeat_interleave(num_texts)


def _check_carrier(memory: CompressedContext, model: Any) -> None:
    if memory.carrier != model.config.carrier:
        raise ValueError(f"`memory` holds {memory.carrier}, {type(model).__name__} reads {model.config.carrier}")
    if memory.embeddings is not None:
        width = model.config.hidden_size
        if width_of(memory.embeddings) != width:
            raise ValueError(
                f"`memory` has slots of width {width_of(memory.embeddings)}, the decoder reads width {width}"
            )
        return
    pairs = memory.key_values or ()
    keys = pairs[0][0]
    found, wanted = (len(pairs), keys.shape[1], width_of(keys)), key_value_shape(model.config.decoder_config)
    if found != wanted:
        raise ValueError(
            f"`memory` has (layers, key/value heads, head dimension) = {found}, the decoder reads {wanted}"
        )


def check_text_and_memory(text: TokenRows, memory: Any, model: Any) -> tuple[CompressedContext, bool, int]:
    """Check a text and the memory in front of it by one wait for the device.

    Args:
        text: of the backbone's `text_rows`.
        memory: as [`check_memory`] takes it.
        model: the compressor's backbone.

    Returns:
        The memory, as [`check_memory`] gives it, whether all of its slots are real, and how many slots and text tokens
        the longest row has.

    Raises:
        TypeError: as [`check_memory`].
        ValueError: as [`check_memory`] and [`check_together`]; or values that are not finite, but not in training.
    """
    memory = check_memory(memory, model, text.input_ids)
    # A run of training stops at its loss, and names the batch.
    flags = [] if model.training else value_flags(memory, finite=True)
    longest = (memory.num_slots + text.attention_mask.sum(dim=1)).max()
    *found, all_real, longest = check_together(text, also=[*flags, memory.attention_mask.all(), longest])
    if flags:
        refuse_values(memory, found)
    return memory, bool(all_real), longest


def warn_about_positions(
    decoder_config: PreTrainedConfig, memory: CompressedContext, offset: Tensor, num_text_tokens: int
) -> None:
    """Say once that slots and text reach further than the decoder's positions, where it may have learned nothing.

    Args:
        decoder_config: the decoder's.
        memory: the slots in front of the text.
        offset: `(batch_size,)`, position of each row's first text token.
        num_text_tokens: of the longest text.
    """
    limit = getattr(decoder_config, "max_position_embeddings", None)
    # Under the enhanced layout a text stands behind all tokens of the context, how many only the device knows.
    if limit is None or (
        memory.position_layout != "enhanced" and memory.attention_mask.shape[1] + num_text_tokens <= limit
    ):
        return
    if int(offset.max()) + num_text_tokens > limit:
        # Under the enhanced layout no ratio moves a text.
        otherwise = "give less text" if memory.position_layout == "enhanced" else "take a higher ratio"
        logger.warning_once(
            f"slots and text need more positions than the {limit} of the decoder (max_position_embeddings), and it "
            f"may not read what lies behind them: {otherwise}, or join fewer memories"
        )
