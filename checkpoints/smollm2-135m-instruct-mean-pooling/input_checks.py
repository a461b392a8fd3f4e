# SPDX-License-Identifier: Apache-2.0
"""Checks of what users hand in: each error names the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from .compressed_context import CompressedContext
from .key_value_memory import key_value_shape
from .memory_validation import is_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.get_logger(__name__)

_OWN_KEYWORDS = ("context_input_ids", "context_attention_mask", "memory", "ratio", "text_position_offset")
# Some methods ask for memory by the ratio, however short the context is.
_MAX_RATIO = 65_536
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_ids(name: str, ids: Tensor) -> None:
    """Token ids must be rows of int64 or int32; whether the vocabulary has them is for [`check_token_ids`].

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


def check_mask(name: str, mask: Tensor | None, ids_name: str, ids: Tensor) -> Tensor:
    """The mask of `ids` as a LongTensor; all ones where none is given.

    Its values are checked by [`check_text`] or [`check_token_ids`], which wait for the device anyway: what is neither
    one nor zero is -1 in the result.

    Raises:
        TypeError: as [`check_ids`], or the mask is no tensor of real numbers.
        ValueError: as [`check_ids`], or the mask has another shape.
    """
    check_ids(ids_name, ids)
    if mask is None:
        return torch.ones_like(ids, dtype=torch.long)
    if not isinstance(mask, Tensor) or mask.is_complex():
        found = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"`{name}` must be a tensor of ones and zeros, got {found}")
    if tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(f"`{name}` must have the shape of `{ids_name}`, {tuple(ids.shape)}, got {tuple(mask.shape)}")
    ones = (mask == 1).long()
    if mask.dtype != torch.bool:
        ones = torch.where((mask == 0) | (mask == 1), ones, -1)
    return ones.to(device=ids.device)


def check_cached_mask(mask: Tensor | None, input_ids: Tensor, num_cached: int) -> Tensor:
    """The mask of a text whose first tokens are in the cache, as a LongTensor; all ones where none is given.

    Args:
        mask: `(batch_size, num_cached + num_new_tokens)`, or `None`: `generate` drops a mask of ones.
        input_ids: the new tokens `(batch_size, num_new_tokens)`.
        num_cached: how many places of the text are in the cache.

    Raises:
        TypeError: as [`check_ids`], or the mask is no tensor.
        ValueError: the mask has another shape.
    """
    check_ids("input_ids", input_ids)
    shape = (input_ids.shape[0], num_cached + input_ids.shape[1])
    if mask is None:
        return torch.ones(shape, dtype=torch.long, device=input_ids.device)
    if not isinstance(mask, Tensor):
        raise TypeError(f"`attention_mask` must be a tensor of ones and zeros, got {type(mask).__name__}")
    if tuple(mask.shape) != shape:
        raise ValueError(
            "with a cache, `attention_mask` must cover the text in the cache and the new text, "
            f"(batch_size, num_text_tokens) = {shape}, got {tuple(mask.shape)}"
        )
    return (mask != 0).long()


def _refuse_mask(ids_name: str) -> None:
    raise ValueError(
        f"`{ids_name.replace('input_ids', 'attention_mask')}` must hold ones for real tokens and zeros for pads, and "
        "it holds other values (an additive mask, with -inf at pads, is none of these)"
    )


def check_token_ids(
    name: str, ids: Tensor, mask: Tensor, vocab_size: int, task_token_ids: Mapping[str, int]
) -> Tensor:
    """Every real id must be in the vocabulary, or one of the method's own task tokens.

    Returns:
        The ids with 0 at pads: a tokenizer's pad id may lie outside the model's table.

    Raises:
        ValueError: with the first id that is not, or a mask of other values than ones and zeros.
    """
    unknown = ((ids < 0) | (ids >= vocab_size)) & mask.bool()
    for task_id in task_token_ids.values():
        unknown = unknown & (ids != task_id)
    # Together, so that one wait for the device tells of both.
    if bool((unknown | (mask < 0)).any()):
        if bool((mask < 0).any()):
            _refuse_mask(name)
        found = int(ids[unknown][0])
        also = f" or one of the task tokens {dict(task_token_ids)}" if task_token_ids else ""
        raise ValueError(
            f"`{name}` has the token id {found}, which is outside the vocabulary of {vocab_size} tokens{also}; is the "
            "tokenizer the one of this checkpoint?"
        )
    return ids.masked_fill(mask == 0, 0)


