# SPDX-License-Identifier: Apache-2.0
"""Memories saved, cut, repeated, converted and joined, and every method of one with odd arguments."""

import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from budget import fuzz
from calls import Padded, Subject, assert_refused, assert_row, contexts, padded, random_rows, ratios, seeds, subjects
from hypothesis import assume
from hypothesis import strategies as st

from context_compressors import CompressedContext
from context_compressors.modeling.memory.carriers import carrier_tensors
from context_compressors.modeling.memory.memory_quantization import QUANTIZATIONS, width_of


@dataclass(frozen=True)
class Documents:
    """Batches of contexts of one model, each with its ratios."""

    subject: Subject
    batches: list[Padded]
    ratio: Any
    by_row: list[int]
    rows: list[int]
    repeats: int

    def memories(self) -> list[Any]:
        return [self.subject.model.compress(each.ids, each.mask, self.ratio) for each in self.batches]


@st.composite
def documents(draw: Any) -> Documents:
    subject = draw(subjects)
    num_rows = draw(st.integers(1, 3))
    chunk_size = subject.model.config.chunk_size
    batches = [draw(contexts(num_rows)) for _ in range(draw(st.integers(1, 3)))]
    if chunk_size is not None and draw(st.booleans()):
        # Whole chunks, so that the documents can be read as one context, too.
        counts = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
        whole = random_rows([count * chunk_size for count in counts], draw(seeds))
        batches = [draw(padded(whole)), batches[0]]
    ratio, by_row = draw(ratios(subject, num_rows))
    rows = draw(st.lists(st.integers(-num_rows, num_rows - 1), min_size=1, max_size=4))
    return Documents(subject, batches, ratio, by_row, rows, draw(st.integers(1, 3)))


