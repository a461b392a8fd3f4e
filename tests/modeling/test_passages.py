# SPDX-License-Identifier: Apache-2.0
"""Contexts of passages, each compressed apart from the others."""

import pytest
import torch
from decal_models import build
from tiny_bases import ids_of
from tiny_models import TRAINING_FREE_CASES

from context_compressors import CompressedContext

# Methods whose chunks know nothing of each other.
CUT_APART = ("mean_pooling", "compression_tokens", "icae", "five_hundred_x", "comprexit", "gmsa")
PASSAGES = [[5, 1, 9], [], [7]]
ROWS = [ids_of(15), ids_of(0), ids_of(7, seed=2)]
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture
def batch(pad_rows):
    ids, mask = pad_rows([row[0] for row in ROWS], "left")
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", CUT_APART)
def test_passages_are_compressed_as_if_each_stood_alone(name, method_cases, batch):
    """With positions that start anew, in a batch with pads and a row without any passage, at a ratio for each row."""
    model = method_cases[name].build(chunk_size=6)
    ratios = torch.tensor([2, 2, 3])
    lengths = torch.tensor([[5, 1, 9], [0, 0, 0], [0, 7, 0]])
    found = model.compress(**batch, ratio=ratios, chunk_lengths=lengths)
    assert found.num_context_tokens.tolist() == [15, 0, 7]
    for row, (ids, passages, ratio) in enumerate(zip(ROWS, PASSAGES, ratios.tolist(), strict=True)):
        alone = [model.compress(part, ratio=ratio) for part in ids.split(passages or [0], dim=1)]
        joined = CompressedContext.concatenate(alone)
        count = int(found.num_slots[row])
        assert count == int(joined.num_slots)
        assert count == sum(model.config.num_slots(n, ratio) for n in passages)
        if found.embeddings is not None:
            torch.testing.assert_close(found.embeddings[row, :count], joined.embeddings[0], atol=2e-4, rtol=0)
    text = ids_of(4, seed=3)
    row = CompressedContext.concatenate([model.compress(part, ratio=2) for part in ROWS[0].split([5, 1, 9], dim=1)])
    read = {"context_input_ids": ROWS[0], "context_chunk_lengths": torch.tensor([[5, 1, 9]]), "ratio": 2}
    if name != "five_hundred_x":
        # Its joined keys are rotated to their later places; those of one context were made in theirs.
        torch.testing.assert_close(
            model(input_ids=text, **read).logits, model(input_ids=text, memory=row).logits, atol=2e-3, rtol=0
        )
    assert model.generate(text, **read, **GREEDY).shape == (1, 10)


def test_passages_of_an_encoder_decoder():
    model = build()
    ids, text = ids_of(12), ids_of(3, seed=1)
    memory = model.compress(ids, chunk_lengths=[[5, 7]])
    parts = [model.compress(part) for part in ids.split([5, 7], dim=1)]
    torch.testing.assert_close(memory.embeddings, CompressedContext.concatenate(parts).embeddings, atol=1e-5, rtol=0)
    read = {"context_input_ids": ids, "context_chunk_lengths": torch.tensor([[5, 7]])}
    expected = model(input_ids=text, memory=memory).logits
    torch.testing.assert_close(model(input_ids=text, **read).logits, expected)
    assert model.generate(text, **read, **GREEDY).equal(model.generate(text, memory=memory, **GREEDY))


def test_lengths_that_do_not_fit_are_refused(method_cases):
    model, ids = method_cases["icae"].model, ids_of(6)
    with pytest.raises(ValueError, match=r"`chunk_lengths` must add up to the 6 tokens of row 0, got \[2, 3\]"):
        model.compress(ids, chunk_lengths=[[2, 3]])
    with pytest.raises(ValueError, match=r"reads a context whole, without `chunk_lengths`, got \[\[6\]\]"):
        TRAINING_FREE_CASES[0].model.compress(ids, chunk_lengths=[[6]])


@pytest.mark.parametrize(
    ("name", "base"), [("five_hundred_x", "llama-sdpa"), ("voco", "llama-sdpa"), ("mean_pooling", "gemma2-eager")]
)
def test_rows_of_one_length_and_unlike_passages_are_read_as_their_memory(name, base, case_on):
    """Their slots are unlike in number, so that one row has a padding slot; values and the loss of training."""
    model = case_on(name, base).build()
    context, text = (torch.cat([ids_of(length, seed), ids_of(length, seed + 1)]) for length, seed in ((8, 1), (4, 3)))
    lengths = torch.tensor([[4, 4], [3, 5]])
    read = {"context_input_ids": context, "context_chunk_lengths": lengths, "ratio": 2}
    memory = model.compress(context, ratio=2, chunk_lengths=lengths)
    assert memory.num_slots.tolist() == [4, 5]
    with torch.no_grad():
        expected = model(text, memory=memory).logits
        torch.testing.assert_close(model(text, **read).logits, expected, atol=1e-4, rtol=0)
        model.train()
        memory = model.compress(context, ratio=2, chunk_lengths=lengths)
        expected = model(text, memory=memory, labels=text).loss
        torch.testing.assert_close(model(text, **read, labels=text).loss, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CUT_APART)
def test_passes_of_a_bounded_number_of_tokens_give_the_same_memory(name, method_cases, monkeypatch, pad_rows, slots):
    model = method_cases[name].build(chunk_size=6)
    ids, mask = pad_rows([row[0] for row in (*ROWS, ids_of(3, seed=4))], "left")
    ratios = torch.tensor([2, 3, 3, 2])
    expected, passes = model.compress(ids, mask, ratio=[2, ratios]), []
    encode = model.model.encode
    monkeypatch.setattr(model.model, "encode", lambda chunks, *args: passes.append(chunks) or encode(chunks, *args))
    monkeypatch.setattr(model.model, "tokens_at_once", 12)
    found = model.compress(ids, mask, ratio=[2, ratios])
    # Chunks of 6, 6, 3; 6, 1; 3 tokens.
    assert sorted(length for part in passes for length in part.lengths) == [1, 3, 3, 6, 6, 6]
    assert len(passes) > 1
    assert all(part.input_ids.numel() <= 12 for part in passes)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(slots(one), slots(other), atol=1e-4, rtol=1e-4)
        assert one.attention_mask.equal(other.attention_mask)
        assert one.position_ids.equal(other.position_ids)
