# SPDX-License-Identifier: Apache-2.0
"""The fields of a recipe that are this package's own; no torch or TRL is loaded here, so that help is quick."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ..configuration.nearest_names import check_choice
from ..data.yaml_text import parse_yaml
from .schedules import check_ratio_schedule, check_task_schedule

if TYPE_CHECKING:
    from ..data.sources import DataSource

    Fields = dict[str, Any]
    Entries = list[Any]
else:
    # The command line gives them as YAML text, which is read when they are set.
    Fields, Entries = dict | str, list | str

DESCRIPTION = "Train a full-context teacher or a compressor from a recipe."
OBJECTIVES = (
    *("teacher", "compression", "distillation", "joint", "segments", "windows"),
    *("denoising", "retrieval"),
)
OPTIMIZERS = ("adamw", "muon", "adafactor")
# Fields of TRL's configuration that nothing reads but the teacher's loss, which is TRL's own, and what to do instead.
_OF_TRL = {
    "label_smoothing_factor": "has a part in the loss of the objective teacher alone: leave it out",
    "loss_type": "has a part in the loss of the objective teacher alone: leave it out",
    "max_length": "cuts nothing: give max_context_tokens and max_target_tokens",
}
RATIO_MODES = ("all", "random", "per_sample")
CONTEXT_MODES = ("compressed", "full_context", "no_context")
OVERLONG_CONTEXTS = ("truncate", "truncate_left", "skip")
PROMPT_FORMATS = ("plain", "chat")


def check_finite(name: str, value: float) -> None:
    """Raise `ValueError` naming a field whose value is not a finite number of 0 or more."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, 0 or more, got {value}")


def _structured(name: str, value: Any, kind: type) -> Any:
    """A mapping or list field, which the command line gives as YAML text."""
    if isinstance(value, str):
        try:
            # YAML reads a rare character that JSON has in two escaped halves as two.
            value = json.loads(value)
        except ValueError:
            value = parse_yaml(value, name)
    if value is not None and not isinstance(value, kind):
        word = "a mapping" if kind is dict else "a list"
        raise ValueError(f"{name} must be {word}, got {value!r}")
    return value


def _read_null(arguments: Any) -> None:
    """Make `None` of the text "null" or "none" in optional fields: the command line has no other way to write it."""
    for entry in fields(arguments):
        value = getattr(arguments, entry.name)
        if entry.default is None and isinstance(value, str) and value.lower() in ("null", "none"):
            setattr(arguments, entry.name, None)


