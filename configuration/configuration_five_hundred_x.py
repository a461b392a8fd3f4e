# SPDX-License-Identifier: Apache-2.0
"""Configuration of 500xCompressor."""

from typing import Any

from .configuration_memory_tokens import MemoryTokensConfig
from .field_checks import check_left_out, one_of

RECONSTRUCTION_TRIGGERS = ("[AE]", "bos")


class FiveHundredXConfig(MemoryTokensConfig):
    r"""
    500xCompressor: the memory tokens' keys and values of every layer are carried over.

    Args:
        reconstruction_trigger (`str`, defaults to `"[AE]"`):
            What a reconstruction starts with: the learned token `"[AE]"` as in EPL, or `"bos"` as in the authors' own
            code (with LoRA rank 64, alpha 32); there is then no [AE].
        kwargs: fields of [`MemoryTokensConfig`] and [`CompressorConfig`].
    """

    model_type = "five_hundred_x_compressor"
    carrier = "key_values"
    card_fields = {**MemoryTokensConfig.card_fields, "reconstruction_trigger": "A reconstruction starts with"}

    def __init__(self, reconstruction_trigger: str = "[AE]", **kwargs: Any):
        self.reconstruction_trigger = one_of("reconstruction_trigger", reconstruction_trigger, RECONSTRUCTION_TRIGGERS)
        super().__init__(**kwargs)
        check_left_out(
            self, ("bos_before_slots", "slots_after_ids"), "keys and values are made before the text is known"
        )
        if reconstruction_trigger == "bos":
            if self.bos_token_id is None:
                raise ValueError("`reconstruction_trigger='bos'` needs a base with a BOS token, got bos_token_id None")
            if "[AE]" in self.task_token_ids:
                raise ValueError(f"`reconstruction_trigger='bos'` has no [AE], got {self.task_token_ids}")

    @property
    def default_task_tokens(self) -> tuple[str, ...]:
        """The task tokens that there are when none are given."""
        return ("[AE]", "[LM]") if self.reconstruction_trigger == "[AE]" else ("[LM]",)

    @property
    def reconstruction_token_id(self) -> int | None:
        """The token that a reconstruction starts with."""
        return self.bos_token_id if self.reconstruction_trigger == "bos" else super().reconstruction_token_id
