# SPDX-License-Identifier: Apache-2.0
"""The papers' analyses: what slots are made of, what memory tokens attend to, training curves, and operations.

    python -m examples.analyses slots comprexit=my-comprexit icae=my-icae --document report.txt --output analysis
    python -m examples.analyses attention my-icae --document report.txt --ratio 5 --output attention.png
    python -m examples.analyses curves icae=outputs/icae-1 icae=outputs/icae-2 pooled=outputs/p --output curves.png
    python -m examples.analyses flops llama-2-7b --methods gmsa --ratios 4 8

`NAME=` names what is compared; runs of one name are seeds of one curve. `analyses.ipynb` calls the functions.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from context_compressors.cli.loading import load_compressor
from context_compressors.evaluation.flops import flops_table
from context_compressors.evaluation.plots import (
    COLOURS,
    MARKERS,
    blank_figure,
    line_figure,
    save_figure,
    save_with_legend,
)
from context_compressors.evaluation.slot_origins import (
    attention_by_head,
    context_tokenizer,
    information_flow,
    slot_origins,
)
from context_compressors.modeling.parts.position_layout import uniform_memory_ids
from context_compressors.modeling.parts.text_ids import document_ids
from context_compressors.reporting.tables import markdown_table


def correlation(slots: Tensor) -> Tensor:
    """Pearson correlation `(num_slots, num_slots)` of slots `(num_slots, width)` (ComprExIT, Figure 3)."""
    return torch.corrcoef(slots.double()).nan_to_num().fill_diagonal_(1.0)


def singular_values(slots: Tensor) -> Tensor:
    """Singular values of slots `(num_slots, width)`, descending (ComprExIT, Figure 4)."""
    return torch.linalg.svdvals(slots.double())


def effective_rank(values: Tensor) -> float:
    """The exponential of the entropy of singular values over their sum (ComprExIT, Figure 4)."""
    return float(torch.special.entr(values.double() / values.double().sum()).sum().exp())


def loaded(model: str, document: str, max_tokens: int | None) -> tuple[Any, list[int]]:
    """Load a compressor and the token ids of a text file."""
    compressor, tokenizer = load_compressor(model)
    own = context_tokenizer(compressor, tokenizer)
    text = Path(document).read_text(encoding="utf-8")
    return compressor, document_ids(compressor.config, own, text)[:max_tokens]


def draw_maps(maps: dict[str, Tensor], path: Path, axes_names: tuple[str, str], **limits: Any) -> Path:
    """Draw a matrix for each name, one below the other."""
    figure = blank_figure(8.0, 0.5 + 3.2 * len(maps))
    for axes, (name, values) in zip(figure.subplots(len(maps), 1, squeeze=False)[:, 0], maps.items(), strict=True):
        image = axes.imshow(values.float().numpy(), aspect="auto", interpolation="nearest", **limits)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(axes_names[0])
        axes.set_ylabel(axes_names[1])
        figure.colorbar(image, ax=axes)
    return save_figure(figure, path)


def slots(
    models: Sequence[str], document: str, output: str, ratio: int | None = None, max_tokens: int | None = None
) -> None:
    """ComprExIT, Figures 3 to 5 and 7."""
    folder, rows = Path(output), []
    allocations: dict[str, Tensor] = {}
    layers: dict[str, Tensor] = {}
    vectors: dict[str, Tensor] = {}
    for model in models:
        name, _, place = model.rpartition("=")
        name = name or Path(place).name
        compressor, ids = loaded(place, document, max_tokens)
        row = torch.tensor([ids], device=compressor.device)
        origins, memory = slot_origins(compressor, ids, ratio), compressor.compress(row, ratio=ratio)
        if origins is not None:
            allocations[name] = torch.block_diag(*origins.chunks)
            if origins.kind == "plan":
                weights = information_flow(compressor.base_model, row, ratio=ratio)[0]
                layers |= {} if weights is None else {name: weights[0].float().cpu().T}
        if memory.embeddings is not None:
            vectors[name] = memory.embeddings[0].float().cpu()
        for kind, measured in (("allocation", allocations.get(name)), ("slots", vectors.get(name))):
            if measured is not None:
                first, second = torch.triu_indices(len(measured), len(measured), offset=1)
                mean = float(correlation(measured)[first, second].mean())
                rank = effective_rank(singular_values(measured))
                rows.append([name, kind, len(ids), len(measured), f"{rank:.2f}", f"{mean:.3f}"])
    print(markdown_table(["model", "measured on", "tokens", "slots", "effective rank", "mean correlation"], rows))
    paths = [draw_maps(allocations, folder / "allocation.png", ("token", "slot"), vmin=0)] if allocations else []
    if layers:
        paths.append(draw_maps(layers, folder / "layer_weights.png", ("token", "layer"), vmin=0, origin="lower"))
    for kind, of_kind in (("allocation", allocations), ("slots", vectors)):
        if of_kind:
            correlations = {name: correlation(values) for name, values in of_kind.items()}
            path = folder / f"correlation_of_{kind}.png"
            paths.append(draw_maps(correlations, path, ("slot", "slot"), vmin=-1, vmax=1, cmap="RdBu_r"))
            paths.append(draw_singular_values(of_kind, folder / f"singular_values_of_{kind}.png"))
    print(*paths, sep="\n")


def draw_singular_values(vectors: dict[str, Tensor], path: Path) -> Path:
    """Draw the singular values of slots, each divided by its model's largest."""
    figure, axes = line_figure("Singular values of the slots", "singular value / largest")
    for index, (name, slots_of_model) in enumerate(vectors.items()):
        spectrum = singular_values(slots_of_model)
        label = f"{name}, effective rank {effective_rank(spectrum):.2f}"
        values = (spectrum / spectrum[0]).tolist()
        axes.plot(range(1, len(values) + 1), values, color=COLOURS[index % len(COLOURS)], label=label)
    axes.set_xlabel("number of the value")
    return save_with_legend(figure, axes, path)


