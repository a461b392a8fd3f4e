# SPDX-License-Identifier: Apache-2.0
"""From data sources to tokenized evaluation samples; every condition sees the same ones."""

import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.document_ids import document_id, ends_as_source, source_ids
from ..data.prompts import TASKS, format_prompt
from ..data.rows import PassageText, answer_text
from ..data.sources import is_of_benchmark
from ..modeling.parts.text_ids import before_answer, cut_passages, encode, prefix_ids
from ..modeling.parts.text_ids import prompt_ids as make_prompt_ids
from .metrics import BenchmarkMetric, benchmark_max_new_tokens, benchmark_metric
from .settings import WRITTEN_TASKS, EvaluationSettings

logger = logging.getLogger(__name__)

_READ_AS_TEXT = {"question_answering": ("context", "question"), "summarization": ("context", "summary")}
_SKIP = "; `skip_incomplete: true` of a source leaves such rows out"


@dataclass(frozen=True)
class EvaluationDataset:
    """Examples under one name, grouped as in-domain or out-of-domain.

    Args:
        examples: mappings with `context`, `question` and `answers`, with `context` and `summary`, or with `text`.
        domain: "in" when the compressor was trained on the data set's training part, "out" otherwise.
        max_samples: samples per task, drawn by the seed; the evaluation's own number when `None`.
        only: the tasks that it serves, as far as its columns allow; all when empty.
        source: what it was read from, see `source_in_report`.
    """

    name: str
    examples: Sequence[Mapping[str, Any]]
    domain: str = "in"
    max_samples: int | None = None
    only: tuple[str, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    def tasks(self) -> tuple[str, ...]:
        """The tasks that its columns allow, of those that it serves."""
        columns = set(self.examples[0]).intersection(*self.examples)
        needs = {
            "question_answering": {"context", "question", "answers"} <= columns,
            "summarization": {"context", "summary"} <= columns,
            "continuation": bool({"text", "context"} & columns),
            "reconstruction": bool({"text", "context"} & columns),
        }
        return tuple(task for task in TASKS if needs[task] and task in (self.only or TASKS))


@dataclass(frozen=True)
class Sample:
    """One tokenized sample: what is compressed, what follows it, and what should come out.

    `source_ids` are those of the documents that the context was made of, see `document_id`; `document` numbers the
    first. `head_ids` open the user's turn of a chat; `passages` are compressed apart.
    """

    context_ids: list[int]
    prompt_ids: list[int]
    target_ids: list[int]
    references: list[str]
    truncated: bool = False
    document: int = 0
    source_ids: tuple[str, ...] = ()
    id: str = ""
    question: str = ""
    head_ids: list[int] = field(default_factory=list)
    max_new_tokens: int | None = None
    metric: BenchmarkMetric | None = None
    passages: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.context_ids) + len(self.prompt_ids) + len(self.target_ids)


# More than a token has in ordinary text.
_LETTERS_PER_TOKEN = 16
# A text of one token has nothing to predict from.
_SHORTEST_TEXT = 2


