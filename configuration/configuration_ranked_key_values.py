# SPDX-License-Identifier: Apache-2.0
"""Configuration of ranked key/values."""

from typing import Any

from .configuration_compressor import CompressorConfig
from .field_checks import check_left_out, int_between, lora_or, one_of
from .layer_shape import LayerShape, linear_flops

# Keys and values are made before the text is known, by the model that reads them.
_LEFT_OUT = ("encoder_config", "task_token_ids", "bos_before_slots")


class RankedKeyValuesConfig(CompressorConfig):
    """Ranked key/values: a linear scorer in every layer ranks all keys and values of a context, of all layers and
    heads together, and the first of them are its memory.

    Args:
        compression_ratios: The first is the default.
        encoder_lora: The adapter of the one model that reads contexts and answers. `None`: the base stays as it is,
            and the scorers alone train. Defaults to rank 8, alpha 16 on all linear maps.
        opening_ids: Token ids behind which every chunk of a context is read, such as a chat's up to where a document
            would stand. They are in no memory: texts bring them, and `slots_after_ids` tell where they end there.
        repeat_size: In training, tokens that are read again in one pass, to see which keys and values the scorers
            should have ranked first.
        position_layout: `"enhanced"`, the only one: keys keep their places, and the text goes on behind the context.
            The chunks of a context with more tokens than the base has positions stand at the same ones (Parallel
            Context Windows, https://arxiv.org/abs/2212.10947).
        kwargs: fields of [`CompressorConfig`], without an encoder of its own.
    """

    model_type = "ranked_key_values_compressor"
    carrier = "key_values"

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4, 8, 2, 16),
        encoder_lora: dict[str, Any] | str | None = "default",
        opening_ids: list[int] | tuple[int, ...] = (),
        repeat_size: int = 2048,
        position_layout: str = "enhanced",
        **kwargs: Any,
    ):
        self.opening_ids = list(opening_ids)
        self.repeat_size = int_between("repeat_size", repeat_size, 16)
        has_adapter = encoder_lora is not None
        super().__init__(
            compression_ratios=compression_ratios,
            encoder_lora=lora_or(encoder_lora, {"rank": 8, "alpha": 16}),
            position_layout=one_of("position_layout", position_layout, ("enhanced",)),
            **{**kwargs, "shared_adapter": has_adapter},
        )
        check_left_out(
            self,
            _LEFT_OUT if has_adapter else (*_LEFT_OUT, "decoder_lora"),
            "the model that reads the text has read the context, before the text was known",
        )

    def _fits(self, num_tokens: int, ratio: int) -> bool:
        """Chunks alone need positions in the base."""
        longest_chunk = num_tokens if self.chunk_size is None else min(self.chunk_size, num_tokens)
        limit = self.max_position_embeddings
        return limit is None or longest_chunk + len(self.opening_ids) <= limit

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the base over opening and context, and of the scorers."""
        heads = LayerShape.from_config(self.decoder_config).num_key_value_heads
        scorers = self.num_hidden_layers * linear_flops(num_tokens, self.hidden_size, heads)
        return super().chunk_flops(num_tokens + len(self.opening_ids), ratio) + scorers
