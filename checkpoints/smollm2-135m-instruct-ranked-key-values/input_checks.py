# SPDX-License-Identifier: Apache-2.0
"""Checks of what users hand in: each error names the value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import logging

from .nearest_names import nearest_name
from .compressed_context import CompressedContext
from .key_value_memory import key_value_shape
from .memory_quantization import width_of
from .memory_validation import is_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.get_logger(__name__)

_KEYWORDS = (
    "input_ids",
    "attention_mask",
    "position_ids",
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
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
        TypeError: as [`check_ids`], or the mask is no tensor of real numbers.
        ValueError: as [`check_ids`], or the mask has another shape.
    """
    check_ids(name, input_ids)
    mask, mask_name = attention_mask, name.replace("input_ids", "attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids, dtype=torch.long)
    elif not isinstance(mask, Tensor) or mask.is_complex():
        found = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"`{mask_name}` must be a tensor of ones and zeros, got {found}")
    elif tuple(mask.shape) != tuple(input_ids.shape):
        raise ValueError(
            f"`{mask_name}` must have the shape of `{name}`, {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
        )
    elif mask.dtype == torch.bool:
        mask = mask.long().to(input_ids.device)
    else:
        mask = torch.where((mask == 0) | (mask == 1), (mask == 1).long(), -1).to(input_ids.device)
    return TokenRows(name, input_ids, mask, vocab_size, task_token_ids or {}, needs_tokens)


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
        ValueError: a mask of other values than ones and zeros, a row without tokens that needs one, or the first
            unknown id.
    """
    device = inputs[0].input_ids.device
    facts = [tensor[None] for tensor in also]
    for rows in reversed(inputs):
        mask = rows.attention_mask
        borders = [] if rows.borders is None else [rows.borders.reshape(-1)]
        facts = [mask.sum(dim=1), rows.unknown().any()[None], (mask < 0).any()[None], *borders, *facts]
    values = torch.cat([tensor.to(device=device, dtype=torch.long) for tensor in facts]).tolist()
    for rows in inputs:
        rows.lengths, (has_unknown, is_wrong) = values[: len(rows.input_ids)], values[len(rows.input_ids) :][:2]
        values = values[len(rows.input_ids) + 2 :]
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
        rows.input_ids = rows.input_ids.masked_fill(rows.attention_mask == 0, 0)
    return values


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
        TypeError: neither.
        ValueError: another number of rows.
    """
    if isinstance(chunk_lengths, (list, tuple)):
        if not all(isinstance(row, (list, tuple)) and all(type(n) is int for n in row) for row in chunk_lengths):
            raise TypeError(f"`{name}` must hold a list of ints for each row, got {chunk_lengths!r}")
        width = max(map(len, chunk_lengths), default=0)
        chunk_lengths = torch.tensor([[*row, *[0] * (width - len(row))] for row in chunk_lengths], dtype=torch.long)
    if chunk_lengths is None:
        return None
    if not isinstance(chunk_lengths, Tensor) or chunk_lengths.dtype not in _INTEGER_DTYPES:
        found = getattr(chunk_lengths, "dtype", type(chunk_lengths).__name__)
        raise TypeError(f"`{name}` must be an integer tensor, or a list of ints for each row, got {found}")
    if chunk_lengths.dim() != 2 or len(chunk_lengths) != len(input_ids):
        raise ValueError(
            f"`{name}` must have shape (batch_size, num_passages) with {len(input_ids)} rows, got "
            f"{tuple(chunk_lengths.shape)}"
        )
    return chunk_lengths.to(input_ids.device)


def check_ratios(
    ratios: Sequence[Any], trained: Sequence[int], input_ids: Tensor, allow_untrained: bool, selects: bool = False
) -> list[Any]:
    """Ratios as ints or LongTensors `(batch_size,)`, or "auto"; `None` becomes the first trained one.

    Args:
        ratios: of the caller.
        trained: of the checkpoint.
        input_ids: what is compressed, `(batch_size, num_tokens)`.
        allow_untrained: whether it may be another one than those.
        selects: whether "auto" is allowed.

    Raises:
        TypeError: a ratio that is neither an int nor an integer tensor nor "auto".
        ValueError: no ratio, "auto" where it is not allowed, one below 1 or above 65,536, one that the checkpoint was
            not trained for, or a tensor of another shape.
    """
    if not ratios:
        raise ValueError(f"`ratio` is an empty list; the checkpoint has the ratios {list(trained)}")
    if not selects and any(isinstance(ratio, str) and ratio == "auto" for ratio in ratios):
        raise ValueError(
            "`ratio` is 'auto', but the checkpoint has no ratio selector (`ratio_selector` of its configuration): "
            f"give one of {list(trained)}"
        )
    return [_check_ratio(ratio, trained, input_ids, allow_untrained) for ratio in ratios]


