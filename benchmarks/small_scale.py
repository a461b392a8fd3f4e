"""Quality of a method trained under a fixed budget on the small base: the same tokens, seeds and prompts for all.

    python benchmarks/small_scale.py --data DATA                      # mean pooling at ratio 4, three seeds
    python benchmarks/small_scale.py --data DATA --ratios 2 4 8 16    # one model for all four ratios
    python benchmarks/small_scale.py --seeds 0 --steps 50             # generated documents alone, and briefly

DATA is a folder with the data files: SQuAD, NarrativeQA summaries and OpenStax. Reconstruction, continuation and
question answering are trained together on contexts of at most --context-tokens, and tested on documents that are not
in training, beside the base itself without context and with the full context. A question's answer always stands in its
context.

Every finished (method, ratios, seed) is a run in the result file and is not done again; runs of another budget are
refused there. Scores are means over seeds, with the standard deviation.
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
from statistics import fmean, stdev
from typing import Any

import torch
from benchmark_tools import RESULTS, positive_int, write_json
from small_scale_data import prepare
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.report import environment, markdown_table, ratio_condition
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.training.arguments import OPTIMIZERS, ModelArguments, TrainingConfig
from context_compressors.training.collators import CompressionCollator
from context_compressors.training.examples import CompressionDataset
from context_compressors.training.train import METHODS, load_compressor
from context_compressors.training.trainers import CompressionTrainer

BASE = Path(__file__).parent.parent / "checkpoints" / "base"
_LORA = {"rank": 32, "alpha": 32}
# What each method is built with; a new method adds its line.
METHOD_CONFIGS: dict[str, dict[str, Any]] = {"mean_pooling": {"encoder_lora": _LORA, "decoder_lora": _LORA}}
COLUMNS = (
    ("reconstruction", "bleu", "BLEU"),
    ("reconstruction", "token_accuracy", "token accuracy"),
    ("continuation", "perplexity", "perplexity"),
    ("question_answering", "exact_match", "EM"),
    ("question_answering", "f1", "F1"),
)


class _CountingCollator(CompressionCollator):
    """Counts the budget that a run has used."""

    num_context_tokens = 0
    num_target_tokens = 0

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = super().__call__(examples)
        self.num_context_tokens += int(batch["context_attention_mask"].sum())
        self.num_target_tokens += int((batch["labels"] != -100).sum())
        return batch


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="folder with the data files (default: generated documents alone)")
    add("--method", default="mean_pooling", help=f"one of {', '.join(METHOD_CONFIGS)} (default: mean_pooling)")
    add("--ratios", nargs="+", type=positive_int, default=[4], metavar="R", help="ratios of the model (default: 4)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    add("--base", default=str(BASE), metavar="FOLDER", help="the base language model (default: checkpoints/base)")
    add("--steps", type=positive_int, default=200, metavar="N", help="optimizer steps (default: 200)")
    add("--batch-size", type=positive_int, default=8, metavar="B", help="contexts per step (default: 8)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    add(
        "--muon-learning-rate", type=float, default=0.004, metavar="X", help="for matrices, with muon (default: 0.004)"
    )
    add("--learning-rate", type=float, default=2e-3, metavar="X", help="AdamW's (default: 2e-3)")
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
        "context_tokens": arguments.context_tokens,
        "eval_samples": arguments.eval_samples,
        "bleu_samples": arguments.bleu_samples,
    }


def read_results(path: Path, budget: Mapping[str, Any]) -> dict[str, Any]:
    """The result file, or an empty one.

    Raises:
        ValueError: it is no result file of this benchmark, or its runs had another budget.
    """
    if not path.is_file():
        return {"format_version": 1, "benchmark": "small_scale", "budget": dict(budget), "runs": [], "summary": []}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        known = results["budget"]
        finished = [run_key(run) for run in results["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result file of this benchmark: {error!r}") from error
    changed = {name: (known.get(name), value) for name, value in budget.items() if known.get(name) != value}
    if finished and changed:
        raise ValueError(
            f"{path} has runs of another budget, (there, now): {changed}; name another file with --output"
        )
    return {**results, "budget": dict(budget)}


def run_key(run: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int]:
    """What a run is known by: method, ratios and seed."""
    return run["method"], tuple(run["ratios"]), run["seed"]


def train(
    arguments: argparse.Namespace,
    seed: int,
    sources: Sequence[Mapping[str, Any]],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train one model; returns it, and what was used up."""
    set_seed(seed)
    fields = {**METHOD_CONFIGS[arguments.method], "compression_ratios": list(arguments.ratios)}
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
        overlong_contexts="skip",
        # Copying is learned much sooner from short contexts.
        length_schedule=[[0.0, min(48, arguments.context_tokens)], [0.5, arguments.context_tokens]],
        seed=seed,
    )
    collator = _CountingCollator.from_tokenizer(tokenizer)
    args = TrainingConfig(
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
        warmup_steps=min(50, arguments.steps // 10),
        train_sampling_strategy="sequential",
        logging_steps=max(1, arguments.steps // 20),
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=device.type == "cpu",
        seed=seed,
    )
    trainer = CompressionTrainer(
        model=model, args=args, train_dataset=dataset.as_dataset(), processing_class=tokenizer, data_collator=collator
    )
    start = time.perf_counter()
    outcome = trainer.train()
    return model, {
        "steps": outcome.global_step,
        "context_tokens": collator.num_context_tokens,
        "target_tokens": collator.num_target_tokens,
        "mean_loss": outcome.training_loss,
        "seconds": time.perf_counter() - start,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def evaluate(
    arguments: argparse.Namespace,
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tests: Sequence[EvaluationDataset],
) -> list[dict[str, Any]]:
    """Score a model on all data sets and tasks, beside the base without context and with all of it."""
    rows = []
    for task, samples in (
        ("question_answering", arguments.eval_samples),
        ("reconstruction", arguments.bleu_samples),
        ("continuation", arguments.eval_samples),
    ):
        settings = EvaluationSettings(
            tasks=(task,),
            max_samples=samples,
            batch_size=32,
            max_new_tokens={"question_answering": 16, "summarisation": 1},
            context_tokens=arguments.context_tokens,
            continuation_tokens=64,
            reconstruction_bleu=task == "reconstruction",
        )
        report = evaluate_model(model, tokenizer, tests, settings, teacher=base)
        for row in report.rows:
            metrics = {name: value if math.isfinite(value) else None for name, value in row.metrics.items()}
            rows.append({**asdict(row), "metrics": metrics})
    return rows


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method, ratios, condition and data set: mean and standard deviation over the seeds."""
    groups: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for run in runs:
        for row in run["rows"]:
            key = (run["method"], tuple(run["ratios"]), row["dataset"], row["condition"])
            for metric, value in row["metrics"].items():
                name = f"{row['task']}/{metric}"
                groups.setdefault(key, {}).setdefault(name, {})[run["seed"]] = value
    summary = []
    for (method, ratios, dataset, condition), metrics in groups.items():
        scores = {}
        for name, by_seed in metrics.items():
            values = [value for value in by_seed.values() if value is not None]
            if values:
                scores[name] = {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None}
        seeds = sorted({seed for by_seed in metrics.values() for seed in by_seed})
        summary.append(
            {
                "method": method,
                "ratios": list(ratios),
                "dataset": dataset,
                "condition": condition,
                "seeds": seeds,
                "scores": scores,
            }
        )
    return summary


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    """The summary as Markdown; the bounds, which no training changes, stand once."""
    rows: dict[tuple[str, ...], list[Any]] = {}
    for row in summary:
        ratios = " ".join(map(str, row["ratios"]))
        compressed = row["condition"] in [ratio_condition(ratio) for ratio in row["ratios"]]
        name = f"{row['method']}, trained at {ratios}" if compressed else "base"
        cells = []
        for task, metric, _ in COLUMNS:
            score = row["scores"].get(f"{task}/{metric}")
            spread = "" if score is None or score["std"] is None or not compressed else f" ± {score['std']:.2f}"
            cells.append("-" if score is None else f"{score['mean']:.2f}{spread}")
        rows.setdefault(
            (row["dataset"], name, row["condition"]),
            [row["dataset"], name, row["condition"], len(row["seeds"]), *cells],
        )
    order = list(dict.fromkeys(row["dataset"] for row in summary))
    header = ["data set", "model", "context", "seeds", *(title for *_, title in COLUMNS)]
    return markdown_table(header, sorted(rows.values(), key=lambda cells: (order.index(cells[0]), cells[1] != "base")))


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the runs that are not in the result file yet, and write it after each."""
    if arguments.method not in METHOD_CONFIGS or arguments.method not in METHODS:
        raise ValueError(f"--method must be one of {sorted(METHOD_CONFIGS)}, got {arguments.method!r}")
    output = Path(arguments.output)
    results = read_results(output, budget_of(arguments))
    finished = {run_key(run) for run in results["runs"]}
    missing = [s for s in arguments.seeds if (arguments.method, tuple(arguments.ratios), s) not in finished]
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        if missing:
            tokenizer = AutoTokenizer.from_pretrained(arguments.base)
            base = AutoModelForCausalLM.from_pretrained(arguments.base).to(device).eval()
            sources, tests = prepare(arguments.data, tokenizer, arguments.context_tokens, Path(folder))
        for seed in missing:
            print(f"{arguments.method}, ratios {arguments.ratios}, seed {seed}", flush=True)
            model, training = train(arguments, seed, sources, Path(folder), tokenizer, device)
            start = time.perf_counter()
            rows = evaluate(arguments, model, base, tokenizer, tests)
            run = {"method": arguments.method, "ratios": list(arguments.ratios), "seed": seed, "training": training}
            run |= {"evaluation_seconds": time.perf_counter() - start, "environment": environment(), "rows": rows}
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
