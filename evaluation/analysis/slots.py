# SPDX-License-Identifier: Apache-2.0
"""What slots are made of, how alike they are, and how many dimensions they fill, in numbers and pictures."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.parts.position_layout import uniform_memory_ids
from ...reporting.tables import markdown_table
from ..figures import COLOURS, MARKERS, blank_figure, line_figure, save_figure, save_with_legend
from .slot_origins import ATTENTION, PLAN, attention_by_head, information_flow, origin_kind, slot_weights

ALLOCATION, SLOTS = "allocation", "slots"
# Pairs of slots with a higher correlation count as copies of each other.
HIGH_CORRELATION = 0.5
# More tokens than these cannot be told apart on an axis.
_MOST_TOKEN_NAMES = 128


@dataclass(frozen=True)
class SlotAnalysis:
    """The slots of one document.

    Args:
        tokens: the document's tokens, as texts.
        num_slots: of its memory; of keys and values, those of a head on average.
        slots: `(num_slots, hidden_size)`; `None` where a memory is keys and values.
        allocation: `(num_slots, num_tokens)`, how much of each token is in a slot, in sum 1 for a slot; `None` where a
            method has no such weights.
        layer_weights: `(num_tokens, num_states)`, how much of each layer is in a token's anchor; `None` where there is
            no gate.
        first_layer: number of the first of these states, 0 for the embeddings.
    """

    tokens: tuple[str, ...]
    num_slots: int
    slots: Tensor | None
    allocation: Tensor | None = None
    layer_weights: Tensor | None = None
    first_layer: int = 0

    @property
    def vectors(self) -> dict[str, Tensor]:
        """What there is with a row for each slot: "allocation" and "slots"."""
        found = {ALLOCATION: self.allocation, SLOTS: self.slots}
        return {kind: rows for kind, rows in found.items() if rows is not None}


def slot_correlation(vectors: Tensor) -> Tensor:
    """Pearson correlation between slots; one whose entries are all alike is correlated with no other.

    Args:
        vectors: `(num_slots, width)`, such as the weights that a slot is made of tokens with.

    Returns:
        Float64 `(num_slots, num_slots)`.

    Source: ComprExIT, Figure 3.
    """
    rows = vectors.double()
    centred = rows - rows.mean(dim=1, keepdim=True)
    sizes = centred.norm(dim=1, keepdim=True)
    # What is left of equal entries is rounding, and has a direction of its own.
    varies = sizes > 1e-6 * rows.norm(dim=1, keepdim=True)
    directions = torch.where(varies, centred / sizes.clamp(min=torch.finfo(sizes.dtype).tiny), 0.0)
    return (directions @ directions.T).clamp(-1, 1).fill_diagonal_(1.0)


def singular_values(vectors: Tensor) -> Tensor:
    """Singular values of slots `(num_slots, width)`, float64, descending (ComprExIT, Figure 4)."""
    return torch.linalg.svdvals(vectors.double())


def effective_rank(values: Tensor) -> float:
    """The exponential of the entropy of singular values over their sum (ComprExIT, Figure 4)."""
    return float(torch.special.entr(values.double() / values.double().sum()).sum().exp())


def slot_measures(vectors: Tensor) -> dict[str, float]:
    """How alike slots are, in numbers.

    Args:
        vectors: `(num_slots, width)`.
    """
    num_slots = len(vectors)
    if num_slots < 2:
        raise ValueError(f"slots are compared with each other: at least 2 are needed, got {num_slots}")
    first, second = torch.triu_indices(num_slots, num_slots, offset=1)
    pairs = slot_correlation(vectors)[first, second]
    return {
        "effective_rank": effective_rank(singular_values(vectors)),
        "mean_correlation": float(pairs.mean()),
        "highly_correlated_pairs": float((pairs > HIGH_CORRELATION).double().mean()),
    }


@torch.inference_mode()
def analyse_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ratio: int | None = None
) -> SlotAnalysis:
    """Compress a document and look into its slots (ComprExIT, section 4.4).

    Args:
        model: a compressor.
        tokenizer: the tokenizer of its documents, see `context_tokenizer`.
        ids: the document's; of one chunk at most where the method has a transmission plan or memory tokens.
        ratio: context tokens per slot; the checkpoint's default when `None`.

    Raises:
        ValueError: an empty document, a longer one than the method can show, or a ratio that the checkpoint lacks.
    """
    input_ids = torch.tensor([list(ids)], device=model.device)
    kind = origin_kind(model.base_model)
    allocation = layer_weights = None
    first_layer = 0
    # Refused here, a document of several chunks has cost nothing yet.
    if kind == PLAN:
        flow = information_flow(model.base_model, input_ids, ratio=ratio)
        allocation = flow.allocation[0].float().cpu()
        if flow.layer_weights is not None:
            layer_weights = flow.layer_weights[0].float().cpu()
            first_layer = model.config.get_encoder_config().num_hidden_layers + 1 - layer_weights.shape[1]
    elif kind == ATTENTION:
        allocation = slot_weights(model.base_model, kind, input_ids, ratio).float().cpu()
    memory = model.compress(input_ids, ratio=ratio)
    return SlotAnalysis(
        tokens=tuple(tokenizer.decode([token_id]) for token_id in ids),
        num_slots=int(memory.num_slots[0]),
        slots=None if memory.embeddings is None else memory.embeddings[0].float().cpu(),
        allocation=allocation,
        layer_weights=layer_weights,
        first_layer=first_layer,
    )


def summary(analyses: Sequence[SlotAnalysis]) -> dict[str, Any]:
    """Means over documents: tokens, slots, and the measures of whatever has a row for each slot."""
    measured = [{kind: slot_measures(rows) for kind, rows in each.vectors.items()} for each in analyses]
    return {
        "num_documents": len(analyses),
        "num_tokens": fmean(len(each.tokens) for each in analyses),
        "num_slots": fmean(each.num_slots for each in analyses),
        "measures": {
            kind: {name: fmean(each[kind][name] for each in measured) for name in measured[0][kind]}
            for kind in measured[0]
        },
    }


def slots_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: the `summary` of each model, of what its slots are made of and of the slots themselves."""
    header = ["model", "measured on", "documents", "tokens", "slots", "effective rank", "mean correlation"]
    rows = []
    for name, means in summaries.items():
        counts = [means["num_documents"], f"{means['num_tokens']:.1f}", f"{means['num_slots']:.1f}"]
        for kind, measures in means["measures"].items():
            pairs = f"{100 * measures['highly_correlated_pairs']:.1f} %"
            cells = [f"{measures['effective_rank']:.2f}", f"{measures['mean_correlation']:.3f}", pairs]
            rows.append([name, kind, *counts, *cells])
        if not means["measures"]:
            rows.append([name, "-", *counts, "-", "-", "-"])
    return markdown_table([*header, f"pairs above {HIGH_CORRELATION}"], rows)


