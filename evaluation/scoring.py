# SPDX-License-Identifier: Apache-2.0
"""Runs a model on batches of samples under one condition: scores given targets, or writes its own."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor

from ..modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from ..modeling.memory.key_value_memory import position_bytes
from ..modeling.memory.memory_quantization import QUANTIZATIONS
from ..modeling.parts.packing import length_batches
from ..modeling.parts.text_ids import context_end_ids, context_start_ids, restored_ids, start_token_id
from ..modeling.text_compressor import TextCompressor
from .alternatives import (
    BM25,
    KEEP_DROP,
    KEEP_DROP_AWARE,
    SELF_INFORMATION,
    TASKS_OF_ALTERNATIVE,
    bm25_context,
    informative_context,
    kept_words,
    self_information,
)
from .results import GivenTokens, Tally
from .samples import Sample
from .settings import WRITTEN_TASKS, EvaluationSettings

# Pads for each token of a batch.
_MOST_PADDING = 0.5
# Tokens of a batch, pads included, of more than one row: what caches hold is bounded whatever the number of samples.
_MOST_TOKENS = 16384

# Ratio, or `None` where nothing is compressed -> memory.
Memories = dict[int | None, Any]


@dataclass(frozen=True)
class Condition:
    """The form in which a context reaches the model: compressed at `ratio`, in words, or not at all.

    Args:
        with_context, task_token: without compression: what stands in front of the prompt.
        active: makes the context manager to run the model in.
        selection: one of `ALTERNATIVES`: keeps so many of the context's tokens as it has slots at `budget_ratio`.
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
        """Return whether the condition says anything about a task."""
        return self.selection is None or task in TASKS_OF_ALTERNATIVE[self.selection]


