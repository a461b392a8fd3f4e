# SPDX-License-Identifier: Apache-2.0
"""Examples for training: contexts with prompts and targets, drawn from sources."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ...data.prompts import format_prompt
from ...data.rows import FileSource, draw_document, places
from ...data.sources import DataSource
from ...data.synthetic_documents import GeneratedDocument
from ...modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from ...modeling.parts.text_ids import (
    DOCUMENT_END,
    before_answer,
    cut_passages,
    encode,
    prefix_ids,
    prompt_ids,
    text_tokenizer,
)
from ..fields import DataArguments, scheduled_length

# Their contexts belong to a question or a summary, and cannot be made shorter.
_WHOLE_TASKS = {"question_answering", "summarization"}


class CompressionDataset(Dataset):
    """Examples for the collators, each a function of its index and the seed, so that training resumes exactly.

    An example has `head_ids` (in front of the context or its slots), `context_ids`, `passages` (compressed apart, or
    `None`), `prompt_ids`, `target_ids`, `more_turns`, `task`, `id`, `num_cut` (tokens that the limits cut off),
    `index`, `documents` (ids of the context's texts), and where the encoder has its own tokens `encoder_context_ids`
    and `encoder_passages`.

    Args:
        data: the sources, and how examples are made of them.
        num_examples: length of the data set; `None` for as many as there are rows, without weights each row once.
        batch_size: rows in a batch; `data.group_batches` batches are sorted by length together, and dealt out at
            random.
        context_tokenizer: the encoder's, where it reads other tokens than the decoder.
        ratio: context tokens per slot, by which lengths are counted.
    """

    # Fewest tokens that a row's text has; shorter ones are passed over.
    shortest_row = 2
    # The tasks that all sources must have; any where there are none.
    tasks: frozenset[str] = frozenset()

    def __init__(
        self,
        data: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        num_examples: int | None = None,
        *,
        batch_size: int = 1,
        seed: int = 0,
        context_tokenizer: PreTrainedTokenizerBase | None = None,
        ratio: float = 1.0,
    ):
        if data.prompt_format == "chat":
            # What a document says ends no turn.
            tokenizer = text_tokenizer(tokenizer)
        self.data, self.tokenizer, self.context_tokenizer = data, tokenizer, context_tokenizer
        self.end, self.seed, self.epoch = tokenizer.eos_token_id, seed, 0
        self.batch_size, self.group_size, self.ratio = batch_size, batch_size * data.group_batches, ratio
        self._group: tuple[int, list[dict[str, Any]]] = (-1, [])
        self.shortest, self.longest = self._lengths()
        self.prefix_ids = prefix_ids(tokenizer, data.context_prefix)
        self.length_points = data.length_schedule or [[0.0, self.longest]]
        entries = data.parsed_sources()
        for entry in entries:
            if self.tasks and set(entry.tasks) != self.tasks:
                what = f"the tasks of source {entry.label!r} must be {sorted(self.tasks)} here"
                raise ValueError(f"{what}, got {list(entry.tasks)}")
        offered = {task for entry in entries for task in entry.tasks}
        if missing := {task for _, tasks in data.task_schedule or () for task in tasks} - offered:
            raise ValueError(f"task_schedule has {sorted(missing)}; the tasks of the sources are {sorted(offered)}")
        self.sources = [
            entry if entry.generated else FileSource(entry, data.data_dir, seed, tokenizer) for entry in entries
        ]
        self._deal(entries, num_examples)

    def _lengths(self) -> tuple[int, int]:
        """Shortest window of a plain text and longest context, in tokens."""
        return self.data.min_context_tokens, self.data.max_context_tokens

    def _deal(self, entries: Sequence[DataSource], num_examples: int | None) -> None:
        """Fix, for every index, its source and how many examples of that source came before it."""
        sizes: list[Any] = [None if isinstance(source, DataSource) else source.num_rows for source in self.sources]
        missing = [entry.label for entry in entries if entry.weight is None]
        has_weights = len(missing) < len(entries)
        if has_weights and missing:
            raise ValueError(f"give a weight to every source or to none; {missing} have none")
        if None in sizes and not (has_weights and num_examples):
            raise ValueError("generated documents never end: give a weight to every source, and max_steps")
        is_each_row_once = num_examples is None and not has_weights and self.data.task_schedule is None
        num_examples = sum(sizes) if num_examples is None else num_examples
        shares = np.array([entry.weight if has_weights else size for entry, size in zip(entries, sizes, strict=True)])
        generator = np.random.default_rng([self.seed, 0])
        if is_each_row_once:
            phases = [generator.permutation(np.repeat(np.arange(len(sizes)), sizes))]
        else:
            phases = []
            for size, tasks in self._phases(num_examples):
                serves = [tasks is None or not set(tasks).isdisjoint(entry.tasks) for entry in entries]
                probabilities = shares * np.array(serves)
                phases.append(generator.choice(len(entries), size=size, p=probabilities / probabilities.sum()))
        self.source_of = np.concatenate(phases).astype(np.int32)
        self.turn_of = np.zeros(num_examples, dtype=np.int64)
        for index in range(len(entries)):
            is_own = self.source_of == index
            self.turn_of[is_own] = np.arange(is_own.sum())
        # Of each source in one pass.
        self._turns = np.bincount(self.source_of, minlength=len(entries))
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def _phases(self, num_examples: int) -> list[tuple[int, list[str] | None]]:
        """Number of examples and allowed tasks of each part of the training, one after the other."""
        if self.data.task_schedule is None:
            return [(num_examples, None)]
        # The first index whose fraction has been reached, as in `_tasks_at`.
        starts = [math.ceil(fraction * num_examples) for fraction, _ in self.data.task_schedule]
        sizes = np.diff([*starts, num_examples]).tolist()
        return [(size, tasks) for size, (_, tasks) in zip(sizes, self.data.task_schedule, strict=True)]

    def _tasks_at(self, index: int, tasks: Sequence[str]) -> list[str]:
        """Return the tasks of a source that an example may have, as often as the source names them."""
        if self.data.task_per_batch:
            index -= index % self.batch_size
        tasks = list(tasks)
        if self.data.task_schedule is not None:
            reached = [allowed for fraction, allowed in self.data.task_schedule if fraction * len(self) <= index]
            tasks = [task for task in tasks if task in reached[-1]]
        return [random.Random(f"{self._seed}/task/{index}").choice(tasks)] if self.data.task_per_batch else tasks

    def set_epoch(self, epoch: int) -> None:
        """Give the examples of another pass over the rows: in another order, and with all that is drawn drawn anew."""
        if epoch != self.epoch:
            self.epoch, self._group = epoch, (-1, [])

    @property
    def _seed(self) -> str:
        """Seed of an epoch's examples, which their index completes."""
        return f"{self.seed}/epoch {self.epoch}" if self.epoch else str(self.seed)

    def __len__(self) -> int:
        return len(self.source_of)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the example at `index`."""
        if self.group_size == 1:
            return self._in_all_tokens(index)
        group, place = divmod(index, self.group_size)
        if self._group[0] != group:
            self._group = (group, self._sorted_group(group))
        return self._group[1][place]

    def _sorted_group(self, group: int) -> list[dict[str, Any]]:
        first = group * self.group_size
        examples = [self._in_all_tokens(index) for index in range(first, min(first + self.group_size, len(self)))]
        examples.sort(key=self.num_tokens)
        batches = [examples[start : start + self.batch_size] for start in range(0, len(examples), self.batch_size)]
        # Only full batches change places: the last group's short one has to stay the last.
        num_full = len(examples) // self.batch_size
        order = random.Random(f"{self._seed}/group/{group}").sample(range(num_full), num_full)
        return [example for batch in (*order, *range(num_full, len(batches))) for example in batches[batch]]

    def num_tokens(self, example: Mapping[str, Any]) -> float:
        """Return the length of an example as the decoder reads it: slots of the context, and all turns."""
        turns = sum(len(prompt) + len(target) for prompt, target in example["more_turns"])
        return len(example["context_ids"]) / self.ratio + len(example["prompt_ids"] + example["target_ids"]) + turns

    def _in_all_tokens(self, index: int) -> dict[str, Any]:
        """The example at `index`, its context also in the tokens of an encoder with its own."""
        example = self._example_at(index)
        if self.context_tokenizer is not None:
            tokenizers = (self.tokenizer, self.context_tokenizer)
            example["encoder_context_ids"] = in_encoder_tokens(example["context_ids"], *tokenizers)
            passages = example.get("passages") or ()
            example["encoder_passages"] = [in_encoder_tokens(passage, *tokenizers) for passage in passages]
        return example

    def _example_at(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self._seed}/{index}")
        limit = min(self.longest, scheduled_length(self.length_points, index / len(self)))
        # Of any source: one may have few short contexts, or none.
        drawn = (self._placed(place, index, limit, rng) for place in places(index, len(self), rng))
        example = next((example for example in drawn if example is not None), None)
        if example is None:
            raise ValueError(
                f"all rows are longer than the {limit} tokens that length_schedule has for example {index}"
            )
        return {**example, "index": index + self.epoch * len(self)}

    def _placed(self, place: int, index: int, limit: int, rng: random.Random) -> dict[str, Any] | None:
        """The example at `index` of the row at `place`; `None` where its context is too long for the schedule yet, or
        its source has none of the tasks."""
        position = int(self.source_of[place])
        source = self.sources[position]
        if isinstance(source, DataSource):
            tasks = self._tasks_at(index, source.tasks)
            return {**self._from_generated(source, tasks, limit, rng), "documents": []} if tasks else None
        tasks = self._tasks_at(index, source.source.tasks)
        turn = int(self.turn_of[place]) + self.epoch * int(self._turns[position])
        return self._from_file(source, tasks, position, turn, limit, rng) if tasks else None

    def as_dataset(self) -> datasets.Dataset:
        """Return the same examples as a `datasets.Dataset`, which `trl.SFTTrainer` needs; each is made on demand."""
        return datasets.Dataset.from_dict({"index": range(len(self))}).with_transform(self._examples_at)

    def _examples_at(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        examples = [self[index] for index in batch["index"]]
        return {key: [example[key] for example in examples] for key in examples[0]}

    def _row(self, position: int, num_rows: int, turn: int) -> int:
        epoch, place = divmod(turn, num_rows)
        key = (position, epoch)
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[0] != position}
            self._orders[key] = np.random.default_rng([self.seed, 1, position, epoch]).permutation(num_rows)
        return int(self._orders[key][place])

    def _draw(self, source: DataSource, limit: int, rng: random.Random) -> GeneratedDocument:
        return draw_document(source, limit, rng, self.tokenizer)

    def _from_generated(
        self, source: DataSource, tasks: Sequence[str], limit: int, rng: random.Random
    ) -> dict[str, Any]:
        task = rng.choice(tasks)
        limit = self._room(task, limit)
        document = self._draw(source, limit, rng)
        ids = encode(self.tokenizer, document.text)
        identifier = f"generated/{document.kind}/{document.seed}"
        if task != "question_answering":
            return self._text_example(task, ids, limit, identifier, rng)
        questions = document.questions[: self.data.questions_per_example]
        return self._example(task, ids, [(q.question, q.answer, True) for q in questions], limit, identifier, rng)

    def _from_file(
        self, source: FileSource, tasks: Sequence[str], position: int, turn: int, limit: int, rng: random.Random
    ) -> dict[str, Any] | None:
        task = rng.choice(tasks)
        is_window = task not in _WHOLE_TASKS
        limit = self._room(task, limit if is_window or self.data.schedule_contexts else self.longest)
        texts = source.texts(task)
        for row in places(self._row(position, source.num_rows, turn), source.num_rows, rng):
            text = source.text_of(task, row)
            ids = texts[text]
            is_too_long = not is_window and len(ids) > limit
            if is_too_long and self.data.schedule_contexts:
                return None
            if len(ids) >= self.shortest_row and not (is_too_long and self.data.overlong_contexts == "skip"):
                break
        else:
            raise ValueError(
                f"source {source.source.label!r}: all rows are shorter than {self.shortest_row} or longer than "
                f"{limit} tokens"
            )
        identifier = source.identifier(row)
        fields: dict[str, Any] = {"documents": source.document_ids(task, row)}
        if is_window:
            return fields | self._text_example(task, ids.tolist(), limit, identifier, rng, source.ends(task, row))
        texts_of, context_ids, passages = [text], ids.tolist(), texts.passages(text)
        if task == "summarization":
            pairs = [("", source.value("summary", row), source.target_ends(row))]
            example = self._example(task, context_ids, pairs, limit, identifier, rng)
            return fields | self._with_passages(example, passages, limit)
        if source.source.contexts_per_document > 1:
            texts_of, context_ids = self._joined_contexts(source, text, limit, rng)
            rows_of = (source.rows_of_text[text][0] for text in texts_of)
            fields = {"documents": [name for first in rows_of for name in source.document_ids(task, first)]}
            passages = [passage for text in texts_of for passage in texts.passages(text)]
            stays_apart = source.source.separate_passages or source.has_passages
            passages = passages if stays_apart else [context_ids]
        others = [other for text in texts_of for other in source.rows_of_text[text] if other != row]
        rows = [row, *rng.sample(others, min(len(others), self.data.questions_per_example - 1))]
        pairs = []
        for r in rows:
            answers = source.value("answers", r)
            answer = answers[0] if self.data.first_answer else rng.choice(answers)
            pairs.append((source.value("question", r), answer, source.target_ends(r)))
        example = self._example(task, context_ids, pairs, limit, identifier, rng)
        return fields | self._with_passages(example, passages, limit)

    def _with_passages(self, example: dict[str, Any], passages: list[list[int]], limit: int) -> dict[str, Any]:
        """An example whose context is cut where its passages end, if there are several."""
        if len(passages) < 2:
            return example
        # Each has the prefix, as every document of a question does.
        room = max(1, limit - (len(passages) - 1) * len(self.prefix_ids))
        kept = cut_passages(passages, room, self.data.overlong_contexts == "truncate_left")
        num_cut = max(example["num_cut"], sum(map(len, passages)) - sum(map(len, kept)))
        return {**example, "passages": [[*self.prefix_ids, *ids] for ids in kept], "num_cut": num_cut}

    def _joined_contexts(
        self, source: FileSource, own: int, limit: int, rng: random.Random
    ) -> tuple[list[int], list[int]]:
        """A context among neighbours of its file, as many as are drawn and fit: their places and all ids."""
        texts = source.texts("question_answering")
        count = rng.randint(1, source.source.contexts_per_document)
        first = max(0, min(own - rng.randrange(count), len(texts) - count))
        between = encode(self.tokenizer, DOCUMENT_END)
        taken = list(range(first, min(first + count, len(texts))))
        while len(taken) > 1 and sum(len(texts[text]) + len(between) for text in taken) > limit:
            # The end that is farther from the row's own context goes.
            taken.pop(0 if own - taken[0] > taken[-1] - own else -1)
        ids = texts[taken[0]].tolist()
        for text in taken[1:]:
            ids += [*between, *texts[text].tolist()]
        return taken, ids

    def _room(self, task: str, limit: int) -> int:
        """Return the tokens left for a context's text after its prefix or the EOS that ends its reconstruction."""
        if task in _WHOLE_TASKS:
            return max(1, limit - len(self.prefix_ids))
        return min(limit, self.data.max_target_tokens - 1) if task == "reconstruction" else limit

    def _text_example(
        self, task: str, ids: list[int], limit: int, identifier: str, rng: random.Random, text_ends: bool = True
    ) -> dict[str, Any]:
        """A random window of a text: to repeat, or to be read up to some place and then continued."""
        longest, ends = max(1, min(limit, len(ids))), True
        length = rng.randint(min(self.shortest, longest), longest)
        if task == "reconstruction":
            start = rng.randrange(len(ids) - length + 1)
            context = target = ids[start : start + length]
        else:
            # A text that is too short for both gives up context first, down to half of it.
            length = min(length, max(1, len(ids) // 2, len(ids) - self.data.max_target_tokens + 1))
            start = rng.randrange(max(1, len(ids) - length - self.data.max_target_tokens + 2))
            context = ids[start : start + length]
            end = start + length + self.data.max_target_tokens - 1
            # A text that is cut here does not end here: no EOS is learned.
            ends = end >= len(ids) and text_ends
            target = ids[start + length : end + (not ends)]
        return self._finish(task, context, [(self._prompt(task, "", rng), target, ends)], limit, identifier)

    def _example(
        self,
        task: str,
        ids: list[int],
        pairs: Sequence[tuple[str, str, bool]],
        limit: int,
        identifier: str,
        rng: random.Random,
    ) -> dict[str, Any]:
        """An example of (question, answer, whether the answer comes to an end)."""
        turns = []
        for question, answer, ends in pairs:
            prompt = self._prompt(task, question, rng)
            answer = before_answer(prompt, self.data.prompt_format) + answer.strip()
            turns.append((prompt, encode(self.tokenizer, answer), ends))
        return self._finish(task, ids, turns, limit, identifier)

    def _finish(
        self, task: str, context: list[int], turns: Sequence[tuple[str, list[int], bool]], limit: int, identifier: str
    ) -> dict[str, Any]:
        """An example of prompts, their targets, and whether each target comes to an end."""
        num_cut = max(0, len(context) - limit)
        kept = context[num_cut:] if self.data.overlong_contexts == "truncate_left" else context[:limit]
        prefix = self.prefix_ids if task in _WHOLE_TASKS else []
        prompts = prompt_ids(self.tokenizer, [prompt for prompt, *_ in turns], self.data.prompt_format)
        ended = []
        for prompt, (_, target, ends) in zip(prompts.turns, turns, strict=True):
            target = [*target, prompts.end] if ends else target
            num_cut += max(0, len(target) - self.data.max_target_tokens)
            ended.append((prompt, target[: self.data.max_target_tokens]))
        return {
            "head_ids": prompts.head,
            "context_ids": [*prefix, *kept],
            "prompt_ids": ended[0][0],
            "target_ids": ended[0][1],
            "more_turns": ended[1:],
            "task": task,
            "id": identifier,
            "num_cut": num_cut,
            "passages": None,
        }

    def _prompt(self, task: str, question: str, rng: random.Random) -> str:
        return format_prompt(task, question, rng=None if self.data.canonical_prompts else rng, path=self.data.prompts)
