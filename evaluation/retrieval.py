# SPDX-License-Identifier: Apache-2.0
"""Rankings of a retrieval model: vectors of texts, Chamfer scores, nDCG@10 over a corpus that is read as a stream."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.document_ids import TrainingDocuments, document_id
from ..data.retrieval_sources import JudgedQueries, TextEncoder
from ..modeling.modeling_decal_retrieval import chamfer
from ..modeling.parts.text_ids import text_tokenizer
from ..reporting.environment import environment
from ..reporting.tables import markdown_table
from .alternatives import BM25Index
from .bootstrap import mean_statistic, percentile_interval, resampled_scores
from .evaluate import model_label, weights_and_configuration
from .held_out import Sources, compare_sources
from .rows import SampleAnswers, ratio_condition
from .settings import EvaluationSettings

TextVectors = list[Tensor]
# Metric -> each query's score, in percent.
QueryScores = dict[str, list[float]]
# Documents of each query that are kept, and those that are scored at once.
TOP_K, CHUNK_SIZE = 100, 1000
MAX_DOCUMENT_TOKENS = 512


@torch.inference_mode()
def encode_texts(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], ratio: int | None = None, batch_size: int = 32
) -> TextVectors:
    """Return vectors `(num_vectors, vector_size)` on the CPU of many texts, for an index."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    vectors: dict[int, Tensor] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids, mask = (tensor.to(model.device) for tensor in _padded([torch.tensor(rows[index]) for index in chosen]))
        outputs = model.encode(ids, mask, ratio)
        for index, row, row_mask in zip(chosen, outputs.vectors, outputs.attention_mask, strict=True):
            vectors[index] = row[: int(row_mask.sum())].cpu()
    return [vectors[index] for index in range(len(rows))]


