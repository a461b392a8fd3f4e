# SPDX-License-Identifier: Apache-2.0
"""Rankings of a retrieval model: vectors of texts, Chamfer scores, nDCG@10."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchmetrics.functional.retrieval import retrieval_normalized_dcg
from transformers import PreTrainedModel

from ..modeling.parts.late_interaction import chamfer

TextVectors = list[Tensor]


@torch.inference_mode()
def encode_texts(
    model: PreTrainedModel,
    texts: Sequence[str],
    encode: Callable[[str], tuple[list[int], int]],
    ratio: int | None = None,
    batch_size: int = 32,
) -> TextVectors:
    """Vectors of many texts, for an index.

    Args:
        model: a [`DeCALForRetrieval`], in evaluation mode.
        texts: the texts; those of like length go through the model together.
        encode: makes their token ids, see [`TextEncoder`].
        ratio: tokens per vector; the checkpoint's first if not given.
        batch_size: texts in one pass.

    Returns:
        For each text `(num_vectors, vector_size)` on the CPU.
    """
    rows = [torch.tensor(encode(text)[0], dtype=torch.long) for text in texts]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    vectors: dict[int, Tensor] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids = pad_sequence([rows[index] for index in chosen], batch_first=True).to(model.device)
        mask = pad_sequence([torch.ones_like(rows[index]) for index in chosen], batch_first=True).to(model.device)
        outputs = model.encode(ids, mask, ratio)
        for index, row, row_mask in zip(chosen, outputs.vectors, outputs.attention_mask, strict=True):
            vectors[index] = row[: int(row_mask.sum())].cpu()
    return [vectors[index] for index in range(len(rows))]


@torch.inference_mode()
def score_texts(
    queries: TextVectors, documents: TextVectors, device: torch.device | str = "cpu", max_products: int = 2**25
) -> Tensor:
    """Chamfer similarity of every query with every document, exhaustively.

    Args:
        queries: for each `(num_vectors, vector_size)`.
        documents: likewise.
        device: where the products are computed.
        max_products: products of two vectors that are in memory at once.

    Returns:
        `(num_queries, num_documents)` on the CPU.
    """
    query_vectors, query_mask = (tensor.to(device) for tensor in _padded(queries))
    order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    scores = torch.empty(len(queries), len(documents))
    start = 0
    while start < len(order):
        # The longest of a batch stands last; its length bounds how many fit.
        size = 1
        while start + size < len(order):
            longest = len(documents[order[start + size]])
            if (size + 1) * max(1, longest) * query_mask.numel() > max_products:
                break
            size += 1
        chosen = order[start : start + size]
        vectors, mask = (tensor.to(device) for tensor in _padded([documents[index] for index in chosen]))
        scores[:, chosen] = chamfer(query_vectors, query_mask, vectors, mask).cpu().to(scores.dtype)
        start += size
    return scores


def _padded(texts: TextVectors) -> tuple[Tensor, Tensor]:
    ones = [torch.ones(len(vectors), dtype=torch.long) for vectors in texts]
    return pad_sequence(texts, batch_first=True), pad_sequence(ones, batch_first=True)


def ndcg(scores: Tensor, relevant: Sequence[Collection[int]], top_k: int = 10) -> list[float]:
    """nDCG@k of each query, from torchmetrics.

    Args:
        scores: `(num_queries, num_documents)`.
        relevant: for each query the documents that answer it, at least one.
        top_k: places that count.

    Raises:
        ValueError: a query without a relevant document.
    """
    values = []
    for row, (query_scores, documents) in enumerate(zip(scores, relevant, strict=True)):
        if not documents:
            raise ValueError(f"query {row} has no relevant document: leave it out")
        target = torch.zeros(len(query_scores), dtype=torch.bool)
        target[list(documents)] = True
        values.append(float(retrieval_normalized_dcg(query_scores, target, top_k=top_k)))
    return values
