# SPDX-License-Identifier: Apache-2.0
"""Contrastive training of a dual encoder whose texts are several vectors (DeCAL, section 4.3; ColBERT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import ModelOutput

from ...configuration.configuration_compressor import RETRIEVAL_LOADER
from ...configuration.methods import methods_loaded_by
from ...configuration.nearest_names import check_choice
from ...data.document_ids import document_id
from ...data.retrieval_sources import JudgedQueries, TextEncoder
from ...modeling.modeling_decal_retrieval import chamfer
from ...modeling.parts.text_ids import text_tokenizer
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..base_trainer import BaseTrainer
from ..loading import DEFAULT_METHOD, load_compressor, load_tokenizer

_SIDES = ("query", "document")


def contrastive_loss(
    scores: Tensor, query_keys: Tensor, document_keys: Tensor, first_document: int = 0, temperature: float = 1.0
) -> Tensor:
    """Return the cross-entropy of each query's document among those of the batch; equal queries' are no negatives.

    Args:
        scores: `(num_queries, num_documents)`; query i belongs to the document `first_document + i`.
        query_keys: `(num_documents,)`, equal for equal queries: those that the documents belong to.
        document_keys: `(num_documents,)`, equal for equal documents.
    """
    own = first_document + torch.arange(len(scores), device=scores.device)
    same = (query_keys[own, None] == query_keys) | (document_keys[own, None] == document_keys)
    same[torch.arange(len(own)), own] = False
    return cross_entropy(scores.masked_fill(same, -torch.inf) / temperature, own)


def gathered(vectors: Tensor, mask: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """Gather padded vectors, with their gradients, masks and keys of all processes, by rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return vectors, mask, *keys
    length = torch.tensor(vectors.shape[1], device=vectors.device)
    torch.distributed.all_reduce(length, torch.distributed.ReduceOp.MAX)
    missing = int(length) - vectors.shape[1]
    vectors, mask = pad(vectors, (0, 0, 0, missing)), pad(mask, (0, missing))
    # A row's gradient is the sum of what all processes make of it.
    return tuple(torch.cat(all_gather(rows.contiguous())) for rows in (vectors, mask, *keys))


class RetrievalPairs(Dataset):
    """Queries, each with a document that answers it: `query_ids`, `document_ids`, `id`, `num_cut`, `documents`.

    Equal queries have one `query_key`, equal documents one `document_key`. Texts are cut to `max_query_tokens` and
    `max_context_tokens`.
    """

    def __init__(self, data: DataArguments, tokenizer: PreTrainedTokenizerBase):
        self._encode_query = TextEncoder(tokenizer, data.max_query_tokens)
        self._encode_document = TextEncoder(tokenizer, data.max_context_tokens)
        self._corpora: list[dict[str, str]] = []
        self._queries: list[dict[str, str]] = []
        self._pairs: list[tuple[int, str, str]] = []
        for number, source in enumerate(data.sources or ()):
            judged = JudgedQueries(source, data.data_dir)
            self._corpora.append(dict(judged.documents()))
            self._queries.append(dict(zip(judged.query_ids, judged.queries, strict=True)))
            self._pairs += [(number, *pair) for pair in judged.pairs]
        # Numbers of the different queries and documents.
        names = [(n, side, name) for n, *pair in self._pairs for side, name in zip(_SIDES, pair, strict=True)]
        self._keys = {name: number for number, name in enumerate(dict.fromkeys(names))}

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, query, document = self._pairs[index]
        query_ids, query_cut = self._encode_query(self._queries[number][query])
        text = self._corpora[number][document]
        document_ids, document_cut = self._encode_document(text)
        return {
            "query_ids": query_ids,
            "document_ids": document_ids,
            "query_key": self._keys[number, "query", query],
            "document_key": self._keys[number, "document", document],
            "id": f"{query}-{document}",
            "num_cut": query_cut + document_cut,
            "documents": [document_id(text)],
        }


class RetrievalCollator:
    """Turns examples of [`RetrievalPairs`] into ids and masks of queries and documents, and their keys."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch; ids and masks are `(batch_size, width)`, keys `(batch_size,)`, all int64."""
        batch: dict[str, Any] = {}
        for side in _SIDES:
            rows = [torch.tensor(example[f"{side}_ids"]) for example in examples]
            batch[f"{side}_input_ids"] = pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id)
            batch[f"{side}_attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            batch[f"{side}_keys"] = torch.tensor([example[f"{side}_key"] for example in examples])
        batch["example_ids"] = [example["id"] for example in examples]
        batch["num_cut"] = [example["num_cut"] for example in examples]
        batch["documents"] = [document for example in examples for document in example["documents"]]
        return batch


class RetrievalTrainer(BaseTrainer):
    r"""Trains a dual encoder, one model for queries and documents, with the Chamfer similarity in a contrastive loss.

    Negatives are the other documents of the batch, those of all devices included. Losses of several ratios add up.

    Args:
        model: a [`DeCALForRetrieval`], or anything with its `encode`.
        kwargs: as for `transformers.Trainer`; batches come from [`RetrievalCollator`].
    """

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        args.remove_unused_columns = False
        super().__init__(model=model, args=args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Sum over ratios of the contrastive loss, the mean over queries."""
        module = self.accelerator.unwrap_model(self.model)

        def step(**batch: Tensor) -> Tensor:
            losses = [self._ratio_loss(module, batch, ratio) for ratio in module.config.compression_ratios]
            return torch.stack(losses).sum()

        with self.accelerator.autocast():
            loss = self.redirected_forward(model, step, **inputs)
        return (loss, ModelOutput(loss=loss)) if return_outputs else loss

    def _ratio_loss(self, module: PreTrainedModel, batch: dict[str, Tensor], ratio: int) -> Tensor:
        queries, documents = (
            module.encode(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], ratio) for side in _SIDES
        )
        vectors, mask, query_keys, document_keys = gathered(
            documents.vectors, documents.attention_mask, batch["query_keys"], batch["document_keys"]
        )
        scores = chamfer(queries.vectors, queries.attention_mask, vectors, mask)
        first = self.accelerator.process_index * len(scores)
        return contrastive_loss(scores, query_keys, document_keys, first, self.args.contrastive_temperature)


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> RetrievalTrainer:
    """Return the trainer of a recipe: a dual encoder, from the encoder of a checkpoint or of a T5."""
    if model_args.checkpoint is None or model_args.method is not None:
        methods = methods_loaded_by(RETRIEVAL_LOADER)
        check_choice("method of the objective retrieval:", model_args.method or DEFAULT_METHOD, methods)
    tokenizer = load_tokenizer(model_args)
    return RetrievalTrainer(
        model=load_compressor(model_args, tokenizer, RETRIEVAL_LOADER),
        args=args,
        train_dataset=RetrievalPairs(data_args, text_tokenizer(tokenizer)),
        data_collator=RetrievalCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )
