# SPDX-License-Identifier: Apache-2.0
"""Runs a model on batches of samples under one condition: scores given targets, or writes its own."""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor

from ..configuration.nearest_names import check_choice
from ..modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from ..modeling.parts.prompting import context_start_ids, restored_ids
from .alternatives import BM25, TASKS_OF_ALTERNATIVE, bm25_context, cut_context
from .benchmark_metrics import BENCHMARK_SCORE, BenchmarkMetric
from .bert_score import BertScorer
from .bootstrap import Statistic, mean_statistic, perplexity_statistic
from .metrics import (
    bleu_counts,
    bleu_of_counts,
    prefix_exact_match,
    rouge_lsum,
    rouge_scores,
    squad_scores,
    substring_accuracy,
    summed_nll,
)
from .samples import Sample

_IGNORED = -100
# By sample, in the order of a tally's rows.
_COSTS = ("slots", "memory_bytes", "decoder_positions")
_SECONDS = ("compress", "answer")
# What a model's own files say, and what the evaluation itself decides.
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version")
_DECIDED = ("max_new_tokens", "max_length", "min_length", "num_return_sequences", "return_dict_in_generate")


def generation_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a generation configuration that an evaluation may take; ids of a model are left out.

    Raises:
        ValueError: an unknown field, one that the evaluation decides itself, or a value that is not allowed.
    """
    fields = {name: value for name, value in given.items() if name not in _IDS and not name.startswith("_")}
    known = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    for name in fields:
        check_choice("field of the generation configuration:", name, known)
        if name in _DECIDED:
            raise ValueError(f"the evaluation decides {name} itself: leave it out of the generation configuration")
    GenerationConfig(**fields).validate(strict=False)
    return fields


@dataclass(frozen=True)
class Condition:
    """How the context reaches the model.

    Args:
        name: the condition's name in the report.
        model: the model that reads and writes.
        ratio: compress at this ratio; `None` for the conditions without compression.
        with_context: without compression: whether the context stands in front of the prompt, in words.
        task_token: without compression: whether the method's task token stands in front of the prompt, behind the
            context.
        active: makes the context manager to run the model in.
        selection: one of `ALTERNATIVES`: keeps so many of the context's tokens as there are slots at `budget_ratio`.
        budget_ratio: a ratio that the contexts are compressed at, too.
    """

    name: str
    model: PreTrainedModel
    ratio: int | None = None
    with_context: bool = False
    task_token: bool = False
    active: Callable[[], AbstractContextManager[Any]] = nullcontext
    selection: str | None = None
    budget_ratio: int | None = None

    def serves(self, task: str) -> bool:
        """Whether the condition says anything about a task."""
        return self.selection is None or task in TASKS_OF_ALTERNATIVE[self.selection]


class GivenTokens:
    """What a condition makes of tokens that it is given one after another, by sample.

    Args:
        num_samples: how many there are.
    """

    def __init__(self, num_samples: int):
        self.nll, self.hits, self.counts = np.zeros((3, num_samples))

    def state(self, row: int) -> list[float]:
        """What is known of a sample."""
        return [float(values[row]) for values in (self.nll, self.hits, self.counts)]

    def restore(self, row: int, state: Sequence[float]) -> None:
        """Take over what `state` gave."""
        self.nll[row], self.hits[row], self.counts[row] = state

    def token_accuracy(self) -> Statistic:
        """Share of the tokens that were the likeliest in their place, 0 to 100."""
        return mean_statistic(100 * self.hits / self.counts, self.counts)

    def perplexity(self) -> Statistic:
        """Perplexity of the tokens."""
        return perplexity_statistic(self.nll, self.counts)


@dataclass
class Tally:
    """What a condition has scored on one task of one data set; every list has an entry for each sample, in order.

    Args:
        references: the accepted texts of each sample.
        predictions: what was written, if anything was.
        targets: scores of the given targets.
        recovered: scores of what was written, given once more.
        written_ids: token ids of what was written.
        target_ids: token ids of what should have been.
        used: by sample, `(5, num_samples)`: number of slots and their bytes, NaN where nothing was compressed; what
            the decoder has read when it starts to write, slots included; seconds to compress the document, at all
            ratios of the evaluation at once; and seconds to read and write, its share of the batch's.
        metrics: how a benchmark scores each sample, `None` where none does.
    """

    references: list[list[str]]
    predictions: list[str] = field(default_factory=list)
    targets: Any = None
    recovered: Any = None
    written_ids: list[list[int]] = field(default_factory=list)
    target_ids: list[list[int]] = field(default_factory=list)
    used: np.ndarray = field(default_factory=lambda: np.zeros((5, 0)))
    metrics: list[BenchmarkMetric | None] = field(default_factory=list)

    def statistics(self, task: str, bert_scorer: BertScorer | None = None) -> dict[str, Statistic]:
        """The task's metrics."""
        found: dict[str, Statistic] = {}
        if task == "question_answering":
            metrics = [metric for metric in self.metrics if metric is not None]
            if metrics and len(metrics) == len(self.metrics):
                rows = zip(metrics, self.predictions, self.references, strict=True)
                found[BENCHMARK_SCORE] = mean_statistic([metric.score(text, wanted) for metric, text, wanted in rows])
            found |= self._means(squad_scores)
            found |= self._means(lambda *texts: {"substring_accuracy": substring_accuracy(*texts)})
            found |= self._means(rouge_scores)
            if self.targets is not None:
                found["answer_perplexity"] = self.targets.perplexity()
        elif task == "summarisation":
            found |= self._means(rouge_scores)
            found |= self._means(lambda *texts: {"rougeLsum": rouge_lsum(*texts)})
        else:
            found |= {"token_accuracy": self.targets.token_accuracy(), "perplexity": self.targets.perplexity()}
            if self.predictions:
                found |= self._restoration()
        if bert_scorer is not None and self.predictions:
            found |= self._means(lambda *texts: {"bert_score_f1": bert_scorer.score(*texts)})
        return found

    def _restoration(self) -> dict[str, Statistic]:
        pairs = zip(self.predictions, self.references, strict=True)
        ids = zip(self.written_ids, self.target_ids, strict=True)
        return {
            "bleu": Statistic(np.array([bleu_counts(*pair) for pair in pairs], dtype=np.float64), bleu_of_counts),
            **self._means(rouge_scores),
            "prefix_exact_match": mean_statistic([prefix_exact_match([wrote], [target]) for wrote, target in ids]),
            "recovered_perplexity": self.recovered.perplexity(),
        }

    def _means(self, score: Callable[[list[str], list[list[str]]], dict[str, float]]) -> dict[str, Statistic]:
        """Statistics of scores that are means over samples, from a function of a list of samples."""
        texts = zip(self.predictions, self.references, strict=True)
        by_sample = [score([prediction], [references]) for prediction, references in texts]
        return {name: mean_statistic([scores[name] for scores in by_sample]) for name in by_sample[0]}

    def costs(self, documents: Sequence[int]) -> dict[str, float]:
        """Mean slots and bytes of a document's memory, and decoder positions of a question; without those unknown.

        Args:
            documents: each sample's document; one that is asked several times counts once.
        """
        slots, memory_bytes, positions, *_ = self.used
        return _known_means(_COSTS, _of_documents(slots, documents), _of_documents(memory_bytes, documents), positions)

    def seconds(self, documents: Sequence[int]) -> dict[str, float]:
        """Mean seconds to `compress` a document, where it was, and to `answer` a question.

        Args:
            documents: as in `costs`.
        """
        return _known_means(_SECONDS, _of_documents(self.used[3], documents), self.used[4])

    def state(self, row: int) -> dict[str, Any]:
        """All that is known of a sample, as JSON holds it."""
        found: dict[str, Any] = {"used": self.used[:, row].tolist()}
        if self.predictions:
            found |= {"prediction": self.predictions[row], "written": self.written_ids[row]}
        for name in ("targets", "recovered"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name).state(row)
        return found

    def restore(self, row: int, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""
        self.used[:, row] = state["used"]
        if self.predictions:
            self.predictions[row], self.written_ids[row] = state["prediction"], state["written"]
        for name in ("targets", "recovered"):
            if getattr(self, name) is not None:
                getattr(self, name).restore(row, state[name])


def _of_documents(values: np.ndarray, documents: Sequence[int]) -> np.ndarray:
    """Of each document the value of its first sample."""
    return values[[documents.index(document) for document in dict.fromkeys(documents)]]


def _known_means(names: Sequence[str], *values: np.ndarray) -> dict[str, float]:
    means = {name: float(numbers.mean()) for name, numbers in zip(names, values, strict=True)}
    return {name: mean for name, mean in means.items() if not np.isnan(mean)}


class Scorer:
    """Scores batches for every condition; a context is compressed once, whatever the number of ratios and questions.

    Args:
        compressor: compresses the contexts.
        tokenizer: pads and decodes.
        conditions: what to compare.
        start_token_id: the id that text starts with.
        task_start_ids: task -> the method's own start token, which takes the place of `start_token_id` after slots.
        allow_untrained_ratio: also compress at ratios that the checkpoint was not trained for.
        bert_scorer: also gives everything that is written a BERTScore.
        repetition_penalty: on tokens that were already written, those of the prompt apart; none when `None`.
        generation: what else everything is written with, see `generation_fields`.
        seed: of what is sampled.
    """

    def __init__(
        self,
        compressor: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        conditions: Sequence[Condition],
        start_token_id: int,
        task_start_ids: dict[str, int] | None = None,
        allow_untrained_ratio: bool = False,
        bert_scorer: BertScorer | None = None,
        repetition_penalty: float | None = None,
        generation: Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        self.compressor = compressor
        self.tokenizer = tokenizer
        self.conditions = list(conditions)
        self.start_token_id = start_token_id
        self.task_start_ids = task_start_ids or {}
        self.allow_untrained_ratio = allow_untrained_ratio
        self.bert_scorer = bert_scorer
        self.repetition_penalty = repetition_penalty
        self.generation, self.seed = generation_fields(generation or {}), seed
        eos = tokenizer.eos_token_id
        self.pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @torch.inference_mode()
    def score(
        self,
        task: str,
        samples: Sequence[Sample],
        batch_size: int,
        max_new_tokens: int | None = None,
        reconstruction_bleu: bool = False,
        on_batch: Callable[[list[int], dict[str, Tally]], Any] = lambda rows, tallies: None,
        answer_perplexity: bool = False,
    ) -> dict[str, dict[str, float]]:
        """Score a task under all conditions.

        Args:
            task: the task of the samples.
            samples: what to score.
            batch_size: samples per batch.
            max_new_tokens: most tokens that an answer or summary may have.
            reconstruction_bleu: also write reconstructions greedily, and score how they match.
            on_batch: called with a batch's rows and what the conditions have scored, once it is done.
            answer_perplexity: also score each question's first answer token by token.

        Returns:
            Condition -> metric -> score.
        """
        tallies = self.tallies(
            task, samples, batch_size, max_new_tokens, reconstruction_bleu, on_batch, answer_perplexity
        )
        return {
            name: {metric: statistic.score() for metric, statistic in tally.statistics(task, self.bert_scorer).items()}
            for name, tally in tallies.items()
        }

    @torch.inference_mode()
    def tallies(
        self,
        task: str,
        samples: Sequence[Sample],
        batch_size: int,
        max_new_tokens: int | None = None,
        reconstruction_bleu: bool = False,
        on_batch: Callable[[list[int], dict[str, Tally]], Any] = lambda rows, tallies: None,
        answer_perplexity: bool = False,
        done: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> dict[str, Tally]:
        """As `score`, by sample: condition -> what it scored.

        Rows that are `done` are taken over from what their tallies' `state` gave, by condition; batches are those that
        there would be without them.
        """
        written = task in ("question_answering", "summarisation")
        given = not written or (task == "question_answering" and answer_perplexity)
        writes = written or (task == "reconstruction" and reconstruction_bleu)
        conditions = [condition for condition in self.conditions if condition.serves(task)]
        tallies = {
            condition.name: _empty_tally(samples, given, writes, recovers=writes and not written)
            for condition in conditions
        }
        done = done or {}
        for row, found in done.items():
            for name, tally in tallies.items():
                tally.restore(row, found[name])
        for rows, memories, seconds in self._batches(samples, batch_size, done):
            batch = [samples[row] for row in rows]
            targets = [sample.target_ids for sample in batch]
            for condition in conditions:
                tally, memory = tallies[condition.name], memories.get(condition.ratio)
                began = _now(condition.model.device)
                readings = self._readings(condition, batch, memories)
                prompts = [self._prompt(condition, task, sample) for sample in readings]
                _note_costs(tally, rows, prompts, memory, None if condition.ratio is None else seconds)
                with condition.active():
                    if writes:
                        own = [sample.max_new_tokens or max_new_tokens for sample in batch]
                        limits = own if written else [len(target) for target in targets]
                        written_ids = self._write(condition.model, prompts, memory, limits, rows[0])
                        tally.used[4, rows] = (_now(condition.model.device) - began) / len(rows)
                        for row, ids in zip(rows, written_ids, strict=True):
                            text = self.tokenizer.decode(ids, skip_special_tokens=True)
                            # A benchmark's score of code knows spaces.
                            tally.predictions[row] = text.strip() if samples[row].metric is None else text
                            tally.written_ids[row] = ids
                        if not written:
                            self._score_tokens(condition.model, prompts, written_ids, memory, tally.recovered, rows)
                    if given:
                        self._score_tokens(condition.model, prompts, targets, memory, tally.targets, rows)
                        if not writes:
                            tally.used[4, rows] = (_now(condition.model.device) - began) / len(rows)
            on_batch(rows, tallies)
        return tallies

    def _batches(
        self, samples: Sequence[Sample], batch_size: int, done: Collection[int] = ()
    ) -> Iterator[tuple[list[int], dict[int | None, Any], float]]:
        """Rows of samples, their memories, and the seconds that each took.

        The longest contexts come first, so that too large a batch fails at once; batches that are `done` are left out.

        A context's samples are in one batch, or where they are more than a batch takes, in batches that follow one
        another, so that it is compressed once.
        """
        rows_of: dict[Any, list[int]] = {}
        for row, sample in enumerate(samples):
            rows_of.setdefault(self._context_key(sample), []).append(row)
        group: list[list[int]] = []
        for rows in sorted(rows_of.values(), key=lambda rows: len(samples[rows[0]]), reverse=True):
            if group and sum(map(len, group)) + len(rows) > batch_size:
                yield from self._batches_of_group(samples, group, batch_size, done)
                group = []
            group.append(rows)
        if group:
            yield from self._batches_of_group(samples, group, batch_size, done)

    def _batches_of_group(
        self, samples: Sequence[Sample], group: list[list[int]], batch_size: int, done: Collection[int]
    ) -> Iterator[tuple[list[int], dict[int | None, Any], float]]:
        places = [(place, row) for place, rows in enumerate(group) for row in rows]
        parts = [places[start : start + batch_size] for start in range(0, len(places), batch_size)]
        parts = [part for part in parts if not all(row in done for _, row in part)]
        if not parts:
            return
        began = _now(self.compressor.device)
        memories = self._compress([samples[rows[0]] for rows in group])
        seconds = (_now(self.compressor.device) - began) / len(group)
        for part in parts:
            index = [place for place, _ in part]
            taken = {ratio: memory.rows(index) for ratio, memory in memories.items()}
            yield [row for _, row in part], taken, seconds

    def _context_key(self, sample: Sample) -> Any:
        """What samples have in common that are compressed into the same memory."""
        return tuple(sample.context_ids), tuple(sample.prompt_ids) if self._compresses_questions else ()

    @property
    def _ratios(self) -> list[int]:
        return [condition.ratio for condition in self.conditions if condition.ratio is not None]

    @property
    def _compresses_questions(self) -> bool:
        # Without ratios the model may be a plain one.
        return bool(self._ratios) and self.compressor.config.compresses_questions

    def _readings(
        self, condition: Condition, batch: Sequence[Sample], memories: dict[int | None, Any]
    ) -> Sequence[Sample]:
        """The samples with what the condition leaves of their contexts, where these are read in words."""
        if condition.selection is None:
            return batch
        budgets = memories[condition.budget_ratio].num_slots.tolist()
        readings = []
        for sample, budget in zip(batch, budgets, strict=True):
            if condition.selection == BM25:
                kept = bm25_context(self.tokenizer, sample.context_ids, sample.question, budget)
            else:
                kept = cut_context(sample.context_ids, budget)
            readings.append(replace(sample, context_ids=kept))
        return readings

    def _compress(self, batch: Sequence[Sample]) -> dict[int | None, Any]:
        contexts = [sample.context_ids for sample in batch]
        ratios = self._ratios
        if not ratios:
            return {}
        # A plain language model has none; the encoder of a compressor may read other tokens than the decoder.
        encoder_tokenizer = getattr(self.compressor, "encoder_tokenizer", None)
        if encoder_tokenizer is not None:
            contexts = [in_encoder_tokens(ids, self.tokenizer, encoder_tokenizer) for ids in contexts]
        starts = [context_start_ids(self.tokenizer if encoder_tokenizer is None else encoder_tokenizer)] * len(batch)
        if self.compressor.config.opens_context:
            starts = [sample.head_ids or [self.start_token_id] for sample in batch]
        rows = [[*start, *ids] for start, ids in zip(starts, contexts, strict=True)]
        input_ids, attention_mask = self._pad(rows, self.compressor.device)
        asked = {}
        if self._compresses_questions:
            question, mask = self._pad([sample.prompt_ids for sample in batch], self.compressor.device)
            asked = {"question_input_ids": question, "question_attention_mask": mask}
        memories = self.compressor.compress(
            input_ids, attention_mask, ratio=ratios, allow_untrained_ratio=self.allow_untrained_ratio, **asked
        )
        return dict(zip(ratios, memories, strict=True))

    def _prompt(self, condition: Condition, task: str, sample: Sample) -> list[int]:
        # As the collator has it in training.
        head = sample.head_ids or [self.start_token_id]
        if task in self.task_start_ids and (condition.ratio is not None or condition.task_token):
            context = []
            if condition.with_context:
                # EPL, Appendix D.
                context = [*context_start_ids(self.tokenizer), *sample.context_ids]
            # Given, so that what is scored is the text alone.
            restored = restored_ids(self.compressor.config, self.tokenizer) if task == "reconstruction" else []
            return [*context, self.task_start_ids[task], *sample.head_ids, *sample.prompt_ids, *restored]
        if condition.ratio is not None:
            config = self.compressor.config
            if not config.bos_before_text and sample.prompt_ids:
                head = [] if config.opens_context else sample.head_ids
            return [*head, *sample.prompt_ids]
        return [*head, *(sample.context_ids if condition.with_context else ()), *sample.prompt_ids]

    def _pad(self, rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, padded on the left: generation goes on at the right, and targets end in one column."""
        width = max(map(len, rows))
        input_ids = torch.full((len(rows), width), self.pad_token_id, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for index, row in enumerate(rows):
            start = width - len(row)
            input_ids[index, start:] = torch.tensor(row, dtype=torch.long)
            attention_mask[index, start:] = 1
        return input_ids.to(device), attention_mask.to(device)

    def _score_tokens(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        targets: Sequence[Sequence[int]],
        memory: Any,
        tokens: GivenTokens,
        samples: Sequence[int],
    ) -> None:
        rows = [[*prompt, *target] for prompt, target in zip(prompts, targets, strict=True)]
        input_ids, attention_mask = self._pad(rows, model.device)
        longest = max(map(len, targets))
        # All other logits would only be thrown away, and they are the largest tensor of the pass.
        inputs: dict[str, Any] = {"logits_to_keep": longest + 1, "use_cache": False}
        if memory is None:
            # A plain language model counts padding on the left as positions.
            inputs["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        else:
            inputs["memory"] = memory
        logits = model(input_ids=input_ids, attention_mask=attention_mask, **inputs).logits[:, -longest - 1 : -1]
        labels, target_mask = self._pad(targets, model.device)
        labels = labels.masked_fill(target_mask == 0, _IGNORED)
        hits = ((logits.argmax(-1) == labels) & (labels != _IGNORED)).sum(dim=1).tolist()
        for row, sample in enumerate(samples):
            tokens.nll[sample], tokens.counts[sample] = summed_nll(logits[row : row + 1], labels[row : row + 1])
            tokens.hits[sample] = hits[row]

    def _write(
        self, model: PreTrainedModel, prompts: list[list[int]], memory: Any, limits: Sequence[int | None], row: int = 0
    ) -> list[list[int]]:
        """Token ids that the model writes, each row up to its limit, EOS included where it wrote one."""
        input_ids, attention_mask = self._pad(prompts, model.device)
        processors = []
        if self.repetition_penalty is not None:
            # The library's own argument would penalise the question's words, too.
            processors = [RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty), input_ids.shape[1])]
        if self.generation.get("do_sample"):
            # What is sampled for a batch is the same after a stop.
            torch.manual_seed(random.Random(f"{self.seed}/{row}").randrange(2**31))
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **({} if memory is None else {"memory": memory}),
            # A text's score is its own: what is written beyond its limit is another row's time.
            max_new_tokens=max((limit for limit in limits if limit is not None), default=None),
            **{"do_sample": False, "num_beams": 1, **self.generation},
            **({"tokenizer": self.tokenizer} if "stop_strings" in self.generation else {}),
            logits_processor=processors,
            pad_token_id=self.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        eos = self.tokenizer.eos_token_id
        rows = output[:, input_ids.shape[1] :].tolist()
        rows = [ids[:limit] for ids, limit in zip(rows, limits, strict=True)]
        return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in rows]


def _empty_tally(samples: Sequence[Sample], given: bool, writes: bool, recovers: bool) -> Tally:
    size = len(samples)
    return Tally(
        [sample.references for sample in samples],
        [""] * size if writes else [],
        GivenTokens(size) if given else None,
        GivenTokens(size) if recovers else None,
        [[] for _ in samples],
        [sample.target_ids for sample in samples] if recovers else [],
        np.full((5, size), np.nan),
        [sample.metric for sample in samples],
    )


def _note_costs(tally: Tally, rows: list[int], prompts: list[list[int]], memory: Any, seconds: float | None) -> None:
    lengths = np.array([len(prompt) for prompt in prompts])
    slots: Any = 0 if memory is None else memory.num_slots.cpu().numpy()
    tally.used[2, rows] = lengths + slots
    if seconds is not None:
        tally.used[0, rows] = slots
        tally.used[1, rows] = slots * (memory.nbytes / max(1, int(slots.sum())))
        tally.used[3, rows] = seconds


def _now(device: torch.device) -> float:
    """Seconds, when all that a device was told is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()