@torch.inference_mode()
def score_texts(
    queries: TextVectors, documents: TextVectors, device: torch.device | str = "cpu", max_products: int = 2**25
) -> Tensor:
    """Return the Chamfer similarity of all queries with all documents, `(num_queries, num_documents)` on the CPU."""
    query_vectors, query_mask = (tensor.to(device) for tensor in _padded(queries))
    # Documents of like length together, so few pads are scored.
    order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    longest = max(map(len, documents), default=1)
    size = max(1, max_products // (max(1, longest) * query_mask.numel()))
    scores = torch.empty(len(queries), len(documents))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        vectors, mask = (tensor.to(device) for tensor in _padded([documents[index] for index in chosen]))
        scores[:, chosen] = chamfer(query_vectors, query_mask, vectors, mask).cpu().to(scores.dtype)
    return scores


def _padded(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    ones = [torch.ones(len(vectors), dtype=torch.long) for vectors in texts]
    return pad_sequence(list(texts), batch_first=True), pad_sequence(ones, batch_first=True)


class Rankings:
    """The best documents of every query, from scores of one part of a corpus after the other.

    Ties stay in the order of the corpus. A document with a query's own id is left out, as BEIR does.
    """

    def __init__(self, query_ids: Sequence[str], top_k: int = TOP_K):
        self._query_ids, self._top_k = np.array(query_ids, dtype=object), top_k
        self._scores = torch.empty(len(query_ids), 0)
        self._ids = np.empty((len(query_ids), 0), dtype=object)

    def add(self, ids: Sequence[str], scores: Tensor) -> None:
        """Take in documents by their ids, with scores `(num_queries, num_documents)`."""
        new_ids = np.broadcast_to(np.array(ids, dtype=object), scores.shape)
        is_query = torch.from_numpy(np.equal(new_ids, self._query_ids[:, None]).astype(bool))
        scores = scores.masked_fill(is_query, -torch.inf)
        joined, places = torch.cat([self._scores, scores], dim=1).sort(dim=1, descending=True, stable=True)
        all_ids = np.concatenate([self._ids, new_ids], axis=1)
        self._scores = joined[:, : self._top_k]
        self._ids = np.take_along_axis(all_ids, places[:, : self._top_k].numpy(), axis=1)

    def documents(self) -> list[list[str]]:
        """Return the ids of each query's documents, the best first, without those at minus infinity."""
        is_document = self._scores > -torch.inf
        return [ids[kept].tolist() for ids, kept in zip(self._ids, is_document.numpy(), strict=True)]


def ndcg(ranking: Sequence[str], grades: Mapping[str, float], top_k: int = 10) -> float:
    """Return nDCG@k of one query, 0 to 1, as trec_eval has it: a document's gain is its grade."""

    def gain(values: Sequence[float]) -> float:
        return sum(value / math.log2(place + 2) for place, value in enumerate(values[:top_k]))

    ideal = gain(sorted(grades.values(), reverse=True))
    return gain([grades.get(document, 0) for document in ranking]) / ideal if ideal else 0.0


def recall(ranking: Sequence[str], grades: Mapping[str, float], top_k: int = TOP_K) -> float:
    """Return the share of a query's relevant documents that are among the first `top_k`."""
    relevant = {document for document, grade in grades.items() if grade > 0}
    return len(relevant.intersection(ranking[:top_k])) / len(relevant)


def ranking_scores(rankings: Sequence[Sequence[str]], judged: JudgedQueries) -> tuple[dict[str, Any], QueryScores]:
    """Return means over queries in percent with 95 % bootstrap intervals (NaN of a single query), and each query's."""
    pairs = list(zip(rankings, judged.grades, strict=True))
    scores = {
        "ndcg_at_10": [100 * ndcg(*pair) for pair in pairs],
        "recall_at_100": [100 * recall(*pair) for pair in pairs],
    }
    resampled = resampled_scores({name: mean_statistic(values) for name, values in scores.items()}, range(len(pairs)))
    means: dict[str, Any] = {}
    for name, values in scores.items():
        interval = percentile_interval(resampled[name]) if len(pairs) > 1 else (math.nan, math.nan)
        means |= {name: mean(values), f"{name}_interval": interval}
    return {**means, "queries": len(pairs)}, scores


def query_answers(collection: str, judged: JudgedQueries, scores: Mapping[str, QueryScores]) -> list[SampleAnswers]:
    """Return the scores of each query, for a file that `compare` reads: a query is its own document."""
    rows = zip(judged.query_ids, judged.queries, judged.grades, strict=True)
    return [
        SampleAnswers(
            collection,
            "retrieval",
            id_,
            row,
            query,
            list(grades),
            {},
            {name: {metric: values[row] for metric, values in of_model.items()} for name, of_model in scores.items()},
        )
        for row, (id_, query, grades) in enumerate(rows)
    ]


def evaluate_retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    judged: JudgedQueries,
    ratio: int,
    settings: EvaluationSettings,
    progress: bool = False,
) -> tuple[dict[str, Any], QueryScores]:
    """Rank a corpus, read part by part, for every query at one ratio of both; return a row and each query's scores.

    Savings are relative to one vector for each token: tokens per vector, and the same for pairs.
    """
    tokenizer = text_tokenizer(tokenizer)
    counts: dict[str, Counter[str]] = {"queries": Counter(), "documents": Counter()}

    def vectors(side: str, texts: Sequence[str], encode: Callable[[str], tuple[list[int], int]]) -> TextVectors:
        encoded = [encode(text) for text in texts]
        of_texts = encode_texts(model, [ids for ids, _ in encoded], ratio, settings.batch_size)
        num_tokens, num_vectors = sum(len(ids) for ids, _ in encoded), sum(map(len, of_texts))
        num_cut = sum(cut > 0 for _, cut in encoded)
        counts[side].update(texts=len(texts), cut=num_cut, tokens=num_tokens, vectors=num_vectors)
        return of_texts

    of_queries = vectors("queries", judged.queries, TextEncoder(tokenizer, settings.max_query_tokens))
    encode = TextEncoder(tokenizer, settings.max_context_tokens or MAX_DOCUMENT_TOKENS)
    rankings, stream = Rankings(judged.query_ids), iter(judged.documents())
    with tqdm(unit="document", desc=f"ratio {ratio}", disable=not progress) as bar:
        while chunk := list(islice(stream, CHUNK_SIZE)):
            scores = score_texts(of_queries, vectors("documents", [text for _, text in chunk], encode), model.device)
            rankings.add([key for key, _ in chunk], scores)
            bar.update(len(chunk))
    means, scores_of_queries = ranking_scores(rankings.documents(), judged)
    queries, documents = counts["queries"], counts["documents"]
    storage = documents["tokens"] / documents["vectors"]
    row = {
        "compression": model.config.compression,
        "query_ratio": ratio,
        "document_ratio": ratio,
        **means,
        "documents": documents["texts"],
        "queries_cut": queries["cut"],
        "documents_cut": documents["cut"],
        "vector_size": model.config.hidden_size,
        "vectors_per_query": queries["vectors"] / queries["texts"],
        "vectors_per_document": documents["vectors"] / documents["texts"],
        "index_bytes_float32": 4 * model.config.hidden_size * documents["vectors"],
        "storage_saving": storage,
        "scoring_saving": storage * queries["tokens"] / queries["vectors"],
    }
    return row, scores_of_queries


def judged_documents(judged: JudgedQueries) -> tuple[list[Sources], str]:
    """Return the documents that answer each query, and a digest of queries and corpus, from one reading of it."""
    digest = hashlib.sha256(repr((judged.query_ids, judged.queries, judged.grades)).encode())
    relevant = {key for grades in judged.grades for key in grades}
    document_ids = {}
    for key, text in judged.documents():
        digest.update(repr((key, text)).encode())
        if key in relevant:
            document_ids[key] = document_id(text)
    answers = [tuple(document_ids[key] for key in grades if key in document_ids) for grades in judged.grades]
    return [Sources(*pair) for pair in zip(judged.query_ids, answers, strict=True)], digest.hexdigest()[:16]


def evaluate_bm25(judged: JudgedQueries) -> tuple[dict[str, Any], QueryScores]:
    """Return the row of BM25, whose index holds the corpus in memory, and each query's scores."""
    ids, texts = zip(*judged.documents(), strict=True)
    index = BM25Index(texts)
    scores = torch.from_numpy(np.stack(list(map(index.scores, judged.queries))))
    rankings = Rankings(judged.query_ids)
    # What shares no word with a query is not found.
    rankings.add(ids, scores.masked_fill(scores <= 0, -torch.inf))
    means, of_queries = ranking_scores(rankings.documents(), judged)
    return {"model": "BM25", "query_ratio": None, "document_ratio": None, **means, "documents": len(ids)}, of_queries


def retrieval_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `evaluate_retrieval` and `evaluate_bm25`, with their `model`, as a Markdown table."""
    header = ["model", "ratio", "nDCG@10", "vectors of a document", "index, MB", "storage", "scoring"]
    cells = []
    for row in rows:
        own = ["-", "-", "-", "-"]
        if row["document_ratio"] is not None:
            own = [f"{row['vectors_per_document']:.0f}", f"{row['index_bytes_float32'] / 1e6:.1f}"]
            own += [f"{row['storage_saving']:.1f}x", f"{row['scoring_saving']:.1f}x"]
        score = f"{row['ndcg_at_10']:.1f}"
        low, high = row["ndcg_at_10_interval"]
        if not math.isnan(low):
            score += f" [{low:.1f}, {high:.1f}]"
        cells.append([row["model"], row["document_ratio"] or "-", score, *own])
    return markdown_table(header, cells)


def evaluate_collection(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    judged: JudgedQueries,
    collection: str,
    settings: EvaluationSettings,
    records: Mapping[str, TrainingDocuments | None],
) -> tuple[dict[str, Any], list[SampleAnswers]]:
    """Rank a corpus at each ratio, and with BM25 if `alternatives` has it; return the result file and answers."""
    name, allow_trained = model_label(model.name_or_path), settings.allow_trained_documents
    queries, digest = judged_documents(judged)
    content: dict[str, Any] = {
        "format_version": 2,
        "model": name,
        "settings": {
            "collection": collection,
            "max_query_tokens": settings.max_query_tokens,
            "max_document_tokens": settings.max_context_tokens or MAX_DOCUMENT_TOKENS,
            "batch_size": settings.batch_size,
            "allow_trained_documents": allow_trained,
            "dtype": str(model.dtype),
            **weights_and_configuration(model),
            "samples": digest,
        },
        "device": model.device.type,
        "environment": environment(),
        "held_out": compare_sources({collection: queries}, records, allow_trained),
        "documents": {collection: " ".join(sorted({id_ for query in queries for id_ in query.source_ids}))},
    }
    rows: list[dict[str, Any]] = []
    scores: dict[str, QueryScores] = {}
    if "bm25" in settings.alternatives:
        row, scores["bm25"] = evaluate_bm25(judged)
        rows.append(row)
    for ratio in settings.ratios or sorted(model.config.compression_ratios):
        row, of_queries = evaluate_retrieval(model, tokenizer, judged, int(ratio), settings, progress=True)
        rows.append({"model": name, **row})
        scores[ratio_condition(ratio)] = of_queries
    return {**content, "rows": rows}, query_answers(collection, judged, scores)
