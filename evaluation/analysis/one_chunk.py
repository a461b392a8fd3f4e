# SPDX-License-Identifier: Apache-2.0
"""A context of one chunk, as the encoder of a compressor reads it."""

from torch import Tensor

from ...modeling.compressor.backbone import CompressorBackbone
from ...modeling.compressor.chunking import Chunks, cut
from ...modeling.compressor.validation import check_context_length, check_ratios, check_together


def one_chunk(
    backbone: CompressorBackbone, input_ids: Tensor, attention_mask: Tensor | None, ratio: int | None, shown: str
) -> tuple[Chunks, int | Tensor]:
    """Contexts, each as a chunk of its own, and the ratio that they are compressed at.

    Args:
        backbone: the compressor's.
        input_ids: `(batch_size, num_tokens)`.
        attention_mask: same shape; all ones when `None`.
        ratio: one of the checkpoint's; its default when `None`.
        shown: what is shown of the context, for the message.

    Raises:
        ValueError: "auto", a context of several chunks, or no context tokens at all; as `compress` besides.
    """
    config, context = backbone.config, backbone.context_rows(input_ids, attention_mask)
    if isinstance(ratio, str):
        raise ValueError(f"{shown} at a given ratio, one of {sorted(config.compression_ratios)}, got {ratio!r}")
    check_together(context)
    ratios = check_ratios([ratio], config.compression_ratios, input_ids, False)
    chunks = cut(context.input_ids, context.attention_mask, context.lengths, config.chunk_size, config.position_layout)
    if chunks.chunks_per_row > 1 or not max(chunks.lengths):
        raise ValueError(
            f"{shown} of a context of 1 to {config.chunk_size or 'any number of'} tokens (one chunk), "
            f"got {max(context.lengths)}"
        )
    if config.encoder_limit is not None:
        check_context_length(config.get_encoder_config(), int(chunks.position_ids.max()) + 1, config.chunk_size)
    return chunks, ratios[0]