@dataclass
class ModelArguments:
    """What is trained. An optional field is `None` when it is given as null or none.

    Args:
        base: folder or Hub id of the pretrained language model to start from.
        base_revision: revision of `base` on the Hub.
        base_gguf_file: GGUF file in `base` that has the weights and the tokenizer; the weights are dequantised.
        encoder: folder or Hub id of another language model that encodes, for a method with an encoder of its own.
        encoder_revision: revision of `encoder` on the Hub.
        adapter: folder or Hub id of a LoRA adapter of `base`, such as a teacher's, that the decoder's own adapter, or
            one that both sides share, starts as.
        checkpoint: a compressor checkpoint to go on from, instead of `base`; of a teacher, its adapter's folder.
        checkpoint_base: where the base of a light `checkpoint` is, folder or Hub id, if not where it says.
        checkpoint_config: configuration fields that the checkpoint goes on with instead of its own, e.g.
            `{training_stage: keft}` or `{decoder_config: {dropout_rate: 0.1}}`, where the rest of `decoder_config`
            stays; its weights must fit them.
        model_config: configuration of the new T5 of a method that is an encoder-decoder, e.g. `{d_model: 192}`.
        tokenizer: folder or Hub id of a tokenizer; that of `base` or `checkpoint` when not given.
        method: compression method, by its name in the README's table. When not given, that of `checkpoint`, and
            mean_pooling for a new compressor.
        method_config: configuration fields of the method, e.g. `{compression_ratios: [4, 8]}`.
        teacher: folder of the full-context teacher that distillation learns from; the base itself when not given.
        teacher_lora: rank, alpha, dropout and target modules of the teacher's adapters; `None` trains all weights.
        dtype: weights' type: float32, bfloat16 or float16. What trains beside a frozen base is float32; where all
            weights train, smaller types round small steps away.
        attn_implementation: eager, sdpa or flash_attention_2.
    """

    base: str | None = field(default=None, metadata={"help": "folder or Hub id of the base language model"})
    base_revision: str | None = field(default=None, metadata={"help": "revision of the base on the Hub"})
    base_gguf_file: str | None = field(default=None, metadata={"help": "GGUF file of the base"})
    encoder: str | None = field(default=None, metadata={"help": "folder or Hub id of another model that encodes"})
    encoder_revision: str | None = field(default=None, metadata={"help": "revision of the encoder on the Hub"})
    adapter: str | None = field(default=None, metadata={"help": "adapter of the base to start from"})
    checkpoint: str | None = field(default=None, metadata={"help": "compressor checkpoint to go on from"})
    checkpoint_base: str | None = field(default=None, metadata={"help": "where the base of a light checkpoint is"})
    checkpoint_config: Fields | None = field(default=None, metadata={"help": "what changes in the checkpoint"})
    model_config: Fields | None = field(default=None, metadata={"help": "configuration of a new encoder-decoder"})
    tokenizer: str | None = field(default=None, metadata={"help": "folder or Hub id of the tokenizer"})
    method: str | None = field(default=None, metadata={"help": "compression method"})
    method_config: Fields | None = field(default=None, metadata={"help": "configuration fields of the method"})
    teacher: str | None = field(default=None, metadata={"help": "folder of the full-context teacher"})
    teacher_lora: Fields | None = field(default=None, metadata={"help": "adapters of the teacher"})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16"})
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2"})

    def __post_init__(self) -> None:
        _read_null(self)
        for name in ("model_config", "method_config", "checkpoint_config", "teacher_lora"):
            setattr(self, name, _structured(name, getattr(self, name), dict))
        check_choice("dtype", self.dtype, ("float32", "bfloat16", "float16"))


# A target is at least a token and the EOS behind it.
_LEAST = {
    "max_context_tokens": 1,
    "max_target_tokens": 2,
    "questions_per_example": 1,
    "group_batches": 1,
    "num_eval_examples": 1,
    "max_document_tokens": 1,
    "max_query_tokens": 1,
}


