# SPDX-License-Identifier: Apache-2.0
"""The objective keep_drop: a token classifier learns which words of a text answer a question, or any question."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...data.document_ids import document_id
from ...data.rows import read_rows
from ...modeling.text_compressor import opening, plain_words, word_places, word_sentences, word_spans
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..base_trainer import BaseTrainer

_IGNORED = -1.0
# The label of an answer's words is 1, of the other words in its sentence this.
_SENTENCE_LABEL = 0.7
_SHARE_WITHOUT_QUESTION = 1 / 6


def drawn_examples(data: DataArguments, number: int, seed: int) -> list[dict[str, Any]]:
    """Draw texts of at most `max_context_tokens` words by the weights of their sources, some without a question.

    Examples have `text`, `question` or `None`, and `labels`, the probability that each word is kept.
    """
    rng = random.Random(seed)
    sources = data.parsed_sources()
    questions: list[dict[str, list[tuple[str, list[str]]]]] = []
    for source in sources:
        questions.append({})
        for row in read_rows(source, data.data_dir, seed).to_pylist():
            if len(row["context"].split()) <= data.max_context_tokens:
                questions[-1].setdefault(row["context"], []).append((row["question"], row["answers"]))
    texts = [list(of_source) for of_source in questions]
    examples = []
    for place in rng.choices(range(len(sources)), [source.weight or 1.0 for source in sources], k=number):
        text = rng.choice(texts[place])
        asked = questions[place][text]
        if rng.random() < _SHARE_WITHOUT_QUESTION:
            of_questions = [answer_labels(text, *pair) for pair in asked]
            question, labels = None, [fmean(of_word) for of_word in zip(*of_questions, strict=True)]
        else:
            question, answers = rng.choice(asked)
            labels = answer_labels(text, question, answers)
        examples.append({"text": text, "question": question, "labels": labels})
    return examples


def answer_labels(text: str, question: str, answers: Sequence[str]) -> list[float]:
    """Return the probability that each word is kept: those of the sentence with most of an answer's words are."""
    words, sentences = plain_words(text), word_sentences(text)
    wanted, asked = [set(plain_words(answer)) for answer in answers], set(plain_words(question))

    def value(sentence: int) -> tuple[float, int]:
        own = {word for word, number in zip(words, sentences, strict=True) if number == sentence}
        return max(len(own & answer) / max(1, len(answer)) for answer in wanted), len(own & asked)

    best = max(dict.fromkeys(sentences), key=value)
    kept = zip(words, sentences, strict=True)
    return [
        0.0 if sentence != best else 1.0 if any(word in answer for answer in wanted) else _SENTENCE_LABEL
        for word, sentence in kept
    ]


def pruned_tokenizer(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], size: int
) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Keep the most frequent pieces, those of one ASCII character and special tokens; also return their old ids."""
    vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
    counts = Counter(token for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"] for token in ids)
    letters = {token for token in vocabulary if len(piece := token.removeprefix("##")) == 1 and piece.isascii()}
    needed = letters | special
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
    small = type(tokenizer)(
        tokenizer_object=Tokenizer.from_str(json.dumps(fields)),
        model_max_length=tokenizer.model_max_length,
        **tokenizer.special_tokens_map,
    )
    return small, [vocabulary[token] for token in kept]


def student(
    base: str, texts: Sequence[str], num_hidden_layers: int | None = None, vocab_size: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a token classifier of the labels drop and keep on an encoder's first layers and most frequent pieces."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    labels = {"id2label": {0: "drop", 1: "keep"}, "label2id": {"drop": 0, "keep": 1}}
    config: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **labels}
    if num_hidden_layers is not None:
        config["num_hidden_layers"] = num_hidden_layers
    model = AutoModelForTokenClassification.from_pretrained(base, dtype=torch.float32, **config)
    tokenizer.model_max_length = model.config.max_position_embeddings
    if vocab_size is not None:
        tokenizer, earlier_ids = pruned_tokenizer(tokenizer, texts, vocab_size)
        weights = model.get_input_embeddings().weight.data[earlier_ids]
        model.resize_token_embeddings(len(earlier_ids), mean_resizing=False)
        model.get_input_embeddings().weight.data.copy_(weights)
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def tokenized(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example as `input_ids` and `labels` (each token's word's), cut to the positions, and its document."""
    text, question = example["text"], example["question"]
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = word_places(encoding["offset_mapping"], word_spans(text))
    asked = [] if question is None else tokenizer(question, add_special_tokens=False)["input_ids"]
    start = opening(tokenizer, asked)
    length = tokenizer.model_max_length
    labels = [_IGNORED] * len(start) + [example["labels"][place] for place in places.tolist()]
    return {
        "input_ids": [*[*start, *encoding["input_ids"]][: length - 1], tokenizer.sep_token_id],
        "labels": [*labels[: length - 1], _IGNORED],
        "document": document_id(text),
    }


class KeepDropCollator:
    """Pads rows of [`tokenized`] to a batch."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return `input_ids`, `attention_mask` and `labels`, all `(batch_size, width)`, and the rows' documents."""
        columns = {"input_ids": self.pad_token_id, "labels": _IGNORED}
        batch = {
            name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value)
            for name, value in columns.items()
        }
        lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
        mask = (torch.arange(batch["labels"].shape[1]) < lengths).long()
        return {**batch, "attention_mask": mask, "documents": [row["document"] for row in rows]}


class KeepDropTrainer(BaseTrainer):
    """A `Trainer` of token classifiers whose labels are probabilities, on batches of [`KeepDropCollator`]."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # The loss is a mean of a batch: the library divides it by the batches that are accumulated.
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean cross-entropy of the labels over tokens."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        is_word = labels != _IGNORED
        odds = (outputs.logits[..., 1] - outputs.logits[..., 0])[is_word]
        loss = binary_cross_entropy_with_logits(odds, labels[is_word])
        return (loss, outputs) if return_outputs else loss


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> KeepDropTrainer:
    """Return the trainer of a recipe: a classifier on `base` learns examples for `max_steps` steps."""
    if model_args.base is None or args.max_steps < 1:
        raise ValueError("keep_drop needs base, an encoder, and max_steps of at least 1")
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    examples = drawn_examples(data_args, args.max_steps * batch, args.seed)
    texts = [text for example in examples for text in (example["text"], example["question"]) if text]
    model, tokenizer = student(model_args.base, texts, **(model_args.model_config or {}))
    args.remove_unused_columns = False
    return KeepDropTrainer(
        model=model,
        args=args,
        train_dataset=[tokenized(tokenizer, example) for example in examples],
        data_collator=KeepDropCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )
