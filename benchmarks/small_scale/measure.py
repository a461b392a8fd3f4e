# SPDX-License-Identifier: Apache-2.0
"""Quality of a method trained under a fixed budget on the small base: the same tokens, seeds and prompts for all.

    python -m benchmarks.small_scale.measure --data DATA --ratios 2 4 8 16
    python -m benchmarks.small_scale.measure --data DATA --jobs benchmarks/small_scale/methods_jobs.json

Runs of several budgets do not share a file: give --output where the result file has runs of another one.

DATA is a folder with the data files: SQuAD, NarrativeQA summaries and OpenStax. Reconstruction, continuation and
question answering are trained together on contexts of at most --context-tokens, and tested on documents that are not
in training, beside the base itself without context and with the full context. A question's answer always stands in its
context. All methods see the same contexts, questions and targets. Where a method has task tokens, its text starts with
them, and they take the place of the words that ask for a reconstruction (prompts "embedded", or --prompts). --tasks
leaves tasks out; with reconstruction alone it is GMSA's first stage, and tests may be of lengths beyond the trained
ones (--restoration-lengths).

A job file is a list of mappings with `method` and, where they differ from the command line, `config`, `ratios` and
`prompts`; it is gone through once for each seed. With --lowest-first a model of several ratios is trained at its
lowest one alone for a share of the steps: slots are read much sooner there. --ratio-schedule says in full which ratios
are trained when, and with --restore-first a share of the steps is reconstruction alone, the task that asks most of a
slot. Every finished (method, configuration, ratios, seed) is a run in the result file and is not done again; runs of
another budget are refused there. Several processes may write to one file. Scores are means over seeds, with the
standard deviation; "saved by context" is by how many nats per token a continuation's loss is lower behind its own
context than behind another text's, which adapters that have learned the kind of text do not change. A run's `log`
has the training loss and the reconstruction and continuation losses of held-out documents by step, for
`context-compressors curves`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from benchmarks.common.data import prepare
from benchmarks.common.runs import add_run, check_kept, do_runs, read_runs
from benchmarks.small_scale.arguments import budget_of, build_parser, fields_of, read_jobs
from benchmarks.small_scale.results import DEFAULT_PROMPTS, run_key, run_name, table
from benchmarks.small_scale.scoring import HeldOutCurves, evaluate, held_out, prompts_of
from context_compressors.data.task_tokens import text_starts
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.reporting.result_files import write_results
from context_compressors.training.arguments import DataArguments, ModelArguments, TrainingConfig
from context_compressors.training.loading import load_compressor
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer

# Points of a run's log.
_LOG_ENTRIES = 25
_CURVE_TASKS = ("reconstruction", "continuation")
# Of the positions, for the words around a text.
_PROMPT_ROOM = 32


class _CountingCollator(CompressionCollator):
    """Counts the budget that a run has used."""

    num_context_tokens = 0
    num_target_tokens = 0

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = super().__call__(examples)
        self.num_context_tokens += int(batch["context_attention_mask"].sum())
        self.num_target_tokens += int((batch["labels"] != -100).sum())
        return batch


def training_config(arguments: argparse.Namespace, seed: int, folder: Path, device: torch.device) -> TrainingConfig:
    """How all methods are trained."""
    ratios = sorted(arguments.ratios)
    schedule = arguments.ratio_schedule
    if arguments.lowest_first:
        schedule = [[0.0, ratios[:1]], [arguments.lowest_first, ratios]]
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
        DataArguments(
            sources=_with_tasks(sources, arguments.tasks),
            data_dir=str(folder),
            max_context_tokens=arguments.context_tokens,
            min_context_tokens=min(16, arguments.context_tokens),
            max_target_tokens=arguments.context_tokens + 1,
            questions_per_example=4,
            canonical_prompts=True,
            prompts=prompts_of(arguments, model),
            overlong_contexts="skip",
            length_schedule=[[0.0, min(48, arguments.context_tokens)], [0.5, arguments.context_tokens]],
            task_schedule=_task_schedule(arguments),
        ),
        tokenizer,
        arguments.steps * arguments.batch_size,
        seed=seed,
    )
    collator = _CountingCollator.from_tokenizer(tokenizer, **text_starts(model.config, tokenizer))
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
        for task in _curve_tasks(arguments)
    }
    curves = HeldOutCurves(model, tokenizer, samples)
    trainer.add_callback(curves)
    start = time.perf_counter()
    outcome = trainer.train()
    log = [
        {name: entry[name] for name in ("step", "loss", *(f"{task}_loss" for task in samples))}
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


def _task_schedule(arguments: argparse.Namespace) -> list[list[Any]] | None:
    if not arguments.restore_first:
        return None
    return [[0.0, ["reconstruction"]], [arguments.restore_first, list(arguments.tasks)]]


def _with_tasks(sources: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """The sources that serve some of the tasks, for these alone."""
    kept = [{**source, "tasks": [task for task in source["tasks"] if task in tasks]} for source in sources]
    return [source for source in kept if source["tasks"]]


def _curve_tasks(arguments: argparse.Namespace) -> list[str]:
    return [task for task in _CURVE_TASKS if task in arguments.tasks]


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the runs that are not in the result file yet, and write it after each."""
    output, budget = Path(arguments.output), budget_of(arguments)
    jobs = [(job, seed) for seed in arguments.seeds for job in read_jobs(arguments)]
    for job, _ in jobs:
        _check_schedules(job)
    results = _read(output, budget)
    _check_lengths(arguments)
    if arguments.save is not None:
        finished = [(job, seed) for job, seed in jobs if _is_finished(job, seed, results)]
        check_kept([(_name(job), seed, _folder(arguments.save, job, seed)) for job, seed in finished], output)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if all(_is_finished(job, seed, results) for job, seed in jobs):
        return results
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(arguments.base)
        base = AutoModelForCausalLM.from_pretrained(arguments.base).to(device).eval()
        sources, tests = prepare(arguments.data, tokenizer, _document_tokens(arguments), Path(folder))
        tests = [test for test in tests if _is_long_enough(test, tokenizer, arguments)]
        if not tests:
            raise ValueError(f"no data set has texts for --restoration-lengths {arguments.restoration_lengths}")
        for job, seed in jobs:
            if _is_finished(job, seed, _read(output, budget)):
                continue
            print(f"{_name(job)}, ratios {job.ratios}, seed {seed}", flush=True)
            model, training, log = train(job, seed, sources, tests, Path(folder), tokenizer, device)
            if arguments.save is not None:
                kept = _folder(arguments.save, job, seed)
                model.save_pretrained(kept)
                tokenizer.save_pretrained(kept)
            start = time.perf_counter()
            bounds, scores = evaluate(job, model, base, tokenizer, tests)
            run = {"name": _name(job), "method": job.method, "config": job.config, "fields": fields_of(job)}
            run |= {"ratios": list(job.ratios), "seed": seed, "prompts": prompts_of(job, model)}
            run |= {"training": training, "log": log, "evaluation_seconds": time.perf_counter() - start}
            results = _add(output, budget, {**run, "scores": scores}, bounds)
    return results


def _check_schedules(arguments: argparse.Namespace) -> None:
    """Refuse schedules that contradict each other, or the tasks."""
    if arguments.ratio_schedule is not None and arguments.lowest_first:
        raise ValueError("--lowest-first is a ratio schedule: give either it or --ratio-schedule")
    if arguments.restore_first and "reconstruction" not in arguments.tasks:
        raise ValueError(f"--restore-first needs reconstruction among the --tasks, got {arguments.tasks}")
    if arguments.restore_first and arguments.tasks == ["reconstruction"]:
        raise ValueError("--restore-first says when the other --tasks begin, and there are none")
    scheduled = {ratio for _, ratios in arguments.ratio_schedule or () for ratio in ratios}
    if scheduled and scheduled != set(arguments.ratios):
        raise ValueError(
            f"--ratio-schedule has the ratios {sorted(scheduled)}, and {arguments.method} {sorted(arguments.ratios)}: "
            "each ratio of a model must be trained, and no other"
        )


def _check_lengths(arguments: argparse.Namespace) -> None:
    """Refuse lengths that could not be tested, before anything is trained."""
    lengths = arguments.restoration_lengths
    if lengths is None:
        return
    EvaluationSettings(restoration_lengths=tuple(lengths))
    if arguments.tasks != ["reconstruction"]:
        raise ValueError("--restoration-lengths is about reconstruction alone: give --tasks reconstruction")
    # Text, and the same once more.
    longest = AutoConfig.from_pretrained(arguments.base).max_position_embeddings // 2 - _PROMPT_ROOM
    if max(lengths) > longest:
        raise ValueError(f"--restoration-lengths must be at most {longest} with this base, got {max(lengths)}")


def _document_tokens(arguments: argparse.Namespace) -> int:
    """Longest document: windows of exactly some length need longer ones, and are cut anywhere."""
    lengths = arguments.restoration_lengths
    return arguments.context_tokens if lengths is None else 2 * max(arguments.context_tokens, *lengths)


def _is_long_enough(
    test: EvaluationDataset, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> bool:
    """Whether a data set has texts for every length that is asked for, as many as are scored."""
    if arguments.restoration_lengths is None:
        return True
    texts = dict.fromkeys(example.get("text", example.get("context")) for example in test.examples)
    longest = max(arguments.restoration_lengths)
    enough = sum(len(encode(tokenizer, text)) >= longest for text in texts) >= arguments.bleu_samples
    if not enough:
        print(f"{test.name} is left out: it has too few texts of {longest} tokens", flush=True)
    return enough


def _name(job: argparse.Namespace) -> str:
    return run_name(job.method, {**job.config, **({} if job.prompts is None else {"prompts": job.prompts})})


def _folder(save: str, job: argparse.Namespace, seed: int) -> Path:
    """Where a trained model is kept: its run's name in letters, digits and underscores."""
    name = re.sub(r"\W+", "_", " ".join([_name(job), "ratios", *map(str, job.ratios)])).strip("_")
    return Path(save) / f"seed_{seed}" / name


def _is_finished(job: argparse.Namespace, seed: int, results: Mapping[str, Any]) -> bool:
    return (_name(job), tuple(job.ratios), seed) in map(run_key, results["runs"])


def _read(output: Path, budget: Mapping[str, Any]) -> dict[str, Any]:
    return {"bounds": {}, **read_runs(output, "small_scale", budget, run_key)}


def _add(output: Path, budget: Mapping[str, Any], run: dict[str, Any], bounds: dict[str, Any]) -> dict[str, Any]:
    """Add a run to what the file holds by now: other processes may have written to it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(output.with_name(f".{output.name}.lock")):
        results = _read(output, budget)
        if run_key(run) not in map(run_key, results["runs"]):
            add_run(results, run)
        results["bounds"].setdefault(run["prompts"] or DEFAULT_PROMPTS, bounds)
        write_results(results, output)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return do_runs(build_parser(__doc__).parse_args(argv), run_all, table)


if __name__ == "__main__":
    raise SystemExit(main())
