# SPDX-License-Identifier: Apache-2.0
"""The table of all methods, and the cases that tests try them in: a new method joins by one entry in `METHODS`."""

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from parameters import disturb
from tiny_bases import BACKBONES, BASES, FAR_APART, TASK_TOKENS, base_config
from transformers import AutoModelForCausalLM

import context_compressors
from context_compressors.configuration.methods import METHODS as REGISTER

SMALL_LORA = {"rank": 4, "alpha": 8.0}
MEMORY_LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Method:
    """A method under test.

    Args:
        name: its name in the register.
        easy: fields of its plainest useful setting; two ratios at least, the first of them 2.
        hard: further settings, by name; each replaces some of the easy fields.
        bidirectional: whether the encoder of the easy setting sees what comes later.
        memory_tokens: whether memory tokens stand behind the context.
        sliding_window: of the bases that have one, where the method cannot do with the tests' short one.
        own_encoder: whether the encoder always has weights of its own.
        ranks: whether scorers choose among the context's own keys and values: with one layout, the context's places,
            without task tokens, and while they train, with a second reading.
        recurrent: whether a chunk is read behind the slots of those before it.
        windows: whether a context is read whole, window by window: without chunks, other layouts, or an adapter.
        passages: whether each window of r tokens is encoded by itself: a pass for each ratio, positions start anew.
    """

    name: str
    easy: dict[str, Any]
    hard: dict[str, dict[str, Any]] = field(default_factory=dict)
    bidirectional: bool = True
    memory_tokens: bool = False
    sliding_window: int | None = None
    own_encoder: bool = False
    ranks: bool = False
    recurrent: bool = False
    windows: bool = False
    passages: bool = False
    idle: tuple[str, ...] = ()

    @property
    def config_class(self) -> type:
        return getattr(context_compressors, REGISTER[self.name][0])

    @property
    def model_class(self) -> type:
        return getattr(context_compressors, REGISTER[self.name][1])

    @property
    def causal_lm_class(self) -> type:
        return getattr(context_compressors, REGISTER[self.name][2])


