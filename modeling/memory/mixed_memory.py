# SPDX-License-Identifier: Apache-2.0
"""Reading by question: the blocks of a document that a question asks for fine, and all others coarse."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations_with_replacement

from .compressed_context import CompressedContext
from .memory_validation import is_memory


def mixed_memory(memories: Sequence[CompressedContext], asked: Collection[int], num_slots: int) -> CompressedContext:
    """Join a document's blocks into one memory for a question: the blocks that it asks for fine, the others coarse.

    The blocks were compressed once, without any question, at several ratios. Those that a question asks for are taken
    from the finest memory that leaves the others room in some memory, and the others from the finest with which all
    fit.

    Args:
        memories: of the same blocks at each ratio, one row for each block, such as `pipe.compress(blocks, ratio=[2, 8,
            32])` returns, or `at_ratio` of one that holds all of them.
        asked: rows of the blocks to read fine, such as BM25 finds; without any, all blocks are read alike.
        num_slots: most slots of the mixed memory.

    Raises:
        TypeError: a single memory, or something else.
        ValueError: no memory, memories of unlike numbers of rows or that cannot be joined, an unknown row, or fewer
            slots than the coarsest memory has.
    """
    # A memory gives its rows to whoever goes through it.
    if is_memory(memories) or not all(map(is_memory, memories)):
        raise TypeError(f"`memories` must be a list of memories, one for each ratio, got {memories!r}")
    sizes = {len(memory) for memory in memories}
    if len(sizes) != 1:
        raise ValueError(f"`memories` must be one or several, of the same blocks, got numbers of rows {sorted(sizes)}")
    (num_blocks,) = sizes
    if unknown := [row for row in asked if row not in range(num_blocks)]:
        raise ValueError(f"`asked` must hold rows from 0 to {num_blocks - 1}, got {unknown}")
    levels = sorted(memories, key=lambda memory: int(memory.num_slots.sum()), reverse=True)
    counts = [memory.num_slots.tolist() for memory in levels]
    for fine, coarse in combinations_with_replacement(range(len(levels)), 2):
        chosen = [fine if row in asked else coarse for row in range(num_blocks)]
        if sum(counts[level][row] for row, level in enumerate(chosen)) <= num_slots:
            return CompressedContext.concatenate(levels[level].rows(row) for row, level in enumerate(chosen))
    raise ValueError(f"`num_slots` must be {sum(counts[-1])} or more, those of the coarsest memory, got {num_slots}")
