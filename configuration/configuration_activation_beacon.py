# SPDX-License-Identifier: Apache-2.0
"""Configuration of Activation Beacon."""

from collections.abc import Iterator
from typing import Any

from .configuration_compressor import CompressorConfig, max_positions
from .field_checks import check_left_out, int_between, one_of
from .layer_shape import LayerShape, linear_flops

BEACON_MAPS = ("query", "key", "value", "output")
# A beacon's keys and values are made by the base and read by it, window by window, before the text is known.
_LEFT_OUT = ("encoder_lora", "chunk_size", "bos_before_slots", "slots_after_ids")


class ActivationBeaconConfig(CompressorConfig):
    r"""
    Activation Beacon: a beacon token behind every r tokens, whose keys and values stay when its window goes. A last
    group of fewer than r tokens has a beacon, too; the authors' code keeps the tokens of the whole unfinished window.

    Args:
        compression_ratios: The authors'; in next-token training one of them is drawn for each window.
        window_size: Context tokens that are read at once (the authors' for Llama-3; 2,048 for Llama-2, 64 in
            ComprExIT's copy). At a ratio that does not divide it, the largest multiple of the ratio below, and at
            least one group.
        num_sinks: First tokens of a context whose own keys and values stay, too, in front of the beacons' (the
            authors' for Llama-3: 1), at most half of the window. They are slots beside those of the ratio.
        beacon_maps: Which maps of attention beacons have for themselves, of `"query"`, `"key"`, `"value"` and
            `"output"`. In the last layer beacons keep the base's query and output: nothing reads what they would
            change.
        kwargs: fields of [`CompressorConfig`], without chunks, an adapter of the encoder or another layout.
    """

    model_type = "activation_beacon_compressor"
    objectives = (*CompressorConfig.objectives, "windows")
    carrier = "key_values"
    has_chunks = False
    # A context is read window by window, see `max_context_tokens`.
    encoder_limit = None
    # A text goes on where its windows end.
    opens_context = True
    card_fields = {
        **CompressorConfig.card_fields,
        "window_size": "Tokens of a window",
        "num_sinks": "Sinks",
        "beacon_maps": "Maps of the beacons' own",
    }

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (2, 4, 8, 16, 32),
        window_size: int = 1024,
        num_sinks: int = 0,
        beacon_maps: list[str] | tuple[str, ...] = ("query", "key", "value"),
        position_layout: str = "default",
        bos_before_text: bool = False,
        **kwargs: Any,
    ):
        self.window_size = int_between("window_size", window_size, 1)
        self.num_sinks = int_between("num_sinks", num_sinks, 0, (self.window_size + 1) // 2)
        is_list = isinstance(beacon_maps, (list, tuple)) and len(beacon_maps) > 0
        if not is_list or not all(name in BEACON_MAPS for name in beacon_maps):
            raise ValueError(f"`beacon_maps` must be one or more of {list(BEACON_MAPS)}, got {beacon_maps!r}")
        self.beacon_maps = [name for name in BEACON_MAPS if name in beacon_maps]
        super().__init__(
            compression_ratios=compression_ratios,
            # Places are numbered anew in front of every window: no other layout knows them.
            position_layout=one_of("position_layout", position_layout, ("default",)),
            bos_before_text=bos_before_text,
            **kwargs,
        )
        check_left_out(
            self, _LEFT_OUT, "the base reads a context window by window, and beacons alone have maps of their own"
        )

    def window_tokens(self, ratio: int) -> int:
        """Tokens of a full window: whole groups of r."""
        return ratio * max(1, self.window_size // ratio)

    def chunk_slots(self, num_tokens: int, ratio: int) -> int:
        """Beacons of all windows, which are whole groups but for the last one, and sinks."""
        return super().chunk_slots(num_tokens, ratio) + min(self.num_sinks, num_tokens)

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the base over every window and its beacons, behind those of earlier ones, and of the maps."""
        config, total = self.get_encoder_config(), 0
        shape, layers = LayerShape.from_config(config), config.num_hidden_layers
        heads = {"key": shape.num_key_value_heads, "value": shape.num_key_value_heads}
        for past, read, beacons in self._windows(num_tokens, ratio):
            total += layers * shape.flops(read + beacons, past)
            for name in self.beacon_maps:
                width = shape.head_dim * heads.get(name, shape.num_heads)
                # The last layer has none of the other two.
                total += (layers if name in heads else layers - 1) * linear_flops(beacons, shape.hidden_size, width)
        return total

    def _windows(self, num_tokens: int, ratio: int, first: int = 0) -> Iterator[tuple[int, int, int]]:
        """Of each window from token `first` on the slots in front of it, its tokens and its beacons."""
        size = self.window_tokens(ratio)
        for start in range(first, num_tokens, size):
            read = min(size, num_tokens - start)
            yield self.chunk_slots(start, ratio), read, -(-read // ratio)

    def _fits(self, num_tokens: int, ratio: int) -> bool:
        """Return whether every window has its positions behind the slots of earlier ones."""
        limit, size = max_positions(self.get_encoder_config()), self.window_tokens(ratio)
        # The last full window reaches further than those before it, and perhaps than a short one behind it.
        last_two = max(0, -(-num_tokens // size) - 2) * size
        return limit is None or all(sum(window) <= limit for window in self._windows(num_tokens, ratio, last_two))
