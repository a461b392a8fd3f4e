# SPDX-License-Identifier: Apache-2.0
"""Language modelling for a small base model: text, copying, and documents with many questions each.

A model of a few million parameters does not learn to look things up from plain text alone. It does from rows whose
later part can only be written by looking back: the same text a second time, or answers to questions.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutput

from ...configuration.nearest_names import check_choice
from ...data.document_ids import document_id, source_ids_of
from ...data.prompts import format_prompt, load_prompts
from ...data.rows import PassageText, distinct_texts, draw_document, read_rows
from ...data.sources import DataSource
from ...data.synthetic_documents import MIN_TOKENS
from ...data.tokenized_rows import TokenizedTexts
from ...modeling.parts.chat_template import before_answer
from ...modeling.parts.text_ids import encode, start_token_id
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..base_trainer import BaseTrainer
from ..forward_redirection import redirected_forward
from ..loading import load_tokenizer, new_language_model, pretrained_language_model
from ..losses import logits_function
from ..schedules import check_length_schedule, scheduled_length

ROW_KINDS = ("text", "copy", "generated", "question_answering")
_SHORTEST_COPY = 16
# Token ids and labels; and of those of a batch, how many tokens were cut off.
_Row = tuple[list[int], list[int]]
_CutRow = tuple[list[int], list[int], int]
_MAX_ATTEMPTS = 100


class _QuestionSource:
    """Contexts of one file, by length, each with its questions."""

    def __init__(self, source: DataSource, data_dir: str | None, seed: int, tokenizer: PreTrainedTokenizerBase):
        by_context: dict[str, list[tuple[str, str]]] = defaultdict(list)
        table = read_rows(source, data_dir, seed)
        for row in table.select(["context", "question", "answers"]).to_pylist():
            context = row["context"] if isinstance(row["context"], str) else PassageText(row["context"])
            if not context.strip():
                continue
            by_context[context].append((row["question"], row["answers"][0]))
        if not by_context:
            raise ValueError(f"source {source.label!r} has no context that is not blank")
        self.document_ids = {*map(document_id, by_context), *source_ids_of(table)}
        pairs = [(encode(tokenizer, context), questions) for context, questions in by_context.items()]
        self.rows = sorted(pairs, key=lambda pair: len(pair[0]))
        self.lengths = [len(ids) for ids, _ in self.rows]

    def draw(self, max_tokens: int, rng: random.Random) -> tuple[list[int], list[tuple[str, str]]]:
        """A context of at most `max_tokens` tokens (the shortest when none is so short) and its questions."""
        return self.rows[rng.randrange(max(1, bisect.bisect_right(self.lengths, max_tokens)))]


class LanguageModelingRows:
    """Makes one row after another; a row is token ids and labels, -100 where nothing is to be learned.

    Args:
        data: its `row_mixture` gives the share of each kind of row, among `ROW_KINDS`. Real text is read from sources
            with the task "continuation", what is copied from those with "reconstruction", questions from those with
            "question_answering", up to `max_questions` about one document.
        tokenizer: makes the token ids; its EOS ends copies and answers.
        seed: draws the rows that a source's `max_samples` keeps.

    Attributes:
        document_ids: ids of all texts and contexts that rows may be drawn from, but for generated ones, and of the
            documents that these are cut from.

    Raises:
        ValueError: an unknown kind of row, shares that are negative or all zero, a kind without a source, or a source
            whose texts are all blank.
    """

    def __init__(self, data: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int = 0):
        mixture = dict(data.row_mixture) if data.row_mixture else dict.fromkeys(ROW_KINDS, 1.0)
        for kind, share in mixture.items():
            check_choice("kind of row in row_mixture:", kind, ROW_KINDS)
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf:
                raise ValueError(f"row_mixture: the share of {kind} must be a number from 0 on, got {share!r}")
        self.kinds = [kind for kind, share in mixture.items() if share > 0]
        self.shares = [mixture[kind] for kind in self.kinds]
        if not self.kinds:
            raise ValueError("row_mixture: at least one share must be above 0")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token, which ends every answer and copy")
        self.data, self.tokenizer = data, tokenizer
        self.start, self.end = start_token_id(tokenizer), tokenizer.eos_token_id
        load_prompts(data.prompts)
        self._read_sources(data.parsed_sources(), data.data_dir, seed)

    def _read_sources(self, sources: Sequence[DataSource], data_dir: str | None, seed: int) -> None:
        self.sources: dict[str, list[tuple[float, Any]]] = {kind: [] for kind in ROW_KINDS}
        self.document_ids: set[str] = set()
        for source in sources:
            weight = 1.0 if source.weight is None else source.weight
            if source.generated:
                texts: Any = source
                if "question_answering" in source.tasks:
                    self.sources["generated"].append((weight, source))
            else:
                wanted = {"continuation", "reconstruction"} & set(source.tasks)
                texts = None
                if wanted:
                    table = read_rows(source, data_dir, seed)
                    found = [text for text in distinct_texts(table) if text.strip()]
                    if not found:
                        raise ValueError(f"source {source.label!r} has no text that is not blank")
                    self.document_ids.update(map(document_id, found), source_ids_of(table))
                    texts = TokenizedTexts(found, self.tokenizer)
                if "question_answering" in source.tasks:
                    questions = _QuestionSource(source, data_dir, seed, self.tokenizer)
                    self.document_ids.update(questions.document_ids)
                    self.sources["question_answering"].append((weight, questions))
                if "continuation" in source.tasks:
                    self.sources["text"].append((weight, texts))
            if "reconstruction" in source.tasks:
                self.sources["copy"].append((weight, texts))
        for kind in self.kinds:
            if not self.sources[kind]:
                raise ValueError(f"row_mixture asks for {kind} rows, but no source has the task for them")

    def row(self, max_tokens: int, rng: random.Random) -> _Row:
        """Make a row from a document of at most `max_tokens` tokens (text rows: up to twice as many)."""
        kind = rng.choices(self.kinds, self.shares)[0]
        weights, sources = zip(*self.sources[kind], strict=True)
        source = rng.choices(sources, weights)[0]
        if kind == "text":
            ids = [self.start, *source.window(rng.randint(max_tokens // 2, 2 * max_tokens), rng)]
            return ids, ids
        if kind == "copy":
            return self._copy_row(source, max_tokens, rng)
        if kind == "generated":
            document = draw_document(source, max_tokens, rng, self.tokenizer)
            questions = [(question.question, question.answer) for question in document.questions]
            return self._question_row(encode(self.tokenizer, document.text), questions[: self.data.max_questions], rng)
        ids, questions = source.draw(max_tokens, rng)
        return self._question_row(ids, rng.sample(questions, min(len(questions), self.data.max_questions)), rng)

    def _copy_row(self, source: DataSource | TokenizedTexts, max_tokens: int, rng: random.Random) -> _Row:
        if isinstance(source, DataSource):
            text = encode(self.tokenizer, draw_document(source, max_tokens, rng, self.tokenizer).text)
        else:
            text = source.window(rng.randint(min(_SHORTEST_COPY, max_tokens), max_tokens), rng)
        prompt = encode(self.tokenizer, self._prompt("reconstruction", "", rng))
        target = [*text, self.end]
        return [self.start, *text, *prompt, *target], [-100] * (1 + len(text) + len(prompt)) + target

    def _question_row(self, context: list[int], questions: Sequence[tuple[str, str]], rng: random.Random) -> _Row:
        ids = [self.start, *context]
        labels = [-100] * len(ids)
        for question, answer in questions:
            text = self._prompt("question_answering", question, rng)
            prompt = encode(self.tokenizer, text)
            answer = before_answer(text, self.data.prompt_format) + answer.strip()
            target = [*encode(self.tokenizer, answer), self.end]
            ids += prompt + target
            labels += [-100] * len(prompt) + target
        return ids, labels

    def _prompt(self, task: str, question: str, rng: random.Random) -> str:
        template_rng = None if self.data.canonical_prompts else rng
        return format_prompt(task, question, rng=template_rng, path=self.data.prompts)


class LanguageModelingBatches(Dataset):
    """Whole batches of about `tokens_per_batch` tokens; batch i is a function of i and the seed alone.

    The rows of `batches_per_step` batches are made together, then sorted by length and dealt out in that order, so
    that one optimizer step sees every kind of row and its batches hold little padding.

    Args:
        rows: makes the rows.
        num_batches: number of batches of the whole training.
        tokens_per_batch: real tokens in a batch, roughly.
        batches_per_step: gradient accumulation steps.
        length_schedule: (fraction of training, document length limit in tokens) pairs, linear in between.
        max_length: rows longer than this many tokens lose their end, which is counted (`num_cut` of a batch); those
            that then have nothing to learn are left out.
        seed: everything is drawn from it.
    """

    def __init__(
        self,
        rows: LanguageModelingRows,
        num_batches: int,
        tokens_per_batch: int,
        batches_per_step: int = 1,
        length_schedule: Sequence[Sequence[float]] = ((0.0, 96),),
        max_length: int = 2048,
        seed: int = 0,
    ):
        points = check_length_schedule(length_schedule, MIN_TOKENS)
        if tokens_per_batch < 1 or batches_per_step < 1 or num_batches < 1:
            raise ValueError(
                "num_batches, tokens_per_batch and batches_per_step must be at least 1, "
                f"got {num_batches}, {tokens_per_batch}, {batches_per_step}"
            )
        self.rows, self.num_batches, self.tokens_per_batch = rows, num_batches, tokens_per_batch
        self.batches_per_step, self.points, self.max_length, self.seed = batches_per_step, points, max_length, seed
        self._step: tuple[int, list[list[_CutRow]]] = (-1, [])

    def __len__(self) -> int:
        return self.num_batches

    def length_limit(self, index: int) -> int:
        """Document length limit of batch `index` in tokens."""
        return scheduled_length(self.points, index / self.num_batches)

    def __getitem__(self, index: int) -> list[_CutRow]:
        step = index // self.batches_per_step
        if self._step[0] != step:
            self._step = (step, self._make_step(step))
        return self._step[1][index % self.batches_per_step]

    def _make_step(self, step: int) -> list[list[_CutRow]]:
        rng = random.Random(f"{self.seed}/{step}")
        limit = self.length_limit(step * self.batches_per_step)
        budget = self.tokens_per_batch * self.batches_per_step
        rows: list[_CutRow] = []
        total = num_empty = 0
        while total < budget:
            ids, labels = self.rows.row(limit, rng)
            cut = labels[: self.max_length]
            if all(label == -100 for label in cut):
                num_empty += 1
                if num_empty == _MAX_ATTEMPTS:
                    raise ValueError(
                        f"{_MAX_ATTEMPTS} rows in a row had nothing to learn within the model's {self.max_length} "
                        f"positions, the last of {len(ids)} tokens: leave out longer contexts, or take another base"
                    )
                continue
            num_empty = 0
            rows.append((ids[: self.max_length], cut, max(0, len(ids) - self.max_length)))
            total += len(rows[-1][0])
        rows.sort(key=lambda row: len(row[0]))
        return _deal(rows, self.batches_per_step)


def _deal(rows: list[_CutRow], num_batches: int) -> list[list[_CutRow]]:
    """Cut rows, sorted by length, into batches with the least padding in all; each batch has a row."""
    while len(rows) < num_batches:
        rows = [rows[0], *rows]
    stride = -(-len(rows) // 64)  # few places to cut keep this cheap for big batches
    ends = sorted({*range(stride, len(rows), stride), *range(1, num_batches + 1), len(rows)})
    # cost[end]: padded size of rows[:end] in the number of batches so far, and where they are cut
    cost: dict[int, tuple[int, list[int]]] = {end: (end * len(rows[end - 1][0]), [0]) for end in ends}
    for count in range(1, num_batches):
        cost = {
            end: min(
                (size + (end - start) * len(rows[end - 1][0]), [*cuts, start])
                for start, (size, cuts) in cost.items()
                if count <= start < end
            )
            for end in ends
            if end > count
        }
    cuts = [*cost[len(rows)][1], len(rows)]
    return [rows[start:end] for start, end in itertools.pairwise(cuts)]


class LanguageModelingCollator:
    """Pads one batch of `LanguageModelingBatches` on the right.

    Args:
        pad_token_id: id that fills up; causal attention never looks at it, so there is no mask.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, examples: Sequence[list[_CutRow]]) -> dict[str, Any]:
        """Return input_ids and labels, each `(batch_size, sequence_length)`, and the numbers of tokens cut off."""
        rows = [row for example in examples for row in example]
        width = max(len(ids) for ids, *_ in rows)
        return {
            "input_ids": torch.tensor([ids + [self.pad_token_id] * (width - len(ids)) for ids, *_ in rows]),
            "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels, _ in rows]),
            "num_cut": [cut for *_, cut in rows],
        }