def attention(
    model: str,
    document: str,
    output: str,
    ratio: int | None = None,
    max_tokens: int | None = None,
    layers: Sequence[int] | None = None,
) -> None:
    """EPL, Figures 6 and 7: attention of memory tokens, and their places under the uniform layout."""
    compressor, ids = loaded(model, document, max_tokens)
    row = torch.tensor([ids], device=compressor.device)
    by_layer = attention_by_head(compressor.base_model, row, ratio=ratio)
    chosen = layers or sorted({min(2, len(by_layer)), len(by_layer)})
    figure = blank_figure(1.0 + 5.0 * len(chosen), 4.0)
    for axes, layer in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        weights = by_layer[layer - 1][0].float().mean(dim=0).cpu()
        highest = float(weights.quantile(0.99)) or 1.0
        axes.imshow(weights.numpy(), aspect="auto", interpolation="nearest", vmin=0, vmax=highest)
        places = uniform_memory_ids(0, weights.shape[1], len(weights)).tolist()
        axes.plot(places, range(len(weights)), color="lightgrey", linestyle="--", linewidth=0.8)
        axes.set_title(f"layer {layer} of {len(by_layer)}", fontsize=10)
        axes.set_xlabel("context token")
        axes.set_ylabel("memory token")
    print(save_figure(figure, output))


def read_curve(run: str, metric: str) -> dict[int, float]:
    """Step -> value, of a run's folder (the state that reaches furthest) or of a log file."""
    place = Path(run)
    checkpoints = sorted(place.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    files = [place, place / "trainer_state.json", *(path / "trainer_state.json" for path in checkpoints[::-1])]
    file = next((file for file in files if file.is_file()), place / "training_summary.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    log = content["log_history"] if "log_history" in content else content["log"]
    values = {entry["step"]: float(entry[metric]) for entry in log if metric in entry}
    if not values:
        raise ValueError(
            f"{file} has no {metric!r} in its log, only {sorted({key for entry in log for key in entry})}"
        )
    return values


def steps_to_reach(curve: dict[int, float], loss: float) -> float | None:
    """The first step at which a curve is at a loss or below, linear between the steps that there are."""
    before: tuple[int, float] | None = None
    for step, value in curve.items():
        if value <= loss:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


def mean_curve(seeds: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over the seeds of a run, which were logged at the same steps."""
    return {step: sum(seed[step] for seed in seeds) / len(seeds) for step in seeds[0]}


def curves(runs: Sequence[str], output: str, metric: str = "loss", loss: float | None = None) -> None:
    """EPL, Figures 4 and 5; ComprExIT, Figure 6."""
    of_seeds: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        name, _, place = run.rpartition("=")
        of_seeds.setdefault(name or Path(place).name, []).append(read_curve(place, metric))
    means = {name: mean_curve(seeds) for name, seeds in of_seeds.items()}
    loss = loss or max(min(curve.values()) for curve in means.values())
    steps = {name: steps_to_reach(curve, loss) for name, curve in means.items()}
    first = next(iter(steps.values()))
    rows = []
    figure, axes = line_figure(f"{metric} by training step", metric)
    for index, (name, curve) in enumerate(means.items()):
        colour, values, reached = COLOURS[index % len(COLOURS)], list(curve.values()), steps[name]
        axes.plot(list(curve), values, color=colour, label=name)
        if len(of_seeds[name]) > 1:
            low, high = ([pick(seed[step] for seed in of_seeds[name]) for step in curve] for pick in (min, max))
            axes.fill_between(list(curve), low, high, color=colour, alpha=0.2, linewidth=0)
        if reached is not None:
            axes.plot([reached], [loss], color=colour, marker=MARKERS[index % len(MARKERS)], linestyle="")
        times = "-" if reached is None or first is None else f"{first / reached:.2f}"
        shown = [f"{value:.4g}" for value in (values[0], values[-1], min(values))]
        rows.append([name, len(of_seeds[name]), *shown, "never" if reached is None else f"{reached:.0f}", times])
    axes.axhline(loss, color="grey", linestyle="--", linewidth=0.8)
    axes.set_xlabel("step")
    header = [
        "run",
        "seeds",
        "first",
        "last",
        "lowest",
        f"steps to {loss:.4g}",
        f"times faster than {next(iter(of_seeds))}",
    ]
    print(markdown_table(header, rows))
    print(save_with_legend(figure, axes, output))


def flops(
    base: str,
    methods: Sequence[str] = (),
    ratios: Sequence[int] = (),
    context_tokens: int = 3253,
    question_tokens: int = 50,
    answer_tokens: int = 100,
) -> None:
    """GMSA, Appendix G."""
    print(flops_table(base, methods, ratios, context_tokens, question_tokens, answer_tokens))


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
    arguments = vars(build_parser().parse_args())
    arguments.pop("run")(**arguments)
