# SPDX-License-Identifier: Apache-2.0
"""Configuration of ComprExIT."""

from typing import Any

from .configuration_compressor import CompressorConfig
from .field_checks import int_between, one_of
from .layer_shape import linear_flops, perceptron_flops

GATE, LAST_LAYER = "gate", "last_layer"


class ComprExITConfig(CompressorConfig):
    """Explicit information transmission over the frozen hidden states of a language model ("Context Compression via
    Explicit Information Transmission").

    Where the paper's equations and its authors' code differ, the defaults are the code's, and `literal_equations` the
    paper's. The ablations are values of this configuration: without coordinated allocation (Table 3):
    `slot_aggregation="window_attention"`; without layer aggregation: `token_anchors="last_layer"`; one layer of the
    base, pooled (Figure 8): `token_anchors=8` with `slot_aggregation="mean"` or `"window_attention"`; senders that all
    weigh the same: `uniform_sender_share=1.0`.

    Args:
        compression_ratios: Section 4.1. With several, a window has a receiver for every r tokens.
        bos_before_slots: The decoder reads BOS, slots, question.
        token_anchors: `"gate"` (equations 4 to 7), `"last_layer"`, the base's last hidden state, or the state of one
            layer by its number, 0 for the embeddings.
        gate_size: Width that queries and layers are compared in (Table 7).
        gate_temperature: Temperature of equation 6.
        slot_aggregation: `"transport"` (equations 8 to 12); `"window_attention"`, the mean of r neighbours attends to
            them, behind one LayerNorm; `"mean"`, their mean.
        window_size: Tokens that one transmission plan covers, T in section 3.2.2; rounded down to whole slots.
        metric_size: Width that senders and receivers are compared in (Table 7), likewise of the windowed attention.
        transport_epsilon: Strength of the entropy term in equation 11, in units of the cost.
        transport_iterations: Sinkhorn iterations (Table 7).
        uniform_sender_share: Share of the senders' mass that all real tokens of a window have alike, 0 to 1; the rest
            is learned. Defaults to 0.05, or 0 with `literal_equations`.
        shuffled_receivers: Whether the receivers of a window, and with them its slots, stand in a fixed mixed-up
            order.
        literal_equations: The equations as printed: layers 1 to L without the embeddings (4), scores that the width
            does not scale (5), maps without bias (5, 7, 9, 10, 12) or LayerNorm (9, 10, 12), no uniform share (10),
            slots that the receivers' mass does not divide (12). The map W_l of equation 5 is one for all layers.
        kwargs: fields of [`CompressorConfig`].
    """

    model_type = "comprexit_compressor"
    # Windows that the encoder reads at a time in inference, on an accelerator more, up to 8,192 tokens in all: the
    # states of all layers are held for no more than these.
    segment_windows = 4
    # The authors' code.
    plain_prompts = (
        "comprexit",
        "Question: {question}Answer the question directly with a short span only, no explanation. Answer:",
    )
    card_fields = {
        **CompressorConfig.card_fields,
        "token_anchors": "Token anchors",
        "slot_aggregation": "Anchors become slots by",
        "window_size": "Longest window in tokens",
        "transport_epsilon": "Entropic strength",
        "transport_iterations": "Sinkhorn iterations",
        "literal_equations": "Equations as printed",
    }

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4,),
        bos_before_slots: bool = True,
        token_anchors: str | int = GATE,
        gate_size: int = 256,
        gate_temperature: float = 0.7,
        slot_aggregation: str = "transport",
        window_size: int = 128,
        metric_size: int = 256,
        transport_epsilon: float = 0.1,
        transport_iterations: int = 30,
        uniform_sender_share: float | None = None,
        shuffled_receivers: bool = False,
        literal_equations: bool = False,
        **kwargs: Any,
    ):
        self.gate_size = int_between("gate_size", gate_size, 1)
        self.gate_temperature = gate_temperature
        self.slot_aggregation = one_of("slot_aggregation", slot_aggregation, ("transport", "window_attention", "mean"))
        self.window_size = int_between("window_size", window_size, 1)
        self.metric_size = int_between("metric_size", metric_size, 1)
        self.transport_epsilon = transport_epsilon
        self.transport_iterations = int_between("transport_iterations", transport_iterations, 1)
        self.shuffled_receivers = shuffled_receivers
        self.literal_equations = literal_equations
        usual_share = 0.0 if literal_equations else 0.05
        self.uniform_sender_share = usual_share if uniform_sender_share is None else uniform_sender_share
        super().__init__(compression_ratios=compression_ratios, bos_before_slots=bos_before_slots, **kwargs)
        num_layers = self.get_encoder_config().num_hidden_layers
        if token_anchors not in (GATE, LAST_LAYER, *range(num_layers + 1)):
            raise ValueError(
                f"`token_anchors` must be 'gate', 'last_layer' or 0 to {num_layers}, got {token_anchors!r}"
            )
        self.token_anchors = token_anchors

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder, the gate, the transport or what stands in its place, and the perceptron."""
        encoder, slots = self.get_encoder_config(), self.chunk_slots(num_tokens, ratio)
        width, total = encoder.hidden_size, super().chunk_flops(num_tokens, ratio)
        if self.token_anchors == GATE:
            states, gate = encoder.num_hidden_layers + (not self.literal_equations), self.gate_size
            # The mixture, the scores and the weighted sum go over the states of all layers.
            total += 3 * linear_flops(num_tokens, states, width) + linear_flops(num_tokens, gate, states)
            total += 2 * linear_flops(num_tokens, width, gate) + linear_flops(num_tokens, width, width)
        if self.slot_aggregation == "transport":
            total += self._transport_flops(width, num_tokens, ratio)
        else:
            total += linear_flops(num_tokens, 1, width)
            if self.slot_aggregation != "mean":
                total += linear_flops(num_tokens + slots, width, self.metric_size)
                total += linear_flops(num_tokens, self.metric_size, 1)
        return total + perceptron_flops(slots, width, self.hidden_size)

    def _transport_flops(self, width: int, num_tokens: int, ratio: int) -> int:
        slots = self.chunk_slots(num_tokens, ratio)
        window = ratio * max(1, self.window_size // ratio)
        windows, rest = divmod(num_tokens, window)
        # A token meets the slots of its own window only.
        pairs = windows * window * (window // ratio) + rest * -(-rest // ratio)
        plan = linear_flops(num_tokens + slots, width, self.metric_size) + linear_flops(pairs, self.metric_size, 1)
        if self.uniform_sender_share < 1:
            plan += linear_flops(num_tokens, width, 1)
        # An iteration multiplies the kernel by one scaling for the rows, and by one for the columns.
        iterations = 2 * linear_flops(pairs, 1, self.transport_iterations)
        return plan + iterations + linear_flops(pairs, 1, width) + linear_flops(slots, width, width)