METHODS = [
    Method(
        name="mean_pooling",
        easy={"compression_ratios": (2, 3, 8), "encoder_lora": SMALL_LORA, "decoder_lora": SMALL_LORA},
        hard={
            "chunks": {"chunk_size": 5},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "bos_first_enhanced": {"bos_before_slots": True, "position_layout": "enhanced", "chunk_size": 4},
            "task_tokens": {"task_token_ids": TASK_TOKENS},
            "residual": {"embedding_residual": True},
            "no_linear": {"linear_after_pooling": False},
            "embeddings": {"encoder_type": "embeddings", "encoder_lora": None},
            "causal": {"encoder_attention": "causal"},
            "fixed_encoder": {"encoder_lora": None},
            "fixed_decoder": {"decoder_lora": None},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
            "own_encoder": {"encoder_config": {}},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
    ),
    Method(
        name="compression_tokens",
        easy={"compression_ratios": (2, 3, 8), "encoder_lora": SMALL_LORA, "decoder_lora": SMALL_LORA},
        hard={
            "bidirectional": {"token_attention": "bidirectional"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "bidirectional_enhanced": {"token_attention": "bidirectional", "position_layout": "enhanced"},
            # COCOM.
            "shared_adapter": {
                **{"linear_after_encoder": False, "shared_adapter": True, "chunk_markers": True},
                **{"chunk_size": 5, "slot_markers": {"before": 1, "after": 1}},
            },
            "fixed_encoder": {"encoder_lora": None},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        memory_tokens=True,
    ),
    Method(
        name="icae",
        easy={"compression_ratios": (2, 3, 8), "chunk_size": 64, "encoder_lora": MEMORY_LORA},
        hard={
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced"},
            "fixed_enhanced": {"chunk_size": 6, "memory_tokens": "fixed", "position_layout": "enhanced"},
            "no_task_tokens": {"task_token_ids": {}, "position_layout": "enhanced"},
            # PISCO.
            "separator": {
                "chunk_size": 6,
                "memory_tokens": "fixed",
                **{"task_token_ids": {}, "chunk_markers": True},
                "slot_markers": {"after": 1},
                "encoder_lora": SMALL_LORA,
                "decoder_lora": SMALL_LORA,
            },
        },
        bidirectional=False,
        memory_tokens=True,
    ),
    Method(
        name="autocompressor",
        easy={
            "compression_ratios": (2, 3, 8),
            "chunk_size": 64,
            "memory_tokens": "by_ratio",
            "encoder_lora": SMALL_LORA,
        },
        hard={
            "segments": {"chunk_size": 5, "task_token_ids": TASK_TOKENS},
            "fixed": {"chunk_size": 6, "memory_tokens": "fixed", "bos_before_slots": True},
            "latest_summaries": {"chunk_size": 5, "accumulate_summaries": False},
            "two_adapters": {"shared_adapter": False, "decoder_lora": MEMORY_LORA},
            "reader": {"training_stage": "reader", "decoder_lora": MEMORY_LORA},
        },
        bidirectional=False,
        memory_tokens=True,
        recurrent=True,
    ),
    Method(
        name="five_hundred_x",
        easy={"compression_ratios": (2, 3, 8), "chunk_size": 64, "encoder_lora": MEMORY_LORA},
        hard={
            "uniform": {"chunk_size": 6, "position_layout": "uniform"},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced"},
            "fixed": {"chunk_size": 6, "memory_tokens": "fixed", "position_layout": "enhanced"},
            "residual": {"chunk_size": 6, "position_layout": "enhanced", "embedding_residual": True},
            "own_encoder": {"encoder_config": {}},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
        },
        bidirectional=False,
        memory_tokens=True,
        sliding_window=128,
    ),
    Method(
        name="voco",
        easy={"compression_ratios": (2, 3, 8), "encoder_lora": SMALL_LORA},
        hard={"enhanced": {"chunk_size": 6, "position_layout": "enhanced"}, "no_adapter": {"encoder_lora": None}},
        bidirectional=False,
        memory_tokens=True,
        sliding_window=128,
    ),
    Method(
        name="ranked_key_values",
        easy={"compression_ratios": (2, 3, 8), "encoder_lora": SMALL_LORA},
        hard={"chunks": {"chunk_size": 5}, "pieces": {"repeat_size": 16}, "no_adapter": {"encoder_lora": None}},
        bidirectional=False,
        sliding_window=128,
        ranks=True,
    ),
    Method(
        name="activation_beacon",
        # Windows of 6, 6 and 8 tokens.
        easy={"compression_ratios": (2, 3, 8), "window_size": 6},
        hard={
            "sinks": {"num_sinks": 2},
            "value_and_output": {"beacon_maps": ["value", "output"], "decoder_lora": SMALL_LORA},
            "task_tokens": {"task_token_ids": TASK_TOKENS},
        },
        bidirectional=False,
        sliding_window=128,
        recurrent=True,
        windows=True,
    ),
    Method(
        name="comprexit",
        easy={"compression_ratios": (2, 3, 8), "gate_size": 8, "metric_size": 8, "window_size": 4},
        hard={
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "wide_window": {"window_size": 12},
            "segments": {"window_size": 5, "segment_windows": 1, "gate_temperature": 4.0, "transport_epsilon": 1.0},
            "bos_behind_slots": {"bos_before_slots": False},
            "last_layer": {"token_anchors": "last_layer"},
            "layer_mean": {"token_anchors": 1, "slot_aggregation": "mean"},
            "layer_attention": {"token_anchors": 0, "slot_aggregation": "window_attention"},
            "literal": {"literal_equations": True, "gate_temperature": 4.0},
            "fixed_encoder": {"decoder_lora": SMALL_LORA},
            "encoder_lora": {"encoder_lora": SMALL_LORA},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        idle=("layer_gate.layer.bias", "sender_score.1.bias"),
    ),
    Method(
        name="gmsa",
        easy={"compression_ratios": (2, 3, 8), "encoder_layers": 1, "encoder_lora": SMALL_LORA},
        hard={
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "bos_first": {"bos_before_slots": True},
            "keft": {"training_stage": "keft"},
            "two_blocks": {"lsa_layers": 2, "encoder_layers": 2},
            "no_alignment": {"lsa_layers": 0},
            "fixed_encoder": {"encoder_lora": None},
            "decoder_lora": {"decoder_lora": SMALL_LORA},
            "tied": {"decoder_config": {"tie_word_embeddings": True}},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        own_encoder=True,
    ),
    Method(
        name="tcp_autoencoder",
        easy={"compression_ratios": (2, 3, 8), "encoder_layers": 1, "encoder_lora": SMALL_LORA, "appended_tokens": 16},
        hard={
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": TASK_TOKENS},
            "keft": {"training_stage": "keft"},
            "standard_normal": {"memory_start": "standard_normal"},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        memory_tokens=True,
        own_encoder=True,
    ),
    Method(
        name="pcc",
        easy={"compression_ratios": (2, 3, 8), "chunk_size": 64, "encoder_lora": SMALL_LORA, "slot_markers": None},
        hard={
            "markers": {"slot_markers": {"before": 1, "after": 1}, "chunk_size": 6, "memory_tokens": "fixed"},
            "uniform": {"chunk_size": 6, "position_layout": "uniform", "bos_before_slots": False},
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "task_token_ids": {}},
            "lite": {
                "encoder_config": {"hidden_size": 48, "num_attention_heads": 4},
                "encoder_lora": None,
                "train_encoder": True,
            },
        },
        bidirectional=False,
        memory_tokens=True,
    ),
    Method(
        name="xrag",
        easy={"compression_ratios": (2, 3, 8), "passage_start_ids": (3,), "passage_end_ids": (4, 3)},
        hard={
            "enhanced": {"chunk_size": 6, "position_layout": "enhanced", "passage_readout": "mean"},
            "lora": {"passage_end_ids": (), "normalize_embeddings": True, "encoder_lora": SMALL_LORA},
            "own_encoder": {"encoder_config": {}},
            "wide_encoder": {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4}},
        },
        bidirectional=False,
        passages=True,
    ),
]

# Nothing of these trains: they are in the shared tests that follow no gradient, see test_key_value_selection.py.
TRAINING_FREE = [
    Method(
        name="streaming_llm",
        easy={"compression_ratios": (2, 3, 8), "num_sinks": 2},
        hard={"places_of_the_context": {"position_layout": "enhanced"}},
        bidirectional=False,
        sliding_window=128,
    ),
    Method(
        name="snap_kv",
        easy={"compression_ratios": (2, 3, 8), "window_size": 3, "kernel_size": 3},
        hard={"places_of_the_memory": {"position_layout": "default"}},
        bidirectional=False,
        sliding_window=128,
    ),
    Method(
        name="kv_zip",
        easy={"compression_ratios": (2, 3, 8)},
        hard={
            "same_places_for_all_heads": {"head_budgets": "uniform", "position_layout": "default"},
            "many_pieces": {"repeat_size": 16},
        },
        bidirectional=False,
        sliding_window=128,
    ),
]


@functools.cache
def _cached_model(case: "Case") -> Any:
    return case.build()


@dataclass(frozen=True)
class Case:
    """One method in one setting on one base."""

    method: Method
    variant: str = "easy"
    architecture: str = "llama"
    attention: str = "sdpa"

    def __hash__(self) -> int:
        return hash((self.method.name, self.variant, self.architecture, self.attention))

    def __str__(self) -> str:
        return f"{self.method.name}-{self.variant}-{self.architecture}-{self.attention}"

    @property
    def fields(self) -> dict[str, Any]:
        return {**self.method.easy, **self.method.hard.get(self.variant, {})}

    @property
    def model(self) -> Any:
        """A `ForCausalLM` in evaluation mode that other tests use, too: not to be changed."""
        return _cached_model(self)

    def config(self, **fields: Any) -> Any:
        fields = {**self.fields, **fields}
        window = {}
        if self.method.sliding_window and "sliding_window" in BASES.get(self.architecture, (None, ()))[1]:
            window = {"sliding_window": self.method.sliding_window}
        for name in ("decoder_config", "encoder_config"):
            if name == "decoder_config" or fields.get(name) is not None:
                fields[name] = base_config(self.architecture, **{**window, **fields.get(name, {})})
        return self.method.config_class(**fields)

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
        """A new `ForCausalLM` in evaluation mode, with nothing at a start value that could hide a mistake."""
        torch.manual_seed(seed)
        config = self.config(**fields)
        config._attn_implementation = self.attention
        model = disturb(self.method.causal_lm_class(config), 0.15)
        # As `from_pretrained(dtype=...)` gives it: what is frozen in that type, what trains in float32.
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        return model.eval()

    def is_quick(self, fixture: str, is_costly: bool = False) -> bool:
        """Say whether the inner loop has it: one method in several settings, the others as they come.

        Of tests that are costly or on bases or settings, it has one method of each memory form.
        """
        if self.method is METHODS[0] and self.variant in QUICK and self.architecture in ("llama", "gemma2"):
            return True
        is_on_methods = fixture == "method_case" and not is_costly
        return (is_on_methods or self.method.name in ON_EVERY_BASE) and self == Case(self.method)

    @property
    def all_of_its_method(self) -> list["Case"]:
        """The method on its bases, and in every hard setting."""
        return [case for case in CASES["case"] if case.method.name == self.method.name]

    def changes(self, fields: frozenset[str]) -> bool:
        """Say whether the variant sets one of these fields."""
        return not fields.isdisjoint(self.method.hard.get(self.variant, {}))

    def on(self, **changes: Any) -> "Case":
        return replace(self, **changes)


def plain_model(model: Any, attention: str | None = None) -> Any:
    """Return the base of a compressor as `transformers` has it, without adapters."""
    config, prefix = model.config, "model.language_model."
    base = AutoModelForCausalLM.from_config(
        copy.deepcopy(config.decoder_config), attn_implementation=attention or config._attn_implementation
    )
    weights = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    own = {n.replace(prefix, "model."): t for n, t in weights.items() if n.startswith(prefix) and "lora_" not in n}
    head = {} if config.tie_word_embeddings else {"lm_head.weight": weights["lm_head.weight"]}
    base.load_state_dict({**own, **head}, strict=not config.tie_word_embeddings)
    return base.eval()


# Of the first method's settings, those that have little in common.
QUICK = ("easy", "chunks", "bos_first_enhanced", "embeddings")
METHOD_CASES = [Case(method) for method in METHODS]
TRAINING_FREE_CASES = [
    case.on(**changes)
    for case in map(Case, TRAINING_FREE)
    for changes in (
        *({"variant": variant} for variant in ("easy", *case.method.hard)),
        {"architecture": "gemma2", "attention": "eager"},
    )
]
# What the base decides is the same in all methods of one memory form: one of each is tried on every base.
ON_EVERY_BASE = ("mean_pooling", "five_hundred_x")
BACKBONE_CASES = [
    case.on(architecture=architecture, attention=attention)
    for case in METHOD_CASES
    for architecture, attention in (BACKBONES if case.method.name in ON_EVERY_BASE else FAR_APART)
]
VARIANT_CASES = [case.on(variant=variant) for case in METHOD_CASES for variant in case.method.hard]
# Fields that move slots and text, and those that no stored weight depends on.
PLACE_FIELDS = frozenset(["chunk_size", "position_layout", "bos_before_slots", "memory_tokens", "task_token_ids"])
WEIGHTLESS_FIELDS = PLACE_FIELDS | {
    *("encoder_attention", "token_attention", "embedding_residual", "window_size", "segment_windows"),
    *("gate_temperature", "transport_epsilon", "shuffled_receivers", "uniform_sender_share", "literal_equations"),
}
WEIGHT_FIELDS = frozenset(name for case in VARIANT_CASES for name in case.method.hard[case.variant]) - (
    WEIGHTLESS_FIELDS - {"memory_tokens", "task_token_ids"}
)
# Weights are stored, and adapters put on, by one code path: these methods have every combination of them.
ADAPTED_ALL_WAYS = ("mean_pooling", "autocompressor", "gmsa")
WEIGHTS_CASES = METHOD_CASES + [case for case in VARIANT_CASES if case.changes(WEIGHT_FIELDS)]
CASES = {
    "method_case": METHOD_CASES,
    "form_case": [case for case in METHOD_CASES if case.method.name in ON_EVERY_BASE],
    "backbone_case": BACKBONE_CASES,
    # The enhanced layout moves most.
    "place_case": METHOD_CASES
    + [
        case
        for case in VARIANT_CASES
        if case.changes(PLACE_FIELDS) and (case.method.name in ON_EVERY_BASE or "enhanced" in case.variant)
    ]
    + TRAINING_FREE_CASES,
    "weights_case": WEIGHTS_CASES + TRAINING_FREE_CASES,
    "adapter_case": [c for c in WEIGHTS_CASES if c.variant == "easy" or c.method.name in ADAPTED_ALL_WAYS],
    "case": BACKBONE_CASES + VARIANT_CASES,
}
