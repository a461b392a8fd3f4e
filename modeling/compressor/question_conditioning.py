# SPDX-License-Identifier: Apache-2.0
"""Questions that are compressed together with their context, and the memories that belong to them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from ..memory.compressed_context import CompressedContext
from ..parts.packing import left_padded
from .validation import TokenRows, measure_rows, token_rows


def question_rows(
    input_ids: Tensor, attention_mask: Tensor | None, num_contexts: int, config: Any, vocab_size: int | None = None
) -> TokenRows:
    """Check questions `(num_contexts or 1, num_question_tokens)` that are compressed with their contexts."""
    name = "question_input_ids"
    if not config.compresses_questions:
        raise ValueError(
            f"`{name}` need `question_placement='encoder'`, the configuration has {config.question_placement!r}: ask "
            "the decoder, `generate(question, memory=memory)`"
        )
    asked = token_rows(input_ids, attention_mask, name, vocab_size=vocab_size, needs_tokens=True)
    measure_rows(asked)
    if len(input_ids) not in (1, num_contexts):
        raise ValueError(f"`{name}` has {len(input_ids)} rows, `input_ids` has {num_contexts}")
    return asked


def own_tokens(input_ids: Tensor, attention_mask: Tensor, config: Any) -> Tensor:
    """Return the mask of questions `(batch_size, num_tokens)`, padded anywhere, without the decoder's start token and
    the EOS that may stand around them."""
    places = attention_mask.cumsum(dim=1)
    is_start = (places == 1) & (input_ids == config.decoder_start_token_id)
    end = [] if config.eos_token_id is None else config.eos_token_id
    is_end = (places == places[:, -1:]) & torch.isin(input_ids, input_ids.new_tensor(end))
    return attention_mask * ~(is_start | is_end)


def question_in_front(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    question_input_ids: Tensor,
    question_attention_mask: Tensor | None,
    config: Any,
    chunk_lengths: Any = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Put questions in front of contexts `(batch_size, num_tokens)`, and return ids and mask of both together, and the
    questions' own ids and mask."""
    if chunk_lengths is not None:
        raise ValueError("`chunk_lengths` must be left out where a question stands in front of the whole context")
    context = token_rows(input_ids, attention_mask)
    asked = question_rows(question_input_ids, question_attention_mask, len(input_ids), config)
    mask = own_tokens(question_input_ids, asked.attention_mask, config)
    question, mask = (tensor.expand(input_ids.shape[0], -1) for tensor in (question_input_ids, mask))
    joined, joined_mask = torch.cat([question, input_ids], dim=1), torch.cat([mask, context.attention_mask], dim=1)
    return joined, joined_mask, (question, mask)


def question_fingerprints(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return a number for each question `(batch_size,)`, the same wherever its pads stand; 0 for no tokens."""
    fingerprints = [of_row[-1] for of_row in _fingerprints_of_starts(input_ids, attention_mask)]
    return torch.tensor(fingerprints, dtype=torch.long, device=input_ids.device)


def _fingerprints_of_starts(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return for each row the fingerprints of its first tokens: of none, of one, of two and so on."""
    fingerprints = []
    for row, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
        digest, of_row = hashlib.sha256(), [0]
        for token in (token for token, real in zip(row, mask, strict=True) if real):
            digest.update(f"{' ' * (len(of_row) > 1)}{token}".encode())
            of_row.append(int.from_bytes(digest.digest()[:7], "big"))
        fingerprints.append(of_row)
    return fingerprints


def check_question(
    memory: CompressedContext, input_ids: Tensor, attention_mask: Tensor, may_go_on: bool = False
) -> None:
    """Raise `ValueError` unless each text is the question that its row of the memory was compressed with."""
    known = memory.question_fingerprints
    numbers = [0] * len(input_ids) if known is None else known.expand(len(input_ids)).tolist()
    for row, of_row in enumerate(_fingerprints_of_starts(input_ids, attention_mask)):
        if numbers[row] not in ((of_row[1:] or of_row) if may_go_on else of_row[-1:]):
            raise ValueError(
                f"row {row} of `memory` was compressed with {'another' if numbers[row] else 'no'} question "
                "(`question_placement='encoder'`): compress the context with this one, "
                "`compress(..., question_input_ids=...)`"
            )


def with_start(input_ids: Tensor, attention_mask: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return ids and mask of questions as the decoder reads them: left-padded, behind its start token, without EOS."""
    own = own_tokens(input_ids, attention_mask, config)
    ids, mask = (left_padded(tensor, own) for tensor in (input_ids, own))
    counts = mask.sum(dim=1, keepdim=True)
    width = int(counts.max())
    ids, mask = (torch.nn.functional.pad(tensor[:, tensor.shape[1] - width :], (1, 0)) for tensor in (ids, mask))
    return ids.scatter(1, width - counts, config.decoder_start_token_id), mask.scatter(1, width - counts, 1)
