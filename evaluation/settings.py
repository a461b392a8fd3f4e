# SPDX-License-Identifier: Apache-2.0
"""Options of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..configuration.nearest_names import check_choice
from ..data.prompts import TASKS

# The command line reads these before any model is wanted, so they come from nowhere that loads torch.
ALTERNATIVES = ("cut", "bm25", "self_information", "keep_drop", "keep_drop_aware")
NUM_RESAMPLES = 10_000
DEFAULT_TASKS = ("question_answering", "reconstruction", "continuation")
# Tasks whose answers are written token by token from a question or an instruction.
WRITTEN_TASKS = ("question_answering", "summarization")
TRUNCATION_SIDES = ("right", "left")
MEMORY_DTYPES = ("bfloat16", "float16", "int8", "int4", "int2")


@dataclass(frozen=True)
class EvaluationSettings:
    """Options of an evaluation; the report holds them all.

    Args:
        tasks: what to ask of every data set whose columns allow it.
        ratios: compression ratios; all of the checkpoint's when `None`.
        memory_dtype: round memories to one of `MEMORY_DTYPES`, see `CompressedContext.quantize`, before they are read.
        max_samples: samples per data set and task, drawn by the seed, unless a data set has its own number.
        batch_size: samples per batch.
        seed: draws samples, windows of text, generated documents and bootstrap resamples.
        alternatives: texts at as many decoder positions as a ratio's slots, read by the model of the bounds: "cut",
            the beginning; "bm25", sentences that BM25 picks by the question; "self_information", the tokens that the
            base expects least; "keep_drop", words that `text_compressor` keeps, "keep_drop_aware" for the question.
        text_compressor: folder or Hub id of a [`TextCompressor`].
        num_resamples: bootstrap resamples behind the intervals.
        max_new_tokens: most tokens of an answer or summary, per task.
        context_tokens: length of the windows that reconstruction and continuation take from a text.
        continuation_tokens: length of what follows such a window in continuation.
        reconstruction_bleu: also write reconstructions greedily and score them (GMSA, Figure 4 and Table 10).
        restoration_lengths: reconstruct windows of these lengths, each as a data set (GMSA: 128, 256 and 512).
        bert_score_model: folder of a scorer model; everything that is written gets a BERTScore, too.
        answer_perplexity: also score a question's first answer token by token.
        repetition_penalty: penalty on tokens already written, those of the prompt apart (1.3 in GMSA's code).
        generation: further fields of `transformers.GenerationConfig`, such as `{"cache_implementation": "static"}`.
        prompts: name or file of the prompts, or one for each task; those of the checkpoint's training when `None`.
        prompt_format: of a plain language model, "plain" or "chat"; a compressor's is its checkpoint's.
        context_prefix: text in front of the contexts of questions and summaries; the checkpoint's own when empty.
        zero_shot: also score the base language model, adapters off, with full context and without.
        bounds_only: score a compressor without and with full context only, such as a prompt-tuned bound.
        ratios_only: leave the two bounds out, as between checkpoints whose bounds are the same.
        task_tokens_in_bounds: the compressor's task token starts the texts of the bounds, too (EPL).
        max_context_tokens: most tokens of a context; the model's positions, or 512 of retrieval, when `None`.
        max_query_tokens: most tokens of a query of retrieval.
        leave_out_long: leave out and count contexts of more than `max_context_tokens` (mean pooling's Table 2).
        truncate_context: cut contexts that do not fit, and count them, instead of raising.
        truncation_side: "right" or "left", of contexts of questions and summaries.
        allow_untrained_ratio: also compress at ratios that the checkpoint was not trained for.
        allow_trained_documents: also score documents that trained a model or chose it; the report says so.
    """

    tasks: tuple[str, ...] = DEFAULT_TASKS
    ratios: tuple[int, ...] | None = None
    memory_dtype: str | None = None
    max_samples: int | None = None
    batch_size: int = 8
    seed: int = 0
    alternatives: tuple[str, ...] = ()
    text_compressor: str | None = None
    num_resamples: int = NUM_RESAMPLES
    max_new_tokens: dict[str, int] = field(default_factory=lambda: {"question_answering": 32, "summarization": 128})
    context_tokens: int = 256
    continuation_tokens: int = 64
    reconstruction_bleu: bool = False
    restoration_lengths: tuple[int, ...] | None = None
    bert_score_model: str | None = None
    answer_perplexity: bool = False
    repetition_penalty: float | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    prompts: str | Mapping[str, str] | None = None
    prompt_format: str = "plain"
    context_prefix: str = ""
    zero_shot: bool = False
    bounds_only: bool = False
    ratios_only: bool = False
    task_tokens_in_bounds: bool = False
    max_context_tokens: int | None = None
    max_query_tokens: int = 64
    leave_out_long: bool = False
    truncate_context: bool = False
    truncation_side: str = "right"
    allow_untrained_ratio: bool = False
    allow_trained_documents: bool = False

    def __post_init__(self) -> None:
        for task in self.tasks:
            check_choice("task", task, TASKS)
        for name in self.alternatives:
            check_choice("alternative", name, ALTERNATIVES)
        if bool({"keep_drop", "keep_drop_aware"}.intersection(self.alternatives)) != (
            self.text_compressor is not None
        ):
            raise ValueError("the alternatives keep_drop and keep_drop_aware go with text_compressor, a checkpoint")
        check_choice("truncation_side", self.truncation_side, TRUNCATION_SIDES)
        if self.memory_dtype is not None:
            check_choice("memory_dtype", self.memory_dtype, MEMORY_DTYPES)
        if not self.tasks or any(not int(ratio) >= 1 for ratio in self.ratios or ()):
            raise ValueError(f"tasks must not be empty, and ratios at least 1, got {self.tasks} and {self.ratios}")
