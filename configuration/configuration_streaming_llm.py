# SPDX-License-Identifier: Apache-2.0
"""Configuration of StreamingLLM."""

from typing import Any

from .configuration_key_value_selection import KeyValueSelectionConfig
from .field_checks import int_between


class StreamingLLMConfig(KeyValueSelectionConfig):
    """StreamingLLM ([Efficient Streaming Language Models with Attention Sinks](https://arxiv.org/abs/2309.17453)): the
    keys and values of a context's first tokens, the attention sinks, and of its latest ones.

    Args:
        num_sinks: First tokens that stay (section 3.2); of a memory of no more places all but the latest token's.
        position_layout: `"default"`: positions within the cache, as in section 3.2; `"enhanced"`: those of the
            context.
        kwargs: fields of [`KeyValueSelectionConfig`] and [`CompressorConfig`].
    """

    model_type = "streaming_llm_compressor"
    card_fields = {**KeyValueSelectionConfig.card_fields, "num_sinks": "Attention sinks"}

    def __init__(self, num_sinks: int = 4, position_layout: str = "default", **kwargs: Any):
        self.num_sinks = int_between("num_sinks", num_sinks, 0)
        super().__init__(position_layout=position_layout, **kwargs)
