# SPDX-License-Identifier: Apache-2.0
"""Runs a model on batches of samples under one condition: scores given targets, or writes its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.encoder_tokenizer import in_encoder_tokens
from ..training.data import context_start_ids
from .bert_score import BertScorer
from .metrics import (
    bleu,
    perplexity,
    prefix_exact_match,
    rouge_lsum,
    rouge_scores,
    squad_scores,
    substring_accuracy,
    summed_nll,
    token_accuracy,
)
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
        task_token: without compression: whether the method's task token stands in front of the prompt, behind the
            context.
        active: makes the context manager to run the model in.
    """

    name: str
    model: PreTrainedModel
    ratio: int | None = None
    with_context: bool = False
    task_token: bool = False
    active: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class GivenTokens:
    """What a condition makes of tokens that it is given one after another."""

    total_nll: float = 0.0
    predicted_ids: list[torch.Tensor] = field(default_factory=list)
    label_ids: list[torch.Tensor] = field(default_factory=list)

    def token_accuracy(self) -> float:
        """Share of the tokens that were the likeliest in their place, 0 to 100."""
        return token_accuracy(torch.cat(self.predicted_ids), torch.cat(self.label_ids))

    def perplexity(self) -> float:
        """Perplexity of the tokens."""
        return perplexity(self.total_nll, sum(labels.numel() for labels in self.label_ids))


@dataclass
class Tally:
    """What a condition has scored so far on one task of one data set."""

    targets: GivenTokens = field(default_factory=GivenTokens)
    recovered: GivenTokens = field(default_factory=GivenTokens)
    predictions: list[str] = field(default_factory=list)
    references: list[list[str]] = field(default_factory=list)
    written_ids: list[list[int]] = field(default_factory=list)
    target_ids: list[list[int]] = field(default_factory=list)

    def metrics(self, task: str, bert_scorer: BertScorer | None = None) -> dict[str, float]:
        """The task's metrics over everything that was tallied."""
        texts = (self.predictions, self.references)
        scores: dict[str, float] = {}
        if task == "question_answering":
            scores = {**squad_scores(*texts), "substring_accuracy": substring_accuracy(*texts), **rouge_scores(*texts)}
            if self.targets.label_ids:
                scores["answer_perplexity"] = self.targets.perplexity()
        elif task == "summarisation":
            scores = {**rouge_scores(*texts), "rougeLsum": rouge_lsum(*texts)}
        else:
            scores = {
                "token_accuracy": self.targets.token_accuracy(),
                "perplexity": self.targets.perplexity(),
            }
            if self.predictions:
                scores |= {"bleu": bleu(*texts), **rouge_scores(*texts)}
                scores["prefix_exact_match"] = prefix_exact_match(self.written_ids, self.target_ids)
                scores["recovered_perplexity"] = self.recovered.perplexity()
        if bert_scorer is not None and self.predictions:
            scores["bert_score_f1"] = bert_scorer.score(*texts)
        return scores


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
        bert_scorer: also gives everything that is written a BERTScore.
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
    ):
        self.compressor = compressor
        self.tokenizer = tokenizer
        self.conditions = list(conditions)
        self.start_token_id = start_token_id
        self.task_start_ids = task_start_ids or {}
        self.allow_untrained_ratio = allow_untrained_ratio
        self.bert_scorer = bert_scorer
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
        answer_perplexity: bool = False,
    ) -> dict[str, dict[str, float]]:
        """Score a task under all conditions.

        Args:
            task: the task of the samples.
            samples: what to score.
            batch_size: samples per batch.
            max_new_tokens: most tokens that an answer or summary may have.
            reconstruction_bleu: also write reconstructions greedily, and score how they match.
            on_batch: called with a batch's size once it is done.
            answer_perplexity: also score each question's first answer token by token.

        Returns:
            Condition -> metric -> score.
        """
        written = task in ("question_answering", "summarisation")
        tallies = {condition.name: Tally() for condition in self.conditions}
        for batch in batches(samples, batch_size):
            memories = self._compress(batch)
            for condition in self.conditions:
                tally, memory = tallies[condition.name], memories.get(condition.ratio)
                prompts = [self._prompt(condition, task, sample) for sample in batch]
                with condition.active():
                    targets = [sample.target_ids for sample in batch]
                    if not written or (task == "question_answering" and answer_perplexity):
                        self._score_tokens(condition.model, prompts, targets, memory, tally.targets)
                    if written or (task == "reconstruction" and reconstruction_bleu):
                        limit = max_new_tokens if written else max(map(len, targets))
                        written_ids = self._write(condition.model, prompts, memory, limit)
                        if not written:
                            # A text's score is its own: the limit is that of the longest one beside it.
                            written_ids = [
                                ids[: len(target)] for ids, target in zip(written_ids, targets, strict=True)
                            ]
                        tally.predictions += map(self._decode, written_ids)
                        tally.references += [sample.references for sample in batch]
                        if not written:
                            self._score_tokens(condition.model, prompts, written_ids, memory, tally.recovered)
                            tally.written_ids += written_ids
                            # Without EOS, which is no part of the text.
                            tally.target_ids += [target[:-1] for target in targets]
            on_batch(len(batch))
        return {name: tally.metrics(task, self.bert_scorer) for name, tally in tallies.items()}

    def _compress(self, batch: Sequence[Sample]) -> dict[int | None, Any]:
        contexts = [sample.context_ids for sample in batch]
        ratios = [condition.ratio for condition in self.conditions if condition.ratio is not None]
        if not ratios:
            return {}
        # A plain language model has none; the encoder of a compressor may read other tokens than the decoder.
        encoder_tokenizer = getattr(self.compressor, "encoder_tokenizer", None)
        if encoder_tokenizer is not None:
            contexts = [in_encoder_tokens(ids, self.tokenizer, encoder_tokenizer) for ids in contexts]
        start = context_start_ids(self.tokenizer if encoder_tokenizer is None else encoder_tokenizer)
        input_ids, attention_mask = self._pad([[*start, *ids] for ids in contexts], self.compressor.device)
        memories = self.compressor.compress(
            input_ids, attention_mask, ratio=ratios, allow_untrained_ratio=self.allow_untrained_ratio
        )
        return dict(zip(ratios, memories, strict=True))

    def _prompt(self, condition: Condition, task: str, sample: Sample) -> list[int]:
        if condition.ratio is not None:
            return [self.task_start_ids.get(task, self.start_token_id), *sample.prompt_ids]
        if condition.task_token and task in self.task_start_ids:
            # As the collator has it in training (EPL, Appendix D).
            context = [*context_start_ids(self.tokenizer), *sample.context_ids] if condition.with_context else []
            return [*context, self.task_start_ids[task], *sample.prompt_ids]
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

    def _score_tokens(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        targets: Sequence[Sequence[int]],
        memory: Any,
        tokens: GivenTokens,
    ) -> None:
        rows = [[*prompt, *target] for prompt, target in zip(prompts, targets, strict=True)]
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
        tokens.total_nll += summed_nll(logits, labels)[0]
        counted = labels != _IGNORED
        tokens.predicted_ids.append(logits.argmax(-1)[counted].cpu())
        tokens.label_ids.append(labels[counted].cpu())

    def _write(
        self, model: PreTrainedModel, prompts: list[list[int]], memory: Any, max_new_tokens: int | None
    ) -> list[list[int]]:
        """Token ids that the model writes, EOS included where it wrote one."""
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
        eos = self.tokenizer.eos_token_id
        rows = output[:, input_ids.shape[1] :].tolist()
        return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in rows]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()