def draw_slots(analyses: Mapping[str, SlotAnalysis], folder: str | Path) -> list[Path]:
    """Draw one document as several models see it: allocation, layers, correlation between slots, singular values."""
    folder, paths = Path(folder), []
    if any(analysis.allocation is not None for analysis in analyses.values()):
        paths.append(plot_allocation(analyses, folder / "allocation.png"))
    if any(analysis.layer_weights is not None for analysis in analyses.values()):
        paths.append(plot_layer_weights(analyses, folder / "layer_weights.png"))
    for kind in (ALLOCATION, SLOTS):
        vectors = {name: a.vectors[kind] for name, a in analyses.items() if kind in a.vectors}
        if vectors:
            paths.append(plot_slot_correlation(vectors, folder / f"correlation_of_{kind}.png"))
            paths.append(plot_singular_values(vectors, folder / f"singular_values_of_{kind}.png"))
    return paths


def plot_allocation(analyses: Mapping[str, SlotAnalysis], path: str | os.PathLike[str]) -> Path:
    """Draw how much of each token (across) is in each slot (down), one map for each model (ComprExIT, Figure 7)."""
    shown = {name: analysis for name, analysis in analyses.items() if analysis.allocation is not None}
    figure, panels = _stacked(shown.values())
    for axes, (name, analysis) in zip(panels, shown.items(), strict=True):
        values = _numpy(analysis.allocation)
        image = axes.imshow(values, aspect="auto", interpolation="nearest", vmin=0, vmax=_highest(values))
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("slot")
        _name_tokens(axes, analysis.tokens)
        figure.colorbar(image, ax=axes, extend="max")
    return save_figure(figure, path)


def plot_layer_weights(analyses: Mapping[str, SlotAnalysis], path: str | os.PathLike[str]) -> Path:
    """Draw how much of each layer (up) is in each token's anchor (across), by model (ComprExIT, Figure 5)."""
    shown = {name: analysis for name, analysis in analyses.items() if analysis.layer_weights is not None}
    figure, panels = _stacked(shown.values())
    for axes, (name, analysis) in zip(panels, shown.items(), strict=True):
        values, first = _numpy(analysis.layer_weights).T, analysis.first_layer
        extent = (-0.5, values.shape[1] - 0.5, first - 0.5, first + len(values) - 0.5)
        image = axes.imshow(values, aspect="auto", interpolation="nearest", vmin=0, origin="lower", extent=extent)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("layer")
        axes.yaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # a MaxNLocator
        _name_tokens(axes, analysis.tokens)
        figure.colorbar(image, ax=axes)
    return save_figure(figure, path)


