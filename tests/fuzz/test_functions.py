# SPDX-License-Identifier: Apache-2.0
"""Public functions with one odd argument: a right result, or `ValueError` or `TypeError` with the argument's name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from budget import fuzz
from calls import assert_refused
from hypothesis import strategies as st

import context_compressors as package

NAN, INF = float("nan"), float("inf")
ODD = (None, True, False, -1, 0, 1, 3, 100, 2.5, NAN, INF, "", "default", "text", b"x", (), [], [2], {}, object())
ODD_TENSORS = (torch.zeros(2, 5, 3), torch.ones(2, 5), torch.ones(2, 5).long(), torch.tensor([2, 3]), torch.tensor(2))
odd = st.sampled_from([*ODD, *ODD_TENSORS])
Allowed = Callable[[Any], bool]


def is_int(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def one_of(*values: Any) -> Allowed:
    return lambda value: isinstance(value, (str, type(None))) and value in values


def count(value: Any) -> bool:
    return is_int(value)


def positive(value: Any) -> bool:
    return is_int(value, 1)


def shaped(*dtypes: torch.dtype, dim: int) -> Allowed:
    shapes = {1: (2,), 2: (2, 5), 3: (2, 5, 3)}
    return lambda value: isinstance(value, torch.Tensor) and value.dtype in dtypes and value.shape == shapes[dim]


def small_config(name: str) -> Any:
    return getattr(package, name)(decoder_config={"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2})


floats, masks = (torch.float32,), (torch.int64, torch.float32)
layout = one_of("default", "uniform", "enhanced")
# Of each function: good arguments, and of some of them which other values are as good.
FUNCTIONS: dict[str, tuple[dict[str, Any], dict[str, Allowed]]] = {
    "mean_pool": (
        {"hidden_states": torch.ones(2, 5, 3), "attention_mask": torch.ones(2, 5).long(), "ratio": 2},
        {
            "hidden_states": shaped(*floats, dim=3),
            "attention_mask": shaped(torch.int64, dim=2),
            "ratio": lambda value: positive(value) or shaped(torch.int64, dim=1)(value),
        },
    ),
    "encoder_position_ids": (
        {"num_tokens": 5, "num_memory_tokens": 2, "layout": "uniform", "chunk_start": 0},
        {"num_tokens": positive, "num_memory_tokens": count, "layout": layout, "chunk_start": count},
    ),
    "decoder_position_ids": (
        {
            "chunk_lengths": [2],
            "memory_counts": [1],
            "num_text_tokens": 3,
            "layout": "uniform",
            "carrier": "embeddings",
            "task": "continuation",
        },
        {
            "chunk_lengths": lambda value: value == [2],
            "memory_counts": lambda value: value == [2],
            "num_text_tokens": count,
            "layout": layout,
            "carrier": one_of(),
            "task": one_of(),
        },
    ),
    "generate_document": (
        {"seed": 1, "num_tokens": 64, "kind": "ledger", "split": "test", "facts_per_record": 2},
        {
            "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
            "num_tokens": lambda value: is_int(value, 32),
            "kind": one_of(None),
            "split": one_of(),
            "facts_per_record": lambda value: value is None or positive(value),
        },
    ),
    "chamfer": (
        {
            "query_vectors": torch.ones(2, 5, 3),
            "query_mask": torch.ones(2, 5),
            "document_vectors": torch.ones(2, 5, 3),
            "document_mask": torch.ones(2, 5),
        },
        {
            "query_vectors": shaped(*floats, dim=3),
            "query_mask": shaped(*masks, dim=2),
            "document_vectors": shaped(*floats, dim=3),
            "document_mask": shaped(*masks, dim=2),
        },
    ),
    "layer_flops": (
        {
            "length": 5,
            "hidden_size": 8,
            "head_dim": 4,
            "num_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
        },
        {
            "length": count,
            **dict.fromkeys(
                ("hidden_size", "head_dim", "num_heads", "num_key_value_heads", "intermediate_size"), positive
            ),
        },
    ),
    "compression_flops": (
        {"config": small_config("GMSAConfig"), "num_context_tokens": 20, "ratio": 4},
        {"num_context_tokens": count, "ratio": positive},
    ),
    "generation_flops": (
        {
            "config": small_config("GMSAConfig").decoder_config,
            "num_slots": 2,
            "question_length": 3,
            "answer_length": 2,
        },
        {"num_slots": count, "question_length": count, "answer_length": positive},
    ),
}


def test_every_public_function_on_tensors_and_numbers_is_fuzzed():
    """The others take models, memories, data and files."""
    public = {name for name in package.__all__ if name.islower() and not name.startswith("_")}
    others = {"evaluate_model", "pretrained_base", "from_base", "add_task_tokens", "write_card"}
    others |= {"mixed_memory", "model_card", "retrieval_card"}
    assert public - others == FUNCTIONS.keys()


@dataclass(frozen=True)
class OddCall:
    function: str
    argument: str
    value: Any


@st.composite
def odd_calls(draw: Any) -> OddCall:
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    return OddCall(name, draw(st.sampled_from(sorted(FUNCTIONS[name][1]))), draw(odd))


@fuzz("odd arguments of functions", call=odd_calls())
def test_odd_arguments(call):
    good, allowed = FUNCTIONS[call.function]
    arguments = {**good, call.argument: call.value}
    function = getattr(package, call.function)
    if allowed[call.argument](call.value):
        assert function(**arguments) is not None
    else:
        assert_refused(lambda: function(**arguments), call.argument)
