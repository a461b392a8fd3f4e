# SPDX-License-Identifier: Apache-2.0
"""Span-corruption accuracy of DeCAL and what its paper compares it with, from nothing on the same data and steps.

    python -m benchmarks.decal.span_corruption --save PRETRAINED

The models are those of Tables 1 and 5: the T5 baseline, DeCAL 2x, 4x and 8x, AttnPool 2x, and DeCAL 2x without token
pooling (`decal_2x_no_pooling`). All of them see the same corrupted texts in the same order, and are tested on the same
ones; a token counts as right if it is the likeliest behind the right ones before it. The context gain is by how much
the loss grows where each text has another one's context in place of its own: zero for a model that reads none.

The texts are generated documents, in a vocabulary of little more than letters: with it, all models learn to read their
context in five to nine minutes on one core. DATA is a folder with the data files: the texts are then those of Standard
Ebooks and OpenStax, whose held-out documents are the test; in words, 400 steps are not enough to read.

Every finished (model, seed) is a run in the result file and is not done again; runs of another budget are refused
there. Scores are means over seeds, with the standard deviation.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from benchmarks.common.tools import positive_int
from benchmarks.decal.runs import add_run, cell, check_kept, do_runs, mean_and_std, read_runs
from context_compressors import DeCALForConditionalGeneration
from context_compressors.configuration.nearest_names import check_choice
from context_compressors.data.sources import DataSource
from context_compressors.data.task_tokens import add_sentinel_tokens
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table
from context_compressors.training.arguments import DataArguments, TrainingConfig
from context_compressors.training.fields import OPTIMIZERS
from context_compressors.training.loading import new_encoder_decoder
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.denoising import DenoisingDataset, SpanCorruptionCollator
from context_compressors.training.objectives.encoder_decoder import Seq2SeqCompressionTrainer
from context_compressors.training.tokenizer import train_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "t5": {"compression": "none"},
    "decal_2x": {"compression_ratios": [2]},
    "decal_4x": {"compression_ratios": [4]},
    "decal_8x": {"compression_ratios": [8]},
    "attention_pooling_2x": {"compression": "attention_pooling", "compression_ratios": [2]},
    "decal_2x_no_pooling": {"latent_pooling": False, "compression_ratios": [2]},
}
TEXTS = ("standardebooks", "openstax")
# The same texts for every model and seed.
_DATA_SEED, _TEST_SEED = 0, 1
# T5 does not scale the scores of its attention, which therefore stands no higher rate.
MUON_LEARNING_RATE = 0.003
RESULTS = Path(__file__).with_suffix(".json")
_METRICS = ("accuracy", "loss", "context_gain")
_BUDGET = (
    "steps",
    "batch_size",
    "inputs_length",
    "hidden_size",
    "layers",
    "learning_rate",
    "muon_learning_rate",
    "optimizer",
    "test_texts",
)


def add_optimizer_arguments(parser: argparse.ArgumentParser, learning_rate: float) -> None:
    """Add which optimizer trains the models, and its rates; that of AdamW has its default here."""
    add = parser.add_argument
    add("--learning-rate", type=float, default=learning_rate, metavar="R", help=f"AdamW's (default: {learning_rate})")
    add(
        "--muon-learning-rate",
        type=float,
        default=MUON_LEARNING_RATE,
        metavar="R",
        help=f"of the hidden matrices (default: {MUON_LEARNING_RATE})",
    )
    add("--optimizer", choices=OPTIMIZERS, default="muon", help="default: muon")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="folder with the data files (default: generated documents alone)")
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument("--tokenizer", metavar="MODEL", help="a folder or a Hub name (default: a trained one)")
    tokenizer.add_argument(
        "--train-tokenizer",
        type=positive_int,
        default=300,
        metavar="N",
        help="tokens of one that is trained on generated documents (default: 300, little more than letters)",
    )
    add("--models", nargs="+", default=list(MODELS), metavar="NAME", help=f"among {', '.join(MODELS)}")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    add("--steps", type=positive_int, default=2500, metavar="N", help="default: 2500")
    add("--batch-size", type=positive_int, default=32, metavar="B", help="texts in a step (default: 32)")
    add("--inputs-length", type=positive_int, default=48, metavar="N", help="encoder's tokens (default: 48)")
    add("--hidden-size", type=positive_int, default=96, metavar="H", help="a multiple of 32 (default: 96)")
    add("--layers", type=positive_int, default=2, metavar="L", help="of encoder and of decoder (default: 2)")
    add_optimizer_arguments(parser, learning_rate=3e-3)
    add("--save", metavar="FOLDER", help="keep the trained models, as FOLDER/seed_S/NAME (default: they are not kept)")
    add("--test-texts", type=positive_int, default=2000, metavar="N", help="texts of the test (default: 2000)")
    add("--output", default=str(RESULTS), metavar="FILE", help="where the JSON goes")
    return parser


def load_tokenizer(arguments: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The tokenizer that is named, or a small one that is trained on generated documents."""
    if arguments.tokenizer is not None:
        return AutoTokenizer.from_pretrained(arguments.tokenizer)
    source = DataSource(generated=True, tasks=("reconstruction",))
    return train_tokenizer([source], vocab_size=arguments.train_tokenizer, num_texts=50)