def plot_slot_correlation(vectors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> Path:
    """Draw the correlation between slots `(num_slots, width)`, one map for each model (ComprExIT, Figure 3)."""
    figure = blank_figure(1.2 + 4.2 * len(vectors), 4.4)
    panels = figure.subplots(1, len(vectors), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, vectors.items(), strict=True):
        image = axes.imshow(_numpy(slot_correlation(rows)), interpolation="nearest", vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("slot")
        axes.set_ylabel("slot")
    figure.colorbar(image, ax=list(panels), label="Pearson correlation")
    return save_figure(figure, path)


def plot_singular_values(vectors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> Path:
    """Draw the singular values of slots, each divided by its model's largest (ComprExIT, Figure 4)."""
    figure, axes = line_figure("Singular values of the slots", "singular value / largest")
    for index, (name, rows) in enumerate(vectors.items()):
        spectrum = singular_values(rows)
        axes.plot(
            range(1, len(spectrum) + 1),
            _numpy(spectrum / spectrum[0]),
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)] if len(spectrum) <= 32 else None,
            label=f"{name}, effective rank {effective_rank(spectrum):.2f}",
        )
    axes.set_xlabel("number of the value")
    axes.set_ylim(bottom=0)
    return save_with_legend(figure, axes, path)


def plot_memory_attention(
    model: PreTrainedModel,
    ids: Sequence[int],
    path: str | os.PathLike[str],
    ratio: int | None = None,
    layers: Sequence[int] | None = None,
) -> Path:
    """Draw attention from memory tokens (down) to context tokens (across), a mean over the heads.

    The grey dashed line is where memory tokens stand among the context under the uniform layout.

    Args:
        model: a compressor with memory tokens.
        ids: a document's, of one chunk at most.
        path: PNG file to write; folders are made.
        ratio: context tokens per memory token; the checkpoint's default when `None`.
        layers: numbers of the layers, from 1; the second and the last when `None`.

    Raises:
        ValueError: a layer that is not there; as `attention_by_head` besides.

    Source: EPL, appendix G, Figures 6 and 7.
    """
    attentions = attention_by_head(model.base_model, torch.tensor([list(ids)], device=model.device), ratio=ratio)
    num_layers = len(attentions)
    chosen = sorted({min(2, num_layers), num_layers}) if layers is None else list(layers)
    if not chosen or not all(1 <= layer <= num_layers for layer in chosen):
        raise ValueError(f"layers must be one or more of 1 to {num_layers}, got {chosen}")
    figure = blank_figure(1.0 + 5.0 * len(chosen), 4.0)
    for axes, layer in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        weights = _numpy(attentions[layer - 1][0].float().mean(dim=0))
        image = axes.imshow(weights, aspect="auto", interpolation="nearest", vmin=0, vmax=_highest(weights))
        positions = uniform_memory_ids(0, weights.shape[1], len(weights)).tolist()
        axes.plot(positions, range(len(weights)), color="lightgrey", linestyle="--", linewidth=0.8)
        axes.set_title(f"layer {layer} of {num_layers}", fontsize=10)
        axes.set_xlabel("context token")
        axes.set_ylabel("memory token")
        figure.colorbar(image, ax=axes, extend="max")
    return save_figure(figure, path)


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def _highest(values: np.ndarray) -> float:
    """Where colours end: a first token that everything attends to would leave the rest dark."""
    return float(np.quantile(values, 0.99)) or 1.0


def _stacked(analyses: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a map of tokens for each analysis, wide enough to name the tokens of a short document."""
    longest = max(len(analysis.tokens) for analysis in analyses)
    figure = blank_figure(3.0 + 0.14 * min(max(longest, 32), _MOST_TOKEN_NAMES), 0.5 + 3.2 * len(analyses))
    return figure, list(figure.subplots(len(analyses), 1, squeeze=False)[:, 0])


def _name_tokens(axes: Axes, tokens: Sequence[str]) -> None:
    axes.set_xlabel("token")
    if len(tokens) <= _MOST_TOKEN_NAMES:
        names = [token.strip(" ").replace("\n", "\\n").replace("\t", "\\t") for token in tokens]
        # A document's dollar signs are no formulas.
        axes.set_xticks(range(len(tokens)), names, rotation=90, fontsize=6, parse_math=False)
