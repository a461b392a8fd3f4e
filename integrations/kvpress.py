# SPDX-License-Identifier: Apache-2.0
"""The scorers of ranked key/values as a press of NVIDIA's kvpress, which has an environment of its own.

kvpress 0.5.5 needs transformers below 5.3, this package 5.17 or later: install this package there with `--no-deps`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

try:
    from kvpress import BasePress
except ImportError as error:
    raise ImportError("the press needs kvpress, in an environment of its own: pip install kvpress") from error

logger = logging.getLogger(__name__)


@dataclass
class RankedKeyValuesPress(BasePress):
    """Keeps the key/value pairs of highest score of all layers and heads together, by the method's equations (2), (3).

    Args:
        checkpoint: folder of a checkpoint of ranked key/values, such as `context-compressors fit` writes. With an
            adapter of its own, the model must be the decoder that `publish export-decoder` writes.
        compression_ratio: share of the pairs that are dropped.
        num_opening_tokens: first tokens of every context, which stay; as many as the checkpoint's `opening_ids`.
    """

    checkpoint: str = ""
    compression_ratio: float = 0.0
    num_opening_tokens: int | None = None
    _scorers: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)
    _scores: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    def post_init_from_model(self, model: Any) -> None:
        """Read the scorers, once."""
        if self._scorers:
            return
        config = json.loads((Path(self.checkpoint) / "config.json").read_text(encoding="utf-8"))
        if config["encoder_lora"] is not None:
            logger.warning("the checkpoint has an adapter: the model must be the decoder that export-decoder writes")
        if self.num_opening_tokens is None:
            self.num_opening_tokens = len(config["opening_ids"])
        with safe_open(Path(self.checkpoint) / "model.safetensors", "pt") as weights:
            names = [f"model.scorers.{layer}" for layer in range(model.config.num_hidden_layers)]
            self._scorers = [
                tuple(weights.get_tensor(f"{name}.{part}").float().to(model.device) for part in ("weight", "bias"))
                for name in names
            ]

    def compress(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """Score a layer's pairs; all of them stay until every layer has its scores."""
        weight, bias = self._scorers[module.layer_idx]
        scores = torch.nn.functional.linear(hidden_states.float(), weight, bias).transpose(1, 2)
        scores[..., : self.num_opening_tokens] = math.inf
        self._scores[module] = scores
        return keys, values

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Score the context that is read meanwhile, and hide the pairs of lowest score from what is read later."""
        self._scores.clear()
        with super().__call__(model):
            yield
        if not self._scores or not self.compression_ratio:
            return
        scores = torch.stack(list(self._scores.values()), dim=1)  # (batch_size, num_layers, num_heads, num_tokens)
        num_kept = math.ceil(scores[0].numel() * (1 - self.compression_ratio))
        ranks = scores.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        is_dropped = (ranks >= num_kept).view_as(scores)
        for layer, module in enumerate(self._scores):
            module.masked_key_indices = is_dropped[:, layer].nonzero(as_tuple=True)
        self._scores.clear()
