# SPDX-License-Identifier: Apache-2.0
"""Runs a model on batches of samples under one condition: scores given targets, or writes its own."""

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor

from ..configuration.nearest_names import check_choice
from ..modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from ..modeling.memory.key_value_memory import position_bytes
from ..modeling.memory.memory_quantization import QUANTIZATIONS
from ..modeling.parts.length_batches import length_batches
from ..modeling.parts.prompting import restored_ids
from ..modeling.parts.text_ids import context_start_ids
from .alternatives import (
    BM25,
    SELF_INFORMATION,
    TASKS_OF_ALTERNATIVE,
    bm25_context,
    cut_context,
    informative_context,
    self_information,
)
from .bert_score import BertScorer
from .metrics import summed_nll
from .samples import Sample
from .settings import WRITTEN_TASKS
from .tallies import GivenTokens, Tally, empty_tally, note_costs

_IGNORED = -100
_KEPT_CONTEXTS = 64
# Pads for each token of a batch.
_MOST_PADDING = 0.5
# Tokens of a batch, pads included, of more than one row: what caches hold is bounded whatever the number of samples.
_MOST_TOKENS = 16384
# What a model's own files say, and what the evaluation itself decides.
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version")
_DECIDED = ("max_new_tokens", "max_length", "min_length", "num_return_sequences", "return_dict_in_generate")


