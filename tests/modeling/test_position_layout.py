# SPDX-License-Identifier: Apache-2.0
"""Position layouts beside the tables of EPL, and their properties."""

import pytest
import torch

from context_compressors.modeling.parts.position_layout import (
    decoder_position_ids,
    encoder_position_ids,
    uniform_memory_ids,
)


def assert_ids(ids, length, first, last, total):
    assert ids.dtype == torch.long
    assert ids.shape == (length,)
    assert ids[: len(first)].tolist() == first
    assert ids[-len(last) :].tolist() == last
    assert int(ids.sum()) == total


@pytest.mark.parametrize(
    ("layout", "chunk_start", "context", "memory"),
    [
        ("default", 0, ([0, 1, 2], [508, 509], 129795), ([510, 511, 512], [610, 611], 57171)),
        ("uniform", 0, ([1, 2, 3], [509, 510], 130305), ([3, 8, 13], [503, 508], 26061)),
        ("enhanced", 0, ([1, 2, 3], [509, 510], 130305), ([3, 8, 13], [503, 508], 26061)),
        ("default", 510, ([0, 1, 2], [508, 509], 129795), ([510, 511, 512], [610, 611], 57171)),
        ("uniform", 510, ([511, 512, 513], [1019, 1020], 390405), ([513, 518, 523], [1013, 1018], 78081)),
        ("enhanced", 510, ([511, 512, 513], [1019, 1020], 390405), ([513, 518, 523], [1013, 1018], 78081)),
    ],
)
def test_encoder_ids_of_tables_1_and_12(layout, chunk_start, context, memory):
    context_ids, memory_ids = encoder_position_ids(510, 102, layout, chunk_start)
    assert_ids(context_ids, 510, *context)
    assert_ids(memory_ids, 102, *memory)


RUNNING = ([0, 1, 2], [202, 203], 20706, [0, 101, 102, 203])
AS_ENCODED_BY_DEFAULT = ([510, 511, 512], [610, 611], 114342, [510, 611, 510, 611])
SPREAD = ([3, 8, 13], [1013, 1018], 104142, [3, 508, 513, 1018])
AFTER_MEMORY = ([204, 205, 206], [1223, 1224], 728994)
QUESTION_AFTER_MEMORY = ([204, 205, 206], [258, 259], 12964)
QUESTION_AFTER_CONTEXT = ([1020, 1021, 1022], [1074, 1075], 58660)
RECONSTRUCTION = ([0, 1, 2], [1019, 1020], 520710)
CONTINUATION = ([1020, 1021, 1022], [2039, 2040], 1562130)


@pytest.mark.parametrize(
    ("layout", "carrier", "task", "num_text_tokens", "memory", "text"),
    [
        # Tables 2 and 13: autoencoding.
        ("default", "embeddings", "reconstruction", 1021, RUNNING, AFTER_MEMORY),
        ("default", "key_values", "reconstruction", 1021, AS_ENCODED_BY_DEFAULT, AFTER_MEMORY),
        ("enhanced", "embeddings", "reconstruction", 1021, SPREAD, RECONSTRUCTION),
        ("enhanced", "key_values", "reconstruction", 1021, SPREAD, RECONSTRUCTION),
        ("uniform", "embeddings", "reconstruction", 1021, RUNNING, AFTER_MEMORY),
        ("uniform", "key_values", "reconstruction", 1021, SPREAD, AFTER_MEMORY),
        # Tables 3 and 14: language modelling.
        ("default", "embeddings", "continuation", 1021, RUNNING, AFTER_MEMORY),
        ("enhanced", "embeddings", "continuation", 1021, SPREAD, CONTINUATION),
        ("enhanced", "key_values", "continuation", 1021, SPREAD, CONTINUATION),
        ("uniform", "key_values", "continuation", 1021, SPREAD, AFTER_MEMORY),
        # Table 15: question answering, |Q| = 50, |A| = 5.
        ("default", "key_values", "continuation", 56, AS_ENCODED_BY_DEFAULT, QUESTION_AFTER_MEMORY),
        ("enhanced", "embeddings", "continuation", 56, SPREAD, QUESTION_AFTER_CONTEXT),
        ("uniform", "embeddings", "continuation", 56, RUNNING, QUESTION_AFTER_MEMORY),
    ],
)
def test_decoder_ids_of_tables_2_3_and_13_to_15(layout, carrier, task, num_text_tokens, memory, text):
    memory_ids, text_ids = decoder_position_ids([510, 510], [102, 102], num_text_tokens, layout, carrier, task)
    assert_ids(memory_ids, 204, *memory[:3])
    assert [int(memory_ids[index]) for index in (0, 101, 102, 203)] == memory[3]
    assert_ids(text_ids, num_text_tokens, *text)


@pytest.mark.parametrize(
    ("start_id", "num_tokens", "num_memory_tokens", "expected"),
    [
        (1, 6, 2, [2, 5]),  # Figure 1
        (1, 10, 3, [2, 6, 9]),
        (0, 28, 10, [1, 4, 6, 9, 12, 15, 18, 20, 23, 26]),  # a float32 linspace gives 7 in the third place
        (35, 34, 7, [37, 42, 47, 52, 56, 61, 66]),  # and 51 in the fourth here
        (0, 576, 2, [144, 432]),
    ],
)
def test_algorithm_1_by_hand(start_id, num_tokens, num_memory_tokens, expected):
    assert uniform_memory_ids(start_id, num_tokens, num_memory_tokens).tolist() == expected
