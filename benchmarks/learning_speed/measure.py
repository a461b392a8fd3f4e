# SPDX-License-Identifier: Apache-2.0
"""Count the tokens of context that a decoder needs until it reads a method's slots.

    python -m benchmarks.learning_speed.measure icae gmsa --data-dir DATA

Each run is smollm2/learning_speed.yaml over a method's recipe of smollm2/comparison/. `NAME+residual` sets
`embedding_residual`, and `NAME+residual+enhanced` the enhanced position layout, too. `pooled_embeddings` is the
control without an encoder. Runs in the result file are skipped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.common.tools import positive_int, script_parser, tells_errors
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer

# Accuracy of held-out tokens at which slots count as read.
READ = 0.6
# The control: the encoder is gone, and W maps pooled embeddings.
POOLED = {"encoder_type": "embeddings", "encoder_lora": None, "embedding_residual": True}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="recipes of smollm2/comparison/, such as icae or icae+residual")
    add("--data-dir", required=True, metavar="DIR", help="folder of the data sets")
    add("--tokens", type=positive_int, default=400_000, metavar="N", help="context tokens of a run (default: 400,000)")
    add("--seed", type=positive_int, default=1, metavar="S", help="default: 1")
    add("--until-read", action="store_true", help=f"stop a run at an accuracy of {READ}")
    add("--output", type=Path, default=Path(__file__).parent / "results.json", metavar="FILE", help="results as JSON")
    add("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipe, such as bf16=false")
    return parser


class Curve(TrainerCallback):
    """Held-out accuracy and loss by tokens of context; ends the run at a number of tokens, or once slots are read."""

    def __init__(self, most_tokens: int, until_read: bool):
        self.points: list[dict[str, float]] = []
        self._tokens, self._most_tokens, self._until_read = 0, most_tokens, until_read

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self._tokens = int(logs.get("num_context_tokens", self._tokens))
        if "eval_token_accuracy_ratio_2" not in logs:
            return
        accuracy, loss = logs["eval_token_accuracy_ratio_2"], logs["eval_loss"]
        self.points.append({"tokens": self._tokens, "accuracy": round(accuracy, 4), "loss": round(loss, 4)})
        print(json.dumps(self.points[-1]), flush=True)
        is_read = self._until_read and accuracy >= READ
        control.should_training_stop |= is_read or self._tokens >= self._most_tokens


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one method and return its curve."""
    recipe, *forms = name.split("+")
    fields: dict[str, Any] = {"embedding_residual": True} if "residual" in forms else {}
    if fields and recipe == "mean_pooling":
        fields["linear_after_pooling"] = False
    if "enhanced" in forms:
        fields["position_layout"] = "enhanced"
    if recipe == "pooled_embeddings":
        recipe, fields = "mean_pooling", POOLED
    curve = Curve(arguments.tokens, arguments.until_read)
    given = [f"--{pair}" for pair in arguments.set]
    with tempfile.TemporaryDirectory() as folder:
        # A recipe, whose fields join those of the method's own.
        own = Path(folder) / "own.yaml"
        own.write_text(json.dumps({"method_config": fields}))
        recipes = [f"smollm2/comparison/{recipe}.yaml", "smollm2/learning_speed.yaml", str(own), "smollm2/cpu.yaml"]
        places = ["--data_dir", arguments.data_dir, "--output_dir", f"{folder}/out", "--seed", str(arguments.seed)]
        trainer = build_trainer(*parse_recipe([*recipes, *places, *given]))
        trainer.add_callback(curve)
        trainer.train()
    read = next((point["tokens"] for point in curve.points if point["accuracy"] >= READ), None)
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    result = {"run": name, "seed": arguments.seed, "trainable": trainable, "tokens_until_read": read}
    return {**result, "curve": curve.points, "environment": environment()}


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure all runs that the result file lacks; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"runs": []}
    for name in arguments.runs:
        if not any((found["run"], found["seed"]) == (name, arguments.seed) for found in results["runs"]):
            print(name, flush=True)
            results["runs"].append(run(name, arguments))
            write_results(results, arguments.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