class LanguageModelingTrainer(BaseTrainer):
    """A `transformers.Trainer` that computes logits only where there is a label, and knows Muon.

    In these rows one token in five has a label; a fused head over all positions would spend most of its time on
    the others. The dataset comes in its own order: it draws at random itself.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Cross-entropy summed over labelled positions, divided by their number in the whole step."""
        labels = inputs["labels"][:, 1:]
        labelled = labels != -100
        module = self.accelerator.unwrap_model(model)

        def step(input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            states = module.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            logits = logits_function(module)(states[:, :-1][labelled])
            return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

        with self.accelerator.autocast():
            total = redirected_forward(model, module, step, input_ids=inputs["input_ids"], targets=labels[labelled])
        count = labelled.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = total / count.clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        return torch.utils.data.SequentialSampler(rows)


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> LanguageModelingTrainer:
    """Trainer of a base language model, new (`model_config`) or pretrained (`base`)."""
    if (model_args.model_config is None) == (model_args.base is None):
        raise ValueError("language_modeling needs either model_config (a new model) or base (a pretrained one)")
    if args.max_steps < 1:
        raise ValueError(f"language_modeling needs max_steps: its rows never end (got {args.max_steps})")
    longest = data_args.max_context_tokens
    if not data_args.length_schedule and longest < MIN_TOKENS:
        raise ValueError(f"max_context_tokens of language_modeling must be at least {MIN_TOKENS}, got {longest}")
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    if model_args.base is not None:
        model = pretrained_language_model(model_args)
    else:
        model = new_language_model(model_args, tokenizer)
    if not hasattr(model.config, "max_position_embeddings"):
        raise ValueError(
            f"language_modeling cuts rows to max_position_embeddings, which {type(model.config).__name__} does not "
            "have: take another model"
        )
    rows = LanguageModelingRows(data_args, tokenizer, args.seed)
    batches = LanguageModelingBatches(
        rows,
        num_batches=args.max_steps * args.gradient_accumulation_steps * args.world_size,
        tokens_per_batch=data_args.tokens_per_batch,
        batches_per_step=args.gradient_accumulation_steps * args.world_size,
        length_schedule=data_args.length_schedule or [(0.0, longest)],
        max_length=model.config.max_position_embeddings,
        seed=args.seed,
    )
    args.per_device_train_batch_size = 1
    trainer = LanguageModelingTrainer(
        model=model,
        args=args,
        train_dataset=batches,
        data_collator=LanguageModelingCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )
    trainer.documents.trained |= rows.document_ids
    return trainer
