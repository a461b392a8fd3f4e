# SPDX-License-Identifier: Apache-2.0
"""What learned position encodings prefer: near positions, but for a special token (EPL's Figures 2, 9 and 10).

    python -m benchmarks.position_bias.measure google-bert/bert-base-uncased
    python -m benchmarks.position_bias.measure google-t5/t5-base

Of a model with a vector for each position, such as BERT, the cosine similarity between these vectors: the ten highest
of each of the first fifty (Figure 9), and those of positions 0 (BERT's [CLS]), 100, 200 and 300 with all others
(Figure 10). Of a model with relative biases, such as T5 or a DeCAL checkpoint, what the encoder's attention scores get
by distance (Figure 2). Writes JSON and pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedModel
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.common.tools import add_output_argument, save_and_report, tells_errors

# Importing it registers every method with the Auto classes.
from context_compressors import modeling  # noqa: F401
from context_compressors.evaluation.evaluate import model_label
from context_compressors.evaluation.figures import blank_figure, line_figure, save_figure, save_with_legend
from context_compressors.reporting.tables import markdown_table

_SHOWN, _HIGHEST = 50, 10
_ANCHORS = (0, 100, 200, 300)
_DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def position_vectors(model: PreTrainedModel) -> Tensor | None:
    """A model's learned vector for each position, `(positions, hidden_size)`, in float32."""
    found = [m.weight for name, m in model.named_modules() if name.endswith("position_embeddings")]
    return found[0].detach().float() if found else None


def relative_biases(model: PreTrainedModel, distances: Sequence[int]) -> Tensor | None:
    """What the encoder's attention scores get for keys so many places ahead, `(heads, distances)`, in float32."""
    layers = [m for m in model.modules() if isinstance(m, T5Attention) and m.has_relative_attention_bias]
    if not layers:
        return None
    layer = layers[0]
    buckets = layer._relative_position_bucket(
        torch.tensor(distances),
        bidirectional=not layer.is_decoder,
        num_buckets=layer.relative_attention_num_buckets,
        max_distance=layer.relative_attention_max_distance,
    )
    return layer.relative_attention_bias.weight.detach().float()[buckets].T


def similarity_rows(similarity: Tensor) -> list[dict[str, Any]]:
    """By distance: the mean similarity of two positions, and of position 0 with the one so far behind it.

    Args:
        similarity: cosines, `(positions, positions)`.
    """
    rows = []
    for distance in (d for d in _DISTANCES if 0 < d < len(similarity)):
        diagonal = similarity[1:, 1:].diagonal(distance)
        if len(diagonal):
            rows.append(
                {"distance": distance, "others": float(diagonal.mean()), "first": float(similarity[0, distance])}
            )
    return rows


def bias_rows(model: PreTrainedModel) -> list[dict[str, Any]]:
    """By distance: the bias of every head, behind and ahead."""
    rows = []
    for distance in _DISTANCES:
        behind, ahead = relative_biases(model, [-distance, distance]).T
        rows.append({"distance": distance, "behind": behind.tolist(), "ahead": ahead.tolist()})
    return rows


def draw_similarity(similarity: Tensor, name: str, folder: Path) -> list[Path]:
    """Figures 9 and 10 of the paper."""
    shown = similarity[:_SHOWN, :_SHOWN]
    kept = torch.full_like(shown, float("nan"))
    places = similarity.topk(_HIGHEST, dim=1).indices[:_SHOWN]
    for row, columns in enumerate(places):
        inside = columns[columns < shown.shape[1]]
        kept[row, inside] = shown[row, inside]
    figure = blank_figure(5.5, 4.5)
    axes = figure.add_subplot()
    axes.set_title(f"{name}: the {_HIGHEST} most similar positions")
    axes.set_xlabel("position")
    axes.set_ylabel("position")
    figure.colorbar(axes.imshow(kept.numpy(), origin="lower", cmap="viridis"), ax=axes, label="cosine similarity")
    nearest = save_figure(figure, folder / f"{name}_nearest.png")
    figure, axes = line_figure(f"{name}: similarity with one position", "cosine similarity")
    for anchor in (a for a in _ANCHORS if a < len(similarity)):
        axes.plot(similarity[anchor], label=f"position {anchor}", linewidth=1)
    axes.set_xlabel("position")
    return [nearest, save_with_legend(figure, axes, folder / f"{name}_anchors.png")]


def draw_biases(model: PreTrainedModel, name: str, folder: Path) -> list[Path]:
    """Figure 2 of the paper: the bias by distance, thin for each head and thick for their mean."""
    distances = list(range(-_DISTANCES[-4], _DISTANCES[-4] + 1))
    biases = relative_biases(model, distances)
    figure, axes = line_figure(f"{name}: relative bias of the encoder", "bias of the attention score")
    for head in biases:
        axes.plot(distances, head, color="grey", alpha=0.4, linewidth=0.8)
    axes.plot(distances, biases.mean(dim=0), label="mean of the heads")
    axes.set_xlabel("position of the key less that of the query")
    return [save_with_legend(figure, axes, folder / f"{name}_bias.png")]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people; of biases the mean over heads."""
    if "first" in rows[0]:
        header = ["distance", "two positions", "position 0 and that one"]
        return markdown_table(header, [[r["distance"], f"{r['others']:.3f}", f"{r['first']:.3f}"] for r in rows])
    cells = [[r["distance"], *(f"{sum(r[side]) / len(r[side]):.2f}" for side in ("behind", "ahead"))] for r in rows]
    return markdown_table(["distance", "mean bias, behind", "mean bias, ahead"], cells)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="Hub id or folder of an encoder, or an encoder-decoder such as T5")
    parser.add_argument("--name", help="of result and pictures (default: the model's)")
    add_output_argument(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    model = AutoModel.from_pretrained(arguments.model)
    vectors, has_biases = position_vectors(model), relative_biases(model, [0]) is not None
    if vectors is None and not has_biases:
        raise ValueError(f"{arguments.model} learns neither vectors of positions nor relative biases")
    arguments.model = model_label(arguments.model)
    arguments.name = name = arguments.name or arguments.model.rpartition("/")[2]
    similarity = None if vectors is None else normalize(vectors, dim=-1) @ normalize(vectors, dim=-1).T
    rows = bias_rows(model) if similarity is None else similarity_rows(similarity)
    path = save_and_report(__file__, arguments, rows, table(rows), name)
    drawn = (
        draw_biases(model, name, path.parent) if similarity is None else draw_similarity(similarity, name, path.parent)
    )
    print("drew " + ", ".join(map(str, drawn)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
