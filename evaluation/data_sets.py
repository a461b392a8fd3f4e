# SPDX-License-Identifier: Apache-2.0
"""The data sets of an evaluation, from the sources that name them."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice
from ..data.columns import column_of, is_list
from ..data.rows import PassageText, distinct_texts, generated_document, read_rows
from ..data.sources import COLUMNS, DataSource, parse_sources
from ..data.synthetic_documents import KINDS, GeneratedDocument, split_of
from ..data.yaml_text import read_yaml
from ..modeling.parts.text_ids import encode
from ..modeling.text_compressor import split_sentences
from .evaluate import model_label
from .samples import EvaluationDataset

logger = logging.getLogger(__name__)

# Fields of a source that change no data set, or only its name.
_NOT_IN_REPORT = ("title", "tasks", "weight", "license")
_HOPS = {"one_hop": 1, "two_hop": 2}
_ATTEMPTS = 100
# Of generated documents and needles, where a source says nothing else.
_NUM_DOCUMENTS, _DOCUMENT_TOKENS = 100, 128
RULER = "simonjegou/ruler"
NEEDLES = "needles"
NEEDLE_KINDS = ("numbers", "names", "dates")

_WORDS: dict[str, Any] = read_yaml(Path(__file__).with_name("needles.yaml"))


def load_datasets(
    sources: Sequence[str | DataSource | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    domain: str = "in",
    data_dir: str | None = None,
    seed: int = 0,
) -> list[EvaluationDataset]:
    """Read the data sets of an evaluation.

    Args:
        sources: in any form that `parse_sources` takes.
        tokenizer: measures the length of generated documents and needles, which `seed` draws.
        domain: "in" or "out".
    """
    for place in sources:
        if isinstance(place, str) and (Path(data_dir or ".") / place).is_dir():
            raise ValueError(f"{place!r} is a folder: name its files, such as {place}/*.parquet")
    datasets: list[EvaluationDataset] = []
    for source in parse_sources(sources):
        if source.kind == NEEDLES:
            of_source = [_needles(source, tokenizer, domain, data_dir, seed)]
        elif source.generated:
            examples = _generated_examples(source, tokenizer, seed)
            of_source = [EvaluationDataset(data_set_name(source), examples, domain, source.max_samples, source.tasks)]
        else:
            of_source = _read(source, domain, data_dir, seed)
        datasets += [replace(data, source=source_in_report(source)) for data in of_source]
    return datasets


def sources_of_task(sources: Sequence[str], task: str, lengths: Sequence[int]) -> list[DataSource]:
    """The sources of "needles", contexts of each length, or of "ruler" as kvpress publishes it at each length."""
    if task == NEEDLES:
        return [
            replace(source, kind=NEEDLES, document_tokens=length)
            for source in parse_sources(sources)
            for length in lengths
        ]
    return [
        DataSource(name=name, config=str(length), split="test", by="task", title=f"RULER {length}")
        for name in sources or [RULER]
        for length in lengths
    ]


def source_in_report(source: DataSource) -> dict[str, Any]:
    """Return the fields of a source for a report, as JSON holds them, of files and folders the last part alone."""
    shown = {
        field.name: value
        for field in fields(source)
        if field.name not in _NOT_IN_REPORT and (value := vars(source)[field.name]) != field.default
    }
    if source.path is not None:
        shown["path"] = Path(source.path).name
        # A file has none.
        shown.pop("split", None)
    if source.name is not None:
        shown |= {"name": model_label(source.name), "split": source.split}
    return json.loads(json.dumps(shown, default=str))


def data_set_name(source: DataSource) -> str:
    """Return the name of a source's data set: its title, or its place, of folders the last part alone."""
    if source.title is not None:
        return source.title
    if source.path is not None:
        return Path(source.path).stem
    label = source.label if source.name is None else model_label(source.name)
    return ":".join(filter(None, [label, source.config, source.kind]))


def _read(source: DataSource, domain: str, data_dir: str | None, seed: int) -> list[EvaluationDataset]:
    table = read_rows(source if source.streaming else replace(source, max_samples=None), data_dir, seed)
    # The documents that rows are windows of, by which it is known whether they trained.
    wanted = table.select([name for name in (*COLUMNS, "source_texts") if name in table.column_names])
    max_samples = None if source.streaming and source.rows is None else source.max_samples

    def data_set(name: str, rows: pyarrow.Table) -> EvaluationDataset:
        examples = rows.to_pylist()
        if "context" in rows.column_names and is_list(rows["context"].type):
            examples = [{**example, "context": PassageText(example["context"])} for example in examples]
        return EvaluationDataset(name, examples, domain, max_samples, source.tasks)

    if source.by is None:
        return [data_set(data_set_name(source), wanted)]
    values = column_of(table, source.by, source)
    if values.null_count:
        logger.warning("source %r: %d rows have no %s, and are left out", source.label, values.null_count, source.by)
    return [
        data_set(f"{data_set_name(source)}/{value}", wanted.filter(pyarrow.compute.equal(values, value)))
        for value in values.unique()
        if value.is_valid
    ]


def _needles(
    source: DataSource, tokenizer: PreTrainedTokenizerBase, domain: str, data_dir: str | None, seed: int
) -> EvaluationDataset:
    """Return needles in running text, in contexts of one length."""
    number, num_tokens = source.max_samples or _NUM_DOCUMENTS, source.document_tokens or _DOCUMENT_TOKENS
    # A stream needs an end.
    needs_samples = source.streaming and source.rows is None
    table = read_rows(source if needs_samples else replace(source, max_samples=None), data_dir, seed)
    examples = needle_examples(distinct_texts(table), tokenizer, num_tokens, number, seed)
    name = f"{source.title or NEEDLES}, {num_tokens} tokens"
    return EvaluationDataset(name, examples, domain, only=("question_answering",))