@dataclass
class DataArguments:
    """What it is trained on. An optional field is `None` when it is given as null or none.

    Args:
        sources: list of sources, each a `DataSource` or its fields; of the objective retrieval, `RetrievalSource`.
        eval_sources: list of sources to evaluate the loss on, in the same form.
        data_dir: folder that the sources' paths are relative to.
        prompts: file of prompt templates, or the name of a packaged one: default, memory_tokens, comprexit, embedded,
            gmsa or chat.
        prompt_format: plain, or chat: context and prompt are the user's turn of the tokenizer's chat template.
        context_prefix: text in front of the contexts of questions and summaries, which counts as part of them.
        canonical_prompts: the first template of each task only.
        first_answer: the first answer of each question only; else one of them is drawn.
        max_context_tokens: contexts are cut to so many tokens (counted in the log).
        min_context_tokens: shortest window of a plain text; the objective windows passes over rows with shorter texts.
        max_target_tokens: targets are cut to so many tokens (counted in the log).
        min_document_tokens: shortest document of joint pretraining, context and completion together.
        max_document_tokens: longest document of joint pretraining; length of every block of the objective segments.
        questions_per_example: questions about one context in an example of a compressor.
        overlong_contexts: of contexts of questions and summaries that are too long: truncate their end or
            truncate_left their beginning (both counted in the log), or skip them.
        group_batches: batches of a compressor that are sorted by the length that the decoder reads (slots and text)
            together, so that they hold little padding; the log has its share as `padding_share`.
        pack_texts: texts to be continued stand one behind the other, with EOS behind each, and are cut every
            `max_context_tokens + max_target_tokens` tokens: no pads; sources with the task continuation alone.
        memories: folder of memory files, named by `document_id` as `compress --by-document` names them, that a stage
            which changes no memory reads in place of its contexts.
        num_eval_examples: examples of `eval_sources`.
        length_schedule: (fraction of training, context tokens) pairs; the limit of generated documents and of windows
            of texts grows from one to the next.
        schedule_contexts: it also holds for contexts of questions and summaries: for one that is longer, a row of any
            source is read.
        task_schedule: (fraction of training, tasks) pairs of a compressor's training: from there on only these, of the
            sources that have them, e.g. `[[0.0, [reconstruction]], [0.5, [reconstruction, question_answering]]]`;
            `eval_sources` have all their tasks.
        task_per_batch: all examples of a device's batch have one task, drawn for the batch, as by the coin of PCC's
            pretraining, and not one drawn for each; every source has the same tasks then, and `group_batches` is 1.
        noise_density: share of a text's tokens that denoising takes out; the corrupted text has up to
            `max_context_tokens` tokens.
        mean_span_length: mean length of a span that it takes out.
        max_query_tokens: queries of retrieval are cut to so many tokens, its documents to `max_context_tokens`
            (counted in the log).
    """

    sources: Entries | None = field(default=None, metadata={"help": "data sources"})
    eval_sources: Entries | None = field(default=None, metadata={"help": "data sources to evaluate the loss on"})
    data_dir: str | None = field(default=None, metadata={"help": "folder with the data files"})
    prompts: str | None = field(default=None, metadata={"help": "file of prompt templates, or a packaged name"})
    prompt_format: str = field(default="plain", metadata={"help": ", ".join(PROMPT_FORMATS)})
    context_prefix: str = field(default="", metadata={"help": "text in front of contexts of questions and summaries"})
    canonical_prompts: bool = field(default=False, metadata={"help": "the first template of each task only"})
    first_answer: bool = field(default=False, metadata={"help": "the first answer of each question only"})
    max_context_tokens: int = field(default=1024, metadata={"help": "longest context in tokens"})
    min_context_tokens: int = field(default=32, metadata={"help": "shortest text window in tokens"})
    max_target_tokens: int = field(default=256, metadata={"help": "longest target in tokens"})
    min_document_tokens: int = field(default=510, metadata={"help": "shortest document of joint pretraining"})
    max_document_tokens: int = field(default=2040, metadata={"help": "longest document of joint pretraining"})
    questions_per_example: int = field(default=1, metadata={"help": "questions about one context in an example"})
    overlong_contexts: str = field(default="truncate", metadata={"help": ", ".join(OVERLONG_CONTEXTS)})
    group_batches: int = field(default=1, metadata={"help": "batches sorted by length together"})
    pack_texts: bool = field(default=False, metadata={"help": "texts to be continued as one stream, without pads"})
    memories: str | None = field(default=None, metadata={"help": "folder of memories in place of contexts"})
    num_eval_examples: int = field(default=200, metadata={"help": "number of evaluation examples"})
    length_schedule: Entries | None = field(default=None, metadata={"help": "how the length limit grows"})
    schedule_contexts: bool = field(default=False, metadata={"help": "whole contexts, too, wait for the limit"})
    task_schedule: Entries | None = field(default=None, metadata={"help": "which tasks are trained when"})
    task_per_batch: bool = field(default=False, metadata={"help": "one task for all examples of a batch"})
    noise_density: float = field(default=0.15, metadata={"help": "share of tokens that denoising takes out"})
    mean_span_length: float = field(default=3.0, metadata={"help": "mean length of a span that it takes out"})
    max_query_tokens: int = field(default=64, metadata={"help": "longest query of retrieval in tokens"})

    def __post_init__(self) -> None:
        _read_null(self)
        for name in ("sources", "eval_sources", "length_schedule", "task_schedule"):
            setattr(self, name, _structured(name, getattr(self, name), list))
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 1 <= self.min_context_tokens <= self.max_context_tokens:
            raise ValueError(
                f"min_context_tokens must be 1 to max_context_tokens ({self.max_context_tokens}), "
                f"got {self.min_context_tokens}"
            )
        check_choice("overlong_contexts", self.overlong_contexts, OVERLONG_CONTEXTS)
        check_choice("prompt_format", self.prompt_format, PROMPT_FORMATS)
        if self.task_schedule is not None:
            check_task_schedule(self.task_schedule)
        if self.task_per_batch and self.group_batches > 1:
            raise ValueError(
                f"task_per_batch goes with group_batches 1, got {self.group_batches}: groups are sorted by length, "
                "whatever the task"
            )

    def parsed_sources(self) -> list[DataSource]:
        """The entries of `sources`; `ValueError` when there are none, or one has a field that says nothing of it."""
        from ..data.sources import DataSource, check_trained_source

        if not self.sources:
            raise ValueError("there are no sources: give at least one {path | name | generated: true, tasks}")
        sources = [DataSource.from_mapping(entry) for entry in self.sources]
        for source in sources:
            check_trained_source(source)
        return sources

    def of_evaluation(self) -> DataArguments:
        """The same with `eval_sources` as its sources, and without schedules."""
        schedules: dict[str, Any] = {"length_schedule": None, "schedule_contexts": False, "task_schedule": None}
        return replace(self, sources=self.eval_sources, eval_sources=None, **schedules)


