# SPDX-License-Identifier: Apache-2.0
"""The common part of the configurations of ICAE and 500xCompressor."""

from typing import Any, cast

from .configuration_compressor import CompressorConfig
from .field_checks import lora_or, one_of

MEMORY_STARTS = ("embedding_statistics", "standard_normal", "eos")
TASK_TOKENS = ("[AE]", "[LM]")


class MemoryTokensConfig(CompressorConfig):
    r"""
    Chunks that are compressed independently, each by distinct memory tokens of which chunk_size / ratio are learned.

    Args:
        compression_ratios: EPL, section 4: 510 context tokens in 102 memory tokens.
        chunk_size: Context tokens of a chunk, L; there are ceil(L / r) memory tokens for the lowest ratio.
        encoder_lora: EPL's, which has no dropout; the decoder is the frozen base. Defaults to rank 128, alpha 256,
            dropout 0.05 on `q_proj` and `v_proj`.
        memory_tokens: `"by_ratio"`: a chunk of n tokens uses the first ceil(n / r) memory tokens. `"fixed"`: every
            chunk uses ceil(L / r), however short it is, as in EPL (section 3.1.1); its effective ratio is then lower.
        memory_start: Start values of the memory tokens: normal with the mean and the deviation of all numbers in the
            embedding matrix, two scalars (EPL's code), `"standard_normal"`, N(0, 1) (the authors of ICAE and
            500xCompressor, and ComprExIT's baselines), or `"eos"`, copies of EOS (AutoCompressor).
        task_token_ids: Ids of [AE] and [LM], which stand in front of a reconstruction and of any other text. By
            default the two ids behind the base's vocabulary; `{}`: no task tokens.
        kwargs: fields of [`CompressorConfig`].
    """

    card_fields = {**CompressorConfig.card_fields, "memory_tokens": "Memory tokens of a chunk"}
    default_task_tokens: tuple[str, ...] = TASK_TOKENS

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (5,),
        chunk_size: int = 510,
        encoder_lora: dict[str, Any] | str | None = "default",
        memory_tokens: str = "by_ratio",
        memory_start: str = "embedding_statistics",
        task_token_ids: dict[str, int] | None = None,
        **kwargs: Any,
    ):
        self.memory_tokens = one_of("memory_tokens", memory_tokens, ("by_ratio", "fixed"))
        self.memory_start = one_of("memory_start", memory_start, MEMORY_STARTS)
        default_lora = {"rank": 128, "alpha": 256.0, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
        super().__init__(
            compression_ratios=compression_ratios,
            chunk_size=chunk_size,
            encoder_lora=lora_or(encoder_lora, default_lora),
            task_token_ids=task_token_ids,
            **kwargs,
        )
        if self.chunk_size is None:
            raise ValueError("`chunk_size` must be an int: there are chunk_size / ratio memory tokens, got None")
        if task_token_ids is None:
            self.task_token_ids = {token: self.vocab_size + i for i, token in enumerate(self.default_task_tokens)}

    def chunk_slots(self, num_tokens: int, ratio: int) -> int:
        """ceil(n / r); ceil(L / r) of a chunk of any length with `memory_tokens="fixed"`."""
        return super().chunk_slots(self._longest_chunk if self.memory_tokens == "fixed" else num_tokens, ratio)

    def chunk_memory_tokens(self, num_tokens: int, ratio: int) -> int:
        """A memory token for every slot."""
        return self.chunk_slots(num_tokens, ratio)

    @property
    def num_memory_tokens(self) -> int:  # type: ignore[override]
        """Learned memory tokens, |M| = ceil(L / r) for the lowest ratio."""
        return super().chunk_slots(self._longest_chunk, min(self.compression_ratios))

    @property
    def _longest_chunk(self) -> int:
        return cast(int, self.chunk_size)
