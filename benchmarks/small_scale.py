# SPDX-License-Identifier: Apache-2.0
"""Quality of a method trained under a fixed budget on the small base: the same tokens, seeds and prompts for all.

    python benchmarks/small_scale.py --data DATA                      # mean pooling at ratio 4, three seeds
    python benchmarks/small_scale.py --data DATA --ratios 2 4 8 16    # one model for all four ratios
    python benchmarks/small_scale.py --data DATA --ratios 5 --method icae --config '{"position_layout": "enhanced"}'
    python benchmarks/small_scale.py --data DATA --jobs benchmarks/small_scale_jobs.json   # a list of such runs
    python benchmarks/small_scale.py --seeds 0 --steps 50             # generated documents alone, and briefly

DATA is a folder with the data files: SQuAD, NarrativeQA summaries and OpenStax. Reconstruction, continuation and
question answering are trained together on contexts of at most --context-tokens, and tested on documents that are not
in training, beside the base itself without context and with the full context. A question's answer always stands in its
context. All methods see the same contexts, questions and targets. Where a method has task tokens, its text starts with
them, and they take the place of the words that ask for a reconstruction (prompts "embedded", or --prompts).

A job file is a list of mappings with `method` and, where they differ from the command line, `config`, `ratios` and
`prompts`; it is gone through once for each seed. With --lowest-first a model of several ratios is trained at its
lowest one alone for a share of the steps: slots are read much sooner there. Every finished (method, configuration,
ratios, seed) is a run in the result file and is not done again; runs of another budget are refused there. Several
processes may write to one file. Scores are means over seeds, with the standard deviation. A run's `log` has the training loss
and the reconstruction and continuation losses of held-out documents by step, for `context-compressors curves`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmark_tools import RESULTS, positive_int, write_json
from filelock import FileLock
from small_scale_data import prepare
from small_scale_results import read_results, run_key, run_name, summarize, table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)

from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.report import environment, ratio_condition
from context_compressors.evaluation.samples import EvaluationDataset, Sample, SampleBuilder
from context_compressors.evaluation.scoring import Condition, Scorer
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.training.arguments import OPTIMIZERS, ModelArguments, TrainingConfig
from context_compressors.training.collators import CompressionCollator
from context_compressors.training.data import context_start_ids, start_token_id, task_start_ids
from context_compressors.training.examples import CompressionDataset
from context_compressors.training.suggestions import check_choice
from context_compressors.training.train import METHODS, load_compressor
from context_compressors.training.trainers import CompressionTrainer

BASE = Path(__file__).parent.parent / "checkpoints" / "base"
_LORA = {"rank": 32, "alpha": 32}
_WIDE_LORA = {"rank": 64, "alpha": 128}
# Where a method's own defaults, which are made for large bases, are not taken. The small base does not read slots that
# it was not tuned for, and adapters on its attention alone hardly learn: all methods but GMSA and its baseline, whose
# first stage is defined by a frozen decoder, get the same adapters on both sides. ComprExIT has no encoder of its own.
METHOD_CONFIGS: dict[str, dict[str, Any]] = {
    "mean_pooling": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "compression_tokens": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "icae": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "five_hundred_x": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "comprexit": {"decoder_lora": _LORA},
    "gmsa": {"encoder_lora": _WIDE_LORA},
    "tcp_autoencoder": {"encoder_lora": _WIDE_LORA},
}
# Points of a run's log.
_LOG_ENTRIES = 25
# Held-out documents of each data set behind a point of the curves.
_CURVE_SAMPLES = 8
_CURVE_TASKS = ("reconstruction", "continuation")
_CONTINUATION_TOKENS = 64
_JOB_FIELDS = ("method", "config", "ratios", "prompts")
_EVALUATION_BATCH = 32
# With task tokens: no words for a reconstruction, and questions in the one form that the small base knows.
_TASK_TOKEN_PROMPTS = "embedded"


class _CountingCollator(CompressionCollator):
    """Counts the budget that a run has used."""

    num_context_tokens = 0
    num_target_tokens = 0

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = super().__call__(examples)
        self.num_context_tokens += int(batch["context_attention_mask"].sum())
        self.num_target_tokens += int((batch["labels"] != -100).sum())
        return batch


class _HeldOutCurves(TrainerCallback):
    """At every entry of the training log, the losses of held-out documents at the model's first ratio.

    Args:
        model: in training.
        tokenizer: the tokenizer of the texts.
        samples: task -> what its loss is taken over.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Mapping[str, Sequence[Sample]]
    ):
        condition = Condition("compressed", model, ratio=model.config.default_ratio)
        starts = task_start_ids(model.config)
        self.scorer = Scorer(model, tokenizer, [condition], start_token_id(tokenizer), starts)
        self.samples = samples
        self.seconds = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], model: Any, **kwargs: Any) -> None:
        """Add the losses to the entry that the Trainer has just made."""
        if "loss" not in logs:
            return
        start = time.perf_counter()
        model.eval()
        for task, samples in self.samples.items():
            scores = self.scorer.score(task, samples, _EVALUATION_BATCH)["compressed"]
            state.log_history[-1][f"{task}_loss"] = math.log(scores["perplexity"])
        model.train()
        self.seconds += time.perf_counter() - start