@dataclass(frozen=True)
class SampleBuilder:
    """Makes the samples of a task, and keeps each within the model's positions.

    EOS ends answers, summaries, and continuations that come to the end of their text.

    Args:
        max_positions: positions for context, prompt and target together, `None` for no limit.
        max_context_tokens: most tokens of a context; the settings' own when `None`.
        context_per_position: tokens of a context to a position of the decoder.
        left_out: data set and task -> number of rows with contexts that are too long.
    """

    tokenizer: PreTrainedTokenizerBase
    settings: EvaluationSettings
    max_positions: int | None = None
    max_context_tokens: int | None = None
    context_per_position: int = 1
    left_out: dict[str, int] = field(default_factory=dict, compare=False)

    @cached_property
    def prefix_ids(self) -> list[int]:
        """Token ids of `context_prefix`."""
        return prefix_ids(self.tokenizer, self.settings.context_prefix)

    def build(
        self, dataset: EvaluationDataset, task: str, max_samples: int | None = None, least_tokens: int = _SHORTEST_TEXT
    ) -> list[Sample]:
        """Make the samples of a task: all, or as many as are wanted, drawn by the seed whatever else is evaluated."""
        examples = self._of_allowed_length(task, _examples_of(task, dataset), dataset.name, least_tokens)
        max_samples = max_samples if dataset.max_samples is None else dataset.max_samples
        if max_samples is not None and max_samples < len(examples):
            rng = random.Random(f"{self.settings.seed}/{dataset.name}/{task}")
            examples = [examples[index] for index in sorted(rng.sample(range(len(examples)), max_samples))]
        rng = random.Random(f"{self.settings.seed}/{dataset.name}/{task}/windows")
        documents: dict[str, int] = {}
        samples = [self._named(example, self._sample(task, example, rng), documents) for example in examples]
        fitted = [self._fit(task, sample, dataset.name) for sample in samples]
        if truncated := sum(sample.truncated for sample in fitted):
            logger.warning("%s, %s: %d of %d contexts truncated", dataset.name, task, truncated, len(fitted))
        return fitted

    def _named(self, example: Mapping[str, Any], sample: Sample, documents: dict[str, int]) -> Sample:
        """The sample with its example's name, its question, and the number of its document."""
        context = example.get("context", example.get("text"))
        # A training records both, too.
        sources = tuple(dict.fromkeys([*source_ids(example.get("source_texts")), document_id(context)]))
        document = documents.setdefault(sources[0], len(documents))
        question = example.get("question", "")
        return replace(sample, document=document, source_ids=sources, id=example["id"], question=question)

    def _of_allowed_length(
        self, task: str, examples: Sequence[Mapping[str, Any]], name: str, least_tokens: int
    ) -> Sequence[Mapping[str, Any]]:
        """Return the examples whose texts are long enough and whose contexts are not too long."""
        most_tokens = self.settings.max_context_tokens
        if task not in WRITTEN_TASKS:
            kept = [example for example in examples if self._has_tokens(example["text"], least_tokens)]
            fault = f"texts of less than {least_tokens} tokens"
        elif self.settings.leave_out_long and most_tokens is not None:
            too_long = most_tokens + 1 - len(self.prefix_ids)
            kept = [example for example in examples if not self._has_tokens(example["context"], too_long)]
            self.left_out[f"{name}, {task}"] = len(examples) - len(kept)
            fault = f"contexts of more than {most_tokens} tokens"
        else:
            return examples
        if number := len(examples) - len(kept):
            logger.warning("%s, %s: %d of %d rows left out: %s", name, task, number, len(examples), fault)
        if not kept:
            raise ValueError(f"data set {name!r} has nothing to score for {task}: all rows are {fault}")
        return kept

    def _has_tokens(self, text: str, number: int) -> bool:
        """Return True for a text of so many tokens, as its beginning tells."""
        return len(encode(self.tokenizer, text[: _LETTERS_PER_TOKEN * number])) >= number

    def build_by_length(
        self, dataset: EvaluationDataset, task: str, lengths: Sequence[int] | None, max_samples: int | None = None
    ) -> list[tuple[EvaluationDataset, str, list[Sample]]]:
        """Make the samples of a task, those of a reconstruction at several lengths as data sets of their own."""
        if task != "reconstruction" or lengths is None:
            return [(dataset, task, self.build(dataset, task, max_samples))]
        sets = []
        for length in lengths:
            builder = replace(self, settings=replace(self.settings, context_tokens=length))
            named = replace(dataset, name=f"{dataset.name}, {length} tokens")
            sets.append((named, task, builder.build(named, task, max_samples, length)))
        return sets

    def _sample(self, task: str, example: Mapping[str, Any], rng: random.Random) -> Sample:
        prompt, prefix = self._prompt(task, example)
        ids_of_prompt = make_prompt_ids(self.tokenizer, [prompt], self.settings.prompt_format)
        head_ids, prompt_ids, eos = ids_of_prompt.head, ids_of_prompt.turns[0], ids_of_prompt.end
        if task in WRITTEN_TASKS:
            references, context = list(example["answers"]), example["context"]
            answer = before_answer(prompt, self.settings.prompt_format) + references[0]
            passages = context.passages if isinstance(context, PassageText) else ()
            # Tokenized apart, as in training.
            return Sample(
                [*self.prefix_ids, *encode(self.tokenizer, context)],
                [*prompt_ids, *encode(self.tokenizer, prefix)],
                [*encode(self.tokenizer, answer), eos],
                references,
                head_ids=head_ids,
                max_new_tokens=benchmark_max_new_tokens(example),
                metric=benchmark_metric(example),
                passages=[[*self.prefix_ids, *encode(self.tokenizer, text)] for text in passages],
            )
        ids = encode(self.tokenizer, example["text"])
        length = self.settings.context_tokens + (self.settings.continuation_tokens if task == "continuation" else 0)
        start = rng.randrange(max(1, len(ids) - length + 1))
        window = ids[start : start + length]
        is_cut = start + length < len(ids) or not ends_as_source(example["text"], example.get("source_texts"))
        if task == "reconstruction":
            references = [self.tokenizer.decode(window)]
            return Sample(window, prompt_ids, window, references, head_ids=head_ids)
        # A text shorter than both parts is divided as they are.
        split = max(1, min(len(window) - 1, len(window) * self.settings.context_tokens // length))
        continuation = window[split:]
        target_ids = continuation if is_cut else [*continuation, eos]
        references = [self.tokenizer.decode(continuation)]
        return Sample(window[:split], prompt_ids, target_ids, references, head_ids=head_ids)

    def _prompt(self, task: str, example: Mapping[str, Any]) -> tuple[str, str]:
        """Return the prompt and the start of an answer: of a benchmark, its own words, as kvpress puts them."""
        prefix = example.get("answer_prefix")
        if task != "question_answering" or prefix is None:
            return format_prompt(task, example.get("question", ""), path=self.settings.prompts), ""
        if self.settings.prompt_format == "chat":
            return example["question"], prefix
        return f"{example['question']}\n{prefix}", ""

    def _room(self, task: str, sample: Sample) -> int:
        """Return the tokens left for the context after start token, prompt and the longest possible output."""
        limit = self.max_context_tokens or self.settings.max_context_tokens or sys.maxsize
        if self.max_positions is None:
            return limit
        room = self.max_positions - max(1, len(sample.head_ids)) - len(sample.prompt_ids)
        share = self.context_per_position
        if task == "reconstruction":
            # Its target is the context itself.
            return min(limit, room * share // (share + 1))
        num_new = sample.max_new_tokens or self.settings.max_new_tokens.get(task, 0)
        return min(limit, (room - max(len(sample.target_ids), num_new)) * share)

    def _fit(self, task: str, sample: Sample, name: str) -> Sample:
        """A sample whose context has its place, cut if it may be."""
        prefix = self.prefix_ids if task in WRITTEN_TASKS else []
        text, room = sample.context_ids[len(prefix) :], self._room(task, sample) - len(prefix)
        if len(text) <= room:
            return sample
        if not self.settings.truncate_context or room < 1:
            advice = "allow truncation (`truncate_context`)" if room >= 1 else "ask for fewer new tokens"
            raise ValueError(
                f"data set {name!r}, {task}: a context of {len(text)} tokens with its prompt and target does not fit: "
                f"max_context_tokens and the model's positions leave {max(room, 0)} tokens for the context; {advice}"
            )
        if task == "reconstruction":
            kept = text[:room]
            references = [self.tokenizer.decode(kept)]
            return replace(sample, context_ids=kept, target_ids=kept, references=references, truncated=True)
        # What stands right before a continuation matters most.
        keeps_end = task == "continuation" or self.settings.truncation_side == "left"
        context_ids = [*prefix, *(text[-room:] if keeps_end else text[:room])]
        passages = cut_passages(sample.passages, len(context_ids), keeps_end)
        return replace(sample, context_ids=context_ids, passages=passages, truncated=True)


def _examples_of(task: str, dataset: EvaluationDataset) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {**example, "id": str(row if example.get("id") is None else example["id"])}
        for row, example in enumerate(dataset.examples)
    ]
    for row, example in enumerate(rows):
        for column in _READ_AS_TEXT.get(task, ()):
            may_be_blank = column == "context" or is_of_benchmark(example)
            _check_text(example[column], column, dataset.name, row, may_be_blank)
    if task == "question_answering":
        answers = [accepted_answers(example["answers"], dataset.name, row) for row, example in enumerate(rows)]
        return [{**example, "answers": accepted} for example, accepted in zip(rows, answers, strict=True)]
    column = "context" if task == "summarization" else "text"
    # Rows with one text are one sample; several summaries of it are its references.
    by_text: dict[str, dict[str, Any]] = {}
    for row, example in enumerate(rows):
        text = example["context"] if task == "summarization" else example.get("text") or example.get("context") or ""
        _check_text(text, column, dataset.name, row)
        known = by_text.setdefault(text, {column: text, "id": example["id"], "source_texts": [], "answers": []})
        known["source_texts"] = list(dict.fromkeys([*known["source_texts"], *(example.get("source_texts") or ())]))
        known["answers"].append(example.get("summary"))
    return list(by_text.values())


def _check_text(value: Any, column: str, name: str, row: int, may_be_blank: bool = True) -> None:
    if not isinstance(value, str) or not (may_be_blank or value.strip()):
        what = f"data set {name!r}: {column!r} must be a text{'' if may_be_blank else ', not blank'}"
        raise ValueError(f"{what}, got {value!r} in row {row} (counted from 0){_SKIP}")


def accepted_answers(value: Any, name: str, row: int) -> list[str]:
    """The accepted answers, from a list of texts, a single answer, or SQuAD's mapping with `text`."""
    content: Any = value.get("text") if isinstance(value, Mapping) else value
    is_list = isinstance(content, Sequence) and not isinstance(content, str)
    answers = list(content) if is_list else [] if content is None or content != content else [answer_text(content)]
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise ValueError(
            f"data set {name!r}: answers must be one or more texts, none blank, got {value!r} in row {row} (counted "
            f"from 0){_SKIP}"
        )
    return answers
