# SPDX-License-Identifier: Apache-2.0
"""Pictures of slots and attention: what slots are made of, how alike they are, and how many dimensions they fill."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from ...modeling.parts.position_layout import uniform_memory_ids
from ..figures import COLOURS, MARKERS, blank_figure, line_figure, save_figure, save_with_legend

# More tokens than these cannot be told apart on an axis.
_MOST_TOKEN_NAMES = 128


def plot_memory_attention(
    attention: Tensor, path: str | os.PathLike[str], layers: Sequence[int] | None = None
) -> Path:
    """Draw attention from memory tokens (down) to context tokens (across), one map for each chosen layer.

    Colours end at each map's 99th percentile: a first token that everything attends to would leave the rest dark. The
    grey dashed line is where memory tokens stand among the context under the uniform layout.

    Args:
        attention: `(num_layers, num_memory_tokens, num_context_tokens)`.
        path: PNG file to write; folders are made.
        layers: numbers of the layers, from 1; the second and the last when `None`.

    Returns:
        The path.

    Raises:
        ValueError: no layers, or one that is not there; no memory tokens.

    Source: EPL, appendix G, Figures 6 and 7.
    """
    num_layers, num_memory_tokens, num_context_tokens = attention.shape
    chosen = sorted({min(2, num_layers), num_layers}) if layers is None else list(layers)
    if not chosen or not all(1 <= layer <= num_layers for layer in chosen):
        raise ValueError(f"layers must be one or more of 1 to {num_layers}, got {chosen}")
    if not attention.numel():
        raise ValueError(f"there is no attention to draw in shape {tuple(attention.shape)}")
    figure = blank_figure(1.0 + 5.0 * len(chosen), 4.0)
    positions = uniform_memory_ids(0, num_context_tokens, num_memory_tokens).tolist()
    for axes, layer in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        weights = attention[layer - 1].float().cpu().numpy()
        highest = float(np.quantile(weights, 0.99)) or 1.0
        image = axes.imshow(weights, aspect="auto", interpolation="nearest", vmin=0, vmax=highest)
        axes.plot(positions, range(num_memory_tokens), color="lightgrey", linestyle="--", linewidth=0.8)
        axes.set_title(f"layer {layer} of {num_layers}", fontsize=10)
        axes.set_xlabel("context token")
        axes.set_ylabel("memory token")
        figure.colorbar(image, ax=axes, extend="max")
    return save_figure(figure, path)


def plot_allocation(
    allocations: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    tokens: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Draw how much of each token (across) is in each slot (down), one map for each model.

    Colours end at each map's 99th percentile: a first token that everything attends to would leave the rest dark.

    Args:
        allocations: name -> `(num_slots, num_tokens)`.
        path: PNG file to write; folders are made.
        tokens: name -> the tokens as texts, shown where there are few.

    Returns:
        The path.

    Raises:
        ValueError: nothing to draw.

    Source: ComprExIT, Figure 7.
    """
    _check(allocations)
    longest = max(weights.shape[1] for weights in allocations.values())
    figure = blank_figure(_width(longest), 0.5 + 3.2 * len(allocations))
    for axes, (name, weights) in zip(_rows(figure, len(allocations)), allocations.items(), strict=True):
        values = _values(weights)
        image = axes.imshow(
            values, aspect="auto", interpolation="nearest", vmin=0, vmax=float(np.quantile(values, 0.99)) or 1.0
        )
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("slot")
        _token_axis(axes, (tokens or {}).get(name), values.shape[1])
        figure.colorbar(image, ax=axes, extend="max")
    return save_figure(figure, path)


