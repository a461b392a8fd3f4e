# SPDX-License-Identifier: Apache-2.0
"""BERTScore with a scorer model from a local folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchmetrics.functional.text import bert_score
from transformers import AutoModel, AutoTokenizer

_MAX_TOKENS = 512


class BertScorer:
    """BERTScore F1 of texts, by the hidden states of an encoder such as RoBERTa-large.

    Neither inverse document frequencies nor a baseline are used, and texts are cut to 512 tokens. Only scores of the
    same scorer model and layer can be compared.

    Args:
        folder: the scorer model with its tokenizer, already on this machine.
        layer: the layer whose states are compared, 0 for the embeddings; the last one when `None`. The original
            implementation takes layer 17 of RoBERTa-large.
        device: where the scorer runs.

    Source: Zhang and others, "BERTScore: Evaluating Text Generation with BERT"; GMSA, section 4.1.
    """

    def __init__(self, folder: str, layer: int | None = None, device: str | torch.device = "cpu"):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval().to(device)
        self.layer = layer
        self.max_tokens = min(_MAX_TOKENS, self.model.config.max_position_embeddings)

    def score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """Mean BERTScore F1, each the best over the references, times 100."""
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
