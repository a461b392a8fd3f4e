# SPDX-License-Identifier: Apache-2.0
"""Memories saved, cut, repeated, converted and joined."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from calls import Padded, Subject, assert_row, contexts, fuzz, ratios, subjects
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
    batches = [draw(contexts(num_rows)) for _ in range(draw(st.integers(1, 3)))]
    ratio, by_row = draw(ratios(subject, num_rows))
    rows = draw(st.lists(st.integers(-num_rows, num_rows - 1), min_size=1, max_size=4))
    return Documents(subject, batches, ratio, by_row, rows, draw(st.integers(1, 3)))


@torch.no_grad()
@fuzz(15, call=documents())
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
