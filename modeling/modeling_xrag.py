# SPDX-License-Identifier: Apache-2.0
"""xRAG ("xRAG: Extreme Context Compression for Retrieval-augmented Generation with One Token")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from ..configuration.configuration_xrag import XRAGConfig
from .compressor.backbone import Chunks, slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.modeling_compressor import CompressorModel
from .parts.base_pass import perceptron, weights_of
from .parts.text_ids import context_end_ids, context_start_ids, leave_out_bos

_NO_LIMIT = 2**40


class XRAGModel(CompressorModel):
    r"""
    Takes a frozen retriever's embedding of every passage of r tokens to the decoder's input by a perceptron, the
    modality bridge W.
    """

    config_class = XRAGConfig
    method_parts = ("slot_mlp",)
    slot_origin = "windows"
    checked_architectures = (*CompressorModel.checked_architectures, "bert")

    def __init__(self, config: XRAGConfig):
        super().__init__(config)
        self.slot_mlp = nn.Sequential(*perceptron(config.get_encoder_config().hidden_size, config.hidden_size))
        self.post_init()

    def train(self, mode: bool = True) -> XRAGModel:
        """As in torch; a frozen retriever of its own drops nothing, so that embeddings are those of evaluation."""
        super().train(mode)
        if self.encoder_model is not None and not self._encoder_trains:
            self.encoder_model.eval()
        return self

    @property
    def _encoder_trains(self) -> bool:
        return any(weight.requires_grad for weight in weights_of(self.encoder_backbone))

    needs_encoder_tokenizer = True

    def take_from_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Put the tokens that a retriever's tokenizer has around a text around each passage, and around no context."""
        config = self.config
        if not (config.passage_start_ids or config.passage_end_ids):
            config.passage_start_ids = context_start_ids(tokenizer)
            config.passage_end_ids = context_end_ids(tokenizer)
            for ratio in config.compression_ratios:
                config.check_passage(ratio)
        leave_out_bos(tokenizer)
        # Of whatever length a text is, its passages fit.
        tokenizer.model_max_length = _NO_LIMIT

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Tensor]:
        return [self._slots(chunks, ratio) for ratio in ratios]

    def _slots(self, chunks: Chunks, ratio: int | Tensor) -> Tensor:
        counts = slot_counts(self.config, chunks.lengths, ratio)
        # W(E(D)) of each passage D, to its place among its chunk's.
        embeddings = self.embed(*self.passages(chunks, ratio, counts))
        rows, columns = _places(counts, embeddings.device)
        slots = embeddings.new_zeros(len(counts), max(counts), self.config.hidden_size, dtype=self.dtype)
        return slots.index_put((rows, columns), self.slot_mlp(embeddings).to(self.dtype))

    def passages(self, chunks: Chunks, ratio: int | Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return every passage as the encoder reads it, a row each, right-padded: ids and mask."""
        config, ids = self.config, chunks.input_ids
        rows, columns = _places(counts, ids.device)
        every = ratio.tolist() if isinstance(ratio, Tensor) else [ratio]
        # No passage is longer than its chunk.
        longest = min(max(every), ids.shape[1])
        config.check_passage(longest)
        size = ratio[rows] if isinstance(ratio, Tensor) else torch.full_like(rows, ratio)
        starts = columns * size
        lengths = torch.minimum(chunks.attention_mask.sum(dim=1)[rows] - starts, size)
        # Places within a passage, counted from its first token; those around it are in front of 0 and behind the end.
        first, last = ids.new_tensor(config.passage_start_ids), ids.new_tensor(config.passage_end_ids)
        places = torch.arange(-len(first), longest + len(last), device=ids.device).expand(len(rows), -1)
        read = ids[rows[:, None], (starts[:, None] + places).clamp(0, ids.shape[1] - 1)]
        behind = places - lengths[:, None]
        for around, index in ((first, places + len(first)), (last, behind)):
            if len(around):
                inside = (index >= 0) & (index < len(around))
                read = torch.where(inside, around[index.clamp(0, len(around) - 1)], read)
        mask = behind < len(last)
        # Some encoders number their positions by which ids are pads.
        pad = getattr(config.get_encoder_config(), "pad_token_id", None) or 0
        return read.masked_fill(~mask, pad), mask.long()

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return E(D), embeddings `(num_passages, encoder_hidden_size)` of right-padded passages with their
        surrounding tokens."""
        # Checkpointed layers would follow gradients to where there is nothing to train.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._encoder_trains):
            # No passage is empty, and a retriever makes a mask of its own kind.
            states = self.encoder_outputs(input_ids, attention_mask, is_full=True).last_hidden_state
        if self.config.passage_readout == "mean":
            weights = attention_mask[:, :, None].to(torch.float32)
            embeddings = (states * weights).sum(dim=1) / weights.sum(dim=1)
        else:
            is_last = self.config.passage_readout == "last_token"
            place = attention_mask.sum(dim=1) - 1 if is_last else torch.zeros_like(attention_mask[:, 0])
            embeddings = states.take_along_dim(place[:, None, None], dim=1)[:, 0].float()
        return functional.normalize(embeddings, dim=-1) if self.config.normalize_embeddings else embeddings


def _places(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every left-aligned place, so many in each row."""
    places = [(row, column) for row, count in enumerate(counts) for column in range(count)]
    rows, columns = torch.tensor(places, device=device).T
    return rows, columns


class XRAGForCausalLM(CompressorForCausalLM):
    """[`XRAGModel`] with the decoder's LM head."""

    model_class = XRAGModel
