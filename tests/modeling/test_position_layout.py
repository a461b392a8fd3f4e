# SPDX-License-Identifier: Apache-2.0
"""Position layouts beside the tables of EPL, and their properties."""

from pathlib import Path

import pytest
import torch
import yaml

from context_compressors.modeling.parts.position_layout import (
    decoder_position_ids,
    encoder_position_ids,
    uniform_memory_ids,
)

TABLES = yaml.safe_load(Path(__file__).with_name("epl_tables.yaml").read_text(encoding="utf-8"))


def assert_ids(ids, length, first, last, total):
    assert ids.dtype == torch.long
    assert ids.shape == (length,)
    assert ids[: len(first)].tolist() == first
    assert ids[-len(last) :].tolist() == last
    assert int(ids.sum()) == total


@pytest.mark.parametrize("row", TABLES["encoder"], ids=lambda row: f"{row['layout']}-{row['chunk_start']}")
def test_encoder_ids_of_tables_1_and_12(row):
    context_ids, memory_ids = encoder_position_ids(510, 102, row["layout"], row["chunk_start"])
    assert_ids(context_ids, 510, *row["context"])
    assert_ids(memory_ids, 102, *row["memory"])


@pytest.mark.parametrize("row", TABLES["decoder"], ids=lambda row: "-".join(map(str, list(row.values())[:4])))
def test_decoder_ids_of_tables_2_3_and_13_to_15(row):
    layout, carrier, task, num_text_tokens, memory, text = row.values()
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
