# SPDX-License-Identifier: Apache-2.0
"""Configuration of SnapKV."""

from typing import Any

from .configuration_key_value_selection import KeyValueSelectionConfig
from .field_checks import int_between, one_of
from .layer_shape import LayerShape


class SnapKVConfig(KeyValueSelectionConfig):
    """SnapKV ([SnapKV: LLM Knows What You are Looking for Before Generation](https://arxiv.org/abs/2404.14469)): the
    keys and values that the last tokens attend to, in each layer and head.

    Args:
        window_size: L_obs, last tokens whose attention votes, and which stay themselves. The paper needs more places
            than that: in a memory of `window_size` places or fewer, the window is half of them.
        kernel_size: Neighbouring places whose votes are pooled; an odd number.
        pooling: `"average"` (section 4.2) or `"max"`, as in the authors' settings for LongBench, with `window_size=32`
            and `kernel_size=7`.
        question_placement: `"decoder"`: the context's last tokens vote, and the memory answers any question.
            `"encoder"`: the question's last tokens vote, as in the paper; all places are the context's, and the memory
            answers this question alone.
        kwargs: fields of [`KeyValueSelectionConfig`] and [`CompressorConfig`].
    """

    model_type = "snap_kv_compressor"
    card_fields = {
        **KeyValueSelectionConfig.card_fields,
        "window_size": "Observation window",
        "kernel_size": "Places of a pool",
        "question_placement": "A question is read by",
    }

    def __init__(
        self,
        window_size: int = 64,
        kernel_size: int = 5,
        pooling: str = "average",
        question_placement: str = "decoder",
        **kwargs: Any,
    ):
        self.window_size = int_between("window_size", window_size, 1)
        self.kernel_size = int_between("kernel_size", kernel_size, 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"`kernel_size` must be odd, so that a pool has a middle, got {kernel_size}")
        self.pooling = one_of("pooling", pooling, ("average", "max"))
        self.question_placement = one_of("question_placement", question_placement, ("decoder", "encoder"))
        super().__init__(**kwargs)

    @property
    def compresses_questions(self) -> bool:  # type: ignore[override]
        """Return whether a context is compressed together with its question, so that a memory answers no other one."""
        return self.question_placement == "encoder"

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """The encoder's, which reads the last tokens behind the cache of the others; without a question's."""
        last = min(self.window_size, num_tokens)
        shape, num_past = LayerShape.from_config(self.decoder_config), num_tokens - last
        return self.num_hidden_layers * (shape.flops(num_past) + shape.flops(last, num_past))
