# SPDX-License-Identifier: Apache-2.0
"""The objective keep_drop: a token classifier learns which words a compressor's scores would keep."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...data.document_ids import document_id
from ...data.rows import distinct_texts, read_rows
from ...modeling.checkpoint.pretrained_bases import load_from_place, tokenizer_from_place
from ...modeling.text_compressor import pooled_scores, standardized, word_places, word_spans
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..base_trainer import BaseTrainer, without_metadata

LABELS_FILE = "labels.jsonl"
_IGNORED = -1.0
# What the pieces of the classifier's vocabulary are counted in.
_VOCABULARY_TEXTS = 4000


def drawn_texts(data: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[tuple[str, str]]:
    """Yield texts of at most `max_context_tokens` tokens in whole words, each with the document that it is from.

    Sources are drawn by their weights, and each document at most once: of a long text a part from a random word on.
    """
    rng = random.Random(seed)
    sources = data.parsed_sources()
    documents = [distinct_texts(read_rows(source, data.data_dir, seed)) for source in sources]
    for texts in documents:
        rng.shuffle(texts)
    while any(documents):
        weights = [source.weight or 1.0 if texts else 0.0 for source, texts in zip(sources, documents, strict=True)]
        document = rng.choices(documents, weights)[0].pop()
        spans = word_spans(document)
        first = rng.randrange(len(spans)) if len(spans) > data.max_context_tokens else 0
        part = document[spans[first][0] : spans[min(len(spans), first + data.max_context_tokens) - 1][1]]
        offsets = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) > data.max_context_tokens:
            last = offsets[data.max_context_tokens - 1][1]
            part = part[: max(end for _, end in word_spans(part) if end <= last)]
        if len(offsets) >= data.min_context_tokens:
            yield part, document


@torch.no_grad()
def teacher_labels(teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> list[float]:
    """Return for each word the probability that it is kept.

    The teacher's scores are logarithms of attention: a token's is the mean attention over all layers and heads.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt")
    scores = teacher.base_model.token_scores(encoding["input_ids"].to(teacher.device))[0].cpu()
    return word_labels(scores.logsumexp(dim=0), encoding["offset_mapping"][0].tolist(), text)


def word_labels(scores: Tensor, offsets: Sequence[Sequence[int]], text: str) -> list[float]:
    """Return probabilities whose log odds are the mean scores of each word's tokens, standardized within the text."""
    labels = standardized(pooled_scores(scores, offsets, word_spans(text))).sigmoid()
    return [round(label, 4) for label in labels.tolist()]


