# SPDX-License-Identifier: Apache-2.0
"""The common part of the configurations of StreamingLLM, SnapKV and KVzip: key/values are selected, and nothing
trains."""

from typing import Any

from .configuration_compressor import CompressorConfig
from .field_checks import check_left_out, one_of

# What trains, what cuts a context, and what stands in front of a memory that is made before its text is known.
_LEFT_OUT = (
    *("encoder_lora", "decoder_lora", "encoder_config", "trainable_parameters", "task_token_ids"),
    *("chunk_size", "bos_before_slots", "slots_after_ids", "bos_before_text"),
)


class KeyValueSelectionConfig(CompressorConfig):
    """The base reads the context as it is, and the keys and values of some of its tokens stay. Nothing is trained, so
    that every ratio is allowed.

    Args:
        compression_ratios: Ratios that are compared where none are given; the first is the default.
        position_layout: `"enhanced"`: keys keep their places in the context, and the text goes on behind it.
            `"default"`: keys are numbered anew within the memory, and the text goes on behind that.
        kwargs: fields of [`CompressorConfig`], without adapters, an encoder of its own, task tokens or chunks.
    """

    carrier = "key_values"
    is_trained = False
    opens_context = True
    # The base alone counts from 0, and reads a context whole.
    first_context_position = 0
    has_chunks = False

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (2, 4, 8),
        position_layout: str = "enhanced",
        bos_before_text: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            compression_ratios=compression_ratios,
            position_layout=one_of("position_layout", position_layout, ("default", "enhanced")),
            bos_before_text=bos_before_text,
            **kwargs,
        )
        check_left_out(self, _LEFT_OUT, "the base reads a context whole and as it is, and nothing trains")
