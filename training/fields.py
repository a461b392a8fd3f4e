# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF009  (`_option` returns a field)
"""The fields of a recipe that are this package's own; importing them loads neither torch nor TRL."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..configuration.nearest_names import check_choice
from ..data.prompts import TASKS
from ..data.yaml_text import parse_yaml

if TYPE_CHECKING:
    from ..data.sources import DataSource

    Fields = dict[str, Any]
    Entries = list[Any]
else:
    # The command line gives them as YAML text, which `_structured` reads.
    Fields, Entries = dict | str, list | str

DESCRIPTION = "Train a full-context teacher or a compressor from a recipe."
USAGE = "RECIPE.yaml [RECIPE.yaml ...] [--field value ...]"
EXAMPLES = """\
examples:
  context-compressors train embedded/mean_pooling.yaml --base BASE --data_dir DATA --output_dir outputs/mean_pooling
  context-compressors train mean_pooling/multi_ratio.yaml mean_pooling/bases/qwen3_0.6b.yaml mean_pooling/data.yaml \\
      --teacher TEACHER --data_dir DATA --output_dir outputs/qwen3
  context-compressors train epl/icae.yaml epl/layouts/enhanced.yaml epl/bases/llama3.2_1b.yaml epl/pretraining.yaml
  context-compressors train my_recipe.yaml --resume_from_checkpoint latest
"""
OBJECTIVES = (
    "teacher",
    "compression",
    "distillation",
    "joint",
    "segments",
    "windows",
    "denoising",
    "retrieval",
    "keep_drop",
)
CONTEXT_MODES = ("compressed", "full_context", "no_context")
DTYPES = ("float32", "bfloat16", "float16")


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


def _structured(name: str, value: Any, kind: type) -> Any:
    """A mapping or list field, which the command line gives as YAML text."""
    if isinstance(value, str):
        try:
            # YAML reads a rare character that JSON has in two escaped halves as two.
            value = json.loads(value)
        except ValueError:
            value = parse_yaml(value, name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be {'a mapping' if kind is dict else 'a list'}, got {value!r}")
    return value


@dataclass
class ModelArguments:
    """The model to train; the command line's help describes each field."""

    base: str | None = _option(None, "folder or Hub id of the pretrained language model to start from")
    base_gguf_file: str | None = _option(None, "GGUF file of the base, dequantised on loading")
    encoder: str | None = _option(None, "folder or Hub id of another language model that encodes")
    adapter: str | None = _option(None, "LoRA adapter of the base that the decoder's starts as")
    checkpoint: str | None = _option(None, "checkpoint to go on from; of a teacher, its adapter's folder")
    checkpoint_config: Fields | None = _option(None, "fields to change, e.g. {training_stage: keft}")
    model_config: Fields | None = _option(
        None, "configuration of a new T5, e.g. {d_model: 192}, or of keep_drop's classifier"
    )
    tokenizer: str | None = _option(None, "folder or Hub id of a tokenizer, if not the base's or checkpoint's")
    method: str | None = _option(None, "compression method; default: the checkpoint's, or mean_pooling")
    method_config: Fields | None = _option(None, "fields of it, e.g. {compression_ratios: [4, 8]}")
    teacher: str | None = _option(None, "folder of the teacher; the base itself by default")
    teacher_lora: Fields | None = _option(None, "rank, alpha, dropout, target_modules; null: no LoRA")
    dtype: str = _option("float32", "type of the weights; small types round small steps of trained weights away")
    attn_implementation: str | None = _option(None, "eager, sdpa or flash_attention_2")

    def __post_init__(self) -> None:
        for name in ("model_config", "method_config", "checkpoint_config", "teacher_lora"):
            setattr(self, name, _structured(name, vars(self)[name], dict))
        check_choice("dtype", self.dtype, DTYPES)


@dataclass
class DataArguments:
    """The training data and how examples are made of it; the command line's help describes each field."""

    sources: Entries | None = _option(None, "data sources, each with the fields of DataSource or RetrievalSource")
    eval_sources: Entries | None = _option(None, "data to evaluate the loss on")
    data_dir: str | None = _option(None, "folder that the sources' paths are relative to")
    prompts: str | None = _option(None, "file of prompt templates, or a packaged name such as default or chat")
    prompt_format: str = _option("plain", "plain, or chat: in the user's turn of the chat template")
    context_prefix: str = _option("", "text in front of the contexts of questions and summaries")
    canonical_prompts: bool = _option(False, "take the first template of each task instead of a random one")
    first_answer: bool = _option(False, "take the first answer of each question instead of a random one")
    max_context_tokens: int = _option(1024, "longest context; longer ones are cut and counted in the log")
    min_context_tokens: int = _option(32, "shortest window of a plain text in tokens")
    max_target_tokens: int = _option(256, "longest target; longer ones are cut and counted in the log")
    min_document_tokens: int = _option(510, "shortest document of joint pretraining: context and completion")
    max_document_tokens: int = _option(2040, "longest document of joint pretraining; block length of segments")
    questions_per_example: int = _option(1, "questions about one context in an example")
    overlong_contexts: str = _option("truncate", "truncate, truncate_left or skip contexts of questions")
    group_batches: int = _option(1, "batches that are sorted by length together, so that they hold little padding")
    pack_texts: bool = _option(False, "continue texts from one stream without pads")
    memories: str | None = _option(None, "folder of memories, from `compress --by-document`")
    num_eval_examples: int = _option(200, "number of examples of eval_sources")
    length_schedule: Entries | None = _option(None, "[fraction, context tokens] pairs")
    schedule_contexts: bool = _option(False, "length_schedule also holds for contexts of questions")
    task_schedule: Entries | None = _option(None, "[fraction of training, tasks] pairs")
    task_per_batch: bool = _option(False, "draw one task for all examples of a batch (PCC's pretraining)")
    max_query_tokens: int = _option(64, "longest query of retrieval in tokens")

    def __post_init__(self) -> None:
        for name in ("sources", "eval_sources", "length_schedule", "task_schedule"):
            setattr(self, name, _structured(name, vars(self)[name], list))
        check_choice("overlong_contexts", self.overlong_contexts, ("truncate", "truncate_left", "skip"))
        check_choice("prompt_format", self.prompt_format, ("plain", "chat"))
        if self.length_schedule is not None:
            check_schedule("length_schedule", self.length_schedule, lambda length: length >= 1)
        if self.task_schedule is not None:
            check_changes("task_schedule", self.task_schedule, TASKS.__contains__)

    def parsed_sources(self) -> list[DataSource]:
        """Return the entries of `sources` as [`DataSource`]; `ValueError` where there are none."""
        from ..data.sources import DataSource

        if not self.sources:
            raise ValueError("there are no sources: give at least one {path | name | generated: true, tasks}")
        return [DataSource.from_mapping(entry) for entry in self.sources]

    def of_evaluation(self) -> DataArguments:
        """Return the same with `eval_sources` as its sources, and without schedules."""
        schedules: dict[str, Any] = {"length_schedule": None, "schedule_contexts": False, "task_schedule": None}
        return replace(self, sources=self.eval_sources, eval_sources=None, **schedules)