@torch.no_grad()
@fuzz("memories saved, cut, repeated and joined", call=documents())
def test_memories(call, tmp_path_factory):
    compress, memories = call.subject.model.compress, call.memories()
    alone = [
        [compress(row[None], ratio=ratio) for row, ratio in zip(batch.rows, call.by_row, strict=True)]
        for batch in call.batches
    ]
    num_rows = len(call.by_row)
    memory = memories[0]
    path = tmp_path_factory.mktemp("memories") / "memory.safetensors"
    memory.save(path)
    loaded = CompressedContext.load(path, model_id=call.subject.model.model_id)
    for same in (
        loaded,
        copy.deepcopy(memory),
        pickle.loads(pickle.dumps(memory)),
        memory.to(torch.float64).to("cpu"),
    ):
        for i in range(num_rows):
            assert_row(same.to(memory.dtype), i, alone[0][i])
    assert len(memory.rows(call.rows)) == len(call.rows)
    for place, i in enumerate(call.rows):
        assert_row(memory.rows(call.rows), place, alone[0][i])
        assert_row(memory[torch.tensor(call.rows)], place, alone[0][i])
        assert_row(memory[i], 0, alone[0][i])
    repeated = memory.repeat_interleave(call.repeats)
    assert len(repeated) == num_rows * call.repeats
    for i in range(len(repeated)):
        assert_row(repeated, i, alone[0][i // call.repeats])
    joined = CompressedContext.concatenate(memories)
    for i in range(num_rows):
        assert_row(joined, i, CompressedContext.concatenate([row[i] for row in alone]))
    assert joined.nbytes == sum(each.nbytes for each in memories)
    width = width_of(carrier_tensors(memory)[0])
    for form in QUANTIZATIONS if width % 8 == 0 else ("int8", "int4"):
        rounded = memory.quantize(form)
        rounded.save(path)
        for same in (CompressedContext.load(path), CompressedContext.stack([rounded[i] for i in range(num_rows)])):
            assert same.nbytes == sum(rounded[i].nbytes for i in range(num_rows))
            for i in range(num_rows):
                assert_row(same.dequantize(), i, memory[i].quantize(form).dequantize())
    assert str(len(joined)) in repr(joined)
    assert "\n" not in repr(joined)
    chunk_size = call.subject.model.config.chunk_size
    for i, ratio in enumerate(() if call.subject.is_recurrent else call.by_row):
        lengths = [len(batch.rows[i]) for batch in call.batches]
        if chunk_size is None or any(length % chunk_size for length in lengths[:-1]):
            continue
        whole = compress(torch.cat([batch.rows[i] for batch in call.batches])[None], ratio=ratio)
        assert_row(joined, i, whole)


# --- odd arguments ---

ODD = (None, True, -1, 0, 7, 2.5, float("nan"), "text", "float32", b"x", (), [], [0], [True], ["a"], {}, object())
ODD_TENSORS = ([0], [5], [[0]], [0.5], [True], [1 + 1j], 0, [])
odd = st.one_of(st.sampled_from(ODD), st.sampled_from(ODD_TENSORS).map(torch.tensor))
FIELDS = ("embeddings", "attention_mask", "position_ids", "num_context_tokens", "ratio", "model_id", "position_layout")


@dataclass(frozen=True)
class OddCall:
    subject: Subject
    method: str
    argument: Any


@st.composite
def odd_calls(draw: Any) -> OddCall:
    methods = ["rows", "repeat_interleave", "to", "concatenate", "save", "load", *FIELDS]
    return OddCall(draw(subjects), draw(st.sampled_from(methods)), draw(odd))


@torch.no_grad()
@fuzz("odd arguments of memories", call=odd_calls())
def test_odd_arguments(call, tmp_path_factory):
    """The result is right, or the argument is refused by its name."""
    memory = call.subject.model.compress(torch.full((2, 6), 9))
    value, is_int = call.argument, isinstance(call.argument, int) and not isinstance(call.argument, bool)
    if call.method == "rows":
        check_rows(memory, value)
    elif call.method == "repeat_interleave":
        if is_int and value >= 1:
            assert len(memory.repeat_interleave(value)) == 2 * value
        else:
            assert_refused(lambda: memory.repeat_interleave(value), "repeats")
    elif call.method == "to":
        if value is None:
            assert memory.to(dtype=value).dtype == memory.dtype
        elif value == "float32":
            assert memory.to(dtype=value).dtype == torch.float32
        else:
            assert_refused(lambda: memory.to(dtype=value), "dtype")
    elif call.method == "concatenate":
        for memories in (value, [memory, value], [value]):
            assert_refused(lambda memories=memories: CompressedContext.concatenate(memories), "concatenate")
    elif call.method in ("save", "load"):
        folder = tmp_path_factory.mktemp("odd")
        assume(not isinstance(value, (str, bytes)))
        other = memory.save if call.method == "save" else CompressedContext.load
        assert_refused(lambda: other(value), "path", "PathLike")
        assert_refused(lambda: other(folder), str(folder))
    else:
        check_field(memory, call.method, value)


def check_rows(memory: Any, index: Any) -> None:
    places = index.tolist() if isinstance(index, torch.Tensor) else index
    places = places if isinstance(places, (list, tuple)) else [places]
    is_float = isinstance(index, torch.Tensor) and index.is_floating_point()
    if not is_float and all(
        isinstance(place, int) and not isinstance(place, bool) and -2 <= place < 2 for place in places
    ):
        assert len(memory.rows(index)) == len(places)
    else:
        # Python's own way to say that a sequence has ended.
        with pytest.raises((IndexError, TypeError, ValueError), match="index"):
            memory.rows(index)


def check_field(memory: Any, name: str, value: Any) -> None:
    allowed = {"ratio": value == 7, "model_id": isinstance(value, str), "position_layout": False}
    if name == "embeddings":
        allowed[name] = memory.key_values is not None and value is None
    if isinstance(value, torch.Tensor):
        allowed["ratio"] = False
    if allowed.get(name, False):
        assert getattr(replace(memory, **{name: value}), name) == value
    else:
        assert_refused(lambda: replace(memory, **{name: value}), name)
