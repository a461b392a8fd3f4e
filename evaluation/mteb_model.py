# SPDX-License-Identifier: Apache-2.0
"""A retrieval checkpoint as a model of MTEB, whose encoders may give several vectors for each text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.retrieval_sources import TextEncoder
from ..modeling.checkpoint.fingerprints import fingerprint
from ..modeling.parts.text_ids import text_tokenizer
from .retrieval import TextVectors, encode_texts, score_texts


class MTEBRetriever:
    """A retrieval checkpoint that MTEB takes: `mteb.evaluate(MTEBRetriever(model, tokenizer), tasks)`.

    Texts become lists of vectors, which are compared by Chamfer similarity; MTEB encodes and scores a corpus part by
    part.

    Args:
        model: a [`DeCALForRetrieval`], put into evaluation mode.
        tokenizer: the one saved with it.
        ratio: tokens per vector of queries and documents; the checkpoint's default if not given.
        max_query_tokens: queries are cut to so many tokens.
        max_document_tokens: documents and all other texts likewise.
        name: for MTEB's results, "organisation/name"; made from where the model was loaded if not given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ratio: int | None = None,
        max_query_tokens: int = 64,
        max_document_tokens: int = 512,
        name: str | None = None,
    ):
        tokenizer = text_tokenizer(tokenizer)
        self._model, self._ratio, self._max_tokens = model.eval(), ratio, max_document_tokens
        self._encode_query = TextEncoder(tokenizer, max_query_tokens)
        self._encode_document = TextEncoder(tokenizer, max_document_tokens)
        self._name = name or f"context-compressors/{model.name_or_path.rstrip('/').rpartition('/')[2] or 'retriever'}"

    def encode(
        self,
        inputs: Iterable[Mapping[str, Sequence[str]]],
        *,
        prompt_type: str | None = None,
        batch_size: int = 32,
        **kwargs: Any,
    ) -> TextVectors:
        """Vectors of texts.

        Args:
            inputs: MTEB's batches, which have their texts in "text".
            prompt_type: "query" for queries; everything else is a document.
            batch_size: texts in one pass.
            kwargs: what else MTEB tells an encoder; of no use here.

        Returns:
            For each text `(num_vectors, vector_size)`.
        """
        encode = self._encode_query if prompt_type == "query" else self._encode_document
        rows = [encode(text)[0] for batch in inputs for text in batch["text"]]
        return encode_texts(self._model, rows, self._ratio, batch_size)

    def similarity(self, embeddings1: Sequence[Tensor], embeddings2: Sequence[Tensor]) -> Tensor:
        """Chamfer similarity of every text with every other one, `(num_texts, num_other_texts)`."""
        return score_texts(list(embeddings1), list(embeddings2), self._model.device)

    def similarity_pairwise(self, embeddings1: Sequence[Tensor], embeddings2: Sequence[Tensor]) -> Tensor:
        """Chamfer similarity of each text with the other of the same place, `(num_texts,)`."""
        pairs = zip(embeddings1, embeddings2, strict=True)
        return torch.stack([self.similarity([one], [other])[0, 0] for one, other in pairs])

    @property
    def mteb_model_meta(self) -> Any:
        """What MTEB's results say about the model; `ImportError` where MTEB is not installed."""
        try:
            from mteb.models import ModelMeta
        except ImportError as error:
            raise ImportError("MTEB is not installed: pip install mteb") from error
        unknown = (
            "loader release_date languages memory_usage_mb license open_weights public_training_code "
            "public_training_data training_datasets"
        )
        return ModelMeta(
            **dict.fromkeys(unknown.split()),
            name=self._name,
            revision=fingerprint(self._model, of_answers=True),
            n_parameters=self._model.num_parameters(),
            max_tokens=self._max_tokens,
            embed_dim=self._model.config.hidden_size,
            framework=["PyTorch"],
            similarity_fn_name="MaxSim",
            use_instructions=False,
            model_type=["late-interaction"],
            experiment_kwargs={"ratio": self._ratio or self._model.config.default_ratio},
        )