@dataclass
class TrainingFields:
    """Settings of the training in addition to those of `trl.SFTConfig`; the command's help describes each field."""

    objective: str = _option("compression", ", ".join(OBJECTIVES))
    optimizer: str = _option("adamw", "adamw, or adafactor as in T5, with a relative rate")
    ratio_mode: str = _option("all", "all ratios at each step, or one: random, per_sample per row")
    ratio_schedule: Entries | None = _option(None, "[fraction of training, ratios] pairs")
    kl_weight: float = _option(1.0, "weight of KL(teacher || student)")
    nll_weight: float = _option(0.0, "weight of the answer's own cross-entropy")
    save_dtype: str | None = _option(None, "type of the final weights' file, such as bfloat16 or float8_e4m3fn")
    overwrite: bool = _option(False, "replace weights, code and checkpoints of an earlier run in output_dir")
    alpha: float = _option(0.5, "weight of the reconstruction; the continuation has the rest")
    training_substeps: int = _option(2, "parts of a block with a backward pass each")
    segments_per_substep: int = _option(2, "segments of each part, with gradient between them")
    random_segments: bool = _option(True, "draw the lengths of segments; otherwise they are equal")
    context_mode: str = _option("compressed", ", ".join(CONTEXT_MODES))
    contrastive_temperature: float = _option(1.0, "divides the scores of retrieval")
    fit_scorers: int = _option(0, "contexts that the scorers of ranked_key_values are fitted to at first")
    sample_answers_steps: int = _option(0, "steps between answers in the log; 0 for none")

    def resolve_fields(self) -> None:
        """Read `ratio_schedule` from its text; `ValueError` names the first field whose value is not allowed."""
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("optimizer", self.optimizer, ("adamw", "adafactor"))
        check_choice("ratio_mode", self.ratio_mode, ("all", "random", "per_sample"))
        check_choice("context_mode", self.context_mode, CONTEXT_MODES)
        if self.save_dtype is not None:
            check_choice("save_dtype", self.save_dtype, (*DTYPES, "float8_e4m3fn"))
        self.ratio_schedule = _structured("ratio_schedule", self.ratio_schedule, list)
        if self.ratio_schedule is not None:
            if self.ratio_mode == "per_sample":
                raise ValueError("ratio_schedule goes with ratio_mode all or random, got ratio_mode 'per_sample'")
            check_changes("ratio_schedule", self.ratio_schedule, lambda ratio: isinstance(ratio, int) and ratio >= 1)


def check_schedule(name: str, schedule: Sequence[Sequence[Any]], is_allowed: Callable[[Any], bool]) -> None:
    """Raise `ValueError` unless a schedule has [fraction of training, allowed value] pairs, fractions in order."""
    fractions = [fraction for fraction, _ in schedule]
    in_order = bool(fractions) and fractions == sorted(fractions) and 0 <= fractions[0] <= fractions[-1] <= 1
    if not in_order or not all(is_allowed(value) for _, value in schedule):
        raise ValueError(
            f"{name} must be a list of [fraction of training, value] in order, fractions from 0 to 1 and values "
            f"allowed, got {schedule!r}"
        )


def scheduled_length(points: list[list[Any]], fraction: float) -> int:
    """Length limit after a fraction of the training, linear between the points and constant outside them."""
    position = bisect.bisect_right(points, [fraction, math.inf])
    if position == 0 or position == len(points):
        return points[min(position, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[position - 1], points[position]
    return round(y0 + (y1 - y0) * (fraction - x0) / (x1 - x0))


def check_changes(name: str, schedule: Sequence[Sequence[Any]], is_allowed: Callable[[Any], bool]) -> None:
    """Raise `ValueError` unless a schedule has [fraction of training, allowed values] pairs from fraction 0 on."""
    check_schedule(name, schedule, lambda values: values and all(map(is_allowed, values)))
    if schedule[0][0] != 0:
        raise ValueError(f"the first fraction of {name} must be 0, got {schedule[0][0]}")
