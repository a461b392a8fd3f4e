# SPDX-License-Identifier: Apache-2.0
"""What slots are made of, how alike they are, and how many dimensions they fill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...reporting.tables import markdown_table
from .attention import has_memory_tokens, memory_token_shares
from .information_flow import has_information_flow, information_flow
from .pictures import plot_allocation, plot_layer_weights, plot_singular_values, plot_slot_correlation

ALLOCATION, SLOTS = "allocation", "slots"
# Pairs of slots with a higher correlation count as copies of each other.
HIGH_CORRELATION = 0.5


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
    """Singular values of slots, float64, descending.

    Args:
        vectors: `(num_slots, width)`.

    Source: ComprExIT, Figure 4.
    """
    return torch.linalg.svdvals(vectors.double())


def effective_rank(values: Tensor) -> float:
    """The exponential of the entropy of singular values over their sum.

    Args:
        values: `(num_values,)`, zero or more.

    Raises:
        ValueError: no value above zero.

    Source: ComprExIT, Figure 4.
    """
    total = float(values.sum())
    if not total > 0:
        raise ValueError(f"an effective rank needs a singular value above 0, got values that sum up to {total}")
    return float(torch.special.entr(values.double() / total).sum().exp())


def slot_measures(vectors: Tensor) -> dict[str, float]:
    """How alike slots are, in numbers.

    Args:
        vectors: `(num_slots, width)`.

    Returns:
        "effective_rank"; "mean_correlation" over the pairs of slots; "highly_correlated_pairs", the share of pairs
        whose correlation is above 0.5.

    Raises:
        ValueError: fewer than two slots.
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
    """Compress a document and look into its slots.

    Where a method has a transmission plan (ComprExIT), the plan tells what a slot is made of; where it has memory
    tokens (ICAE and the like), their attention to the context does, in the last layer and averaged over the heads.

    Args:
        model: a compressor.
        tokenizer: the tokenizer of its documents, which tells the tokens' texts.
        ids: the document's; of one chunk at most where the method has such weights.
        ratio: context tokens per slot; the checkpoint's default when `None`.

    Raises:
        ValueError: an empty document, a longer one than the method can show, or a ratio that the checkpoint lacks.

    Source: ComprExIT, section 4.4.
    """
    if not ids:
        raise ValueError("the document has no tokens")
    input_ids = torch.tensor([list(ids)], device=model.device)
    backbone = model.base_model
    allocation = layer_weights = None
    first_layer = 0
    # Refused here, a document of several chunks has cost nothing yet.
    if has_information_flow(backbone):
        flow = information_flow(backbone, input_ids, ratio=ratio)
        allocation = flow.allocation[0].float().cpu()
        if flow.layer_weights is not None:
            layer_weights = flow.layer_weights[0].float().cpu()
            first_layer = model.config.get_encoder_config().num_hidden_layers + 1 - layer_weights.shape[1]
    elif has_memory_tokens(backbone):
        allocation = memory_token_shares(backbone, input_ids, ratio).cpu()
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
    """Means over documents: tokens, slots, and the measures of whatever has a row for each slot; keys and values of
    several heads have none.

    Args:
        analyses: one for each document, of one model.

    Raises:
        ValueError: a document with fewer than two slots.
    """
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


def draw(analyses: Mapping[str, SlotAnalysis], folder: str | Path) -> list[Path]:
    """Draw one document as several models see it: allocation, layers, correlation between slots, singular values.

    Args:
        analyses: name of the model -> its analysis of the document.
        folder: where the pictures go; made when it is not there.

    Returns:
        The files, PNG; there is none of what no model has.
    """
    folder = Path(folder)
    tokens = {name: analysis.tokens for name, analysis in analyses.items()}
    paths = []
    if allocations := {name: a.allocation for name, a in analyses.items() if a.allocation is not None}:
        paths.append(plot_allocation(allocations, folder / "allocation.png", tokens))
    if gates := {name: a.layer_weights for name, a in analyses.items() if a.layer_weights is not None}:
        first_layers = {name: a.first_layer for name, a in analyses.items()}
        paths.append(plot_layer_weights(gates, folder / "layer_weights.png", tokens, first_layers))
    for kind in (ALLOCATION, SLOTS):
        vectors = {name: a.vectors[kind] for name, a in analyses.items() if kind in a.vectors}
        if not vectors:
            continue
        correlations = {name: slot_correlation(rows) for name, rows in vectors.items()}
        paths.append(plot_slot_correlation(correlations, folder / f"correlation_of_{kind}.png"))
        spectra = {name: singular_values(rows) for name, rows in vectors.items()}
        ranks = {name: effective_rank(values) for name, values in spectra.items()}
        paths.append(plot_singular_values(spectra, ranks, folder / f"singular_values_of_{kind}.png"))
    return paths


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: each model's measures, of what its slots are made of and of the slots themselves; "-" without any."""
    header = ["model", "measured on", "documents", "tokens", "slots", "effective rank", "mean correlation"]
    rows = [
        [
            name,
            kind,
            found["num_documents"],
            f"{found['num_tokens']:.1f}",
            f"{found['num_slots']:.1f}",
            *(
                [
                    f"{measures['effective_rank']:.2f}",
                    f"{measures['mean_correlation']:.3f}",
                    f"{100 * measures['highly_correlated_pairs']:.1f} %",
                ]
                if measures
                else "---"
            ),
        ]
        for name, found in summaries.items()
        for kind, measures in (found["measures"] or {"-": {}}).items()
    ]
    return markdown_table([*header, f"pairs above {HIGH_CORRELATION}"], rows)
