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
        ValueError: no such folder, no encoder with a tokenizer in it, or a layer that it does not have.

    Source: Zhang and others, "BERTScore: Evaluating Text Generation with BERT"; GMSA, section 4.1.
    """

    def __init__(self, folder: str, layer: int | None = None, device: str | torch.device = "cpu"):
        if not Path(folder).is_dir():
            raise ValueError(
                f"there is no folder {folder!r} with a scorer model for BERTScore: put one there first, such as "
                "FacebookAI/roberta-large from the Hub; nothing is downloaded"
            )
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder!r} holds no scorer model with a tokenizer for BERTScore: {error}") from error
        num_layers = self.model.config.num_hidden_layers
        if self.model.config.is_encoder_decoder or self.tokenizer.pad_token is None:
            raise ValueError(f"{folder!r} holds no encoder with a padding token, which BERTScore needs")
        if layer is not None and not 0 <= layer <= num_layers:
            raise ValueError(f"layer of the scorer model must be 0 to {num_layers}, got {layer}")
        self.model.to(device)
        self.layer = layer
        limit = getattr(self.model.config, "max_position_embeddings", _MAX_TOKENS)
        self.max_tokens = min(_MAX_TOKENS, limit)

    def score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """Mean BERTScore F1, each the best over the references, times 100; longer texts are cut, and counted.

        Args:
            predictions: one output per sample.
            references: the accepted texts of each sample, at least one.

        Raises:
            ValueError: no predictions, another number of references, or a sample without one.
        """
        check_references(predictions, references)
        self._warn_of_long_texts([*predictions, *(text for texts in references for text in texts)])
        best = [
            max(self._pair(prediction, text) for text in texts)
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return 100.0 * sum(best) / len(best)

    def _pair(self, prediction: str, reference: str) -> float:
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

    def _warn_of_long_texts(self, texts: Sequence[str]) -> None:
        lengths = [len(ids) for ids in self.tokenizer(list(texts), verbose=False).input_ids]
        if cut := sum(length > self.max_tokens for length in lengths):
            logger.warning("BERTScore: %d of %d texts cut to %d tokens", cut, len(lengths), self.max_tokens)