class Scorer:
    """Scores batches for every condition; a context is compressed once for all ratios and questions."""

    def __init__(
        self,
        compressor: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        conditions: Sequence[Condition],
        settings: EvaluationSettings,
        task_start_ids: Mapping[str, int] | None = None,
    ):
        self.compressor, self.tokenizer, self.settings = compressor, tokenizer, settings
        self.conditions, self.task_start_ids = list(conditions), task_start_ids or {}
        self.start_token_id = start_token_id(tokenizer)
        # The last contexts' are kept for their other ratios and questions.
        self._self_information = lru_cache(maxsize=64)(
            lambda context_ids: self_information(compressor, self.start_token_id, context_ids)
        )
        eos = tokenizer.eos_token_id
        self.pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @torch.inference_mode()
    def tallies(
        self,
        task: str,
        samples: Sequence[Sample],
        on_condition: Callable[[Condition, int], Any] = lambda condition, num_samples: None,
    ) -> dict[str, Tally]:
        """Score a task under all conditions, by sample."""
        written = task in WRITTEN_TASKS
        scores_targets = not written or (task == "question_answering" and self.settings.answer_perplexity)
        restores = task == "reconstruction" and self.settings.reconstruction_bleu
        conditions = [condition for condition in self.conditions if condition.serves(task)]
        tallies = {
            condition.name: Tally(
                samples,
                GivenTokens(len(samples)) if scores_targets else None,
                GivenTokens(len(samples)) if restores else None,
                position_bytes=_position_bytes(condition.model),
            )
            for condition in conditions
        }
        for rows, memories, seconds in self._batches(samples):
            batch = [samples[row] for row in rows]
            targets = [sample.target_ids for sample in batch]
            for condition in conditions:
                tally, memory = tallies[condition.name], memories.get(condition.ratio)
                began = _now(condition.model.device)
                readings = self._readings(condition, batch, memories)
                prompts = [self._prompt(condition, task, sample) for sample in readings]
                slots = 0 if memory is None else memory.num_slots.cpu().numpy()
                tally.decoder_positions[rows] = slots + torch.tensor(list(map(len, prompts))).numpy()
                if condition.ratio is not None:
                    tally.note_memory(rows, memory, seconds)
                if condition.with_context:
                    # What picks by the question needs all of the text for later ones.
                    kept = batch if condition.selection in (BM25, KEEP_DROP_AWARE) else readings
                    contexts = self.tokenizer.batch_decode([sample.context_ids for sample in kept])
                    tally.memory_bytes[rows] = [len(text.encode()) for text in contexts]
                with condition.active():
                    if written or restores:
                        longest = self.settings.max_new_tokens.get(task)
                        own = [sample.max_new_tokens or longest for sample in batch]
                        limits = own if written else [len(target) for target in targets]
                        written_ids = self._write(condition.model, prompts, memory, limits)
                        tally.answer_seconds[rows] = (_now(condition.model.device) - began) / len(rows)
                        for row, ids in zip(rows, written_ids, strict=True):
                            text = self.tokenizer.decode(ids, skip_special_tokens=True)
                            # A benchmark's score of code knows spaces.
                            tally.predictions[row] = text.strip() if samples[row].metric is None else text
                            tally.written_ids[row] = ids
                        if tally.recovered is not None:
                            self._score_tokens(condition.model, prompts, written_ids, memory, tally.recovered, rows)
                    if tally.targets is not None:
                        self._score_tokens(condition.model, prompts, targets, memory, tally.targets, rows)
                        if not (written or restores):
                            tally.answer_seconds[rows] = (_now(condition.model.device) - began) / len(rows)
                on_condition(condition, len(rows))
        return tallies

    def _batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Memories, float]]:
        """Rows of samples, their memories, and the seconds that each took."""
        rows_of: dict[Any, list[int]] = {}
        for row, sample in enumerate(samples):
            rows_of.setdefault(self._context_key(sample), []).append(row)
        contexts, batch_size = list(rows_of.values()), self.settings.batch_size
        lengths, counts = [len(samples[rows[0]]) for rows in contexts], [len(rows) for rows in contexts]
        for indices in length_batches(lengths, batch_size, _MOST_TOKENS, _MOST_PADDING, counts):
            group = [contexts[index] for index in indices]
            places = [(place, row) for place, rows in enumerate(group) for row in rows]
            size = max(1, min(batch_size, _MOST_TOKENS // max(1, *(len(samples[row]) for _, row in places))))
            began = _now(self.compressor.device)
            memories = self._compress([samples[rows[0]] for rows in group])
            seconds = (_now(self.compressor.device) - began) / len(group)
            for start in range(0, len(places), size):
                part = places[start : start + size]
                index = [place for place, _ in part]
                yield [row for _, row in part], {key: memory.rows(index) for key, memory in memories.items()}, seconds

    def _context_key(self, sample: Sample) -> Any:
        """Return what samples share that are compressed into the same memory."""
        lengths = tuple(map(len, sample.passages))
        return tuple(sample.context_ids), lengths, tuple(sample.prompt_ids) if self._compresses_questions else ()

    @property
    def _ratios(self) -> list[int]:
        return [condition.ratio for condition in self.conditions if condition.ratio is not None]

    @property
    def _compresses_questions(self) -> bool:
        # Without ratios the model may be a plain one.
        return bool(self._ratios) and self.compressor.config.compresses_questions

    def _readings(self, condition: Condition, batch: Sequence[Sample], memories: Memories) -> Sequence[Sample]:
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
                kept = informative_context(
                    sample.context_ids, self._self_information(tuple(sample.context_ids)), budget
                )
            elif condition.selection in (KEEP_DROP, KEEP_DROP_AWARE):
                question = sample.question if condition.selection == KEEP_DROP_AWARE else None
                kept = kept_words(self._text_compressor, self.tokenizer, sample.context_ids, question, budget)
            else:
                kept = sample.context_ids[:budget]
            readings.append(replace(sample, context_ids=kept))
        return readings

    @cached_property
    def _text_compressor(self) -> TextCompressor:
        return TextCompressor.from_pretrained(str(self.settings.text_compressor))

    def _compress(self, batch: Sequence[Sample]) -> Memories:
        if not self._ratios:
            return {}
        opens = self.compressor.config.opens_context
        contexts = [[sample.context_ids] if opens or not sample.passages else sample.passages for sample in batch]
        # The encoder of a compressor may read other tokens than the decoder.
        own = self.compressor.encoder_tokenizer
        if own is not None:
            contexts = [[in_encoder_tokens(ids, self.tokenizer, own) for ids in passages] for passages in contexts]
        starts = [context_start_ids(self.tokenizer if own is None else own)] * len(batch)
        if opens:
            starts = [sample.head_ids or [self.start_token_id] for sample in batch]
        rows = [[[*start, *ids] for ids in passages] for start, passages in zip(starts, contexts, strict=True)]
        options = {}
        if self._compresses_questions:
            question, mask = self._pad([sample.prompt_ids for sample in batch], self.compressor.device)
            options = {"question_input_ids": question, "question_attention_mask": mask}
        return self._compress_rows(rows, rows, **options)

    def _compress_rows(
        self, contexts: Sequence[Sequence[Sequence[int]]], chunks: Sequence[Sequence[Sequence[int]]], **options: Any
    ) -> Memories:
        """Compress contexts, each in parts, whose chunks are of other parts where a question stands in front."""
        joined = [[token for ids in parts for token in ids] for parts in contexts]
        if any(len(parts) > 1 for parts in chunks):
            options["chunk_lengths"] = [[len(ids) for ids in parts] for parts in chunks]
        memories = self.compressor.compress(
            *self._pad(joined, self.compressor.device),
            ratio=self._ratios,
            allow_untrained_ratio=self.settings.allow_untrained_ratio,
            **options,
        )
        dtype = self.settings.memory_dtype
        if dtype is not None:
            memories = [
                memory.quantize(dtype) if dtype in QUANTIZATIONS else memory.to(dtype=dtype) for memory in memories
            ]
        return dict(zip(self._ratios, memories, strict=True))

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
        # One row at a time: a float32 copy of all logits would be the largest tensor of an evaluation.
        for row, target, sample in zip(logits, targets, samples, strict=True):
            scores, wanted = row[-len(target) :].float(), torch.tensor(target, device=row.device)
            tokens.nll[sample] = float(cross_entropy(scores, wanted, reduction="sum"))
            tokens.hits[sample] = int((scores.argmax(-1) == wanted).sum())
            tokens.counts[sample] = len(target)

    def _write(
        self, model: PreTrainedModel, prompts: list[list[int]], memory: Any, limits: Sequence[int | None]
    ) -> list[list[int]]:
        """Token ids that the model writes greedily, each row up to its limit, EOS included where it wrote one."""
        input_ids, attention_mask = self._pad(prompts, model.device)
        processors, ends = [], end_ids(model, self.tokenizer)
        if self.settings.repetition_penalty is not None:
            # The library's own argument would penalise the question's words, too.
            processors = [RepetitionPenaltyLogitsProcessor(self.settings.repetition_penalty, input_ids.shape[1])]
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **({} if memory is None else {"memory": memory}),
            # A text's score is its own: what is written beyond its limit is another row's time.
            max_new_tokens=max((limit for limit in limits if limit is not None), default=None),
            **{"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, **self.settings.generation},
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


class Seq2SeqScorer(Scorer):
    """[`Scorer`] of an encoder-decoder: no context is a memory of no tokens, or of an encoded question."""

    @property
    def _encodes_questions(self) -> bool:
        return self.compressor.config.question_placement == "encoder"

    def _context_key(self, sample: Sample) -> Any:
        return super()._context_key(sample), tuple(sample.prompt_ids) if self._encodes_questions else ()

    def _compress(self, batch: Sequence[Sample]) -> Memories:
        questions = [sample.prompt_ids if self._encodes_questions else [] for sample in batch]
        start, end = context_start_ids(self.tokenizer), context_end_ids(self.tokenizer)
        # A question stands in front of a whole context.
        passages = [
            [sample.context_ids] if self._encodes_questions else sample.passages or [sample.context_ids]
            for sample in batch
        ]
        chunks = [[[*start, *ids, *end] for ids in row] for row in passages]
        contexts = [[question, *row] for question, row in zip(questions, chunks, strict=True)]
        memories = self._compress_rows(contexts, chunks) if self._ratios else {}
        return {None: self.compressor.compress(*self._pad(questions, self.compressor.device)), **memories}

    def _prompt(self, condition: Condition, task: str, sample: Sample) -> list[int]:
        return [self.task_start_ids[task], *([] if self._encodes_questions else sample.prompt_ids)]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that end an output: EOS and the model's own, such as the end of a chat's turn."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    return [id_ for id_ in dict.fromkeys([tokenizer.eos_token_id, *own]) if id_ is not None]


def _now(device: torch.device) -> float:
    """Return the time in seconds after all work queued on a device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


def _position_bytes(model: PreTrainedModel) -> float:
    """Return the cache's bytes per position; NaN for an encoder-decoder, which reads slots by cross-attention."""
    config = model.config.get_text_config(decoder=True)
    return math.nan if config.is_encoder_decoder else position_bytes(config, model.dtype)