def texts(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, part: str) -> DenoisingDataset:
    """Texts of training ("train") or test ("valid"), the same for every model."""
    sources: list[dict[str, Any]] = [
        {"generated": True, "split": "train" if part == "train" else "test", "tasks": ["continuation"], "weight": 1}
    ]
    if arguments.data is not None:
        sources = [{"path": f"text_{name}_{part}.parquet", "tasks": ["continuation"], "weight": 1} for name in TEXTS]
    return DenoisingDataset(
        DataArguments(
            sources=sources,
            max_context_tokens=arguments.inputs_length,
            min_context_tokens=1,
            data_dir=arguments.data,
        ),
        tokenizer,
        arguments.steps * arguments.batch_size if part == "train" else arguments.test_texts,
        seed=_DATA_SEED if part == "train" else _TEST_SEED,
    )


def new_model(name: str, arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model that has not been trained."""
    shape = {
        "d_model": arguments.hidden_size,
        "d_kv": 32,
        "num_heads": arguments.hidden_size // 32,
        "d_ff": 2 * arguments.hidden_size,
        "num_layers": arguments.layers,
        "dropout_rate": 0.0,
    }
    loading = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return new_encoder_decoder(DeCALForConditionalGeneration, shape, MODELS[name], tokenizer, loading)


def train(
    model: PreTrainedModel,
    arguments: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    data: DenoisingDataset,
    collator: CompressionCollator,
    seed: int,
    objective: str = "denoising",
) -> dict[str, Any]:
    """Train a model for the budget; how long it took, and its last loss."""
    with tempfile.TemporaryDirectory() as folder:
        decay = max(1, arguments.steps * 2 // 5)
        warmup = min(50, arguments.steps // 4)
        args = TrainingConfig(
            output_dir=folder,
            objective=objective,
            per_device_train_batch_size=arguments.batch_size,
            max_steps=arguments.steps,
            optimizer=arguments.optimizer,
            learning_rate=arguments.learning_rate,
            **({"muon_learning_rate": arguments.muon_learning_rate} if arguments.optimizer == "muon" else {}),
            adam_beta2=0.95,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": decay, "min_lr_ratio": 0.02},
            warmup_steps=warmup,
            train_sampling_strategy="sequential",
            distillation_chunk_size=2048,
            logging_steps=max(1, arguments.steps // 20),
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            seed=seed,
        )
        trainer = Seq2SeqCompressionTrainer(
            model=model,
            args=args,
            train_dataset=data.as_dataset(),
            data_collator=collator,
            processing_class=tokenizer,
        )
        start = time.perf_counter()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"seconds": time.perf_counter() - start, "last_loss": losses[-1]}


@torch.inference_mode()
def test(
    model: PreTrainedModel, data: DenoisingDataset, collator: SpanCorruptionCollator, batch_size: int
) -> dict[str, float | None]:
    """Scores of the target tokens of all texts.

    Returns:
        `accuracy` in percent, `loss`, and `context_gain`: how much lower the loss is than with the context of another
        text of the batch, over batches of several texts (`None` without any).
    """
    model.eval()
    correct = total = compared = 0
    loss = gain = 0.0
    for start in range(0, len(data), batch_size):
        batch = collator([data[index] for index in range(start, min(start + batch_size, len(data)))])
        labels = batch["labels"][:, 1:].to(model.device)
        context = {"input_ids": batch["context_input_ids"], "attention_mask": batch["context_attention_mask"]}
        context = {name: tensor.to(model.device) for name, tensor in context.items()}
        logits = model(**context, labels=labels).logits
        counted = labels != -100
        batch_loss = _summed_loss(logits, labels)
        correct += int((logits.argmax(-1) == labels)[counted].sum())
        total += int(counted.sum())
        loss += batch_loss
        if len(labels) > 1:
            others = {name: tensor.roll(1, dims=0) for name, tensor in context.items()}
            gain += _summed_loss(model(**others, labels=labels).logits, labels) - batch_loss
            compared += int(counted.sum())
    return {
        "accuracy": 100 * correct / total,
        "loss": loss / total,
        "context_gain": gain / compared if compared else None,
    }


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    counted = labels != -100
    return torch.nn.functional.cross_entropy(logits[counted].float(), labels[counted], reduction="sum").item()


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each model: mean and deviation of its scores over the seeds; of those that all its runs have."""
    summary = []
    for name in MODELS:
        mine = [run for run in runs if run["model"] == name]
        if mine:
            row: dict[str, Any] = {"model": name, "seeds": sorted(run["seed"] for run in mine)}
            for metric in _METRICS:
                values = [run.get(metric) for run in mine]
                if None not in values:
                    row[metric] = mean_and_std(values)
            summary.append(row)
    return summary


def table(results: Mapping[str, Any]) -> str:
    """The summary as Markdown, as Table 1 has it."""
    rows = [
        [row["model"], len(row["seeds"]), *(cell(row.get(metric)) for metric in _METRICS)]
        for row in summarize(results["runs"])
    ]
    return markdown_table(["model", "seeds", "accuracy, %", "loss", "context gain"], rows)


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do what is not in the result file yet; returns its content.

    Raises:
        ValueError: an unknown model, a width that no head divides, a missing data file, or runs of another budget.
    """
    for name in arguments.models:
        check_choice("model", name, MODELS)
    if arguments.hidden_size % 32:
        raise ValueError(f"--hidden-size must be a multiple of 32, got {arguments.hidden_size}")
    output = Path(arguments.output)
    budget = {name: getattr(arguments, name) for name in _BUDGET}
    budget |= {"texts": list(TEXTS) if arguments.data is not None else ["generated"]}
    if arguments.tokenizer is None:
        budget["train_tokenizer"] = arguments.train_tokenizer
    results = read_runs(output, "span_corruption", budget)
    finished = [(run["model"], run["seed"]) for run in results["runs"]]
    if arguments.save is not None:
        asked = [(name, seed) for seed in arguments.seeds for name in arguments.models]
        check_kept([(*run, _folder(arguments.save, *run)) for run in asked if run in finished], output)
    tokenizer = load_tokenizer(arguments)
    collator = SpanCorruptionCollator.from_tokenizer(
        tokenizer, sentinel_ids=add_sentinel_tokens(tokenizer), end_id=tokenizer.eos_token_id, seed=_DATA_SEED
    )
    training, held_out = (texts(arguments, tokenizer, part) for part in ("train", "valid"))
    for seed in arguments.seeds:
        for name in arguments.models:
            if (name, seed) in finished:
                continue
            print(f"{name}, seed {seed}", flush=True)
            set_seed(seed)
            model = new_model(name, arguments, tokenizer)
            run = {"model": name, "config": MODELS[name], "seed": seed, "parameters": model.num_parameters()}
            run |= train(model, arguments, tokenizer, training, collator, seed)
            run |= test(model, held_out, collator, arguments.batch_size)
            if arguments.save is not None:
                folder = _folder(arguments.save, name, seed)
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            add_run(results, run)
            finished.append((name, seed))
            write_results(results, output)
    return results


def _folder(save: str, name: str, seed: int) -> Path:
    """Where a trained model is kept."""
    return Path(save) / f"seed_{seed}" / name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return do_runs(build_parser().parse_args(argv), run_all, table)


if __name__ == "__main__":
    raise SystemExit(main())
