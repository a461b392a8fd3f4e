# SPDX-License-Identifier: Apache-2.0
"""AutoCompressor ("Adapting Language Models to Compress Contexts"), whose summaries are read with later segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..configuration.configuration_autocompressor import AutoCompressorConfig
from .compressor.backbone import Chunks, Slots, first_places, slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.memory_token_compressor import MemoryTokenModel
from .compressor.validation import check_context_length
from .parts.lora import SHARED, lora_layers
from .parts.packing import pack, text_positions


class AutoCompressorModel(MemoryTokenModel):
    r"""
    Reads a context segment by segment, each behind the summaries of those before it; the last hidden states of the
    summary tokens behind a segment are its summary, and all summaries are the slots.
    """

    config_class = AutoCompressorConfig
    reads_full_rows = True

    def __init__(self, config: AutoCompressorConfig):
        super().__init__(config)
        widths = config.get_encoder_config().hidden_size, config.hidden_size
        if widths[0] != widths[1]:
            raise ValueError(f"AutoCompressor maps no widths: the encoder has {widths[0]}, the decoder {widths[1]}")
        self.post_init()

    def train(self, mode: bool = True) -> AutoCompressorModel:
        super().train(mode)
        for _, layer in lora_layers(self) if self.config.has_frozen_memories else ():
            # The decoder reads with frozen weights as they are.
            if SHARED in layer.lora_dropout:
                layer.lora_dropout[SHARED].eval()
        return self

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Slots]:
        was_training = self.training
        # Frozen memories are those of evaluation, without the base's dropout or an adapter's.
        self.train(was_training and not self.config.has_frozen_memories)
        try:
            return [self._accumulated(chunks, slot_counts(self.config, chunks.lengths, ratio)) for ratio in ratios]
        finally:
            self.train(was_training)

    def kept_slots(self, chunks: Chunks, ratio: int | Tensor) -> list[int]:
        """Return the slots of each segment that the decoder reads: without accumulation those of a row's last one."""
        counts = super().kept_slots(chunks, ratio)
        if self.config.accumulate_summaries:
            return counts
        behind = [*chunks.lengths[1:], 0]
        is_last = [(place + 1) % chunks.chunks_per_row == 0 or not following for place, following in enumerate(behind)]
        return [count * last for count, last in zip(counts, is_last, strict=True)]

    def _accumulated(self, chunks: Chunks, counts: list[int]) -> Tensor:
        """Summaries of all segments, `(num_chunks, num_slots, hidden_size)`."""
        num_rows = len(counts) // chunks.chunks_per_row
        num_before = [0] * num_rows
        device = chunks.input_ids.device
        soft_prompt = torch.zeros(num_rows, 0, self.config.hidden_size, dtype=self.dtype, device=device)
        mask = chunks.attention_mask.new_zeros(num_rows, 0)
        summaries = []
        for index in range(chunks.chunks_per_row):
            # Segment S_i of every row; rows that have ended have none, and no summary tokens.
            segment = slice(index, None, chunks.chunks_per_row)
            ids, segment_mask, own = chunks.input_ids[segment], chunks.attention_mask[segment], counts[segment]
            places = list(map(sum, zip(num_before, chunks.lengths[segment], own, strict=True)))
            check_context_length(self.config, max(places))
            is_full = min(places) == soft_prompt.shape[1] + ids.shape[1] + max(own)
            _, summary = self.read_segment(ids, segment_mask, soft_prompt, mask, own, is_full)
            summaries.append(torch.nn.functional.pad(summary, (0, 0, 0, max(counts) - summary.shape[1])))
            soft_prompt, mask = self.next_soft_prompt(soft_prompt, mask, summary, own)
            is_kept = self.config.accumulate_summaries
            num_before = [before * is_kept + count for before, count in zip(num_before, own, strict=True)]
        return torch.stack(summaries, dim=1).flatten(0, 1)

    def read_segment(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        soft_prompt: Tensor,
        soft_mask: Tensor,
        counts: Sequence[int],
        is_full: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run one causal pass over `[soft prompt, segment, summary tokens]`, with positions through all of it (section
        3).

        The soft prompt holds the summaries so far, `(batch_size, num_slots, hidden_size)`. Returns the last hidden
        states of the segment's tokens, which predict the next ones, and those of the summary tokens.
        """
        embeddings = self.encoder_backbone.get_input_embeddings()(input_ids)
        tokens = self.memory_vectors(max(counts)).to(embeddings.dtype).expand(len(counts), -1, -1)
        summary_mask = first_places(counts, input_ids.device)
        text_mask = torch.cat([attention_mask, summary_mask], dim=1)
        sequence = pack(soft_mask, text_mask, is_full=is_full, pads_behind=True)
        joined = torch.cat([soft_prompt.to(embeddings.dtype), embeddings, tokens], dim=1)
        states = self.encoder_outputs(
            inputs_embeds=sequence.arrange(joined),
            attention_mask=sequence.attention_mask,
            position_ids=text_positions(sequence.attention_mask),
            is_full=sequence.is_full,
            is_right_padded=True,
        ).last_hidden_state
        return tuple(sequence.text_states(states).split([input_ids.shape[1], max(counts)], dim=1))

    def next_soft_prompt(
        self, soft_prompt: Tensor, soft_mask: Tensor, summary: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the next segment's soft prompt and its mask: [sigma_1, ..., sigma_i], or without accumulation
        sigma_i."""
        mask = first_places(counts, summary.device)
        if not self.config.accumulate_summaries:
            return summary.to(soft_prompt.dtype), mask
        return torch.cat([soft_prompt, summary.to(soft_prompt.dtype)], dim=1), torch.cat([soft_mask, mask], dim=1)


class AutoCompressorForCausalLM(CompressorForCausalLM):
    """[`AutoCompressorModel`] with the decoder's LM head, which reads the summaries as segments do."""

    model_class = AutoCompressorModel