def check_ratios(
    ratios: Sequence[Any], trained: Sequence[int], input_ids: Tensor, allow_untrained: bool
) -> list[int | Tensor]:
    """Ratios as ints or LongTensors `(batch_size,)`; `None` becomes the first trained one.

    Raises:
        TypeError: a ratio that is neither an int nor an integer tensor.
        ValueError: no ratio, one below 1 or above 65,536, one that the checkpoint was not trained for, or a tensor of
            another shape.
    """
    if not ratios:
        raise ValueError(f"`ratio` is an empty list; the checkpoint has the ratios {list(trained)}")
    return [_check_ratio(ratio, trained, input_ids, allow_untrained) for ratio in ratios]


def _check_ratio(ratio: Any, trained: Sequence[int], input_ids: Tensor, allow_untrained: bool) -> int | Tensor:
    if ratio is None:
        return trained[0]
    if isinstance(ratio, Tensor) and ratio.dim() == 0:
        ratio = ratio.item()
    if isinstance(ratio, Tensor):
        if ratio.dtype not in _INTEGER_DTYPES:
            raise TypeError(f"`ratio` must hold ints, got a tensor of {ratio.dtype}")
        if tuple(ratio.shape) != (input_ids.shape[0],):
            raise ValueError(
                f"`ratio` must be an int or have one value for each of the {input_ids.shape[0]} rows, got shape "
                f"{tuple(ratio.shape)}"
            )
        ratio = ratio.to(device=input_ids.device, dtype=torch.long)
        values = set(ratio.tolist())
    elif isinstance(ratio, bool) or not isinstance(ratio, int):
        raise TypeError(f"`ratio` must be an int, a LongTensor or a list of ints, got {ratio!r}")
    else:
        values = {ratio}
    for value in sorted(values):
        if value < 1:
            raise ValueError(f"`ratio` must be at least 1, got {value}")
        if value > max(_MAX_RATIO, *trained):
            raise ValueError(f"`ratio` must be at most {_MAX_RATIO}, got {value}")
        if value not in trained and not allow_untrained:
            raise ValueError(
                f"this checkpoint was not trained for the ratio {value}; it has {list(trained)} "
                "(compress(..., allow_untrained_ratio=True) goes on nevertheless)"
            )
    return ratio


def check_context_length(encoder_config: PreTrainedConfig, num_positions: int, chunk_size: int | None) -> None:
    """A context, or chunk, must fit into the encoder's positions.

    Raises:
        ValueError: with both lengths.
    """
    limit = getattr(encoder_config, "max_position_embeddings", None)
    if limit is not None and num_positions > limit:
        hint = "set `chunk_size` in the configuration, or cut the context" if chunk_size is None else "cut the context"
        raise ValueError(
            f"the context needs {num_positions} positions, the encoder has {limit} (max_position_embeddings): {hint}"
        )


def warn_about_positions(decoder_config: PreTrainedConfig, num_positions: int) -> None:
    """Say once that slots and text reach further than the decoder's positions, where it may have learned nothing."""
    limit = getattr(decoder_config, "max_position_embeddings", None)
    if limit is not None and num_positions > limit:
        logger.warning_once(
            f"slots and text need more positions than the {limit} of the decoder (max_position_embeddings), and it "
            "may not read what lies behind them: take a higher ratio, or join fewer memories"
        )