def _generated_examples(source: DataSource, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[dict[str, Any]]:
    if source.config is not None:
        check_choice("kind of generated questions:", source.config, _HOPS)
    if source.kind is not None:
        check_choice("kind of generated documents:", source.kind, KINDS)
    hops = _HOPS.get(source.config or "")
    rng = random.Random(f"{seed}/evaluation")
    examples = []
    for _ in range(_NUM_DOCUMENTS):
        document = _draw_document(source, tokenizer, rng, source.document_tokens or _DOCUMENT_TOKENS)
        examples += [
            {"context": document.text, "question": question.question, "answers": [question.answer]}
            for question in document.questions
            if hops in (None, question.hops)
        ]
    return examples


def _draw_document(
    source: DataSource, tokenizer: PreTrainedTokenizerBase, rng: random.Random, num_tokens: int
) -> GeneratedDocument:
    # With a short limit, the first sentence of some seeds does not fit; the next seed's may.
    for _ in range(_ATTEMPTS):
        with suppress(ValueError):
            return generated_document(source, rng.randrange(2**31), num_tokens, tokenizer)
    raise ValueError(f"no generated document fits into {num_tokens} tokens: take more")


# --- one fact in running text, asked for at several lengths ---


class Needle(NamedTuple):
    """A sentence with one fact about a town, and the question that asks for it."""

    town: str
    sentence: str
    question: str
    answers: tuple[str, ...]


def draw_needle(kind: str, rng: random.Random) -> Needle:
    """Draw a fact of one of `NEEDLE_KINDS`."""

    def word(name: str) -> str:
        return rng.choice(_WORDS[name].split())

    sentence, question = rng.choice(_WORDS["facts"][kind])
    town = word("towns")
    if kind == "numbers":
        number = rng.randrange(1000, 100_000)
        while split_of(str(number)) != "test":
            number = rng.randrange(1000, 100_000)
        answers: tuple[str, ...] = (str(number),)
    elif kind == "names":
        answers = (f"{word('first_names')} {word('last_names')}",)
    else:
        day, month, year = rng.randint(1, 28), word("months"), rng.randint(1801, 1999)
        answers = (f"{day} {month} {year}", f"{month} {day}, {year}")
    return Needle(town, sentence.format(t=town, v=answers[0]), question.format(t=town), answers)


def needle_examples(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    num_needles: int,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return contexts of running text with one needle each, at a place drawn uniformly between two sentences.

    Rows have `id` (kind and number), `context` of at most `num_tokens` tokens, `question`, `answers` and
    `source_texts`.
    """
    examples = []
    for number in range(num_needles):
        kind = NEEDLE_KINDS[number % len(NEEDLE_KINDS)]
        needle = draw_needle(kind, random.Random(f"{seed}/needle/{number}"))
        rng = random.Random(f"{seed}/{num_tokens}/{number}")
        context, sources = _hidden_in_text(needle, texts, tokenizer, num_tokens, rng)
        row = {"id": f"{kind}/{number}", "context": context, "question": needle.question}
        examples.append({**row, "answers": list(needle.answers), "source_texts": sources})
    return examples


def _hidden_in_text(
    needle: Needle, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int, rng: random.Random
) -> tuple[str, list[str]]:
    """Running text with the needle at a random place between two sentences, and the texts that it is from."""
    room = num_tokens - len(encode(tokenizer, " " + needle.sentence))
    if room < 1:
        raise ValueError(f"a context of {num_tokens} tokens has no room for {needle.sentence!r} and text around it")
    depth, start = rng.random(), rng.random()
    while True:
        sentences, ends, taken = _running_text([needle.town, *needle.answers], texts, tokenizer, room, start)
        place = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * room))
        parts = ["".join(sentences[:place]).strip(), needle.sentence, "".join(sentences[place:]).strip()]
        context = " ".join(filter(None, parts))
        # Joined, the parts may have a token more.
        surplus = len(encode(tokenizer, context)) - num_tokens
        if surplus <= 0:
            return context, [texts[index] for index in sorted(taken)]
        room -= surplus


def _running_text(
    avoided: Sequence[str], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int, start: float
) -> tuple[list[str], list[int], set[int]]:
    """Sentences of so many tokens, the last one cut, the tokens before each place where another could stand, and the
    texts that they are from.
    """
    sentences: list[str] = []
    ends, taken = [0], set()
    for index, sentence in _sentences_from(texts, start):
        if any(words in sentence for words in avoided):
            continue
        taken.add(index)
        ids = encode(tokenizer, sentence)
        left = num_tokens - ends[-1]
        if len(ids) >= left:
            return [*sentences, tokenizer.decode(ids[:left])], ends, taken
        sentences.append(sentence)
        ends.append(ends[-1] + len(ids))
    raise ValueError(f"the texts have {ends[-1]} tokens, and a context of running text takes {num_tokens}")


def _sentences_from(texts: Sequence[str], start: float) -> Iterator[tuple[int, str]]:
    """All sentences, each behind its text's number, from one on that `start` (0 to 1) of all letters stand before."""
    place, index = start * sum(map(len, texts)), 0
    while index < len(texts) - 1 and place >= len(texts[index]):
        place -= len(texts[index])
        index += 1
    # Behind the last text comes the first one, and at the very end what stands before the start.
    for turn in range(len(texts) + 1):
        letters, text = 0, (index + turn) % len(texts)
        for number, sentence in enumerate(split_sentences(texts[text])):
            letters += len(sentence)
            if (turn == 0 and letters < place) or (turn == len(texts) and letters >= place):
                continue
            yield text, "\n\n" + sentence.lstrip() if turn and number == 0 else sentence
