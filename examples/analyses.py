# SPDX-License-Identifier: Apache-2.0
"""The papers' analyses: what slots are made of, what memory tokens attend to, training curves, and operations.

    python -m examples.analyses slots comprexit=my-comprexit icae=my-icae --document report.txt --output analysis
    python -m examples.analyses attention my-icae --document report.txt --ratio 5 --output attention.png
    python -m examples.analyses curves icae=outputs/icae-1 icae=outputs/icae-2 pooled=outputs/p --output curves.png
    python -m examples.analyses flops llama-2-7b --methods gmsa --ratios 4 8

`NAME=` names what is compared; runs of one name are seeds of one curve.
"""

import argparse
from pathlib import Path
from typing import Any

from context_compressors.cli.loading import load_compressor
from context_compressors.evaluation.analysis.slot_origins import context_tokenizer
from context_compressors.evaluation.analysis.slots import (
    analyse_ids,
    draw_slots,
    plot_memory_attention,
    slots_table,
    summary,
)
from context_compressors.evaluation.curves import common_loss, curves_table, read_curves
from context_compressors.evaluation.flops import flops_table
from context_compressors.evaluation.plots import plot_curves
from context_compressors.modeling.parts.prompting import document_ids


def loaded(model: str, arguments: argparse.Namespace) -> tuple[Any, Any, list[int]]:
    """A compressor, the tokenizer of its documents, and the document's token ids."""
    compressor, tokenizer = load_compressor(model)
    own = context_tokenizer(compressor, tokenizer)
    text = Path(arguments.document).read_text(encoding="utf-8")
    return compressor, own, document_ids(compressor.config, own, text)[: arguments.max_tokens]


def slots(arguments: argparse.Namespace) -> None:
    """ComprExIT, Figures 3 to 5 and 7."""
    analyses = {}
    for model in arguments.models:
        name, _, place = model.rpartition("=")
        analyses[name or Path(place).name] = analyse_ids(*loaded(place, arguments), arguments.ratio)
    print(slots_table({name: summary([analysis]) for name, analysis in analyses.items()}))
    print(*draw_slots(analyses, arguments.output), sep="\n")


def attention(arguments: argparse.Namespace) -> None:
    """EPL, Figures 6 and 7."""
    compressor, _, ids = loaded(arguments.model, arguments)
    print(plot_memory_attention(compressor, ids, arguments.output, arguments.ratio, arguments.layers))


def curves(arguments: argparse.Namespace) -> None:
    """EPL, Figures 4 and 5; ComprExIT, Figure 6."""
    runs: dict[str, list[str]] = {}
    for run in arguments.runs:
        name, _, place = run.rpartition("=")
        runs.setdefault(name or Path(place).name, []).append(place)
    found = read_curves(runs, arguments.metric)
    loss = common_loss(found) if arguments.loss is None else arguments.loss
    print(curves_table(found, loss))
    print(plot_curves(found, arguments.metric, arguments.output, loss))


def flops(arguments: argparse.Namespace) -> None:
    """GMSA, Appendix G."""
    lengths = (arguments.context_tokens, arguments.question_tokens, arguments.answer_tokens)
    print(flops_table(arguments.base, arguments.methods, arguments.ratios, *lengths))


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the four analyses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run in (slots, attention, curves, flops):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        if run is slots:
            command.add_argument("models", nargs="+", metavar="[NAME=]MODEL")
        elif run is attention:
            command.add_argument("model")
            command.add_argument("--layers", nargs="+", type=int, help="from 1 (default: the second and the last)")
        elif run is curves:
            command.add_argument("runs", nargs="+", metavar="[NAME=]FOLDER")
            command.add_argument("--metric", default="loss", help="value of the logs (default: %(default)s)")
            command.add_argument("--loss", type=float, help="loss to reach (default: the lowest that all runs reach)")
        else:
            command.add_argument("base", help="such as llama-2-7b, or a folder or Hub id")
            command.add_argument("--methods", nargs="+", default=[])
            command.add_argument("--ratios", nargs="+", type=int, default=[])
            for name, default in (("context", 3253), ("question", 50), ("answer", 100)):
                command.add_argument(f"--{name}-tokens", type=int, default=default)
        if run in (slots, attention):
            command.add_argument("--document", required=True, help="a text file")
            command.add_argument("--max-tokens", type=int, help="of the document (default: all)")
            command.add_argument("--ratio", type=int, help="context tokens per slot (default: the checkpoint's)")
        if run is not flops:
            command.add_argument("--output", required=True, help="a folder" if run is slots else "a PNG file")
    return parser


if __name__ == "__main__":
    parsed = build_parser().parse_args()
    parsed.run(parsed)
