# SPDX-License-Identifier: Apache-2.0
"""Slots that are read once: the same logits as slots that are read with each question, and no second reading."""

import pytest
import torch

from context_compressors import ContextCompressionQAPipeline
from context_compressors.modeling.compressor.read_slots import ReadSlots

TEXTS = [[1, 9, 40, 7, 11], [1, 9, 40, 12, 13, 14, 7], [1, 9, 40, 3]]
in_embeddings = pytest.mark.only(lambda case: case.method.config_class.carrier == "embeddings")


def logits_of(model, memory, texts, pad_rows, side="right"):
    """The logits behind the last token of each text."""
    ids, mask = pad_rows([torch.tensor(text) for text in texts], side)
    last = (mask * torch.arange(mask.shape[1])).argmax(dim=1)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, memory=memory).logits[torch.arange(len(texts)), last]


@pytest.mark.parametrize("opening", [[], [9, 40]])
@in_embeddings
def test_kept_slots_are_read_as_slots_in_front_of_each_text(place_case, opening, random_rows, pad_rows, monkeypatch):
    model = place_case.model
    monkeypatch.setattr(model.config, "slots_after_ids", opening)
    ids, mask = pad_rows(random_rows([13, 7, 1]), "left")
    memory = model.compress(ids, mask)
    kept, texts = ReadSlots(model).read(memory, TEXTS)
    assert kept.carrier == "key_values"
    assert all(len(text) < len(whole) for text, whole in zip(texts, TEXTS, strict=True)) or not opening
    expected = logits_of(model, memory, TEXTS, pad_rows)
    for side in ("right", "left"):
        torch.testing.assert_close(logits_of(model, kept, texts, pad_rows, side), expected, atol=1e-4, rtol=1e-4)
    for row in range(3):
        alone = logits_of(model, kept.rows(row), [texts[row]], pad_rows)
        torch.testing.assert_close(alone[0], expected[row], atol=1e-4, rtol=1e-4)


@pytest.fixture
def pooled(method_cases):
    return method_cases["mean_pooling"].build()


def tokens_read(model, counted):
    model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: counted.append(kwargs["inputs_embeds"].shape[:2].numel()), with_kwargs=True
    )
    return counted


def test_a_second_question_reads_the_question_alone(pooled, tiny_tokenizer, tmp_path):
    pipe = ContextCompressionQAPipeline(model=pooled, tokenizer=tiny_tokenizer, device="cpu", max_new_tokens=1)
    memory, other = pipe.compress(["Nora keeps eleven bees." * 4, "Olaf owns the mill."])
    memory.save(tmp_path / "memory.safetensors")
    counted = tokens_read(pooled, [])
    first = pipe("Who?", memory=memory)
    reading, question = counted
    assert reading == int(memory.num_slots)
    counted.clear()
    # A memory is known by what it holds.
    assert pipe("Who?", memory=tmp_path / "memory.safetensors") == first
    assert counted == [question]
    counted.clear()
    # Of several rows those are read that are new.
    pipe("Who?", memory=[memory.stack([other, memory])])
    assert counted == [int(other.num_slots), 2 * question]


def test_kept_slots_are_bounded_and_belong_to_the_weights(pooled):
    memories = [pooled.compress(torch.arange(5, 5 + length)[None]) for length in (12, 13, 14)]
    size = ReadSlots(pooled).read(memories[0], TEXTS)[0].nbytes
    kept = ReadSlots(pooled, max_bytes=2 * size + size // 2)
    for memory in memories:
        kept.read(memory, TEXTS)
    assert size < kept.nbytes <= kept.max_bytes
    counted = tokens_read(pooled, [])
    # The last one is there, the first one has gone.
    kept.read(memories[2], TEXTS)
    assert not counted
    kept.read(memories[0], TEXTS)
    assert len(counted) == 1
    with torch.no_grad():
        next(pooled.parameters()).add_(1)
    kept.read(memories[0], TEXTS)
    assert len(counted) == 2


def test_slots_that_are_too_many_or_have_unlike_openings_are_read_with_each_text(pooled, monkeypatch):
    memory = pooled.compress(torch.arange(5, 25)[None])
    assert ReadSlots(pooled, max_bytes=100).read(memory, TEXTS) == (memory, TEXTS)
    monkeypatch.setattr(pooled.config, "slots_after_ids", [40])
    for other in ([1, 8, 40, 7], [7, 7, 9, 7]):
        unlike = [[1, 9, 40, 7], other]
        assert ReadSlots(pooled).read(memory, unlike) == (memory, unlike)
