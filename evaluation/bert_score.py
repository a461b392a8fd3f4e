# SPDX-License-Identifier: Apache-2.0
"""BERTScore with a scorer model from a local folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torchmetrics.functional.text import bert_score
from transformers import AutoModel, AutoTokenizer

from .metrics import check_references

logger = logging.getLogger(__name__)

_MAX_TOKENS = 512


class BertScorer:
    """BERTScore F1 of texts, by the hidden states of an encoder such as RoBERTa-large.

    Neither inverse document frequencies nor a baseline are used. Only scores of the same scorer model and layer can be
    compared.

    Args:
        folder: the scorer model with its tokenizer, already on this machine.
        layer: the layer whose states are compared, 0 for the embeddings; the last one when `None`. The original
            implementation takes layer 17 of RoBERTa-large.
        device: where the scorer runs.

    Raises:
        ValueError: no such folder, or no encoder with a tokenizer in it.

    Source: Zhang and others, "BERTScore: Evaluating Text Generation with BERT"; GMSA, section 4.1.
    """

    def __init__(self, folder: str, layer: int | None = None, device: str | torch.device = "cpu"):
        if not Path(folder).is_dir():
            raise ValueError(f"there is no folder {folder!r} with a scorer model, such as FacebookAI/roberta-large")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder!r} holds no scorer model with a tokenizer for BERTScore: {error}") from error
        if self.model.config.is_encoder_decoder or self.tokenizer.pad_token is None:
            raise ValueError(f"{folder!r} holds no encoder with a padding token, which BERTScore needs")
        self.model.to(device)
        self.layer = layer
        self.max_tokens = min(_MAX_TOKENS, getattr(self.model.config, "max_position_embeddings", _MAX_TOKENS))

    def score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """Mean BERTScore F1, each the best over the references, times 100; longer texts are cut, and counted."""
        check_references(predictions, references)
        texts = [*predictions, *(text for of_sample in references for text in of_sample)]
        lengths = [len(ids) for ids in self.tokenizer(texts, verbose=False).input_ids]
        if cut := sum(length > self.max_tokens for length in lengths):
            logger.warning("BERTScore: %d of %d texts cut to %d tokens", cut, len(lengths), self.max_tokens)
        pairs = zip(predictions, references, strict=True)
        best = [max(self._score_pair(prediction, text) for text in of_sample) for prediction, of_sample in pairs]
        return 100.0 * sum(best) / len(best)

    def _score_pair(self, prediction: str, reference: str) -> float:
        # One pair a call: with several, torchmetrics 1.9 puts predictions and references that it sorted by length back
        # in an order that mixes up the pairs.
        scores = bert_score(
            [prediction],
            [reference],
            model=self.model,
            user_tokenizer=self.tokenizer,
            num_layers=self.layer,
            max_length=self.max_tokens,
            truncation=True,
            device=self.model.device,
        )
        return float(scores["f1"])