def held_out(
    tokenizer: PreTrainedTokenizerBase,
    test: EvaluationDataset,
    context_tokens: int,
    prompts: str | None,
    task: str = "reconstruction",
) -> list[Sample]:
    """A few reconstructions or continuations of a test set."""
    builder = SampleBuilder(tokenizer, None, {}, context_tokens, _CONTINUATION_TOKENS, prompts=prompts)
    return builder.build(test, task, _CURVE_SAMPLES)


def prompts_of(arguments: argparse.Namespace, model: PreTrainedModel) -> str | None:
    """Name of the prompts that a model is trained and tested with; `None` for the packaged ones."""
    return arguments.prompts or (_TASK_TOKEN_PROMPTS if task_start_ids(model.config) else None)


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of a model's configuration: this benchmark's for the method, and those that were given."""
    return {**METHOD_CONFIGS.get(arguments.method, {}), **arguments.config}


@torch.inference_mode()
def tokens_per_slot(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]
) -> dict[str, float]:
    """By condition, the ratio that the samples' contexts come to: less than the model's where chunks are not full."""
    ratios, start = list(model.config.compression_ratios), context_start_ids(tokenizer)
    tokens, slots = [0] * len(ratios), [0] * len(ratios)
    for sample in samples:
        input_ids = torch.tensor([[*start, *sample.context_ids]], device=model.device)
        for index, memory in enumerate(model.compress(input_ids, ratio=ratios)):
            tokens[index] += int(memory.num_context_tokens)
            slots[index] += int(memory.num_slots)
    return {ratio_condition(r): tokens[i] / slots[i] for i, r in enumerate(ratios)}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="folder with the data files (default: generated documents alone)")
    add("--method", default="mean_pooling", help=f"one of {', '.join(METHODS)} (default: mean_pooling)")
    add("--config", type=_fields, default={}, metavar="JSON", help="fields of the method's configuration")
    add("--prompts", metavar="NAME", help="packaged prompts or a file of prompts (default: the method's, see above)")
    add("--ratios", nargs="+", type=positive_int, default=[4], metavar="R", help="ratios of the model (default: 4)")
    add("--jobs", metavar="FILE", help="a list of runs (JSON), in place of --method, --config, --ratios and --prompts")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    add("--base", default=str(BASE), metavar="FOLDER", help="the base language model (default: checkpoints/base)")
    add("--steps", type=positive_int, default=200, metavar="N", help="optimizer steps (default: 200)")
    add("--batch-size", type=positive_int, default=8, metavar="B", help="contexts per step (default: 8)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    add(
        "--muon-learning-rate", type=float, default=0.004, metavar="X", help="for matrices, with muon (default: 0.004)"
    )
    add("--learning-rate", type=float, default=2e-3, metavar="X", help="AdamW's (default: 2e-3)")
    add("--ratio-mode", choices=("all", "random"), default="all", help="ratios of a step: all, or one (default: all)")
    add(
        "--lowest-first",
        type=_share,
        default=0.0,
        metavar="X",
        help="share of steps at the lowest ratio (default: 0)",
    )
    add("--context-tokens", type=positive_int, default=144, metavar="N", help="longest context (default: 144)")
    add(
        "--eval-samples",
        type=positive_int,
        default=128,
        metavar="N",
        help="questions per data set; also texts to continue (default: 128)",
    )
    add(
        "--bleu-samples", type=positive_int, default=24, metavar="N", help="reconstructions per data set (default: 24)"
    )
    add("--device", help='such as "cpu" or "cuda" (default: a GPU when there is one)')
    add("--output", metavar="FILE", default=str(RESULTS / "small_scale.json"), help="the result file, also read")
    return parser


def _fields(text: str) -> dict[str, Any]:
    """Configuration fields from the command line."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "compression_ratios" in fields:
        raise argparse.ArgumentTypeError(f"{text!r} must be a mapping of fields, without the ratios (--ratios)")
    return fields