def _check_ratio(ratio: Any, trained: Sequence[int], input_ids: Tensor, allow_untrained: bool) -> int | Tensor | str:
    if ratio is None:
        return trained[0]
    if isinstance(ratio, str) and ratio == "auto":
        return ratio
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
        raise TypeError(f"`ratio` must be an int, a LongTensor, 'auto' or a list of these, got {ratio!r}")
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
        logger.warning_once(
            f"slots and text need more positions than the {limit} of the decoder (max_position_embeddings), and it "
            "may not read what lies behind them: take a higher ratio, or join fewer memories"
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
    if memory.batch_size == 1 and input_ids.shape[0] > 1:
        memory = memory.repeat_interleave(input_ids.shape[0])
    if memory.batch_size != input_ids.shape[0]:
        raise ValueError(f"`memory` has {memory.batch_size} rows, `input_ids` has {input_ids.shape[0]}")
    if (memory.device, memory.dtype) == (input_ids.device, model.dtype):
        return memory
    # Checks that no value is beyond what the model's type can hold.
    return memory.to(device=input_ids.device, dtype=model.dtype)


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


def check_memory_ratio(
    memory: CompressedContext | None, ratio: Any, context_attention_mask: Tensor | None, chunk_lengths: Any = None
) -> None:
    """Without `context_input_ids` nothing is compressed: a ratio must be that of the memory, and a mask has no ids.

    Args:
        memory: what is read, or `None` where there is no context at all.
        ratio: the caller's.
        context_attention_mask: the caller's.
        chunk_lengths: the caller's `context_chunk_lengths`.

    Raises:
        TypeError: a ratio that is neither an int nor an integer tensor.
        ValueError: a mask, a ratio without a memory, "auto", or another one than the memory's, with both.
    """
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
    if isinstance(ratio, str) and ratio == "auto":
        raise ValueError(f"`ratio` is 'auto', but `memory` has its ratio already, {memory.ratio}: leave `ratio` out")
    is_tensor = isinstance(ratio, Tensor) and ratio.dtype in _INTEGER_DTYPES and ratio.dim() < 2
    if not is_tensor and (isinstance(ratio, bool) or not isinstance(ratio, int)):
        raise TypeError(f"`ratio` must be an int or a LongTensor, got {ratio!r}")
    own, asked = torch.as_tensor(memory.ratio).cpu(), torch.as_tensor(ratio).cpu()
    fit = own.dim() == 0 or asked.dim() == 0 or 1 in (len(own), len(asked)) or own.shape == asked.shape
    if not fit or not bool((own == asked).all()):
        raise ValueError(f"`memory` was compressed at ratio {memory.ratio}, `ratio` is {ratio}: leave `ratio` out")


def check_integers(name: str, value: Any, *shapes: tuple[int, ...]) -> None:
    """What numbers the tokens of a text, such as its positions, must be an integer tensor; `None` is none at all.

    Raises:
        TypeError: no tensor, or one of another type.
        ValueError: it has none of the shapes.
    """
    if value is None:
        return
    if not isinstance(value, Tensor) or value.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"`{name}` must be an integer tensor, got {getattr(value, 'dtype', type(value).__name__)}")
    if tuple(value.shape) not in shapes:
        raise ValueError(f"`{name}` must have shape {' or '.join(map(str, shapes))}, got {tuple(value.shape)}")


def check_labels(labels: Any, text_ids: Any) -> Tensor | None:
    """The labels of a text as a LongTensor, or `None` where there are none.

    Args:
        labels: `(batch_size, num_text_tokens)`.
        text_ids: the text, same shape; `None` where the labels are all that there is of it.

    Raises:
        TypeError: no integer tensor.
        ValueError: another shape than the text's.
    """
    if labels is None:
        return None
    text = text_ids if isinstance(text_ids, Tensor) else labels
    check_integers("labels", labels, tuple(getattr(text, "shape", ())))
    if labels.dim() != 2:
        raise ValueError(f"`labels` must have shape (batch_size, num_text_tokens), got {tuple(labels.shape)}")
    return labels.long()


def check_logits_to_keep(value: Any) -> None:
    """Which logits are wanted: the number of the last ones, or their indices.

    Raises:
        TypeError: neither an int nor an integer tensor.
        ValueError: a number below zero, or a tensor that is no list of indices.
    """
    if isinstance(value, Tensor):
        if value.dim() != 1:
            raise ValueError(f"`logits_to_keep` must be a number or a list of indices, got shape {tuple(value.shape)}")
        check_integers("logits_to_keep", value, tuple(value.shape))
    elif isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`logits_to_keep` must be an int or an integer tensor, got {value!r}")
    elif value < 0:
        raise ValueError(f"`logits_to_keep` must be 0 or more, got {value}")


def check_cache(cache: Any) -> None:
    """A cache must be one of the library's.

    Raises:
        TypeError: it is something else.
    """
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"`past_key_values` must be a transformers.Cache, got {type(cache).__name__}")


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that are nearly one that `forward` reads: the language model would swallow them.

    Raises:
        TypeError: with the nearest right name.
    """
    for name in keywords:
        found = nearest_name(name.lower(), _KEYWORDS, similarity=0.8)
        if found is not None and name not in _KEYWORDS:
            raise TypeError(f"unexpected argument {name!r}; did you mean {found!r}?")
