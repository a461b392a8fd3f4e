# SPDX-License-Identifier: Apache-2.0
"""Memories that are fine where a question asks and coarse elsewhere: as if each block had been compressed alone."""

import pytest
import torch
from random_memories import assert_same, make_memory
from tiny_bases import ids_of

from context_compressors import CompressedContext, mixed_memory

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


def test_what_does_not_fit_together_is_refused_with_its_numbers():
    fine, coarse = make_memory((6, 4, 8)), make_memory((3, 2, 4))
    assert_same(
        mixed_memory([fine, coarse], [0], 12),
        CompressedContext.concatenate([fine.rows(0), coarse.rows(1), coarse.rows(2)]),
    )
    with pytest.raises(ValueError, match="`num_slots` must be 9 or more"):
        mixed_memory([fine, coarse], [1], 8)
    with pytest.raises(ValueError, match=r"rows from 0 to 2, got \[3\]"):
        mixed_memory([fine, coarse], [1, 3], 18)
