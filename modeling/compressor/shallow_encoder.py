# SPDX-License-Identifier: Apache-2.0
"""What GMSA and TCP-AE have in common: an encoder of a few layers, and training in two stages."""

from __future__ import annotations

import re

from torch import Tensor

from ...configuration.configuration_shallow_encoder import KEFT, ShallowEncoderConfig
from .distinct_memory_tokens import DistinctMemoryTokenModel
from .memory_token_compressor import MemoryRows, MemoryTokenModel

# W_Q, W_K and W_V of every decoder layer, one by one or in one map; their biases belong to them.
QUERY_KEY_VALUE = (
    r"(^|\.)language_model\.layers\.\d+\.(.+\.)?"
    r"(q_proj|k_proj|v_proj|qkv_proj|query_key_value)\.(base_layer\.)?(weight|bias)$"
)
_PARTS = ("width_map", "layer_semantic_alignment", "slot_mlp")


class ShallowEncoderModel(DistinctMemoryTokenModel):
    r"""
    The first layers of a language model encode; what they read out is aligned with the decoder's input.

    The learned tokens of `appended_tokens` stand behind the context; a method may do without them.

    Args:
        config ([`ShallowEncoderConfig`]): the configuration.

    Raises:
        ValueError: the second stage on a decoder whose query, key and value maps are not known.
    """

    _keep_in_fp32_modules_strict = [*MemoryTokenModel._keep_in_fp32_modules_strict, "width_map", "slot_mlp"]

    def __init__(self, config: ShallowEncoderConfig):
        super().__init__(config)
        names = [f"language_model.{name}" for name, _ in self.language_model.named_parameters()]
        is_keft = config.training_stage == KEFT and config.trainable_parameters is None
        if is_keft and not any(re.search(QUERY_KEY_VALUE, name) for name in names):
            raise ValueError(
                f"`training_stage` {KEFT!r} trains query, key and value maps, and a decoder of type "
                f"{config.decoder_config.model_type!r} has none of the known names: name its own in "
                "`trainable_parameters`"
            )

    @property
    def method_parameters(self) -> tuple[str, ...]:
        """What trains in the present stage, as patterns of names."""
        if self.config.training_stage == KEFT:
            return (QUERY_KEY_VALUE,)
        return (*MemoryTokenModel.method_parameters, rf"(^|\.)({'|'.join(_PARTS)})\.")

    def memory_counts(self, lengths: Tensor, ratio: int | Tensor) -> Tensor:
        # As many slots as group merging makes, whatever the length.
        return MemoryTokenModel.memory_counts(self, lengths, ratio)

    def carry_over(self, rows: MemoryRows) -> list[tuple[Tensor, Tensor]]:
        return [(self.soft_tokens(slots, mask), mask) for slots, mask in rows.read(self.memory_states(rows))]

    def soft_tokens(self, summary: Tensor, mask: Tensor) -> Tensor:
        """Align summary vectors with what the decoder's input means.

        Args:
            summary: `(num_chunks, num_slots, encoder_hidden_size)`.
            mask: `(num_chunks, num_slots)`.

        Returns:
            Slots `(num_chunks, num_slots, hidden_size)` in the decoder's type, zero at padding slots.
        """
        return self.align(summary).masked_fill(mask[:, :, None] == 0, 0).to(self.dtype)

    def align(self, summary: Tensor) -> Tensor:
        """The alignment itself, `(num_chunks, num_slots, hidden_size)`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its slots are aligned")