def plot_layer_weights(
    layer_weights: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    tokens: Mapping[str, Sequence[str]] | None = None,
    first_layers: Mapping[str, int] | None = None,
) -> Path:
    """Draw how much of each layer (up) is in each token's anchor (across), one map for each model.

    Args:
        layer_weights: name -> `(num_tokens, num_states)`.
        path: PNG file to write; folders are made.
        tokens: name -> the tokens as texts, shown where there are few.
        first_layers: name -> number of the first state, 0 for the embeddings, which is the default.

    Returns:
        The path.

    Raises:
        ValueError: nothing to draw.

    Source: ComprExIT, Figure 5.
    """
    _check(layer_weights)
    longest = max(len(weights) for weights in layer_weights.values())
    figure = blank_figure(_width(longest), 0.5 + 3.2 * len(layer_weights))
    for axes, (name, weights) in zip(_rows(figure, len(layer_weights)), layer_weights.items(), strict=True):
        values, first = _values(weights).T, (first_layers or {}).get(name, 0)
        extent = (-0.5, values.shape[1] - 0.5, first - 0.5, first + len(values) - 0.5)
        image = axes.imshow(values, aspect="auto", interpolation="nearest", vmin=0, origin="lower", extent=extent)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("layer")
        axes.yaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # a MaxNLocator
        _token_axis(axes, (tokens or {}).get(name), values.shape[1])
        figure.colorbar(image, ax=axes)
    return save_figure(figure, path)


def plot_slot_correlation(correlations: Mapping[str, Tensor], path: str | os.PathLike[str]) -> Path:
    """Draw the correlation between slots, one map for each model.

    Args:
        correlations: name -> `(num_slots, num_slots)`.
        path: PNG file to write; folders are made.

    Returns:
        The path.

    Raises:
        ValueError: nothing to draw.

    Source: ComprExIT, Figure 3.
    """
    _check(correlations)
    figure = blank_figure(1.2 + 4.2 * len(correlations), 4.4)
    panels = figure.subplots(1, len(correlations), squeeze=False)[0]
    for axes, (name, correlation) in zip(panels, correlations.items(), strict=True):
        image = axes.imshow(_values(correlation), interpolation="nearest", vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("slot")
        axes.set_ylabel("slot")
    figure.colorbar(image, ax=list(panels), label="Pearson correlation")
    return save_figure(figure, path)


def plot_singular_values(
    spectra: Mapping[str, Tensor], effective_ranks: Mapping[str, float], path: str | os.PathLike[str]
) -> Path:
    """Draw the singular values of slots, each divided by its model's largest, one line per model.

    Args:
        spectra: name -> `(num_values,)`, descending.
        effective_ranks: name -> number, for the legend.
        path: PNG file to write; folders are made.

    Returns:
        The path.

    Raises:
        ValueError: nothing to draw.

    Source: ComprExIT, Figure 4.
    """
    _check(spectra)
    figure, axes = line_figure("Singular values of the slots", "singular value / largest")
    for index, (name, spectrum) in enumerate(spectra.items()):
        values = _values(spectrum)
        axes.plot(
            range(1, len(values) + 1),
            values / values[0],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)] if len(values) <= 32 else None,
            label=f"{name}, effective rank {effective_ranks[name]:.2f}",
        )
    axes.set_xlabel("number of the value")
    axes.set_ylim(bottom=0)
    return save_with_legend(figure, axes, path)


def _check(items: Mapping[str, Tensor]) -> None:
    if not items or not all(tensor.numel() for tensor in items.values()):
        raise ValueError("there is nothing to draw: give at least one model's values, none of them empty")


def _values(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def _rows(figure: Any, count: int) -> list[Axes]:
    return list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _width(num_tokens: int) -> float:
    """Inches that show each token of a short document by name."""
    return 3.0 + 0.14 * min(max(num_tokens, 32), _MOST_TOKEN_NAMES)


def _token_axis(axes: Axes, tokens: Sequence[str] | None, num_tokens: int) -> None:
    axes.set_xlabel("token")
    if tokens is not None and num_tokens <= _MOST_TOKEN_NAMES:
        names = [token.strip(" ").replace("\n", "\\n").replace("\t", "\\t") for token in tokens]
        # A document's dollar signs are no formulas.
        axes.set_xticks(range(num_tokens), names, rotation=90, fontsize=6, parse_math=False)