def _share(text: str) -> float:
    """A number from 0 to below 1 from the command line."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0 and less than 1")
    return value


def read_jobs(arguments: argparse.Namespace) -> list[argparse.Namespace]:
    """The runs of a job file, or the one that the command line names; each with all arguments.

    Raises:
        ValueError: the file is none of this kind, or a job has an unknown field or method.
    """
    jobs: Any = [{}]
    if arguments.jobs is not None:
        try:
            jobs = json.loads(Path(arguments.jobs).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--jobs {arguments.jobs} cannot be read: {error}") from error
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, dict) for job in jobs):
        raise ValueError(f"--jobs {arguments.jobs} must hold a list of mappings, one for each run")
    found = []
    for job in jobs:
        for name in job:
            check_choice(f"--jobs {arguments.jobs}", name, _JOB_FIELDS)
        found.append(argparse.Namespace(**{**vars(arguments), **job}))
        check_choice("--method", found[-1].method, METHODS)
    return found


def budget_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a result file have in common.

    Raises:
        ValueError: the base is not there.
    """
    weights = Path(arguments.base) / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"there is no base language model in {arguments.base}: name its folder with --base")
    return {
        "base": hashlib.sha256(weights.read_bytes()).hexdigest()[:16],
        "data": "generated" if arguments.data is None else "generated and real text",
        "steps": arguments.steps,
        "batch_size": arguments.batch_size,
        "optimizer": arguments.optimizer,
        "muon_learning_rate": arguments.muon_learning_rate,
        "learning_rate": arguments.learning_rate,
        "ratio_mode": arguments.ratio_mode,
        "lowest_first": arguments.lowest_first,
        "context_tokens": arguments.context_tokens,
        "eval_samples": arguments.eval_samples,
        "bleu_samples": arguments.bleu_samples,
    }