def generation_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a generation configuration that an evaluation may take; ids of a model are left out.

    Raises:
        ValueError: an unknown field, one that the evaluation decides itself, a limit of time, by which scores would
            depend on the machine, or a value that is not allowed.
    """
    fields = {name: value for name, value in given.items() if name not in _IDS and not name.startswith("_")}
    known = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    for name in fields:
        check_choice("field of the generation configuration:", name, known)
        if name in _DECIDED:
            raise ValueError(f"the evaluation decides {name} itself: leave it out of the generation configuration")
    if fields.get("max_time") is not None:
        raise ValueError(
            f"max_time would make scores depend on the machine: leave it out of the generation configuration, got "
            f"{fields['max_time']!r}"
        )
    beams, top_p = fields.get("num_beams"), fields.get("top_p")
    if beams is not None and (not isinstance(beams, int) or isinstance(beams, bool) or beams < 1):
        raise ValueError(f"num_beams must be a whole number of at least 1, got {beams!r}")
    if top_p is not None and (not isinstance(top_p, int | float) or isinstance(top_p, bool) or not 0 < top_p <= 1):
        raise ValueError(f"top_p must be a number above 0 and at most 1, got {top_p!r}")
    GenerationConfig(**fields).validate(strict=False)
    return fields


@dataclass(frozen=True)
class Condition:
    """How the context reaches the model.

    Args:
        name: the condition's name in the report.
        model: the model that reads and writes.
        ratio: compress at this ratio, a number or "auto"; `None` for the conditions without compression.
        with_context: without compression: whether the context stands in front of the prompt, in words.
        task_token: without compression: whether the method's task token stands in front of the prompt, behind the
            context.
        active: makes the context manager to run the model in.
        selection: one of `ALTERNATIVES`: keeps so many of the context's tokens as it has slots at `budget_ratio`.
        budget_ratio: a ratio that the contexts are compressed at, too.
    """

    name: str
    model: PreTrainedModel
    ratio: int | str | None = None
    with_context: bool = False
    task_token: bool = False
    active: Callable[[], AbstractContextManager[Any]] = nullcontext
    selection: str | None = None
    budget_ratio: int | str | None = None

    def serves(self, task: str) -> bool:
        """Whether the condition says anything about a task."""
        return self.selection is None or task in TASKS_OF_ALTERNATIVE[self.selection]


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
        memory_dtype: one of `MEMORY_DTYPES`, which memories are rounded to; as they are when `None`.
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
        memory_dtype: str | None = None,
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
        self.memory_dtype = memory_dtype
        self._information: dict[tuple[int, ...], list[float]] = {}
        eos = tokenizer.eos_token_id
        self.pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @torch.inference_mode()
    def score(self, task: str, *arguments: Any, **options: Any) -> dict[str, dict[str, float]]:
        """As `tallies`, of all samples together: condition -> metric -> score."""
        tallies = self.tallies(task, *arguments, **options)
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
        on_condition: Callable[[Condition, int], Any] = lambda condition, num_samples: None,
    ) -> dict[str, Tally]:
        """Score a task under all conditions, by sample.

        Args:
            task: the task of the samples.
            samples: what to score.
            batch_size: samples per batch.
            max_new_tokens: most tokens that an answer or summary may have.
            reconstruction_bleu: also write reconstructions greedily, and score how they match.
            on_batch: called with a batch's rows and what the conditions have scored, once it is done.
            answer_perplexity: also score each question's first answer token by token.
            done: rows that are taken over from what their tallies' `state` gave, by condition; batches are those that
                there would be without them.
            on_condition: called with each condition and a batch's number of samples, once it has scored these.

        Returns:
            Condition -> what it scored.
        """
        written = task in WRITTEN_TASKS
        given = not written or (task == "question_answering" and answer_perplexity)
        writes = written or (task == "reconstruction" and reconstruction_bleu)
        conditions = [condition for condition in self.conditions if condition.serves(task)]
        tallies = {
            condition.name: empty_tally(
                samples, given, writes, writes and not written, _position_bytes(condition.model)
            )
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
                note_costs(tally, rows, prompts, memory, None if condition.ratio is None else seconds)
                if condition.with_context:
                    tally.used[1, rows] = self._kept_bytes(condition, batch, readings)
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
                on_condition(condition, len(rows))
            on_batch(rows, tallies)
        return tallies

    def _batches(
        self, samples: Sequence[Sample], batch_size: int, done: Collection[int] = ()
    ) -> Iterator[tuple[list[int], dict[int | str | None, Any], float]]:
        """Rows of samples, their memories, and the seconds that each took.

        The longest contexts come first, so that too large a batch fails at once, and few together where the next are
        much shorter; batches that are `done` are left out.

        A context's samples are in one batch, or where they are more than a batch takes, in batches that follow one
        another, so that it is compressed once.
        """
        rows_of: dict[Any, list[int]] = {}
        for row, sample in enumerate(samples):
            rows_of.setdefault(self._context_key(sample), []).append(row)
        contexts = list(rows_of.values())
        lengths, counts = [len(samples[rows[0]]) for rows in contexts], [len(rows) for rows in contexts]
        for group in length_batches(lengths, batch_size, _MOST_TOKENS, _MOST_PADDING, counts):
            yield from self._batches_of_group(samples, [contexts[index] for index in group], batch_size, done)

    def _batches_of_group(
        self, samples: Sequence[Sample], group: list[list[int]], batch_size: int, done: Collection[int]
    ) -> Iterator[tuple[list[int], dict[int | str | None, Any], float]]:
        places = [(place, row) for place, rows in enumerate(group) for row in rows]
        longest = max(len(samples[row]) for _, row in places)
        batch_size = max(1, min(batch_size, _MOST_TOKENS // max(1, longest)))
        parts = [places[start : start + batch_size] for start in range(0, len(places), batch_size)]
        parts = [part for part in parts if not all(row in done for _, row in part)]
        if not parts:
            return
        began = _now(self.compressor.device)
        memories = self._compress([samples[rows[0]] for rows in group])
        for ratio in self._ratios if self.memory_dtype is not None else ():
            given, dtype = memories[ratio], self.memory_dtype
            memories[ratio] = given.quantize(dtype) if dtype in QUANTIZATIONS else given.to(dtype=dtype)
        seconds = (_now(self.compressor.device) - began) / len(group)
        for part in parts:
            index = [place for place, _ in part]
            taken = {ratio: memory.rows(index) for ratio, memory in memories.items()}
            yield [row for _, row in part], taken, seconds

    def _context_key(self, sample: Sample) -> Any:
        """What samples have in common that are compressed into the same memory."""
        lengths = tuple(map(len, sample.passages))
        return tuple(sample.context_ids), lengths, tuple(sample.prompt_ids) if self._compresses_questions else ()

    @property
    def _ratios(self) -> list[int | str]:
        return [condition.ratio for condition in self.conditions if condition.ratio is not None]

    @property
    def _compresses_questions(self) -> bool:
        # Without ratios the model may be a plain one.
        return bool(self._ratios) and self.compressor.config.compresses_questions

    def _readings(
        self, condition: Condition, batch: Sequence[Sample], memories: dict[int | str | None, Any]
    ) -> Sequence[Sample]:
        """The samples with what the condition leaves of their contexts, where these are read in words."""
        if condition.selection is None:
            return batch
        slots = memories[condition.budget_ratio].num_slots.tolist()
        readings = []
        for sample, budget in zip(batch, slots, strict=True):
            if self.compressor.config.opens_context:
                # Slots are of the opening, too, which stands whole in front of a text.
                length = len(sample.context_ids)
                budget = -(-budget * length // (length + max(1, len(sample.head_ids))))
            if condition.selection == BM25:
                kept = bm25_context(self.tokenizer, sample.context_ids, sample.question, budget)
            elif condition.selection == SELF_INFORMATION:
                kept = informative_context(sample.context_ids, self._self_information(sample), budget)
            else:
                kept = cut_context(sample.context_ids, budget)
            readings.append(replace(sample, context_ids=kept))
        return readings

    def _kept_bytes(self, condition: Condition, batch: Sequence[Sample], readings: Sequence[Sample]) -> list[int]:
        """UTF-8 bytes of the text that later questions need; what picks by the question needs all of it."""
        kept = batch if condition.selection == BM25 else readings
        return [len(text.encode()) for text in self.tokenizer.batch_decode([sample.context_ids for sample in kept])]

    def _self_information(self, sample: Sample) -> list[float]:
        """Of each token of a context; the last contexts' are kept for their other ratios and questions."""
        key = tuple(sample.context_ids)
        if key not in self._information:
            if len(self._information) >= _KEPT_CONTEXTS:
                self._information.clear()
            self._information[key] = self_information(self.compressor, self.start_token_id, sample.context_ids)
        return self._information[key]

    def _compress(self, batch: Sequence[Sample]) -> dict[int | str | None, Any]:
        opens = bool(self._ratios) and self.compressor.config.opens_context
        contexts = [[sample.context_ids] if opens or not sample.passages else sample.passages for sample in batch]
        ratios = self._ratios
        if not ratios:
            return {}
        # A plain language model has none; the encoder of a compressor may read other tokens than the decoder.
        encoder_tokenizer = getattr(self.compressor, "encoder_tokenizer", None)
        if encoder_tokenizer is not None:
            own = (self.tokenizer, encoder_tokenizer)
            contexts = [[in_encoder_tokens(ids, *own) for ids in passages] for passages in contexts]
        starts = [context_start_ids(self.tokenizer if encoder_tokenizer is None else encoder_tokenizer)] * len(batch)
        if opens:
            starts = [sample.head_ids or [self.start_token_id] for sample in batch]
        rows = [[[*start, *ids] for ids in passages] for start, passages in zip(starts, contexts, strict=True)]
        joined = [[token for ids in passages for token in ids] for passages in rows]
        input_ids, attention_mask = self._pad(joined, self.compressor.device)
        asked: dict[str, Any] = {}
        if any(len(passages) > 1 for passages in rows):
            asked["chunk_lengths"] = [[len(ids) for ids in passages] for passages in rows]
        if self._compresses_questions:
            question, mask = self._pad([sample.prompt_ids for sample in batch], self.compressor.device)
            asked |= {"question_input_ids": question, "question_attention_mask": mask}
        memories = self.compressor.compress(
            input_ids, attention_mask, ratio=ratios, allow_untrained_ratio=self.allow_untrained_ratio, **asked
        )
        return dict(zip(ratios, memories, strict=True))

    def _prompt(self, condition: Condition, task: str, sample: Sample) -> list[int]:
        # As the collator has it in training.
        head = sample.head_ids or [self.start_token_id]
        if task in self.task_start_ids and (condition.ratio is not None or condition.task_token):
            context = []
            if condition.ratio is not None and self.compressor.config.bos_before_task_token and not sample.head_ids:
                context = [self.start_token_id]
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
        processors, ends = [], end_ids(model, self.tokenizer)
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
            # A tokenizer may have no EOS.
            eos_token_id=ends or None,
        )
        rows = []
        for ids, limit in zip(output[:, input_ids.shape[1] :].tolist(), limits, strict=True):
            length = next((place for place, token in enumerate(ids, 1) if token in ends), None)
            rows.append(ids[:length][:limit])
        return rows


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end what a model writes: EOS, and those of its own, such as the end of a chat's turn."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    return [id_ for id_ in dict.fromkeys([tokenizer.eos_token_id, *own]) if id_ is not None]


def _now(device: torch.device) -> float:
    """Seconds, when all that a device was told is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


def _position_bytes(model: PreTrainedModel) -> float:
    """See [`position_bytes`]; NaN of an encoder-decoder, whose decoder reads slots by cross-attention."""
    config = getattr(model.config, "decoder_config", model.config)
    return math.nan if config.is_encoder_decoder else position_bytes(config, model.dtype)
