# SPDX-License-Identifier: Apache-2.0
"""Configuration of PCC, the pretrained context compressor."""

from typing import Any

from .configuration_memory_tokens import MemoryTokensConfig
from .field_checks import lora_or
from .layer_shape import perceptron_flops


class PCCConfig(MemoryTokensConfig):
    r"""
    A compressor of any family and a converter, trained for a frozen language model ("Pretraining Context Compressor
    for Large Language Models with Embedding-Based Memory").

    PCC-Lite is `train_encoder=True` with GPT2-Large as the encoder, PCC-Large an adapter in the decoder's own model.

    Args:
        compression_ratios: The paper trains a compressor for each of 4, 16 and 128, with the first 64, 16 and 2 memory
            tokens.
        chunk_size: Context tokens of a segment, in the encoder's tokens; segments do not see each other.
        encoder_lora: PCC-Large's, but for the adapters of its embedding and of its head, of which the head's never
            gets a gradient. `None` with `train_encoder`. Defaults to rank 64, alpha 32, dropout 0.1 on all linear
            maps.
        train_encoder: Whether all weights of an encoder of its own train, as PCC-Lite's.
        slot_markers: <mem> and </mem>, around the slots of each segment.
        task_token_ids: Id of [AE], which stands in front of a reconstruction; any other text follows </mem> as it is.
            By default the first id behind the base's vocabulary.
        bos_before_slots: BOS stands in front of the first <mem>, also where [AE] follows the slots.
        kwargs: fields of [`MemoryTokensConfig`] and [`CompressorConfig`]. With `memory_tokens="fixed"` every segment
            uses chunk_size / r memory tokens, a short last one, too, as the authors' code has it.
    """

    model_type = "pcc_compressor"
    # The text of a reconstruction starts right behind [AE].
    restores_context_start = False
    default_task_tokens = ("[AE]",)
    card_fields = {**MemoryTokensConfig.card_fields, "train_encoder": "Whether the whole encoder was trained"}

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4,),
        chunk_size: int = 256,
        encoder_lora: dict[str, Any] | str | None = "default",
        train_encoder: bool = False,
        slot_markers: dict[str, int] | str | None = "default",
        bos_before_slots: bool = True,
        **kwargs: Any,
    ):
        self.train_encoder = train_encoder
        default_lora = {"rank": 64, "alpha": 32.0, "dropout": 0.1, "target_modules": "all-linear"}
        super().__init__(
            compression_ratios=compression_ratios,
            chunk_size=chunk_size,
            encoder_lora=lora_or(encoder_lora, None if train_encoder else default_lora),
            slot_markers={"before": 1, "after": 1} if slot_markers == "default" else slot_markers,
            bos_before_slots=bos_before_slots,
            **kwargs,
        )
        if self.train_encoder and self.encoder_lora is not None:
            raise ValueError(f"`encoder_lora` must be None with `train_encoder`, got {self.encoder_lora!r}")

    @property
    def bos_before_task_token(self) -> bool:  # type: ignore[override]
        """Return whether BOS stands in front of [AE], too, from where it moves in front of the slots."""
        return self.bos_before_slots

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder and of the converter."""
        widths = self.get_encoder_config().hidden_size, self.hidden_size
        return super().chunk_flops(num_tokens, ratio) + perceptron_flops(self.chunk_slots(num_tokens, ratio), *widths)