def labelled_texts(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str]], file: Path
) -> list[dict[str, Any]]:
    """Return the texts with the labels of their words, which are read from a file or added to it."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    known = {row["text"]: row for row in map(json.loads, lines)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as output:
        for text, document in tqdm(texts, desc="label", unit="text"):
            if text not in known:
                labels = teacher_labels(teacher, tokenizer, text)
                known[text] = {"text": text, "document": document_id(document), "labels": labels}
                print(json.dumps(known[text]), file=output, flush=True)
    return [known[text] for text, _ in texts]


def pruned_tokenizer(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], size: int
) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Keep the pieces of a WordPiece vocabulary that texts have most often, all of one ASCII character and the special
    tokens.

    Returns:
        The tokenizer, and the earlier id of each of its tokens.
    """
    vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
    counts = Counter(token for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"] for token in ids)
    needed = {token for token in vocabulary if token in special or _is_letter(token.removeprefix("##"))}
    by_count = sorted(
        vocabulary, key=lambda token: (token not in needed, -counts[vocabulary[token]], vocabulary[token])
    )
    kept = sorted(by_count[:size], key=vocabulary.__getitem__)
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    fields["truncation"] = fields["padding"] = None
    fields["model"]["vocab"] = {token: place for place, token in enumerate(kept)}
    for added in fields["added_tokens"]:
        added["id"] = kept.index(added["content"])
    for entry in (fields["post_processor"] or {}).get("special_tokens", {}).values():
        entry["ids"] = [kept.index(token) for token in entry["tokens"]]
    names = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    small = type(tokenizer)(
        tokenizer_object=Tokenizer.from_str(json.dumps(fields)),
        model_max_length=tokenizer.model_max_length,
        **{name: getattr(tokenizer, name) for name in names},
    )
    return small, [vocabulary[token] for token in kept]


def _is_letter(piece: str) -> bool:
    return len(piece) == 1 and piece.isascii()


def student(
    base: str, texts: Sequence[str], num_hidden_layers: int | None = None, vocab_size: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a token classifier of the labels drop and keep on an encoder's first layers and most frequent pieces."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    labels = {"id2label": {0: "drop", 1: "keep"}, "label2id": {"drop": 0, "keep": 1}}
    layers = {} if num_hidden_layers is None else {"num_hidden_layers": num_hidden_layers}
    model = AutoModelForTokenClassification.from_pretrained(base, dtype=torch.float32, **labels, **layers)
    tokenizer.model_max_length = model.config.max_position_embeddings
    if vocab_size is not None:
        tokenizer, earlier_ids = pruned_tokenizer(tokenizer, texts, vocab_size)
        weights = model.get_input_embeddings().weight.data[earlier_ids]
        model.resize_token_embeddings(len(earlier_ids), mean_resizing=False)
        model.get_input_embeddings().weight.data.copy_(weights)
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


class KeepDropCollator:
    """Turns labelled texts into a batch of a token classifier; each token has the label of its word.

    Args:
        tokenizer: the classifier's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return `input_ids`, `attention_mask` and `labels`, all `(batch_size, width)`, and the rows' documents."""
        texts = [row["text"] for row in rows]
        options = {"truncation": True, "padding": True, "return_offsets_mapping": True, "return_tensors": "pt"}
        batch = self.tokenizer(texts, **options)
        labels = torch.full(batch["input_ids"].shape, _IGNORED)
        for label, row, offsets in zip(labels, rows, batch.pop("offset_mapping"), strict=True):
            is_word = offsets[:, 1] > offsets[:, 0]
            places = word_places(offsets[is_word].tolist(), word_spans(row["text"]))
            label[is_word] = torch.tensor(row["labels"])[places]
        documents = [row["document"] for row in rows]
        return {
            **{name: batch[name] for name in ("input_ids", "attention_mask")},
            "labels": labels,
            "documents": documents,
        }


class KeepDropTrainer(BaseTrainer):
    """A `Trainer` of token classifiers whose labels are probabilities.

    Takes the arguments of `transformers.Trainer`; batches come from [`KeepDropCollator`].
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean cross-entropy of the labels over tokens."""
        inputs = without_metadata(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        is_word = labels != _IGNORED
        odds = (outputs.logits[..., 1] - outputs.logits[..., 0])[is_word]
        loss = binary_cross_entropy_with_logits(odds, labels[is_word])
        return (loss, outputs) if return_outputs else loss


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> KeepDropTrainer:
    """Return the trainer of a recipe: `teacher` labels `label_texts` texts, and a classifier on `base` learns them."""
    if model_args.base is None or model_args.teacher is None:
        raise ValueError("keep_drop needs base, an encoder, and teacher, a checkpoint of ranked_key_values")
    teacher = load_from_place(model_args.teacher, dtype=model_args.dtype or "auto").to(args.device).eval()
    reading = tokenizer_from_place(model_args.teacher)
    teacher.merge_adapters()
    texts = list(islice(drawn_texts(data_args, reading, args.seed), max(args.label_texts, _VOCABULARY_TEXTS)))
    rows = labelled_texts(teacher, reading, texts[: args.label_texts], Path(args.output_dir, LABELS_FILE))
    model, tokenizer = student(model_args.base, [text for text, _ in texts], **(model_args.model_config or {}))
    args.remove_unused_columns = False
    return KeepDropTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=KeepDropCollator(tokenizer),
        processing_class=tokenizer,
    )
