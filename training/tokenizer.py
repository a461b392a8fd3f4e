# SPDX-License-Identifier: Apache-2.0
"""Training a byte-level BPE tokenizer for a base model that starts from nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ..data.prompts import format_prompt
from ..data.rows import distinct_texts, read_rows
from ..data.sources import DataSource
from ..data.synthetic_documents import generate_document

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"


def _training_texts(
    sources: Sequence[DataSource], data_dir: str | None, num_texts: int, num_characters: int, seed: int
) -> Iterator[str]:
    rng = random.Random(f"{seed}/tokenizer")
    weights = [1.0 if source.weight is None else source.weight for source in sources]
    for source, weight in zip(sources, weights, strict=True):
        count = max(1, round(num_texts * weight / sum(weights)))
        if source.generated:
            for index in range(count):
                document = generate_document(index, num_tokens=128, kind=source.kind, split=source.split)
                questions = (
                    format_prompt("question_answering", question.question) + " " + question.answer
                    for question in document.questions[:3]
                )
                yield document.text + "".join(questions)
            continue
        table = read_rows(source, data_dir, seed)
        texts = distinct_texts(table)
        for text in rng.sample(texts, min(count, len(texts))):
            yield text[:num_characters]
        if "question_answering" in source.tasks:
            for row in table.select(["question", "answers"]).to_pylist()[:count]:
                yield format_prompt("question_answering", row["question"]) + " " + row["answers"][0]


def train_tokenizer(
    sources: Sequence[DataSource],
    data_dir: str | None = None,
    vocab_size: int = 4096,
    num_texts: int = 3000,
    num_characters: int = 8000,
    seed: int = 0,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which every digit is a token of its own.

    Numbers are what the questions on generated documents ask for; digit by digit, an unseen number is as easy as a
    seen one.

    Args:
        sources: where the texts come from, drawn in proportion to the sources' weights.
        data_dir: folder that the sources' paths are relative to.
        vocab_size: number of tokens, special tokens and the 256 bytes included.
        num_texts: texts to train on, over all sources.
        num_characters: what is used of each text.
        seed: draws the texts.

    Returns:
        A tokenizer that puts BOS in front of a text, unless `add_special_tokens=False`.

    Raises:
        ValueError: `vocab_size` is below the 259 that bytes and special tokens need.
    """
    if vocab_size < 256 + 3:
        raise ValueError(f"vocab_size must be at least 259 (bytes and special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(sources, data_dir, num_texts, num_characters, seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)
