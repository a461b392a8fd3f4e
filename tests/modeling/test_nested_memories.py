# SPDX-License-Identifier: Apache-2.0
"""Coarser memories taken from finer ones beside those that the same contexts were compressed to."""

from dataclasses import replace

import pytest
import torch
from random_memories import assert_same, make_memory
from test_kv_zip import KV_ZIP
from test_ranked_key_values import FEW_POSITIONS
from tiny_bases import ids_of

from context_compressors import CompressedContext, mixed_memory
from context_compressors.corpus.memory_store import MemoryStore

RATIOS = [1, 2, 4, 5, 16, 50, 255]


@pytest.fixture
def nested_models(method_cases):
    ranked = method_cases["ranked_key_values"]
    chunked = ranked.build(chunk_size=6), ranked.build(**FEW_POSITIONS)
    return {"whole": ranked.build(), "KVzip": KV_ZIP.build(), "chunks": chunked[0], "long": chunked[1]}


def compressed(model, ids, mask=None, ratio=RATIOS):
    return model.compress(ids, mask, ratio=ratio, allow_untrained_ratio=True)


@pytest.mark.slow
@torch.no_grad()
def test_a_coarser_memory_is_what_compressing_again_gives(nested_models, random_rows, pad_rows):
    """Each pair, head, position and byte of it, from any finer one."""
    rows = random_rows([33, 9, 0, 1, 50, 20])
    for name, model in nested_models.items():
        for side in ("left", "right"):
            memories = compressed(model, *pad_rows(rows, side))
            for place, fine in enumerate(memories[:4]):
                for coarse in memories[place:]:
                    found = fine.at_ratio(coarse.ratio)
                    found.validate()
                    assert_same(found, coarse)
                    assert (found.ratio, found.nbytes) == (coarse.ratio, coarse.nbytes), name
            assert fine.at_ratio(fine.ratio) is fine
            assert_same(memories[1].at_ratio(4).at_ratio(16), memories[4])
        nothing = compressed(model, *pad_rows(random_rows([0, 0])), ratio=[2, 4])
        assert_same(nothing[0].at_ratio(4), nothing[1])
    # Of a ratio for each row all coarser ones.
    by_row = compressed(model, *pad_rows(rows), ratio=torch.tensor([2, 3, 1, 2, 3, 1]))
    assert_same(by_row.at_ratio(3), compressed(model, *pad_rows(rows), ratio=3))


@pytest.mark.slow
@torch.no_grad()
def test_joined_memories_are_coarser_part_by_part(nested_models, random_rows, pad_rows):
    parts = [pad_rows(random_rows(lengths)) for lengths in ([33, 9, 0], [5, 0, 12], [0, 50, 21])]
    for model in nested_models.values():
        by_ratio = zip(*(compressed(model, *part) for part in parts), strict=True)
        joined = [CompressedContext.concatenate(memories) for memories in by_ratio]
        for memory in joined[1:]:
            assert_same(joined[1].at_ratio(memory.ratio), memory)
    # A part that is coarser already stays.
    fine, coarse = (compressed(model, ids_of(n), ratio=r) for n, r in ((32, 2), (30, 8)))
    mixed = CompressedContext.concatenate([fine, coarse])
    assert_same(mixed.at_ratio(4), CompressedContext.concatenate([fine.at_ratio(4), coarse]))


@pytest.mark.slow
@torch.no_grad()
def test_they_are_taken_of_stored_cut_and_rounded_memories_too(
    nested_models, random_rows, pad_rows, tiny_tokenizer, tmp_path
):
    for name, model in nested_models.items():
        fine, coarse = compressed(model, *pad_rows(random_rows([33, 9, 50])), ratio=[2, 8])
        fine.save(tmp_path / f"{name}.safetensors")
        assert_same(CompressedContext.load(tmp_path / f"{name}.safetensors").at_ratio(8), coarse)
        assert_same(fine.rows([2, 0]).at_ratio(8), coarse.rows([2, 0]))
        assert_same(CompressedContext.stack([fine.rows(1), fine.rows([0, 2])]).at_ratio(8), coarse.rows([1, 0, 2]))
        assert_same(fine.repeat_interleave(2).at_ratio(8), coarse.repeat_interleave(2))
        pipe = model.question_answering(tiny_tokenizer)
        assert pipe("Who?", memory=fine, ratio=8, max_new_tokens=5) == pipe("Who?", memory=coarse, max_new_tokens=5)
        for form in ("int8", "int4", "int2"):
            rounded = fine.quantize(form)
            assert_same(rounded.at_ratio(8), coarse.quantize(form))
            store = MemoryStore.create(tmp_path / name / form, fine, dtype=form)
            store.add(["a", "b", "c"], fine)
            assert_same(store.get(["a", "b", "c"]).at_ratio(8), rounded.at_ratio(8))
    # Blocks are expanded from one memory as from several.
    levels = compressed(model, *pad_rows(random_rows([33, 9, 20])), ratio=[2, 4, 8])
    of_one = [levels[0].at_ratio(ratio) for ratio in (2, 4, 8)]
    assert_same(mixed_memory(of_one, [1], 14), mixed_memory(levels, [1], 14))


def test_what_no_memory_has_is_refused_with_its_ratios(nested_models):
    memory = compressed(nested_models["whole"], ids_of(20), ratio=4)
    for ratio in (3, 256):
        with pytest.raises(ValueError, match=f"`ratio` must be from 4, the memory's own, to 255, got {ratio}"):
            memory.at_ratio(ratio)
    without = replace(memory, coarsest_ratios=None)
    for other in (make_memory(), without):
        assert other.at_ratio(4) is other
        with pytest.raises(ValueError, match="`ratio` must be 4, the memory's own, got 8: what a coarser"):
            other.at_ratio(8)
    # Joined with one that lacks it.
    for join in (CompressedContext.concatenate, CompressedContext.stack):
        assert join([memory, without]).coarsest_ratios is join([without, memory]).coarsest_ratios is None


LENGTHS = (12, 5, 9, 16)


@pytest.mark.slow
@torch.no_grad()
def test_blocks_are_those_compressed_one_by_one_at_their_own_ratios(method_cases, pad_rows):
    blocks = [ids_of(length, seed=length) for length in LENGTHS]
    ids, mask = pad_rows([block[0] for block in blocks])
    text = ids_of(5, seed=3)
    for name in ("mean_pooling", "ranked_key_values"):
        model = method_cases[name].build(chunk_size=None, compression_ratios=(2, 4, 8))
        memories = model.compress(ids, mask, ratio=[8, 2, 4])
        for asked, num_slots, ratios in (
            ([2], 13, (8, 8, 2, 8)),
            ([3, 0], 19, (2, 4, 4, 2)),
            ([3], 9, (8, 8, 8, 4)),
            ([], 12, (4, 4, 4, 4)),
        ):
            memory = mixed_memory(memories, asked, num_slots)
            alone = [model.compress(block, ratio=ratio) for block, ratio in zip(blocks, ratios, strict=True)]
            expected = CompressedContext.concatenate(alone)
            assert int(memory.num_slots) == int(expected.num_slots) <= num_slots
            assert int(memory.num_context_tokens) == sum(LENGTHS)
            found, wanted = (model(input_ids=text, memory=one).logits for one in (memory, expected))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        for asked, num_slots, message in (([2], 5, "`num_slots` must be"), ([4], 50, r"rows from 0 to 3, got \[4\]")):
            with pytest.raises(ValueError, match=message):
                mixed_memory(memories, asked, num_slots)
