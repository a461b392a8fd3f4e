# SPDX-License-Identifier: Apache-2.0
"""Questions that are compressed together with their context, and the memories that belong to them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .compressed_context import CompressedContext
from .inputs import check_mask, check_text
from .splicing import left_padded


def without_start(input_ids: Tensor, attention_mask: Tensor, start_token_id: int) -> Tensor:
    """The mask of texts without the start token that some of them begin with.

    Args:
        input_ids: `(batch_size, num_tokens)`, padded anywhere.
        attention_mask: same shape.
        start_token_id: the decoder's start token.
    """
    is_first = attention_mask.cumsum(dim=1) == 1
    return attention_mask * ~(is_first & (input_ids == start_token_id))


def question_in_front(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    question_input_ids: Tensor,
    question_attention_mask: Tensor | None,
    start_token_id: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Questions and contexts as one encoder input.

    Args:
        input_ids: contexts `(batch_size, num_tokens)`.
        attention_mask: their mask.
        question_input_ids: `(batch_size or 1, num_question_tokens)`.
        question_attention_mask: their mask.
        start_token_id: the decoder's start token, which is no part of a question.

    Returns:
        Ids and mask `(batch_size, num_question_tokens + num_tokens)`, and the questions' own ids and mask.

    Raises:
        ValueError: a mask of the wrong shape, an empty question, or another number of questions.
    """
    context_mask = check_mask("attention_mask", attention_mask, "input_ids", input_ids)
    name = "question_input_ids"
    mask = check_mask("question_attention_mask", question_attention_mask, name, question_input_ids)
    check_text(mask, name)
    if question_input_ids.shape[0] not in (1, input_ids.shape[0]):
        raise ValueError(f"`{name}` has {question_input_ids.shape[0]} rows, `input_ids` has {input_ids.shape[0]}")
    mask = without_start(question_input_ids, mask, start_token_id)
    question, mask = (tensor.expand(input_ids.shape[0], -1) for tensor in (question_input_ids, mask))
    joined, joined_mask = torch.cat([question, input_ids], dim=1), torch.cat([mask, context_mask], dim=1)
    return joined, joined_mask, (question, mask)


def question_fingerprints(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """A number for each question, the same wherever its pads stand, `(batch_size,)`; 0 for no question at all.

    Args:
        input_ids: questions `(batch_size, num_question_tokens)`.
        attention_mask: their mask.
    """
    fingerprints = []
    for row, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
        ids = [token for token, real in zip(row, mask, strict=True) if real]
        digest = hashlib.sha256(" ".join(map(str, ids)).encode()).digest()
        fingerprints.append(int.from_bytes(digest[:7], "big") if ids else 0)
    return torch.tensor(fingerprints, dtype=torch.long, device=input_ids.device)


def check_question(memory: CompressedContext, input_ids: Tensor, attention_mask: Tensor, start_token_id: int) -> None:
    """The question must be the one that each row of the memory was compressed with.

    Args:
        memory: one row for each question.
        input_ids: questions `(batch_size, num_question_tokens)`, with or without the decoder's start token.
        attention_mask: their mask.
        start_token_id: that token.

    Raises:
        ValueError: another question, or one to a memory without.
    """
    asked = question_fingerprints(input_ids, without_start(input_ids, attention_mask, start_token_id))
    known = memory.question_fingerprints
    known = torch.zeros_like(asked) if known is None else known.to(asked.device)
    if bool((asked != known).any()):
        row = int((asked != known).nonzero()[0])
        reason = "another question" if int(known[row]) else "no question"
        raise ValueError(
            f"row {row} of `memory` was compressed with {reason} (`question_placement='encoder'`): compress the "
            "context with this one, `compress(..., question_input_ids=...)`"
        )


def with_start(input_ids: Tensor, attention_mask: Tensor, start_token_id: int) -> tuple[Tensor, Tensor]:
    """Left-padded texts with the decoder's start token in front, unless all of them begin with it.

    Args:
        input_ids: `(batch_size, num_tokens)`, padded anywhere, a token in each row.
        attention_mask: same shape.
        start_token_id: the decoder's start token.

    Returns:
        Ids and mask, without columns of pads alone.
    """
    ids, mask = (left_padded(tensor, attention_mask) for tensor in (input_ids, attention_mask))
    counts = mask.sum(dim=1)
    first = (mask.shape[1] - counts)[:, None]
    if not bool((ids.gather(1, first) == start_token_id).all()):
        ids, mask = (torch.nn.functional.pad(tensor, (1, 0)) for tensor in (ids, mask))
        ids, mask = ids.scatter(1, first, start_token_id), mask.scatter(1, first, 1)
        counts = counts + 1
    width = int(counts.max())
    return ids[:, -width:], mask[:, -width:]
