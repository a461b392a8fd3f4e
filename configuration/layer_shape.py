# SPDX-License-Identifier: Apache-2.0
"""Sizes of language models, and the floating-point operations that follow from them (GMSA, Appendix G).

As in the appendix, attention counts every pair of tokens whatever its mask, the softmax counts, and norms, rotations,
embeddings and the LM head do not; adapters count as merged into the weights. Everything is for one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Families whose feed-forward part has no gate.
_UNGATED = ("bert", "roberta", "xlm-roberta", "mpnet", "gpt_neox", "opt")


def key_value_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return layers, key/value heads and head dimension of a language model."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim


def layer_kinds(config: PreTrainedConfig) -> Sequence[str]:
    """Return the kind of each layer, such as "sliding_attention"; none where the family has one kind."""
    return getattr(config, "layer_types", None) or ()


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a transformer layer that its operations depend on.

    Args:
        hidden_size: D of Appendix G.
        head_dim: d, size of an attention head.
        num_heads: h^q, query heads.
        num_key_value_heads: h^k, key/value heads.
        intermediate_size: I, width of the feed-forward part.
        is_gated: whether the feed-forward part has a gate, as equation 10 takes it; the first T5 and BERT have none.
    """

    hidden_size: int
    head_dim: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    is_gated: bool = True

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> LayerShape:
        """The layer of a language model's configuration."""
        if config.model_type == "t5":
            heads = config.num_heads
            return cls(config.d_model, config.d_kv, heads, heads, config.d_ff, config.is_gated_act)
        if config.model_type == "gpt2":
            width, heads = config.hidden_size, config.num_attention_heads
            return cls(width, width // heads, heads, heads, config.n_inner or 4 * width, is_gated=False)
        names = ("hidden_size", "num_attention_heads", "intermediate_size")
        if missing := [name for name in names if getattr(config, name, None) is None]:
            raise ValueError(f"a configuration of type {config.model_type!r} has no {', '.join(missing)}")
        _, key_value_heads, head_dim = key_value_shape(config)
        sizes = (config.hidden_size, head_dim, config.num_attention_heads, key_value_heads, config.intermediate_size)
        return cls(*sizes, config.model_type not in _UNGATED)

    def parts(self, length: int, num_past: int = 0) -> dict[str, int]:
        """Operations of the layer by part.

        Returns:
            `qkv`, `qk`, `softmax`, `av`, `out` (equation 9), `up` and `down` (equation 10).
        """
        hidden, d, heads = self.hidden_size, self.head_dim, self.num_heads
        num_keys = num_past + length
        return {
            "qkv": 2 * length * hidden * d * heads + 2 * 2 * length * hidden * d * self.num_key_value_heads,
            "qk": 2 * heads * length * num_keys * d,
            "softmax": heads * length * num_keys,
            "av": 2 * heads * length * num_keys * d,
            "out": 2 * length * d * heads * hidden,
            "up": 2 * length * hidden * (2 if self.is_gated else 1) * self.intermediate_size,
            "down": 2 * length * hidden * self.intermediate_size,
        }

    def flops(self, length: int, num_past: int = 0) -> int:
        """Operations of the whole layer; arguments as `parts`."""
        return sum(self.parts(length, num_past).values())

    def cross_attention_flops(self, length: int, num_states: int, new_states: bool) -> int:
        """Operations of cross-attention by equation 9, with the keys and values of an encoder's output."""
        projection = 2 * self.hidden_size * self.head_dim * self.num_heads
        keys_and_values = 2 * num_states * projection if new_states else 0
        scores = self.num_heads * length * num_states * (2 * self.head_dim + 1 + 2 * self.head_dim)
        return keys_and_values + 2 * length * projection + scores


def stack_flops(config: PreTrainedConfig, length: int, num_layers: int | None = None) -> int:
    """Operations of a stack of layers over `length` tokens at once: F^Encoder and F^LSA of equation 11."""
    return LayerShape.from_config(config).flops(length) * (
        config.num_hidden_layers if num_layers is None else num_layers
    )


def linear_flops(num_vectors: int, in_features: int, out_features: int) -> int:
    """Operations of a linear map of so many vectors."""
    return 2 * num_vectors * in_features * out_features


def perceptron_flops(num_vectors: int, in_features: int, hidden_size: int) -> int:
    """Operations of a perceptron of two layers, the second one from `hidden_size` to itself."""
    return linear_flops(num_vectors, in_features, hidden_size) + linear_flops(num_vectors, hidden_size, hidden_size)