def training_config(arguments: argparse.Namespace, seed: int, folder: Path, device: torch.device) -> TrainingConfig:
    """How all methods are trained."""
    ratios = sorted(arguments.ratios)
    schedule = [[0.0, ratios[:1]], [arguments.lowest_first, ratios]] if arguments.lowest_first else None
    return TrainingConfig(
        output_dir=str(folder / "trainer"),
        objective="compression",
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        optimizer=arguments.optimizer,
        muon_learning_rate=arguments.muon_learning_rate,
        learning_rate=arguments.learning_rate,
        adam_beta2=0.95,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        ratio_mode=arguments.ratio_mode,
        ratio_schedule=schedule,
        warmup_steps=min(50, arguments.steps // 10),
        train_sampling_strategy="sequential",
        logging_steps=max(1, arguments.steps // _LOG_ENTRIES),
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=device.type == "cpu",
        seed=seed,
    )


def train(
    arguments: argparse.Namespace,
    seed: int,
    sources: Sequence[Mapping[str, Any]],
    tests: Sequence[EvaluationDataset],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> tuple[PreTrainedModel, dict[str, Any], list[dict[str, float]]]:
    """Train one model; returns it, what was used up, and its log."""
    set_seed(seed)
    fields = {**fields_of(arguments), "compression_ratios": list(arguments.ratios)}
    model = load_compressor(ModelArguments(base=arguments.base, method=arguments.method, method_config=fields))
    dataset = CompressionDataset(
        sources,
        tokenizer,
        arguments.steps * arguments.batch_size,
        data_dir=str(folder),
        max_context_tokens=arguments.context_tokens,
        min_context_tokens=min(16, arguments.context_tokens),
        max_target_tokens=arguments.context_tokens + 1,
        questions_per_example=4,
        canonical_prompts=True,
        prompts=prompts_of(arguments, model),
        overlong_contexts="skip",
        # Copying is learned much sooner from short contexts.
        length_schedule=[[0.0, min(48, arguments.context_tokens)], [0.5, arguments.context_tokens]],
        seed=seed,
    )
    collator = _CountingCollator.from_tokenizer(tokenizer, task_start_ids=task_start_ids(model.config))
    trainer = CompressionTrainer(
        model=model,
        args=training_config(arguments, seed, folder, device),
        train_dataset=dataset.as_dataset(),
        processing_class=tokenizer,
        data_collator=collator,
    )
    prompts = prompts_of(arguments, model)
    samples = {
        task: [s for test in tests for s in held_out(tokenizer, test, arguments.context_tokens, prompts, task)]
        for task in _CURVE_TASKS
    }
    curves = _HeldOutCurves(model, tokenizer, samples)
    trainer.add_callback(curves)
    start = time.perf_counter()
    outcome = trainer.train()
    log = [
        {name: entry[name] for name in ("step", "loss", *(f"{task}_loss" for task in _CURVE_TASKS))}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    used = {
        "steps": outcome.global_step,
        "context_tokens": collator.num_context_tokens,
        "target_tokens": collator.num_target_tokens,
        "mean_loss": outcome.training_loss,
        "seconds": time.perf_counter() - start - curves.seconds,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    return model, used, log


def evaluate(
    arguments: argparse.Namespace,
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tests: Sequence[EvaluationDataset],
) -> list[dict[str, Any]]:
    """Score a model on all data sets and tasks, beside the base without context and with all of it."""
    rows = []
    prompts = prompts_of(arguments, model)
    model.eval()
    densities = {
        test.name: tokens_per_slot(model, tokenizer, held_out(tokenizer, test, arguments.context_tokens, prompts))
        for test in tests
    }
    for task, samples in (
        ("question_answering", arguments.eval_samples),
        ("reconstruction", arguments.bleu_samples),
        ("continuation", arguments.eval_samples),
    ):
        settings = EvaluationSettings(
            tasks=(task,),
            max_samples=samples,
            batch_size=_EVALUATION_BATCH,
            max_new_tokens={"question_answering": 16, "summarisation": 1},
            context_tokens=arguments.context_tokens,
            continuation_tokens=_CONTINUATION_TOKENS,
            reconstruction_bleu=task == "reconstruction",
            prompts=prompts,
        )
        report = evaluate_model(model, tokenizer, tests, settings, teacher=base)
        for row in report.rows:
            metrics = dict(row.metrics)
            if "perplexity" in metrics:
                metrics["loss"] = math.log(metrics["perplexity"])
            if task == "reconstruction" and row.condition in densities[row.dataset]:
                metrics["tokens_per_slot"] = densities[row.dataset][row.condition]
            metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            rows.append({**asdict(row), "metrics": metrics})
    return rows


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the runs that are not in the result file yet, and write it after each."""
    output, budget = Path(arguments.output), budget_of(arguments)
    jobs = [(job, seed) for seed in arguments.seeds for job in read_jobs(arguments)]
    results = read_results(output, budget)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if all(_is_finished(job, seed, results) for job, seed in jobs):
        return results
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(arguments.base)
        base = AutoModelForCausalLM.from_pretrained(arguments.base).to(device).eval()
        sources, tests = prepare(arguments.data, tokenizer, arguments.context_tokens, Path(folder))
        for job, seed in jobs:
            if _is_finished(job, seed, read_results(output, budget)):
                continue
            print(f"{_name(job)}, ratios {job.ratios}, seed {seed}", flush=True)
            model, training, log = train(job, seed, sources, tests, Path(folder), tokenizer, device)
            start = time.perf_counter()
            rows = evaluate(job, model, base, tokenizer, tests)
            run = {"name": _name(job), "method": job.method, "config": job.config, "fields": fields_of(job)}
            run |= {"ratios": list(job.ratios), "seed": seed, "prompts": prompts_of(job, model)}
            run |= {"training": training, "log": log, "evaluation_seconds": time.perf_counter() - start}
            results = _add_run(output, budget, {**run, "environment": environment(), "rows": rows})
    return results


def _name(job: argparse.Namespace) -> str:
    return run_name(job.method, {**job.config, **({} if job.prompts is None else {"prompts": job.prompts})})


def _is_finished(job: argparse.Namespace, seed: int, results: Mapping[str, Any]) -> bool:
    return (_name(job), tuple(job.ratios), seed) in map(run_key, results["runs"])


def _add_run(output: Path, budget: Mapping[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Add a run to what the file holds by now: other processes may have written to it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(output.with_name(f".{output.name}.lock")):
        results = read_results(output, budget)
        if run_key(run) not in map(run_key, results["runs"]):
            results["runs"].append(run)
        results["summary"] = summarize(results["runs"])
        write_json(output, results)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        results = run_all(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(results['summary'])}\n\nruns are in {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
