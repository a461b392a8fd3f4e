# SPDX-License-Identifier: Apache-2.0
"""Checks of a call's arguments beside its token rows and memories: ratios, lengths, labels, names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .nearest_names import nearest_name
from .token_rows import INTEGER_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
        raise ValueError(f"`ratio` is an empty list; the checkpoint has the ratios {sorted(trained)}")
    if not selects and any(isinstance(ratio, str) and ratio == "auto" for ratio in ratios):
        raise ValueError(
            "`ratio` is 'auto', but the checkpoint has no ratio selector (`ratio_selector` of its configuration): "
            f"give one of {sorted(trained)}"
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
        if ratio.dtype not in INTEGER_DTYPES:
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


def check_integers(name: str, value: Any, *shapes: tuple[int, ...]) -> None:
    """What numbers the tokens of a text, such as its positions, must be an integer tensor; `None` is none at all.

    Raises:
        TypeError: no tensor, or one of another type.
        ValueError: it has none of the shapes.
    """
    if value is None:
        return
    if not isinstance(value, Tensor) or value.dtype not in INTEGER_DTYPES:
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


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that are nearly one that `forward` reads: the language model would swallow them.

    Raises:
        TypeError: with the nearest right name.
    """
    for name in keywords:
        found = nearest_name(name.lower(), _KEYWORDS, similarity=0.8)
        if found is not None and name not in _KEYWORDS:
            raise TypeError(f"unexpected argument {name!r}; did you mean {found!r}?")
