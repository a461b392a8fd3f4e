# SPDX-License-Identifier: Apache-2.0
"""Answers of DeCAL and what its paper compares with it, fine-tuned alike on questions (Tables 2, 3 and 5).

    python -m benchmarks.decal.span_corruption --save PRETRAINED
    python -m benchmarks.decal.fine_tuning PRETRAINED

PRETRAINED is a folder of models that span_corruption.py has trained, with steps enough that they read what they are
given. Those with a name of their own are tuned as they are. Three start from its T5 baseline: `ccproxy_2x` and
`autoencoding_2x` (DeCAL 2x) learn autoencoding and continuation first, in a share of the pretraining's steps
(--text-steps), and `fine_tune_only_2x` compresses from its first question on. The T5 baseline reads its context whole:
it is the bound. Models write at most 16 tokens of an answer, enough for generated documents in letters.

All models see the same questions about generated documents in the same order, and are tested on other documents: exact
match and F1 of what they write, and the perplexity of the right answer's tokens, EOS included, which tells models
apart that hardly answer yet. As in the paper the question stands in front of its context in the encoder; without
context it stands there alone.

Every finished (model, seed) is a run in the result file and is not done again; runs of another budget are refused
there. Scores are means over seeds, with the standard deviation.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from benchmarks.common.tools import positive_int
from benchmarks.decal.runs import add_run, cell, do_runs, mean_and_std, read_runs
from benchmarks.decal.span_corruption import add_optimizer_arguments, train
from context_compressors import DeCALForConditionalGeneration
from context_compressors.configuration.nearest_names import check_choice
from context_compressors.data.task_tokens import task_start_ids
from context_compressors.evaluation.data_sets import load_datasets
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.rows import NO_CONTEXT
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.parts.text_ids import context_end_ids
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.encoder_decoder import Seq2SeqCollator
from context_compressors.training.resume import changed_config

_BASELINE = "t5"
PRETRAINED = ("t5", "decal_2x", "decal_4x", "decal_8x", "attention_pooling_2x", "decal_2x_no_pooling")
_CCPROXY = {"latent_placement": "appended", "latent_pooling": False, "encoder_attention": "causal"}
# Started from the T5 baseline: fields of the configuration, and whether autoencoding and continuation come first.
FROM_BASELINE: dict[str, tuple[dict[str, Any], bool]] = {
    "ccproxy_2x": ({**_CCPROXY, "compression_ratios": [2]}, True),
    "autoencoding_2x": ({"compression_ratios": [2]}, True),
    "fine_tune_only_2x": ({"compression_ratios": [2]}, False),
}
MODELS = (*PRETRAINED, *FROM_BASELINE)
RESULTS = Path(__file__).with_suffix(".json")
METRICS = ("answer_perplexity", "exact_match", "f1")
# As in the paper: a question stands in front of its context, and is compressed with it.
_QUESTION_PLACEMENT = "encoder"
_DATA_SEED = 0
_TEST_DOCUMENTS = 100
_BUDGET = (
    "steps",
    "text_steps",
    "batch_size",
    "context_tokens",
    "learning_rate",
    "muon_learning_rate",
    "optimizer",
    "test_questions",
)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("pretrained", metavar="PRETRAINED", help="folder that span_corruption.py --save has written")
    add("--models", nargs="+", default=list(MODELS), metavar="NAME", help=f"among {', '.join(MODELS)}")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    add("--steps", type=positive_int, default=1000, metavar="N", help="of fine-tuning (default: 1000)")
    add(
        "--text-steps",
        type=positive_int,
        default=500,
        metavar="N",
        help="of restoring and continuing (default: 500)",
    )
    add("--batch-size", type=positive_int, default=32, metavar="B", help="contexts in a step (default: 32)")
    add("--context-tokens", type=positive_int, default=48, metavar="N", help="longest context (default: 48)")
    add_optimizer_arguments(parser, learning_rate=1e-3)
    add("--test-questions", type=positive_int, default=200, metavar="N", help="most (default: 200)")
    add("--output", default=str(RESULTS), metavar="FILE", help="where the JSON goes")
    return parser


def _source(name: str, folder: Path) -> Path:
    """The checkpoint that a model starts from."""
    return folder / (name if name in PRETRAINED else _BASELINE)


def load(name: str, folder: Path) -> PreTrainedModel:
    """A model as fine-tuning, or what comes before it, finds it.

    Raises:
        ValueError: there is no such checkpoint in the folder.
    """
    source = _source(name, folder)
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} is not there: train it with span_corruption.py --save")
    loading = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if name in PRETRAINED:
        config = DeCALForConditionalGeneration.config_class.from_pretrained(source)
        config = changed_config(config, {"question_placement": _QUESTION_PLACEMENT})
        return DeCALForConditionalGeneration.from_pretrained(source, config=config, **loading)
    fields = {**FROM_BASELINE[name][0], "question_placement": _QUESTION_PLACEMENT}
    return DeCALForConditionalGeneration.from_base(str(source), **loading, **fields)


def examples(
    tasks: Sequence[str], arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> CompressionDataset:
    """Training examples of some tasks, the same for every model and seed."""
    return CompressionDataset(
        DataArguments(
            sources=[{"generated": True, "tasks": tasks, "weight": 1}],
            max_context_tokens=arguments.context_tokens,
            min_context_tokens=min(16, arguments.context_tokens),
            max_target_tokens=arguments.context_tokens + 1,
            canonical_prompts=True,
            overlong_contexts="skip",
        ),
        tokenizer,
        arguments.steps * arguments.batch_size,
        seed=_DATA_SEED,
    )


def fine_tune(
    name: str,
    model: PreTrainedModel,
    arguments: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> dict[str, Any]:
    """Train a model on questions, and on its text before that where it learns some; time and last loss by stage."""
    collator = Seq2SeqCollator.from_tokenizer(
        tokenizer,
        question_placement=model.config.question_placement,
        context_end_ids=context_end_ids(tokenizer),
        task_start_ids=task_start_ids(model.config),
    )
    stages = {"questions": (("question_answering",), arguments.steps)}
    if name in FROM_BASELINE and FROM_BASELINE[name][1]:
        stages = {"text": (("reconstruction", "continuation"), arguments.text_steps), **stages}
    outcome = {}
    for stage, (tasks, steps) in stages.items():
        budget = argparse.Namespace(**{**vars(arguments), "steps": steps})
        data = examples(tasks, budget, tokenizer)
        outcome[stage] = train(model, budget, tokenizer, data, collator, seed, "compression")
    return outcome


def evaluate(
    model: PreTrainedModel,
    arguments: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    tests: Sequence[EvaluationDataset],
) -> list[dict[str, Any]]:
    """Scores by data set and condition, without context and at the model's ratio."""
    settings = EvaluationSettings(
        tasks=("question_answering",),
        max_samples=arguments.test_questions,
        batch_size=50,
        max_new_tokens={"question_answering": 16, "summarisation": 1},
        answer_perplexity=True,
    )
    return [row.to_json() for row in evaluate_model(model.eval(), tokenizer, tests, settings).rows]


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each data set and model with its context, and one without: mean and deviation over the seeds."""
    found: dict[tuple[str, str, bool], list[tuple[int, Mapping[str, float]]]] = {}
    for run in runs:
        for row in run["rows"]:
            key = (row["dataset"], run["model"], row["condition"] == NO_CONTEXT)
            found.setdefault(key, []).append((run["seed"], row["metrics"]))
    summary = []
    for (dataset, name, is_bound), scores in found.items():
        entry: dict[str, Any] = {"dataset": dataset, "model": name, "context": "none" if is_bound else "given"}
        entry["seeds"] = sorted(seed for seed, _ in scores)
        for metric in METRICS:
            values = [metrics[metric] for _, metrics in scores]
            entry[metric] = mean_and_std(values)
        summary.append(entry)
    return sorted(summary, key=lambda row: (row["dataset"], row["context"], row["answer_perplexity"]["mean"]))


def table(results: Mapping[str, Any]) -> str:
    """The summary as Markdown."""
    rows = [
        [row["dataset"], row["model"], row["context"], len(row["seeds"]), *(cell(row[metric]) for metric in METRICS)]
        for row in summarize(results["runs"])
    ]
    return markdown_table(["data set", "model", "context", "seeds", "answer perplexity", "EM", "F1"], rows)


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do what is not in the result file yet; returns its content.

    Raises:
        ValueError: an unknown model, a missing checkpoint, or runs of another budget.
    """
    for name in arguments.models:
        check_choice("model", name, MODELS)
    pretrained, output = Path(arguments.pretrained), Path(arguments.output)
    checkpoints = {seed: pretrained / f"seed_{seed}" for seed in arguments.seeds}
    for name in arguments.models:
        for folder in checkpoints.values():
            load(name, folder)
    budget = {name: getattr(arguments, name) for name in _BUDGET}
    results = read_runs(output, "decal_fine_tuning", {**budget, "data": "generated"})
    tokenizer = AutoTokenizer.from_pretrained(_source(arguments.models[0], checkpoints[arguments.seeds[0]]))
    tests = load_datasets(
        ["generated"],
        tokenizer,
        seed=_DATA_SEED,
        num_documents=_TEST_DOCUMENTS,
        document_tokens=arguments.context_tokens,
    )
    for seed, folder in checkpoints.items():
        for name in arguments.models:
            finished = [run for run in results["runs"] if (run["model"], run["seed"]) == (name, seed)]
            if finished:
                _check_same_start(name, folder, finished[0], output)
                continue
            print(f"{name}, seed {seed}", flush=True)
            set_seed(seed)
            model = load(name, folder)
            run: dict[str, Any] = {"model": name, "seed": seed, "pretrained": _fingerprint(name, folder)}
            run["training"] = fine_tune(name, model, arguments, tokenizer, seed)
            run["rows"] = evaluate(model, arguments, tokenizer, tests)
            add_run(results, run)
            write_results(results, output)
    return results


def _fingerprint(name: str, folder: Path) -> str:
    """Which weights a run started from."""
    return hashlib.sha256((_source(name, folder) / "model.safetensors").read_bytes()).hexdigest()[:16]


def _check_same_start(name: str, folder: Path, run: Mapping[str, Any], output: Path) -> None:
    if run["pretrained"] != _fingerprint(name, folder):
        raise ValueError(
            f"{name}, seed {run['seed']}, is finished in {output} from other weights than those in {folder}; name "
            "another file with --output"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return do_runs(build_parser().parse_args(argv), run_all, table)


if __name__ == "__main__":
    raise SystemExit(main())
