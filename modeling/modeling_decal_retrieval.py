# SPDX-License-Identifier: Apache-2.0
"""DeCAL for retrieval with several vectors for each text ("DeCAL Tokenwise Compression", section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from transformers.modeling_outputs import ModelOutput

from ..configuration.configuration_decal import DeCALConfig
from .compressor.backbone import CompressorHead
from .modeling_decal import DeCALModel, DeCALPreTrainedModel


def chamfer(query_vectors: Tensor, query_mask: Tensor, document_vectors: Tensor, document_mask: Tensor) -> Tensor:
    """Return the Chamfer similarity of every query with every document, also called MaxSim (ColBERT, section 3.3).

    Each query vector counts with the document vector that is most similar to it: sum_i max_j q_i . d_j.

    Args:
        query_vectors: `(num_queries, query_length, vector_size)`.
        query_mask: `(num_queries, query_length)`, nonzero for real vectors; what stands elsewhere is not read.
        document_vectors: `(num_documents, document_length, vector_size)`.
        document_mask: `(num_documents, document_length)`.

    Returns:
        `(num_queries, num_documents)`, computed in float32 whatever half type the vectors or autocast have. A query
        without vectors scores 0 with every document, a document without vectors minus infinity with every other query.
    """
    query_pads, document_pads = query_mask == 0, document_mask == 0
    if not document_vectors.shape[1]:
        # There is no largest of no numbers: a pad takes their place.
        document_vectors, document_pads = pad(document_vectors, (0, 0, 0, 1)), pad(document_pads, (0, 1), value=True)
    # Filled rather than multiplied: what stands at a pad may be infinite or NaN.
    query_vectors = query_vectors.masked_fill(query_pads[:, :, None], 0)
    document_vectors = document_vectors.masked_fill(document_pads[:, :, None], 0)
    dtype = torch.promote_types(query_vectors.dtype, torch.float32)
    # Autocast would round the products, whose differences are what counts.
    with torch.autocast(query_vectors.device.type, enabled=False):
        # (num_queries, query_length, num_documents, document_length)
        similarity = torch.einsum("qih,djh->qidj", query_vectors.to(dtype), document_vectors.to(dtype))
        best = similarity.masked_fill(document_pads, -torch.inf).amax(dim=3)
        return best.masked_fill(query_pads[:, :, None], 0).sum(dim=1)


@dataclass
class RetrievalVectors(ModelOutput):
    """The vectors of [`DeCALForRetrieval`] `(batch_size, num_slots, hidden_size)`, left-aligned, each of length 1,
    padding vectors zero, and their mask `(batch_size, num_slots)`."""

    vectors: Tensor | None = None
    attention_mask: Tensor | None = None


class DeCALForRetrieval(CompressorHead, DeCALPreTrainedModel):
    """The encoder of a pretrained DeCAL without its decoder: queries and documents become their slots, compared
    by Chamfer similarity.

    Both sides share the weights and the ratio. The vectors are the slots at length 1, as in ColBERT; the paper names
    no projection. `from_pretrained` takes any checkpoint of the method. `compression="none"` is the T5 baseline.
    """

    model_class = DeCALModel
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^lm_head\."]

    def __init__(self, config: DeCALConfig):
        super().__init__(config)
        self.post_init()

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """Return the entries of a checkpoint without a decoder, which `AutoModelForTextEncoding` loads."""
        return cls.config_class.retrieval_auto_map()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as every compressor, but without a pipeline for questions, which nothing here answers."""
        self.config.custom_pipelines = {}
        super().save_pretrained(*args, **kwargs)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> RetrievalVectors:
        """Return the vectors of queries or documents; arguments and errors as of [`CompressorBackbone.compress`]."""
        slots = self.model(input_ids, attention_mask, ratio)
        # In float32, where half types would square small numbers to zero.
        vectors = normalize(slots.last_hidden_state.float(), dim=-1).to(slots.last_hidden_state.dtype)
        return RetrievalVectors(vectors=vectors, attention_mask=slots.attention_mask)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | None = None,
        return_dict: bool | None = None,
    ) -> RetrievalVectors | tuple[Tensor, Tensor]:
        """Return the vectors of queries or documents; arguments as of [`DeCALForRetrieval.encode`]."""
        outputs = self.encode(input_ids, attention_mask, ratio)
        return outputs if return_dict in (None, True) else outputs.to_tuple()

    @staticmethod
    def score(query_vectors: Tensor, query_mask: Tensor, document_vectors: Tensor, document_mask: Tensor) -> Tensor:
        """Return the Chamfer similarity of every query with every document; arguments and shapes as of [`chamfer`].

        Of two [`RetrievalVectors`]: `model.score(*queries.to_tuple(), *documents.to_tuple())`.
        """
        return chamfer(query_vectors, query_mask, document_vectors, document_mask)
