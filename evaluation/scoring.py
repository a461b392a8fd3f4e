"""Runs a model on batches of samples under one condition: scores given targets, or writes its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.data import context_start_ids
from .metrics import bleu, perplexity, rouge_scores, squad_scores, substring_accuracy, summed_nll, token_accuracy
from .samples import Sample

_IGNORED = -100


@dataclass(frozen=True)
class Condition:
    """How the context reaches the model.

    Args:
        name: the condition's name in the report.
        model: the model that reads and writes.
        ratio: compress at this ratio; `None` for the conditions without compression.
        with_context: without compression: whether the context stands in front of the prompt, in words.
        active: makes the context manager to run the model in.
    """

    name: str
    model: PreTrainedModel
    ratio: int | None = None
    with_context: bool = False
    active: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Tally:
    """What a condition has scored so far on one task of one data set."""

    total_nll: float = 0.0
    predicted_ids: list[torch.Tensor] = field(default_factory=list)
    label_ids: list[torch.Tensor] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    references: list[list[str]] = field(default_factory=list)

    def metrics(self, task: str) -> dict[str, float]:
        """The task's metrics over everything that was tallied."""
        if task == "question_answering":
            return {
                **squad_scores(self.predictions, self.references),
                "substring_accuracy": substring_accuracy(self.predictions, self.references),
                **rouge_scores(self.predictions, self.references),
            }
        if task == "summarisation":
            return rouge_scores(self.predictions, self.references)
        labels = torch.cat(self.label_ids)
        scores = {
            "token_accuracy": token_accuracy(torch.cat(self.predicted_ids), labels),
            "perplexity": perplexity(self.total_nll, labels.numel()),
        }
        return {**scores, "bleu": bleu(self.predictions, self.references)} if self.predictions else scores


def batches(samples: Sequence[Sample], batch_size: int) -> Iterator[list[Sample]]:
    """Batches of samples of about the same length, the longest first, so that too large a batch fails at once."""
    ordered = sorted(samples, key=len, reverse=True)
    for start in range(0, len(ordered), batch_size):
        yield ordered[start : start + batch_size]


class Scorer:
    """Scores batches for every condition; a batch is encoded once however many ratios there are.

    Args:
        compressor: compresses the contexts.
        tokenizer: pads and decodes.
        conditions: what to compare.
        start_token_id: the id that text starts with.
        task_start_ids: task -> the method's own start token, which takes the place of `start_token_id` after slots.
        allow_untrained_ratio: also compress at ratios that the checkpoint was not trained for.
    """

    def __init__(
        self,
        compressor: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        conditions: Sequence[Condition],
        start_token_id: int,
        task_start_ids: dict[str, int] | None = None,
        allow_untrained_ratio: bool = False,
    ):
        self.compressor = compressor
        self.tokenizer = tokenizer
        self.conditions = list(conditions)
        self.start_token_id = start_token_id
        self.task_start_ids = task_start_ids or {}
        self.allow_untrained_ratio = allow_untrained_ratio
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
        on_batch: Callable[[int], Any] = lambda size: None,
    ) -> dict[str, dict[str, float]]:
        """Score a task under all conditions.

        Args:
            task: the task of the samples.
            samples: what to score.
            batch_size: samples per batch.
            max_new_tokens: most tokens that an answer or summary may have.
            reconstruction_bleu: also write reconstructions greedily and score their BLEU.
            on_batch: called with a batch's size once it is done.

        Returns:
            Condition -> metric -> score.
        """
        written = task in ("question_answering", "summarisation")
        tallies = {condition.name: Tally() for condition in self.conditions}
        for batch in batches(samples, batch_size):
            memories = self._compress([sample.context_ids for sample in batch])
            for condition in self.conditions:
                tally, memory = tallies[condition.name], memories.get(condition.ratio)
                prompts = [self._prompt(condition, task, sample) for sample in batch]
                with condition.active():
                    if not written:
                        self._score_targets(condition.model, prompts, batch, memory, tally)
                    if written or (task == "reconstruction" and reconstruction_bleu):
                        limit = max_new_tokens if written else max(len(sample.target_ids) for sample in batch)
                        tally.predictions += self._write(condition.model, prompts, memory, limit)
                        tally.references += [sample.references for sample in batch]
            on_batch(len(batch))
        return {name: tally.metrics(task) for name, tally in tallies.items()}

    def _compress(self, contexts: list[list[int]]) -> dict[int, Any]:
        ratios = [condition.ratio for condition in self.conditions if condition.ratio is not None]
        if not ratios:
            return {}
        start = context_start_ids(self.tokenizer)
        input_ids, attention_mask = self._pad([[*start, *ids] for ids in contexts], self.compressor.device)
        memories = self.compressor.compress(
            input_ids, attention_mask, ratio=ratios, allow_untrained_ratio=self.allow_untrained_ratio
        )
        return dict(zip(ratios, memories, strict=True))

    def _prompt(self, condition: Condition, task: str, sample: Sample) -> list[int]:
        if condition.ratio is not None:
            return [self.task_start_ids.get(task, self.start_token_id), *sample.prompt_ids]
        return [self.start_token_id, *(sample.context_ids if condition.with_context else ()), *sample.prompt_ids]

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

    def _score_targets(
        self, model: PreTrainedModel, prompts: list[list[int]], batch: list[Sample], memory: Any, tally: Tally
    ) -> None:
        targets = [sample.target_ids for sample in batch]
        rows = [prompt + target for prompt, target in zip(prompts, targets, strict=True)]
        input_ids, attention_mask = self._pad(rows, model.device)
        longest = max(map(len, targets))
        # All other logits would only be thrown away, and they are the largest tensor of the pass.
        inputs = {"logits_to_keep": longest + 1, "use_cache": False}
        if memory is None:
            # A plain language model counts padding on the left as positions.
            inputs["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        else:
            inputs["memory"] = memory
        logits = model(input_ids=input_ids, attention_mask=attention_mask, **inputs).logits[:, -longest - 1 : -1]
        labels, target_mask = self._pad(targets, model.device)
        labels = labels.masked_fill(target_mask == 0, _IGNORED)
        tally.total_nll += summed_nll(logits, labels)[0]
        counted = labels != _IGNORED
        tally.predicted_ids.append(logits.argmax(-1)[counted].cpu())
        tally.label_ids.append(labels[counted].cpu())

    def _write(
        self, model: PreTrainedModel, prompts: list[list[int]], memory: Any, max_new_tokens: int | None
    ) -> list[str]:
        input_ids, attention_mask = self._pad(prompts, model.device)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **({} if memory is None else {"memory": memory}),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        return [self._decode(ids) for ids in output[:, input_ids.shape[1] :].tolist()]

    def _decode(self, ids: list[int]) -> str:
        eos = self.tokenizer.eos_token_id
        kept = ids[: ids.index(eos)] if eos in ids else ids
        return self.tokenizer.decode(kept, skip_special_tokens=True).strip()
