# SPDX-License-Identifier: Apache-2.0
"""One part of ranked key/values taken out at a time, on the same questions.

    python -m benchmarks.flagship.ablations CHECKPOINT --output ablations.json --data squad=qa_squad_train.parquet#80

Parts that need no training are taken out of the checkpoint itself; `--also` names other checkpoints. All are asked as
by `evaluate`; differences are paired by question, with 95 % bootstrap intervals over documents. What has been asked is
kept beside the output, and a run that is stopped goes on there.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common.tools import positive_int, tells_errors
from context_compressors.cli.loading import load_compressor
from context_compressors.configuration.nearest_names import check_choice
from context_compressors.data.document_ids import TrainingDocuments
from context_compressors.evaluation.answers_file import AnswersFile, read_answers
from context_compressors.evaluation.data_sets import load_datasets
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.paired import paired_difference, seed_average
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.memory import headwise_pairs
from context_compressors.modeling.modeling_ranked_key_values import RankedKeyValuesModel
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table

WHOLE = "as it is"


def each_head(scores: Tensor, mask: Tensor, num_kept: Tensor) -> Tensor:
    """As `highest`, the same number in every head."""
    return _shared(scores, mask, num_kept, 1)


def _shared(scores: Tensor, mask: Tensor, num_kept: Tensor, heads: int) -> Tensor:
    """As `highest`, the same number in every group of so many heads."""
    num_groups = scores.shape[1] // heads
    return highest_of_groups(scores, mask, (num_kept // num_groups)[:, None].expand(-1, num_groups))


def highest_of_groups(scores: Tensor, mask: Tensor, num_kept: Tensor) -> Tensor:
    """As `highest`, in each group of heads a number of its own.

    Args:
        scores, mask: as of `highest`.
        num_kept: `(batch_size, num_groups)`; groups are of equal size, in the order of the heads.
    """
    num_groups = num_kept.shape[1]
    groups = scores.unflatten(1, (num_groups, -1)).flatten(0, 1)
    is_kept = _HIGHEST(groups, mask.repeat_interleave(num_groups, dim=0), num_kept.flatten())
    return is_kept.view_as(scores)


_HIGHEST = headwise_pairs.highest
_ENCODE = RankedKeyValuesModel.encode


def _second_reading(self: Any, *args: Any) -> Any:
    """As `encode`, the attention of the second reading ranks as in training."""
    self.training = True
    try:
        return _ENCODE(self, *args)
    finally:
        self.training = False


@contextmanager
def _patched(target: Any, name: str, value: Any) -> Iterator[None]:
    with mock.patch.object(target, name, value):
        yield


@contextmanager
def _without_opening(config: Any) -> Iterator[None]:
    with mock.patch.object(config, "opening_ids", []), mock.patch.object(config, "slots_after_ids", []):
        yield


def variants(model: Any) -> dict[str, Callable[[], Any]]:
    """What is asked of one checkpoint: a name and what takes the part out."""
    heads = model.config.decoder_config.num_key_value_heads

    def each_layer(scores: Tensor, mask: Tensor, num_kept: Tensor) -> Tensor:
        return _shared(scores, mask, num_kept, heads)

    return {
        WHOLE: lambda: _patched(headwise_pairs, "highest", _HIGHEST),
        "a second reading in place of the scorers": lambda: _patched(RankedKeyValuesModel, "encode", _second_reading),
        "one budget for each layer": lambda: _patched(headwise_pairs, "highest", each_layer),
        "one budget for each head": lambda: _patched(headwise_pairs, "highest", each_head),
        "read in front of the chat's opening": lambda: _without_opening(model.config),
    }


def build_parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flagship.ablations", description=__doc__)
    add = parser.add_argument
    add("checkpoint", help="Hub id or folder of a checkpoint of ranked key/values")
    add("--also", nargs="*", default=[], metavar="NAME=FOLDER", help="other checkpoints")
    add("--variants", nargs="*", metavar="NAME", help="which parts are taken out (default: each)")
    add("--data", required=True, metavar="SOURCE", help="questions, as `evaluate` takes them")
    add("--ratios", nargs="+", type=positive_int, default=[4, 8, 16], metavar="R", help="default: 4 8 16")
    add("--dtype", default="auto", help="default: as saved")
    add("--seed", type=int, default=0, help="draws questions and resamples (default: 0)")
    add("--output", required=True, metavar="FILE", help="where the JSON goes; what was asked goes beside it")
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Ask all variants; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    output = Path(arguments.output)
    settings = EvaluationSettings(
        tasks=("question_answering",),
        ratios=tuple(arguments.ratios),
        ratios_only=True,
        allow_untrained_ratio=True,
        max_new_tokens={"question_answering": 24, "summarisation": 128},
        seed=arguments.seed,
    )

    def answers(name: str, folder: str, model: Any, tokenizer: Any) -> list[Any]:
        asked = name, Path(folder).name, arguments.data, arguments.ratios, arguments.dtype, arguments.seed
        digest = hashlib.sha256(repr(asked).encode()).hexdigest()[:8]
        place = output.with_name(f"{output.stem}.{name.replace(' ', '_').replace('/', '_')}.{digest}.jsonl")
        if not place.exists():
            datasets = load_datasets([arguments.data], tokenizer, seed=arguments.seed)
            records = {name: TrainingDocuments.of(folder)}
            report = evaluate_model(model, tokenizer, datasets, settings, model_name=name, records=records)
            AnswersFile(str(place), set()).write_new(report)
        return read_answers(place)

    found = {}
    model, tokenizer = load_compressor(arguments.checkpoint, dtype=arguments.dtype)
    known = variants(model)
    chosen = list(known) if arguments.variants is None else [WHOLE, *arguments.variants]
    for name in chosen:
        check_choice("variant", name, known)
    for name in chosen:
        with known[name](), torch.no_grad():
            found[name] = answers(name, arguments.checkpoint, model, tokenizer)
    for entry in arguments.also:
        name, _, folder = entry.rpartition("=")
        found[name] = answers(name, folder, *load_compressor(folder, dtype=arguments.dtype))
    rows, results = [], []
    for name, samples in found.items():
        row = [name]
        for condition in (f"ratio={ratio}" for ratio in arguments.ratios):
            score, interval = seed_average(samples, "f1", condition, seed=arguments.seed)
            pair = paired_difference(samples, found[WHOLE], "f1", condition, seed=arguments.seed)
            results.append(
                {
                    **{"variant": name, "condition": condition, "f1": score, "interval": interval},
                    **{"difference": pair.difference, "difference_interval": pair.interval},
                }
            )
            low, high = pair.interval
            row += [f"{score:.1f}", "" if name == WHOLE else f"{pair.difference:+.1f} [{low:.1f}, {high:.1f}]"]
        rows.append(row)
    header = [part for ratio in arguments.ratios for part in (f"F1 at {ratio}x", "less the first")]
    print(markdown_table(["variant", *header], rows))
    samples = found[WHOLE]
    shown = {"data": Path(arguments.data).name, "seed": arguments.seed, "questions": len(samples)}
    content = {"settings": shown, "rows": results, "environment": environment()}
    print(f"wrote {write_results(content, output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