def check_memory(memory: CompressedContext, model: Any, input_ids: Tensor) -> CompressedContext:
    """The memory, one row for each text row, on the model's device and of its dtype.

    Args:
        memory: what `compress` or `CompressedContext.load` returned.
        model: the compressor's backbone.
        input_ids: the texts `(batch_size, num_text_tokens)`.

    Raises:
        TypeError: it is no `CompressedContext`.
        ValueError: it comes from another model, has another width or carrier, another number of rows, values that are
            not finite, or such that the model's floating-point type cannot hold.
    """
    if not is_memory(memory):
        raise TypeError(f"`memory` must be a CompressedContext, as `compress` returns it, got {type(memory).__name__}")
    _check_carrier(memory, model)
    if not model.made(memory):
        maker = f"the model {memory.model_id}" if memory.model_id else "another model, in training mode"
        raise ValueError(f"`memory` was made by {maker}, not by this one, {model.model_id}")
    if not model.training:
        # A run of training stops at its loss, and names the batch.
        memory.validate(finite=True)
    if memory.batch_size == 1 and input_ids.shape[0] > 1:
        memory = memory.repeat_interleave(input_ids.shape[0])
    if memory.batch_size != input_ids.shape[0]:
        raise ValueError(f"`memory` has {memory.batch_size} rows, `input_ids` has {input_ids.shape[0]}")
    if (memory.device, memory.dtype) == (input_ids.device, model.dtype):
        return memory
    # Checks that no value is beyond what the model's type can hold.
    return memory.to(device=input_ids.device, dtype=model.dtype)


def _check_carrier(memory: CompressedContext, model: Any) -> None:
    if memory.carrier != model.carrier:
        raise ValueError(f"`memory` holds {memory.carrier}, {type(model).__name__} reads {model.carrier}")
    if memory.carrier == "embeddings":
        width = model.config.hidden_size
        if memory.embeddings.shape[-1] != width:
            raise ValueError(
                f"`memory` has slots of width {memory.embeddings.shape[-1]}, the decoder reads width {width}"
            )
        return
    keys = memory.key_values[0][0]
    found, wanted = (
        (len(memory.key_values), keys.shape[1], keys.shape[3]),
        key_value_shape(model.config.decoder_config),
    )
    if found != wanted:
        raise ValueError(
            f"`memory` has (layers, key/value heads, head dimension) = {found}, the decoder reads {wanted}"
        )


def check_memory_ratio(memory: CompressedContext | None, ratio: Any, context_attention_mask: Tensor | None) -> None:
    """Without `context_input_ids` nothing is compressed: a ratio must be that of the memory, and a mask has no ids.

    Args:
        memory: what is read, or `None` where there is no context at all.
        ratio: the caller's.
        context_attention_mask: the caller's.

    Raises:
        ValueError: a mask, a ratio without a memory, or another one than the memory's, with both.
    """
    if context_attention_mask is not None:
        raise ValueError("`context_attention_mask` is the mask of `context_input_ids`, which are not given")
    if ratio is None:
        return
    if memory is None:
        raise ValueError(f"`ratio` is {ratio}, but no context is compressed: give `context_input_ids`")
    if not is_memory(memory):
        return
    own, asked = torch.as_tensor(memory.ratio).cpu(), torch.as_tensor(ratio).cpu()
    fit = own.dim() == 0 or asked.dim() == 0 or 1 in (len(own), len(asked)) or own.shape == asked.shape
    if not fit or not bool((own == asked).all()):
        raise ValueError(f"`memory` was compressed at ratio {memory.ratio}, `ratio` is {ratio}: leave `ratio` out")


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that are nearly one of a compressor's own: the language model would swallow them.

    Raises:
        TypeError: with the nearest right name.
    """
    for name in keywords:
        nearest = difflib.get_close_matches(name, _OWN_KEYWORDS, n=1, cutoff=0.8)
        if nearest:
            raise TypeError(f"unexpected argument {name!r}; did you mean {nearest[0]!r}?")


def check_text(mask: Tensor, name: str = "input_ids") -> None:
    """Every row of the text must have a token.

    Args:
        mask: `(batch_size, num_text_tokens)`.
        name: what the error calls the text.

    Raises:
        ValueError: with the first empty row, or a mask of other values than ones and zeros.
    """
    empty = mask.eq(0).all(dim=1)
    wrong = (mask < 0).any(dim=1)
    if bool((empty | wrong).any()):
        if bool(wrong.any()):
            _refuse_mask(name)
        row = int(empty.nonzero()[0])
        raise ValueError(f"`{name}` has no token in row {row}: the text needs at least one token, such as BOS")
