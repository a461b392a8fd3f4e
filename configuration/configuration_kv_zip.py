# SPDX-License-Identifier: Apache-2.0
"""Configuration of KVzip."""

from typing import Any

from .configuration_key_value_selection import KeyValueSelectionConfig
from .field_checks import int_between, one_of
from .layer_shape import LayerShape


class KVZipConfig(KeyValueSelectionConfig):
    """KVzip ([KVzip: Query-Agnostic KV Cache Compression with Context
    Reconstruction](https://arxiv.org/abs/2505.23416)): the keys and values that the base attends to when it reads the
    context a second time, as if it repeated it.

    Args:
        head_budgets: `"shared"`: all heads of all layers share the places of a memory, so that heads which look far
            back keep more than others (the paper's non-uniform budgets). `"uniform"`: each head keeps `ceil(n /
            ratio)`.
        repeat_size: Tokens that are read again in one pass, the paper's chunk size m. Each pass starts with the last
            few tokens of the one before it.
        kwargs: fields of [`KeyValueSelectionConfig`] and [`CompressorConfig`]. `position_layout="default"`, which
            numbers the keys of each head anew, needs `head_budgets="uniform"`.
    """

    model_type = "kv_zip_compressor"
    card_fields = {
        **KeyValueSelectionConfig.card_fields,
        "head_budgets": "Places are given to heads",
        "repeat_size": "Tokens read again at once",
    }

    def __init__(self, head_budgets: str = "shared", repeat_size: int = 2048, **kwargs: Any):
        self.head_budgets = one_of("head_budgets", head_budgets, ("shared", "uniform"))
        self.repeat_size = int_between("repeat_size", repeat_size, 16)
        super().__init__(**kwargs)
        if self.position_layout == "default" and self.head_budgets == "shared":
            raise ValueError(f"`position_layout='default'` needs `head_budgets='uniform'`, got {self.head_budgets!r}")

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """The encoder's: the context, and each piece of it once more behind the context."""
        shape = LayerShape.from_config(self.decoder_config)
        pieces = [min(self.repeat_size, num_tokens - start) for start in range(0, num_tokens, self.repeat_size)]
        again = sum(shape.flops(piece, num_tokens) for piece in pieces)
        return self.num_hidden_layers * (shape.flops(num_tokens) + again)
