# SPDX-License-Identifier: Apache-2.0
"""Whether a memory is one that a model can read, alone and in front of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import key_value_shape
from ..memory.memory_quantization import width_of
from ..memory.memory_validation import is_memory, refuse_values, value_flags
from .token_rows import INTEGER_DTYPES, TokenRows, check_together

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.get_logger(__name__)


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
        TypeError: a ratio that is neither an int nor an integer tensor.
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
    if isinstance(ratio, str) and ratio == "auto":
        raise ValueError(f"`ratio` is 'auto', but `memory` has its ratio already, {memory.ratio}: leave `ratio` out")
    is_tensor = isinstance(ratio, Tensor) and ratio.dtype in INTEGER_DTYPES and ratio.dim() < 2
    if not is_tensor and (isinstance(ratio, bool) or not isinstance(ratio, int)):
        raise TypeError(f"`ratio` must be an int or a LongTensor, got {ratio!r}")
    own, asked = torch.as_tensor(memory.ratio).cpu(), torch.as_tensor(ratio).cpu()
    fit = own.dim() == 0 or asked.dim() == 0 or 1 in (len(own), len(asked)) or own.shape == asked.shape
    if not fit or not bool((own == asked).all()):
        coarser = "" if memory.coarsest_ratios is None else ", or give `memory.at_ratio(ratio)` if it is coarser"
        raise ValueError(
            f"`memory` was compressed at ratio {memory.ratio}, `ratio` is {ratio}: leave `ratio` out{coarser}"
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
        # Under the enhanced layout no ratio moves a text.
        otherwise = "give less text" if memory.position_layout == "enhanced" else "take a higher ratio"
        logger.warning_once(
            f"slots and text need more positions than the {limit} of the decoder (max_position_embeddings), and it "
            f"may not read what lies behind them: {otherwise}, or join fewer memories"
        )
