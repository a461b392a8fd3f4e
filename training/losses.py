# SPDX-License-Identifier: Apache-2.0
"""Losses that never hold the logits of all positions at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..modeling.parts.base_pass import as_head_takes

Head = Callable[[Tensor], Tensor]
# Targets whose logits are in memory at once.
CHUNK_SIZE = 1024


def logits_function(model: PreTrainedModel) -> Head:
    """Return the map from last hidden states to float32 logits, with Gemma 2's soft-capping."""
    head, config = model.get_output_embeddings(), vars(model.config.get_text_config())
    for field in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if config.get(field) not in (None, 1):
            raise ValueError(f"{type(model).__name__} scales its logits, which no loss here does: {field}")
    cap = config.get("final_logit_softcapping")

    def logits(states: Tensor) -> Tensor:
        scores = head(as_head_takes(head, states)).float()
        return scores if cap is None else cap * torch.tanh(scores / cap)

    return logits


def _chunked_sum(function: Callable[..., Tensor], chunk_size: int, *tensors: Tensor) -> Tensor:
    if 0 < tensors[0].shape[0] <= chunk_size:
        # One chunk may stay in memory until backward, which then need not run it again.
        return function(*tensors)
    parts = [
        checkpoint(function, *chunk, use_reentrant=False)
        for chunk in zip(*(tensor.split(chunk_size) for tensor in tensors), strict=True)
    ]
    # Zero times the states keeps a batch without any target differentiable.
    return torch.stack(parts).sum() if tensors[0].shape[0] else tensors[0].float().sum() * 0.0


def negative_log_likelihood(
    states: Tensor, targets: Tensor, head: Head, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of targets `(num_targets,)` from states `(num_targets, hidden_size)`, summed, and how
    many targets had the highest score (a scalar without gradient)."""
    hits: list[Tensor] = []

    def chunk_loss(chunk_states: Tensor, chunk_targets: Tensor) -> Tensor:
        logits = head(chunk_states)
        hits.append((logits.detach().argmax(dim=-1) == chunk_targets).sum())
        return nn.functional.cross_entropy(logits, chunk_targets, reduction="sum")

    total = _chunked_sum(chunk_loss, chunk_size, states, targets)
    # Summed here: backward runs every chunk again and appends once more.
    return total, torch.stack(hits).sum() if hits else torch.zeros((), dtype=torch.long, device=states.device)


def distillation_loss(
    student_states: Tensor,
    teacher_states: Tensor,
    student_head: Head,
    teacher_head: Head,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Return KL(teacher || student) in nats, summed over states `(num_answer_tokens, hidden_size)` that predict the
    answer (mean pooling's equation 5); no gradient flows into the teacher's."""

    def chunk_loss(student: Tensor, teacher: Tensor) -> Tensor:
        student_log_probs = nn.functional.log_softmax(student_head(student), dim=-1)
        with torch.no_grad():
            teacher_log_probs = nn.functional.log_softmax(teacher_head(teacher), dim=-1)
        return nn.functional.kl_div(student_log_probs, teacher_log_probs, reduction="sum", log_target=True)

    return _chunked_sum(chunk_loss, chunk_size, student_states, teacher_states.detach())


def prediction_positions(labels: Tensor) -> Tensor:
    """Mask `(batch_size, width)` of the positions whose next token has a label."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != -100
    return mask
