# SPDX-License-Identifier: Apache-2.0
"""Scores of several vectors against several vectors, for retrieval (ColBERT's late interaction)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def chamfer(query_vectors: Tensor, query_mask: Tensor, document_vectors: Tensor, document_mask: Tensor) -> Tensor:
    """Chamfer similarity of every query with every document, also called MaxSim (ColBERT, section 3.3).

    Each query vector counts with the document vector that is most similar to it: sum_i max_j q_i . d_j.

    Args:
        query_vectors: `(num_queries, query_length, vector_size)`.
        query_mask: `(num_queries, query_length)`, nonzero for real vectors; what stands elsewhere is not read.
        document_vectors: `(num_documents, document_length, vector_size)`.
        document_mask: `(num_documents, document_length)`.

    Returns:
        `(num_queries, num_documents)`, computed in float32 whatever half type the vectors or autocast have. A query
        without vectors scores 0 with every document, a document without vectors minus infinity with every other query.

    Raises:
        TypeError: an argument that is no tensor, or vectors of complex numbers.
        ValueError: a shape that does not fit.
    """
    _check_shapes(query_vectors, query_mask, document_vectors, document_mask)
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


def _check_shapes(query_vectors: Tensor, query_mask: Tensor, document_vectors: Tensor, document_mask: Tensor) -> None:
    for name, vectors, mask in (("query", query_vectors, query_mask), ("document", document_vectors, document_mask)):
        for argument, value in ((f"{name}_vectors", vectors), (f"{name}_mask", mask)):
            if not isinstance(value, Tensor) or value.is_complex():
                raise TypeError(f"{argument} must be a tensor of real numbers, got {type(value).__name__}")
        if vectors.dim() != 3 or mask.shape != vectors.shape[:2]:
            raise ValueError(
                f"{name}_vectors must have shape (rows, length, vector_size) and {name}_mask (rows, length), got "
                f"{tuple(vectors.shape)} and {tuple(mask.shape)}"
            )
    if query_vectors.shape[2] != document_vectors.shape[2]:
        raise ValueError(
            "query_vectors and document_vectors must have the same size, got "
            f"{query_vectors.shape[2]} and {document_vectors.shape[2]}"
        )
