# SPDX-License-Identifier: Apache-2.0
"""Every row of any batch is read as that row alone, without pads: slots, logits and generated ids of every method."""

from dataclasses import dataclass
from typing import Any

import torch
from calls import Padded, Subject, assert_row, contexts, fuzz, ratios, subjects, texts
from hypothesis import strategies as st

from context_compressors import CompressedContext

NEW_TOKENS = 3
GREEDY = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}


# --- slots ---


@dataclass(frozen=True)
class Compressing:
    subject: Subject
    batch: Padded
    ratio: Any
    by_row: list[list[int]]
    allow_untrained_ratio: bool


@st.composite
def compressings(draw: Any) -> Compressing:
    subject = draw(subjects)
    num_rows = draw(st.integers(1, 4))
    batch = draw(contexts(num_rows))
    kind = draw(st.sampled_from(["one", "list", "untrained"]))
    if kind == "one":
        ratio, by_row = draw(ratios(subject, num_rows))
        return Compressing(subject, batch, ratio, [by_row], draw(st.booleans()))
    if kind == "untrained":
        # Memory tokens that the method has not learned cannot be had: it has those of its smallest ratio.
        ratio = draw(st.integers(min(subject.model.config.compression_ratios), 40))
        return Compressing(subject, batch, ratio, [[ratio] * num_rows], True)
    listed = draw(st.lists(st.sampled_from(subject.model.config.compression_ratios), min_size=1, max_size=3))
    return Compressing(subject, batch, listed, [[ratio] * num_rows for ratio in listed], False)


@fuzz(30, call=compressings())
def test_slots(call):
    model, batch = call.subject.model, call.batch
    found = model.compress(batch.ids, batch.mask, call.ratio, allow_untrained_ratio=call.allow_untrained_ratio)
    memories = found if isinstance(call.ratio, list) else [found]
    assert len(memories) == len(call.by_row)
    for memory, by_row in zip(memories, call.by_row, strict=True):
        memory.validate(finite=True)
        assert len(memory) == len(batch.rows)
        assert memory.model_id == model.model_id
        for i, (row, ratio) in enumerate(zip(batch.rows, by_row, strict=True)):
            alone = model.compress(row[None], ratio=ratio, allow_untrained_ratio=call.allow_untrained_ratio)
            assert_row(memory, i, alone)
            assert int(memory.num_context_tokens[i]) == len(row)
            assert (memory.ratio if isinstance(memory.ratio, int) else int(memory.ratio[i])) == alone.ratio == ratio


# --- text behind memories ---


@dataclass(frozen=True)
class Reading:
    """A batch of texts behind one or several documents each.

    Args:
        way: how the memory comes: with the call ("context"), compressed before it ("memory"), "saved" and loaded, or
            one row for all texts ("shared").
    """

    subject: Subject
    documents: list[Padded]
    ratio: Any
    by_row: list[int]
    text: Padded
    way: str

    def memory(self, folder: Any) -> Any:
        """The memory of the whole batch."""
        parts = [self.subject.model.compress(each.ids, each.mask, self.ratio) for each in self.documents]
        memory = CompressedContext.concatenate(parts)
        if self.way == "shared":
            memory = memory.rows(0)
        if self.way == "saved":
            memory.save(folder / "memory.safetensors")
            memory = CompressedContext.load(folder / "memory.safetensors", model_id=self.subject.model.model_id)
        return memory

    def given(self, folder: Any) -> dict[str, Any]:
        """The arguments of the whole batch."""
        text = {"input_ids": self.text.ids, "attention_mask": self.text.mask}
        if self.way != "context":
            return {**text, "memory": self.memory(folder)}
        (document,) = self.documents
        return {
            **text,
            "context_input_ids": document.ids,
            "context_attention_mask": document.mask,
            "ratio": self.ratio,
        }

    def alone(self, row: int) -> dict[str, Any]:
        """The arguments of one row: without any pad, and one document at a time."""
        source = 0 if self.way == "shared" else row
        compress = self.subject.model.compress
        parts = [compress(each.rows[source][None], ratio=self.by_row[source]) for each in self.documents]
        text = self.text.rows[row][None]
        return {
            "input_ids": text,
            "attention_mask": torch.ones_like(text),
            "memory": CompressedContext.concatenate(parts),
        }


@st.composite
def readings(draw: Any) -> Reading:
    subject = draw(subjects)
    num_rows = draw(st.integers(1, 3))
    way = draw(st.sampled_from(["context", "memory", "saved", "shared"]))
    documents = [draw(contexts(num_rows)) for _ in range(1 if way == "context" else draw(st.integers(1, 3)))]
    ratio, by_row = draw(ratios(subject, num_rows))
    return Reading(subject, documents, ratio, by_row, draw(texts(subject, num_rows)), way)


def real_places(text: Padded, row: int) -> torch.Tensor:
    mask = torch.ones_like(text.ids) if text.mask is None else text.mask
    return mask[row].bool()


@torch.no_grad()
@fuzz(25, reading=readings())
def test_logits(reading, tmp_path_factory):
    model = reading.subject.model
    logits = model(**reading.given(tmp_path_factory.mktemp("memories"))).logits
    for i in range(len(reading.text.rows)):
        alone = model(**reading.alone(i)).logits
        torch.testing.assert_close(logits[i, real_places(reading.text, i)], alone[0], atol=1e-4, rtol=1e-4)


@fuzz(
    15,
    reading=readings(),
    cache=st.sampled_from([{}, {"use_cache": False}, {"cache_implementation": "static"}]),
)
def test_generated_ids(reading, cache, tmp_path_factory):
    model = reading.subject.model
    generated = model.generate(**reading.given(tmp_path_factory.mktemp("memories")), **GREEDY, **cache)
    for i, text in enumerate(reading.text.rows):
        alone = reading.alone(i)
        expected = model.generate(**alone, **GREEDY)[0]
        found = generated[i, -len(expected) :]
        assert found[: len(text)].tolist() == expected[: len(text)].tolist() == text.tolist()
        if not found.equal(expected):
            assert_tied(model, alone, found[len(text) :], expected[len(text) :])


@torch.no_grad()
def assert_tied(model: Any, alone: dict[str, Any], found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that two greedy answers part at tokens that are equally likely, within the arithmetic's error."""
    place = int((found != expected).nonzero()[0])
    text = torch.cat([alone["input_ids"], expected[None, :place]], dim=1)
    if model.config.is_encoder_decoder:
        text = torch.nn.functional.pad(text, (1, 0), value=model.config.decoder_start_token_id)
    logits = model(input_ids=text, memory=alone["memory"]).logits[0, -1]
    difference = logits[found[place]] - logits[expected[place]]
    assert abs(float(difference)) < 1e-3, (found.tolist(), expected.tolist())
