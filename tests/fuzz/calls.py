# SPDX-License-Identifier: Apache-2.0
"""Random calls of every method: contexts and texts of random lengths, padded anywhere, in every form allowed."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import decal_models
import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiny_bases import PAD
from tiny_models import METHOD_CASES, TRAINING_FREE_CASES
from torch import Tensor

VOCAB_SIZE = decal_models.VOCAB_SIZE
CHUNK_SIZES = (None, 1, 4, 7)
# Of all properties together.
WANTED = os.environ.get("FUZZ_EXAMPLES")
seeds = st.integers(0, 2**16)


def fuzz(share: int, **strategies: Any) -> Callable:
    """Try a property on so many of a hundred examples, always the same ones unless `FUZZ_EXAMPLES` says how many."""
    settings = hypothesis.settings(
        max_examples=max(1, int(WANTED or 200) * share // 100),
        derandomize=WANTED is None,
        print_blob=True,
        # A busy machine is no reason to fail, and models are made at their first use.
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    return lambda test: pytest.mark.slow(settings(hypothesis.given(**strategies)(test)))


# --- models ---


@dataclass(frozen=True)
class Subject:
    """A method in one setting, on one base."""

    name: str
    build: Callable[[], Any] = field(repr=False)

    @property
    def model(self) -> Any:
        """Shared by all examples: not to be changed."""
        return _model(self)

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.config.is_encoder_decoder

    @property
    def first_tokens(self) -> list[int]:
        """First tokens of a text that a method treats in its own way."""
        config = self.model.config
        if self.is_encoder_decoder:
            return [config.decoder_start_token_id]
        return [config.bos_token_id, config.eos_token_id, 9, *config.task_token_ids.values()]


@functools.cache
def _model(subject: Subject) -> Any:
    return subject.build()


def _decoder_only(case: Any, chunk_size: int | None = None) -> Subject:
    if chunk_size is None:
        return Subject(str(case), lambda: case.model)
    return Subject(f"{case}-chunks_of_{chunk_size}", lambda: case.build(chunk_size=chunk_size))


def _decal(setting: str, attention: str, chunk_size: int | None) -> Subject:
    fields = {} if chunk_size is None else {"chunk_size": chunk_size}
    return Subject(
        f"decal-{setting}-{attention}-{chunk_size}", lambda: decal_models.build(setting, attention, **fields)
    )


# Method by method, so that each gets as many examples as any other, however many settings it has.
SUBJECTS = [
    [_decoder_only(each) for each in case.all_of_its_method]
    + [_decoder_only(case, size) for size in CHUNK_SIZES[1:] if not case.method.windows]
    for case in METHOD_CASES
]
SUBJECTS.append([_decoder_only(case) for case in TRAINING_FREE_CASES])
SUBJECTS.append(
    [
        _decal(setting, attention, size)
        for setting in decal_models.SETTINGS
        for attention in ("sdpa", "eager")
        for size in CHUNK_SIZES
    ]
)
subjects = st.sampled_from(SUBJECTS).flatmap(st.sampled_from)


# --- rows, pads, masks ---


def random_rows(lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Rows of any token ids, those of BOS, EOS and pads among them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


@dataclass(frozen=True)
class Padded:
    """Rows as one batch.

    Args:
        rows: the rows alone, without pads.
        ids, mask: `(batch_size, width)`; the mask may be `None` where there are no pads.
    """

    rows: list[Tensor]
    ids: Tensor
    mask: Tensor | None


@st.composite
def padded(draw: Any, rows: list[Tensor]) -> Padded:
    """Pads left, right or anywhere, of any value."""
    side = draw(st.sampled_from(["right", "left", "anywhere"]))
    width = max(len(row) for row in rows) + draw(st.integers(0, 3))
    value = draw(st.sampled_from([0, 1, -100, 10**6]))
    ids, mask = torch.full((len(rows), width), value), torch.zeros(len(rows), width, dtype=torch.long)
    generator = torch.Generator().manual_seed(draw(seeds))
    for i, row in enumerate(rows):
        places = torch.randperm(width, generator=generator)[: len(row)].sort().values
        if side == "right":
            places = torch.arange(len(row))
        elif side == "left":
            places = torch.arange(width - len(row), width)
        ids[i, places], mask[i, places] = row, 1
    if bool(mask.all()) and draw(st.booleans()):
        return Padded(rows, ids, None)
    return Padded(rows, ids, mask.to(draw(st.sampled_from([torch.int64, torch.bool]))))


@st.composite
def contexts(draw: Any, num_rows: int) -> Padded:
    """A batch of contexts, of which some may be empty."""
    lengths = draw(st.lists(st.integers(0, 16), min_size=num_rows, max_size=num_rows))
    return draw(padded(random_rows(lengths, draw(seeds))))


@st.composite
def texts(draw: Any, subject: Subject, num_rows: int) -> Padded:
    """A batch of texts; a row may begin with BOS or a task token."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=num_rows, max_size=num_rows))
    rows = random_rows(lengths, draw(seeds))
    for row in rows:
        row[0] = draw(st.sampled_from(subject.first_tokens))
    batch = draw(padded(rows))
    if batch.mask is None and bool((batch.ids == PAD).any()):
        # `generate` takes these for pads where no mask says otherwise.
        return replace(batch, mask=torch.ones_like(batch.ids))
    return batch


# --- ratios ---


@st.composite
def ratios(draw: Any, subject: Subject, num_rows: int) -> tuple[Any, list[int]]:
    """A ratio as it is given, and that of each row."""
    trained = st.sampled_from(subject.model.config.compression_ratios)
    kind = draw(st.sampled_from(["int", "none", "tensor"]))
    if kind == "none":
        return None, [subject.model.config.compression_ratios[0]] * num_rows
    if kind == "tensor":
        by_row = draw(st.lists(trained, min_size=num_rows, max_size=num_rows))
        return torch.tensor(by_row), by_row
    ratio = draw(trained)
    return ratio, [ratio] * num_rows


# --- memories ---


def slots(memory: Any) -> Tensor:
    """Return a memory's carrier, `(batch_size, num_slots, width)`; of key/values those of all layers."""
    if memory.key_values is None:
        return memory.embeddings
    return torch.cat([part.transpose(1, 2).flatten(2) for pair in memory.key_values for part in pair], dim=2)


def assert_row(memory: Any, row: int, alone: Any) -> None:
    """A row of a memory is the same as the one row of another."""
    count = int(memory.num_slots[row])
    assert count == int(alone.num_slots[0])
    assert memory.attention_mask[row].tolist() == [1] * count + [0] * (memory.attention_mask.shape[1] - count)
    torch.testing.assert_close(slots(memory)[row, :count], slots(alone)[0, :count], atol=1e-4, rtol=1e-4)
    assert not slots(memory)[row, count:].any(), "padding slots are zero"
    assert memory.position_ids[row, :count].tolist() == alone.position_ids[0, :count].tolist()
    assert int(memory.num_context_tokens[row]) == int(alone.num_context_tokens[0])
    assert memory.position_layout == alone.position_layout
    assert memory.model_id == alone.model_id
