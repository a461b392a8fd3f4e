# SPDX-License-Identifier: Apache-2.0
"""Fitting the scorers of ranked key/values to contexts of the training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from tqdm import tqdm


def check_fits_scorers(trainer: Any) -> None:
    """Raise `ValueError` when what trains has no scorers, or reads no contexts that they could be fitted to."""
    if trainer.args.context_mode != "compressed":
        raise ValueError(f"fit_scorers goes with context_mode 'compressed', not with {trainer.args.context_mode!r}")
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model.base_model, "fit_scorers"):
        raise ValueError(
            f"fit_scorers goes with the method ranked_key_values, not with {type(model).__name__}: leave it out"
        )


def fit_scorers(trainer: Any, num_contexts: int) -> None:
    """Fit them by least squares as `RankedKeyValuesModel.fit_scorers` does; every process makes the same.

    The documents, their tokens and the time count as those of the training.

    Args:
        trainer: of a compressor with scorers.
        num_contexts: of its examples, taken evenly; all of them where it has fewer.
    """
    model = trainer.accelerator.unwrap_model(trainer.model).base_model
    dataset, collate = trainer.train_dataset, trainer.data_collator
    count = min(num_contexts, len(dataset))
    indices = [index * len(dataset) // count for index in range(count)]

    def batches() -> Iterator[list[Tensor]]:
        for index in tqdm(indices, desc="fit scorers", unit="context"):
            batch = collate([dataset[index]])
            trainer.documents.trained.update(batch.get("documents", ()))
            if trainer.is_world_process_zero():
                trainer.run_counts.add(num_context_tokens=int(batch["context_attention_mask"].sum()))
            names = ("context_input_ids", "context_attention_mask", "context_chunk_lengths")
            yield [batch[name].to(model.device) for name in names if name in batch]

    begin = time.perf_counter()
    model.fit_scorers(batches())
    trainer.run_counts.earlier_seconds += time.perf_counter() - begin
