# SPDX-License-Identifier: Apache-2.0
"""Token ids with their mask, and the passages that they are made of: checked together, by one wait for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    if not isinstance(chunk_lengths, Tensor) or chunk_lengths.dtype not in INTEGER_DTYPES:
        found = getattr(chunk_lengths, "dtype", type(chunk_lengths).__name__)
        raise TypeError(f"`{name}` must be an integer tensor, or a list of ints for each row, got {found}")
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
