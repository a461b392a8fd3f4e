# SPDX-License-Identifier: Apache-2.0
"""Configuration of AutoCompressor, and of LLoCO, its second stage."""

from collections.abc import Iterator
from typing import Any

from .configuration_memory_tokens import MemoryTokensConfig
from .field_checks import lora_or, one_of
from .layer_shape import stack_flops

COMPRESSOR, READER = "compressor", "reader"
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class AutoCompressorConfig(MemoryTokensConfig):
    """AutoCompressor ("Adapting Language Models to Compress Contexts"): the states of summary tokens behind a segment
    are read in front of all later segments.

    LLoCO ("LLoCO: Learning Long Contexts Offline") is its second stage, `training_stage="reader"`.

    Args:
        compression_ratios: 1,536 tokens of a segment in ceil(1,536 / 31) = 50 summary vectors.
        chunk_size: Tokens of a segment; the last one may be shorter. In training their lengths are random.
        accumulate_summaries: Whether a segment, and the decoder, read the summaries of all segments so far. `False`:
            the latest one alone, as in the recurrent memory transformer (RMT).
        encoder_lora: Of the authors' AutoCompressor on Llama-2-7B. On OPT all weights train: `None`, and
            `trainable_parameters=["."]`. Defaults to rank 16, alpha 16, dropout 0.05 on the attention's four maps.
        shared_adapter: One model reads segments and summaries: `True` if not given, where there is an `encoder_lora`
            and no encoder of its own.
        decoder_lora: Of LLoCO: an adapter beside the shared one, with which the decoder alone reads. Defaults to rank
            8, alpha 16, dropout 0.05 on the attention's four maps in the stage `"reader"`, and to none before.
        training_stage: `"compressor"`: the shared adapter and the summary tokens train. `"reader"`: the decoder's own
            adapter alone; memories are then those of the checkpoint that it started from, by name, too.
        memory_tokens: As in the authors' code; `"by_ratio"`: a short segment takes fewer.
        memory_start: Summary tokens start as copies of EOS.
        task_token_ids: None by default.
        kwargs: fields of [`MemoryTokensConfig`] and [`CompressorConfig`]. `position_layout` is `"default"`: positions
            count through a whole row, [summaries, segment, summary tokens].
    """

    model_type = "autocompressor_compressor"
    objectives = (*MemoryTokensConfig.objectives, "segments")
    card_fields = {
        **MemoryTokensConfig.card_fields,
        "accumulate_summaries": "Summaries of all segments are kept",
        "training_stage": "Last stage of training",
    }

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (31,),
        chunk_size: int = 1536,
        accumulate_summaries: bool = True,
        encoder_lora: dict[str, Any] | str | None = "default",
        shared_adapter: bool | None = None,
        decoder_lora: dict[str, Any] | str | None = "default",
        training_stage: str = COMPRESSOR,
        memory_tokens: str = "fixed",
        memory_start: str = "eos",
        task_token_ids: dict[str, int] | None = None,
        **kwargs: Any,
    ):
        self.accumulate_summaries = accumulate_summaries
        self.training_stage = one_of("training_stage", training_stage, (COMPRESSOR, READER))
        lora = {"dropout": 0.05, "target_modules": _ATTENTION}
        if shared_adapter is None:
            shared_adapter = encoder_lora is not None and kwargs.get("encoder_config") is None
        of_the_reader = {"rank": 8, "alpha": 16.0, **lora} if training_stage == READER else None
        super().__init__(
            compression_ratios=compression_ratios,
            chunk_size=chunk_size,
            encoder_lora=lora_or(encoder_lora, {"rank": 16, "alpha": 16.0, **lora}),
            shared_adapter=shared_adapter,
            decoder_lora=lora_or(decoder_lora, of_the_reader),
            memory_tokens=memory_tokens,
            memory_start=memory_start,
            task_token_ids=task_token_ids or {},
            **kwargs,
        )
        # Merged into the weights, there are no adapters at all.
        if training_stage == READER and self.encoder_lora is not None and self.decoder_adapter is None:
            raise ValueError("`training_stage='reader'` needs a `decoder_lora` beside the shared adapter, got None")
        # Positions count through summaries, segment and summary tokens.
        one_of("position_layout", self.position_layout, ("default",))
        if self.markers_per_chunk:
            raise ValueError(f"`slot_markers` must be left out: segments read none, got {self.slot_markers!r}")

    @property
    def card_text(self) -> str:
        """LLoCO's in its stage."""
        return "lloco" if self.training_stage == READER else super().card_text

    @property
    def stage_parameters(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """In LLoCO's stage the decoder's own adapter; nothing once that is merged."""
        if not self.has_frozen_memories:
            return None
        return () if self.decoder_lora is None else (r"\.lora_[AB]\.decoder\.",)

    @property
    def has_frozen_memories(self) -> bool:  # type: ignore[override]
        """Return whether this stage changes no memory: LLoCO's."""
        return self.training_stage == READER

    def num_slots(self, num_context_tokens: int, ratio: int) -> int:
        """Those of all segments, or of the last one; arguments as in [`CompressorConfig.num_slots`]."""
        if self.accumulate_summaries or not num_context_tokens:
            return super().num_slots(num_context_tokens, ratio)
        return self.chunk_slots((num_context_tokens - 1) % self._longest_chunk + 1, ratio)

    def compression_flops(self, num_context_tokens: int, ratio: int) -> int:
        """Operations of compressing one context: each segment is read behind the summaries so far."""
        rows = self._segment_places(num_context_tokens, ratio, 0)
        return sum(stack_flops(self.get_encoder_config(), places) for places in rows)

    def _segment_places(self, num_tokens: int, ratio: int, first: int) -> Iterator[int]:
        """Places that the encoder reads with each segment of a context, from the segment `first` on."""
        size = self._longest_chunk
        for index in range(first, -(-num_tokens // size)):
            length = min(size, num_tokens - index * size)
            before = index if self.accumulate_summaries else min(index, 1)
            yield before * self.chunk_slots(size, ratio) + length + self.chunk_memory_tokens(length, ratio)

    def _fits(self, num_tokens: int, ratio: int) -> bool:
        longest_chunk = min(self._longest_chunk, num_tokens)
        if self.chunk_memory_tokens(longest_chunk, ratio) > self.num_memory_tokens:
            return False
        # Rows grow, but for the last one, which may be shorter than the one before.
        first = max(0, -(-num_tokens // self._longest_chunk) - 2)
        limit = self.encoder_limit
        return limit is None or max(self._segment_places(num_tokens, ratio, first), default=0) <= limit
