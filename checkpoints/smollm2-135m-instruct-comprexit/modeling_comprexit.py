# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import initialization as init
from transformers.cache_utils import DynamicCache

from .compressor_base import (
    CACHE, Chunks, CompressorForCausalLM, CompressorModel, ENCODER, Float32LayerNorm, Float32Linear, perceptron,
    run_backbone, sinkhorn, weights_of
)
from .configuration_comprexit import ComprExITConfig, GATE, LAST_LAYER


# modeling/modeling_comprexit.py

# Tokens whose states across the layers the gate sums at a time: on a CPU as many as its cache holds.
_GATE_TOKENS, _GATE_TOKENS_CPU = 4096, 128
# Tokens of all rows that an encoder on an accelerator reads at a time: shorter passes cost launches and masks.
_SEGMENT_TOKENS = 8192
Reduction = Callable[[Sequence[Tensor]], Tensor]


class LayerMap(nn.Module):
    """W_l of equation 5 on the query's side: no map of states, so that nobody puts an adapter on it."""

    def __init__(self, hidden_size: int, size: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries `(..., hidden_size)` of states, and the bias's share of every score, `(..., 1)`."""
        bias = query.new_zeros(query.shape[-1]) if self.bias is None else self.bias.float()
        return query @ self.weight.float(), query @ bias[:, None]


class LayerGate(nn.Module):
    """Depth-wise transmission: a token's `num_states` states, embeddings first, become its anchor (section 3.2.1)."""

    def __init__(self, hidden_size: int, num_states: int, config: ComprExITConfig):
        super().__init__()
        self.first_state = int(config.literal_equations)
        num_states -= self.first_state
        has_bias = not config.literal_equations
        self.layer_prior = nn.Parameter(torch.zeros(num_states))
        self.context = Float32Linear(hidden_size, config.gate_size, bias=has_bias)
        self.layer = LayerMap(hidden_size, config.gate_size, bias=has_bias)
        self.layer_embeddings = nn.Parameter(torch.zeros(num_states, config.gate_size))
        self.anchor = Float32Linear(hidden_size, hidden_size, bias=has_bias)
        width_scale = 1 if config.literal_equations else config.gate_size**0.5
        self.temperature = config.gate_temperature * width_scale

    def forward(self, hidden_states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return anchors `(batch_size, num_tokens, hidden_size)` and weights `(batch_size, num_tokens,
        num_states)`."""
        # Literally l = 1 ... L; the embeddings stand in front as layer 0.
        layers = [states.flatten(0, 1) for states in hidden_states[self.first_state :]]
        # In blocks of tokens, since a copy of all states in float32 costs more time and memory than the sums.
        block_size = _GATE_TOKENS_CPU if layers[0].device.type == "cpu" else _GATE_TOKENS
        blocks = zip(*(states.split(block_size) for states in layers), strict=True)
        anchors, weights = zip(*(self._gate(torch.stack(block, dim=1).float()) for block in blocks), strict=True)
        shape = hidden_states[0].shape[:2]
        return torch.cat(anchors).unflatten(0, shape), torch.cat(weights).unflatten(0, shape)

    def _gate(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` for states `(num_tokens, num_states, hidden_size)` in float32."""
        with torch.autocast(states.device.type, enabled=False):
            # Equation 4: h~_t = sum_l w_l h_t^(l), the w_l a softmax.
            mixture = self.layer_prior.float().softmax(dim=0) @ states
            # Equation 5: s_{t,l} = <W_c h~_t, W_l h_t^(l) + e_l>, with W_l on the other side, where it is multiplied
            # once for all layers: <W_l^T W_c h~_t, h_t^(l)> + <W_c h~_t, e_l>.
            query = self.context(mixture)
            layer_query, from_bias = self.layer(query)
            scores = (states @ layer_query[..., None])[..., 0] + query @ self.layer_embeddings.float().T + from_bias
            # Equation 6: alpha_{t,l} = softmax over l of s_{t,l} / tau.
            weights = (scores / self.temperature).softmax(dim=-1)
            # Equation 7: sum_l alpha_{t,l} W_a h_t^(l), with W_a behind the sum: the alphas sum up to 1.
            anchors = self.anchor((weights[..., None, :] @ states)[..., 0, :])
        return anchors, weights


class WindowAggregation(nn.Module):
    """Makes one slot of every r tokens; a subclass says which tokens of a window a slot is made of.

    Windows start at a row's first token and are whole multiples of r, the last one of a row short, so that
    ceil(n / r) slots come of n tokens, and neither padding nor other rows bear on them.
    """

    def window_length(self, ratio: int) -> int:
        """Tokens of a window, a multiple of `ratio`; here one slot alone."""
        return ratio

    def weights(self, tokens: Tensor, mask: Tensor, ratio: int) -> Tensor:
        """Return each token's weight in each slot of its window, `(batch_size, num_windows, num_tokens, num_slots)`;
        zero at pads.

        Args:
            tokens: `(batch_size, num_windows, num_tokens, hidden_size)`, float32, zero at pads.
            mask: `(batch_size, num_windows, num_tokens)`, bool.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its slots are made of")

    def aggregate(self, weights: Tensor, tokens: Tensor) -> Tensor:
        """Return slots `(batch_size, num_windows, num_slots, hidden_size)` from the weights."""
        return weights.transpose(-1, -2) @ tokens

    def forward(self, vectors: Tensor, mask: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """Return slots `(batch_size, num_slots, hidden_size)`, left-aligned, and their mask; at padding slots stands
        anything.

        Args:
            vectors: `(batch_size, num_tokens, hidden_size)`, left-aligned.
            mask: `(batch_size, num_tokens)`, bool.
            ratio: tokens per slot.
        """
        tokens, token_mask = self.windows(vectors, mask, ratio)
        slots = self.aggregate(self.weights(tokens, token_mask, ratio), tokens)
        slot_mask = _slot_mask(mask, ratio)
        return slots.flatten(1, 2)[:, : slot_mask.shape[1]], slot_mask

    def windows(self, vectors: Tensor, mask: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """Cut rows into windows: tokens `(batch_size, num_windows, window_length, hidden_size)` and their mask."""
        num_tokens = vectors.shape[1]
        # A window is never longer than the longest row, up to a whole slot.
        length = min(self.window_length(ratio), -(-num_tokens // ratio) * ratio)
        num_windows = -(-num_tokens // length)
        pad = num_windows * length - num_tokens
        # Filled rather than multiplied: what stands at a pad may be anything.
        tokens = vectors.float().masked_fill(~mask[:, :, None], 0)
        tokens = nn.functional.pad(tokens, (0, 0, 0, pad)).unflatten(1, (num_windows, length))
        return tokens, nn.functional.pad(mask, (0, pad)).unflatten(1, (num_windows, length))


class Transmission(WindowAggregation):
    """Width-wise transmission: anchors become slots by a plan that is optimal for a whole window (section 3.2.2)."""

    def __init__(self, hidden_size: int, config: ComprExITConfig):
        super().__init__()
        self.is_literal, self.is_shuffled = config.literal_equations, config.shuffled_receivers
        self.window_size, self.uniform_share = config.window_size, config.uniform_sender_share
        self.epsilon, self.num_iterations = config.transport_epsilon, config.transport_iterations

        def norm() -> nn.Module:
            return nn.Identity() if self.is_literal else Float32LayerNorm(hidden_size)

        def linear(width: int) -> nn.Linear:
            return Float32Linear(hidden_size, width, bias=not self.is_literal)

        self.metric = nn.Sequential(norm(), linear(config.metric_size))
        self.sender_score = nn.Sequential(norm(), linear(1)) if self.uniform_share < 1 else None
        self.value_norm, self.value = norm(), linear(hidden_size)

    def window_length(self, ratio: int) -> int:
        return ratio * max(1, self.window_size // ratio)

    def weights(self, tokens: Tensor, mask: Tensor, ratio: int) -> Tensor:
        # Equation 8: r_k = 1 / |F_k| sum_{t in F_k} h~_t, the fields F_k blocks of r tokens.
        counts = mask.unflatten(2, (-1, ratio)).sum(dim=3)
        receivers = tokens.unflatten(2, (-1, ratio)).sum(dim=3) / counts.clamp(min=1)[..., None]
        if self.is_shuffled:
            receivers = receivers.take_along_dim(_mixed_order(counts > 0)[..., None], dim=2)
        # Equation 9: U_{t,k} = cos(W_u h~_t, W_u r_k).
        senders = functional.normalize(self.metric(tokens), dim=-1)
        receivers = functional.normalize(self.metric(receivers), dim=-1)
        utility = senders @ receivers.transpose(-1, -2)
        # Equation 10, and rho_k = 1 / K for the receivers that have a token.
        sender_mass = self.sender_mass(tokens, mask)
        receiver_mass = (counts > 0) / (counts > 0).sum(dim=-1, keepdim=True).clamp(min=1)
        # Equation 11: the plan of least cost C = 1 - U between these masses.
        is_path = mask[..., None] & (counts > 0)[..., None, :]
        cost = (1 - utility).masked_fill(~is_path, 0)
        plan = sinkhorn(cost, sender_mass, receiver_mass, self.epsilon, self.num_iterations, max_cost=2)
        if self.is_literal:
            return plan
        # Divided by the receiver's mass, a slot is a weighted mean.
        return plan * (counts > 0).sum(dim=-1)[..., None, None]

    def sender_mass(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the information capacity of each token, `(batch_size, num_windows, num_tokens)`, in sum 1 for a
        window."""
        uniform = mask / mask.sum(dim=-1, keepdim=True).clamp(min=1)
        if self.sender_score is None:
            return uniform
        # Equation 10: rho_t = softmax of W_rho h~_t over the window.
        learned = masked_softmax(self.sender_score(tokens)[..., 0], mask)
        return (1 - self.uniform_share) * learned + self.uniform_share * uniform

    def aggregate(self, weights: Tensor, tokens: Tensor) -> Tensor:
        # Equation 12: z_k = sum_t Pi_{t,k} W_g h~_t, with W_g behind the sum, where there are r times fewer vectors;
        # its bias stays itself, for the weights of a slot sum up to 1.
        return self.value(weights.transpose(-1, -2) @ self.value_norm(tokens))


def _mixed_order(is_real: Tensor) -> Tensor:
    """Return a fixed, well-mixed order of each window's real receivers, `(batch_size, num_windows, num_receivers)`:
    multiples of the golden ratio, modulo 1, in order of size."""
    places = torch.arange(1, is_real.shape[-1] + 1, device=is_real.device)
    keys = (places * 2654435761) % 2**32
    return keys.masked_fill(~is_real, 2**32).argsort(dim=-1, stable=True)


# --- ablations ---


class WindowMean(WindowAggregation):
    """The mean of r neighbouring tokens (ComprExIT, Figure 8)."""

    def weights(self, tokens: Tensor, mask: Tensor, ratio: int) -> Tensor:
        weights = mask / mask.sum(dim=-1, keepdim=True).clamp(min=1)
        return weights.to(tokens.dtype)[..., None]


class WindowAttention(WindowAggregation):
    """Aggregation in which the mean of r neighbouring tokens attends to them (ComprExIT, Table 3, "w/o Coordinated
    Allocation").

    As in the authors' code one LayerNorm serves both sides: the query is a map of the normed tokens' mean, the keys
    are maps of the normed tokens; a slot is the weighted mean of the tokens themselves.
    """

    def __init__(self, hidden_size: int, attention_size: int):
        super().__init__()
        self.norm = Float32LayerNorm(hidden_size)
        self.query = Float32Linear(hidden_size, attention_size)
        self.key = Float32Linear(hidden_size, attention_size)
        self.scale = attention_size**-0.5

    def weights(self, tokens: Tensor, mask: Tensor, ratio: int) -> Tensor:
        normed = self.norm(tokens)
        mean = (normed * mask[..., None]).sum(dim=2) / mask.sum(dim=2).clamp(min=1)[..., None]
        scores = self.key(normed) @ self.query(mean)[..., None] * self.scale
        return masked_softmax(scores[..., 0], mask)[..., None]


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension where `mask` is true, zero elsewhere, and zero throughout where nothing is."""
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) * mask


def _slot_mask(mask: Tensor, ratio: int) -> Tensor:
    counts = (mask.sum(dim=1) + ratio - 1) // ratio
    num_slots = -(-mask.shape[1] // ratio)
    return (torch.arange(num_slots, device=mask.device) < counts[:, None]).long()


class ComprExITModel(CompressorModel):
    r"""
    Makes slots of a frozen language model's hidden states: a gate across its layers, and transport across its tokens.

    Like every transformers model that has returned hidden states, it cannot be pickled after `compress`: the library's
    hooks are local functions, and stay on the layers for other threads. Use `save_pretrained`.
    """

    config_class = ComprExITConfig
    method_parts = ("layer_gate", "transmission", "slot_mlp")
    slot_origin = "plan"

    def __init__(self, config: ComprExITConfig):
        super().__init__(config)
        encoder = config.get_encoder_config()
        width = encoder.hidden_size
        self.layer_gate = None
        if config.token_anchors == GATE:
            self.layer_gate = LayerGate(width, encoder.num_hidden_layers + 1, config)
        if config.slot_aggregation == "transport":
            self.transmission: WindowAggregation = Transmission(width, config)
        elif config.slot_aggregation == "window_attention":
            self.transmission = WindowAttention(width, config.metric_size)
        else:
            self.transmission = WindowMean()
        self.slot_mlp = nn.Sequential(*perceptron(width, config.hidden_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LayerGate):
            init.zeros_(module.layer_prior)
            init.normal_(module.layer_embeddings, std=0.02)
        elif isinstance(module, Float32LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, (Float32Linear, LayerMap)):
            bias_limit = 0.0
            if module in self.slot_mlp:
                init.xavier_uniform_(module.weight, gain=0.4)
            elif isinstance(self.transmission, Transmission) and module in (self.transmission.sender_score or ()):
                init.zeros_(module.weight)
            else:
                # torch's default start values, as in the authors' code; unlike N(0, 0.02), they keep the size of
                # vectors whatever their width.
                init.kaiming_uniform_(module.weight, a=5**0.5)
                bias_limit = module.weight.shape[1] ** -0.5
            if module.bias is not None:
                init.uniform_(module.bias, -bias_limit, bias_limit)
        else:
            super()._init_weights(module)

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Tensor]:
        # Section 3.2.1: token anchors.
        anchors = self.reduce_layers(self.anchors, chunks)
        return [self._slots(anchors, chunks.attention_mask.bool(), ratio) for ratio in ratios]

    def anchors(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Return token anchors of the states behind all layers, `(batch_size, num_tokens, hidden_size)`."""
        if self.layer_gate is not None:
            return self.layer_gate(hidden_states)[0]
        layer = self.config.token_anchors
        return hidden_states[-1 if layer == LAST_LAYER else layer].float()

    def reduce_layers(self, reduce: Reduction, chunks: Chunks) -> Tensor:
        """Run the encoder and reduce each token's states across the layers, `(num_chunks, num_tokens, width)`.

        In inference it reads a segment of tokens at a time behind a key/value cache, and the states of a segment are
        gone before the next one is read; it must be causal. Gradients need all tokens at once. `reduce` takes the
        embeddings and the states behind each layer (the last one after the final norm), each `(num_chunks,
        num_segment_tokens, hidden_size)`.
        """
        num_tokens = segment_length = chunks.input_ids.shape[1]
        if not (torch.is_grad_enabled() or self.training):
            num_windows, window_size = self.config.segment_windows, self.config.window_size
            if chunks.input_ids.device.type != "cpu":
                num_windows = max(num_windows, _SEGMENT_TOKENS // (len(chunks.input_ids) * window_size))
            segment_length = num_windows * window_size
        cache = DynamicCache(config=self.encoder_backbone.config) if num_tokens > segment_length else None
        reduced = []
        for start in range(0, num_tokens, segment_length):
            segment = slice(start, min(start + segment_length, num_tokens))
            reduced.append(reduce(self._layer_states(chunks, segment, cache)))
        return torch.cat(reduced, dim=1)

    def _layer_states(self, chunks: Chunks, segment: slice, cache: DynamicCache | None) -> Sequence[Tensor]:
        backbone = self.encoder_backbone
        # Under gradient checkpointing even frozen embeddings require gradients, which nobody would use.
        trains = any(weight.requires_grad for weight in weights_of(backbone))
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains), self._adapter(backbone, ENCODER):
            return run_backbone(
                backbone,
                input_ids=chunks.input_ids[:, segment],
                attention_mask=chunks.attention_mask[:, : segment.stop],
                position_ids=chunks.position_ids[:, segment],
                is_full=chunks.is_full,
                is_right_padded=True,
                output_hidden_states=True,
                use_cache=cache is not None,
                **{CACHE: cache},
            ).hidden_states

    def _slots(self, anchors: Tensor, mask: Tensor, ratio: int | Tensor) -> Tensor:
        if isinstance(ratio, Tensor):
            # Rows of one ratio together.
            rows = [(ratio == value).nonzero()[:, 0] for value in ratio.unique()]
            parts = [self._slots(anchors[index], mask[index], int(ratio[index[0]])) for index in rows]
            return pad_sequence([row for part in parts for row in part], True)[torch.cat(rows).argsort()]
        with torch.autocast(anchors.device.type, enabled=False):
            # Sections 3.2.2 and 3.2.3: compression slots.
            slots = self.transmission(anchors, mask, ratio)[0]
            # Equation 13: c_k = MLP(z_k).
            return self.slot_mlp(slots).to(self.dtype)


class ComprExITForCausalLM(CompressorForCausalLM):
    """[`ComprExITModel`] with the decoder's LM head."""

    model_class = ComprExITModel