@dataclass
class TrainingFields:
    """How it is trained, beside what `trl.SFTConfig` says.

    Args:
        objective: teacher, compression, distillation, joint (reconstruction and continuation
            from the same slots), segments (the next token behind summaries, for autocompressor), windows (the
            next token behind beacons, for activation_beacon), denoising (span corruption, for decal), or retrieval
            (contrastive, for decal).
        optimizer: adamw; muon for matrices and AdamW for embeddings and vectors; or adafactor as in T5, whose
            `learning_rate` is relative to the size of each parameter (that of `optim: adafactor` is absolute) and
            which clips updates itself (`max_grad_norm: 0`).
        muon_learning_rate: of the hidden matrices under Muon; `learning_rate` is AdamW's.
        muon_momentum: momentum of Muon.
        ratio_mode: "all" trains every ratio at each step from one encoding, "random" draws one per step
            (of the objective windows for each window of a step), "per_sample" one per row.
        ratio_schedule: list of [fraction of training, ratios]: the checkpoint's ratios that are trained from there on,
            e.g. `[[0.0, [2]], [0.4, [2, 4, 8]]]`; all of them all the time when not given.
        distillation_chunk_size: answer tokens whose vocabulary scores are in memory at once.
        kl_weight: of the objective distillation, weight of KL(teacher || student).
        nll_weight: of the objective distillation, weight of the answer's own cross-entropy beside it.
        save_dtype: type that the final weights are stored in, e.g. bfloat16; as they are held by default.
        overwrite: whether weights, code and checkpoints that are in `output_dir` are deleted before training starts.
            They are read back in the type that they were trained in.
        alpha: weight of the reconstruction in the objective joint, 0 to 1; the continuation has the rest.
        training_substeps: parts of a block of the objective segments, each with its own backward pass; no gradient
            flows between them.
        segments_per_substep: segments of each, with gradient between them.
        random_segments: whether the lengths of segments are drawn; else they are equal.
        context_mode: how the objectives compression and joint give the context: compressed, or for the bounds as
            full_context in front of the text, or no_context.
        contrastive_temperature: scores of the objective retrieval are divided by it.
        fit_scorers: of ranked_key_values, before the first step its scorers are fitted to the contexts of so many
            examples of the training, taken evenly.
        sample_answers_steps: the log shows answers to the first questions of `eval_sources` every so many steps, and
            before the first; never with 0.
    """

    objective: str = field(default="compression", metadata={"help": ", ".join(OBJECTIVES)})
    optimizer: str = field(default="adamw", metadata={"help": ", ".join(OPTIMIZERS)})
    muon_learning_rate: float = field(default=0.02, metadata={"help": "learning rate of Muon's matrices"})
    muon_momentum: float = field(default=0.95, metadata={"help": "momentum of Muon"})
    ratio_mode: str = field(default="all", metadata={"help": "all ratios at each step, or one: random, per_sample"})
    ratio_schedule: Entries | None = field(default=None, metadata={"help": "which ratios are trained when"})
    distillation_chunk_size: int = field(default=256, metadata={"help": "answer tokens scored at once"})
    kl_weight: float = field(default=1.0, metadata={"help": "weight of the teacher's KL in distillation"})
    nll_weight: float = field(default=0.0, metadata={"help": "weight of cross-entropy in distillation"})

    save_dtype: str | None = field(default=None, metadata={"help": "type that the final weights are stored in"})
    overwrite: bool = field(default=False, metadata={"help": "replace a checkpoint that is in output_dir"})
    alpha: float = field(default=0.5, metadata={"help": "weight of the reconstruction in joint pretraining"})
    training_substeps: int = field(default=2, metadata={"help": "parts of a block of segments"})
    segments_per_substep: int = field(default=2, metadata={"help": "segments of each part"})
    random_segments: bool = field(default=True, metadata={"help": "whether lengths of segments are drawn"})
    context_mode: str = field(default="compressed", metadata={"help": ", ".join(CONTEXT_MODES)})
    contrastive_temperature: float = field(default=1.0, metadata={"help": "what scores of retrieval are divided by"})
    fit_scorers: int = field(default=0, metadata={"help": "contexts that scorers are fitted to at first"})
    sample_answers_steps: int = field(default=0, metadata={"help": "steps between answers in the log; 0 for none"})

    def check_fields(self) -> None:
        """Read `ratio_schedule` from its text; `ValueError` names the first field whose value is not allowed."""
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("ratio_mode", self.ratio_mode, RATIO_MODES)
        self.ratio_schedule = _structured("ratio_schedule", self.ratio_schedule, list)
        if self.ratio_schedule is not None:
            check_ratio_schedule(self.ratio_schedule)
            if self.ratio_mode == "per_sample":
                raise ValueError("ratio_schedule goes with ratio_mode all or random, got ratio_mode 'per_sample'")
        if self.save_dtype is not None:
            check_choice("save_dtype", self.save_dtype, ("float32", "bfloat16", "float16"))
        if self.distillation_chunk_size < 1:
            raise ValueError(f"distillation_chunk_size must be at least 1, got {self.distillation_chunk_size}")
        for name in ("kl_weight", "nll_weight", "muon_learning_rate"):
            check_finite(name, getattr(self, name))
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"muon_momentum must be from 0 to below 1, got {self.muon_momentum}")
        for name in ("muon_learning_rate", "muon_momentum"):
            value = getattr(self, name)
            if self.optimizer != "muon" and value != getattr(type(self), name):
                raise ValueError(f"{name} goes with optimizer muon, got {value} with {self.optimizer!r}: leave it out")
        if self.objective == "distillation" and self.kl_weight == self.nll_weight == 0:
            raise ValueError("kl_weight and nll_weight are both 0: one of them must be above 0")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be from 0 to 1, got {self.alpha}")
        for name in ("training_substeps", "segments_per_substep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("fit_scorers", "sample_answers_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 < self.contrastive_temperature < math.inf:
            raise ValueError(
                f"contrastive_temperature must be a finite number above 0, got {self.contrastive_temperature}"
            )
        defaults = {field.name: field.default for field in fields(type(self))}
        for name, instead in _OF_TRL.items():
            value, is_read = getattr(self, name), self.objective == "teacher" and name != "max_length"
            if not is_read and value not in (None, defaults[name]):
                raise ValueError(f"{name} {instead}, got {value!r} in place of TRL's own {defaults[name]!r}")
        check_choice("context_mode", self.context_mode, CONTEXT_MODES)
        if self.context_mode != "compressed" and self.objective not in ("compression", "joint"):
            raise ValueError(
                f"context_mode {self.context_mode!r} goes with the objectives compression and joint, "
                f"not with {self.objective!r}"
            )


def usage(prog: str) -> str:
    """The command line in one line."""
    return f"{prog} RECIPE.yaml [RECIPE.yaml ...] [--field value ...]"


def examples(prog: str) -> str:
    """Command lines that can be run."""
    return (
        "examples:\n"
        f"  {prog} embedded/mean_pooling.yaml --base BASE --data_dir DATA --output_dir outputs/mean_pooling\n"
        f"  {prog} mean_pooling/multi_ratio.yaml mean_pooling/bases/qwen3_0.6b.yaml --teacher TEACHER\n"
        f"  {prog} epl/icae.yaml epl/layouts/enhanced.yaml epl/bases/llama3.2_1b.yaml epl/pretraining.yaml\n"
        f"  {prog} my_recipe.yaml --resume_from_checkpoint latest\n"
    )
