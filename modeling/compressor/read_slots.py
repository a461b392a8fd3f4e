# SPDX-License-Identifier: Apache-2.0
"""Keys and values of slots that the decoder has read, kept for further questions about the same memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ...configuration.layer_shape import layer_kinds
from ..checkpoint.fingerprints import weight_versions
from ..memory.carriers import map_carrier
from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import position_bytes, sliding_window
from ..parts.base_pass import CACHE, run_backbone
from ..parts.lora import DECODER
from .validation import TokenRows

_MAX_BYTES = 2**29


class ReadSlots:
    """Memories of embeddings as the decoder's keys and values, the least recently used of which go first.

    Args:
        model: a compressor with its LM head.
        max_bytes: most bytes of keys and values that are kept; 0 for none.
    """

    def __init__(self, model: Any, max_bytes: int = _MAX_BYTES):
        self.backbone, self.max_bytes, self.nbytes = model.base_model, max_bytes, 0
        self._rows: dict[bytes, CompressedContext] = {}
        self._versions: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def read(
        self, memory: CompressedContext, texts: Sequence[list[int]]
    ) -> tuple[CompressedContext, Sequence[list[int]]]:
        """Return a memory of keys and values, and the texts without the tokens in front of the slots, which it holds.

        Both come back unchanged where there is nothing to gain, or too much to keep.
        """
        config = self.backbone.config
        if memory.embeddings is None or config.is_encoder_decoder or not memory.model_id:
            return memory, texts
        # What stands in front of the slots must be the same in all texts.
        openings = {tuple(text[: self.backbone.num_in_front(torch.tensor([text]))]) for text in texts}
        first = openings.pop()
        size = memory.batch_size * (len(first) + memory.attention_mask.shape[1])
        if (
            size * position_bytes(config.decoder_config, memory.dtype) > self.max_bytes
            or sliding_window(config.decoder_config) is not None
            or "linear_attention" in layer_kinds(config.decoder_config)
            or self.backbone.num_pads_in_front(memory)
            or openings
            or any(len(text) == len(first) for text in texts)
        ):
            return memory, texts
        names = [_row_digest(memory.rows(row), first) for row in range(memory.batch_size)]
        with self._lock:
            versions = weight_versions(self.backbone)
            if versions != self._versions:
                self._rows, self._versions, self.nbytes = {}, versions, 0
            # Those in use become the last to go.
            rows = {name: self._rows[name] for name in names if name in self._rows}
            self._rows = {name: row for name, row in self._rows.items() if name not in rows} | rows
        if missing := [row for row, name in enumerate(names) if name not in rows]:
            read = slots_as_key_values(self.backbone, memory.rows(missing), first)
            alone = map(read.rows, range(len(missing)))
            # Copies: what is cut out of a batch would keep all of it.
            copies = [replace(row, check=False, **map_carrier(row, torch.clone)) for row in alone]
            new = dict(zip((names[row] for row in missing), copies, strict=True))
            self._keep(new, versions)
            rows |= new
        return memory.stack([rows[name] for name in names]), [text[len(first) :] for text in texts]

    def _keep(self, rows: dict[bytes, CompressedContext], versions: tuple[Any, ...]) -> None:
        with self._lock:
            # Another thread may have met other weights meanwhile, or the same memories.
            rows = {name: row for name, row in rows.items() if name not in self._rows}
            if versions != self._versions:
                return
            self._rows |= rows
            self.nbytes += sum(row.nbytes for row in rows.values())
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._rows.pop(next(iter(self._rows))).nbytes


@torch.no_grad()
def slots_as_key_values(backbone: Any, memory: CompressedContext, first: Sequence[int]) -> CompressedContext:
    """Return a memory of embeddings as the decoder's keys and values, behind the token ids `first`; no gradient
    flows."""
    ids = torch.tensor([list(first)] * memory.batch_size, dtype=torch.long, device=memory.device)
    text = TokenRows("input_ids", ids, torch.ones_like(ids), lengths=[len(first)] * len(ids))
    width, cache = len(first) + memory.attention_mask.shape[1], DynamicCache()
    # All of this text stands in front of the slots, whatever its offset behind them.
    inputs, _ = backbone.first_inputs(text, None, memory, memory.num_slots, False, width)
    with backbone._adapter(backbone.language_model, DECODER):
        run_backbone(backbone.language_model, use_cache=True, **{CACHE: cache}, **inputs)
    return replace(
        memory,
        check=False,
        embeddings=None,
        key_values=tuple((layer.keys, layer.values) for layer in cache.layers),
        attention_mask=inputs["attention_mask"],
        position_ids=inputs["position_ids"],
        num_context_tokens=memory.num_context_tokens + len(first),
    )


def _row_digest(row: CompressedContext, first: Sequence[int]) -> bytes:
    """Return a digest of the values and places of a row's slots."""
    digest = hashlib.sha256(f"{row.model_id}{row.position_layout}{list(first)}".encode())
    tensors: list[Any] = [row.embeddings, row.position_ids, row.num_context_tokens]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.digest()
