# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from context_compressors.training.objectives.compression_collator import CompressionCollator

EXAMPLES = [
    {
        "context_ids": [5, 6, 7],
        "prompt_ids": [8],
        "target_ids": [9, 1],
        "task": "reconstruction",
        "id": "a",
        "num_cut": 2,
    },
    {"context_ids": [5], "prompt_ids": [], "target_ids": [4, 3, 1], "more_turns": [([8, 8], [7, 1])], "id": "b"},
]

STARTS = {"reconstruction": 20, "question_answering": 21, "continuation": 21}


def rows(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def test_compressed_full_and_no_context_hold_the_same_prompt_and_target():
    def batch(mode):
        return CompressionCollator(2, 0, mode=mode)(EXAMPLES)

    compressed, full, none = batch("compressed"), batch("full_context"), batch("no_context")
    texts = [[0, 8, 9, 1], [0, 4, 3, 1, 8, 8, 7, 1]]
    assert rows(compressed["input_ids"], compressed["attention_mask"]) == texts
    assert rows(compressed["context_input_ids"], compressed["context_attention_mask"]) == [[5, 6, 7], [5]]
    assert rows(none["input_ids"], none["attention_mask"]) == texts
    assert "context_input_ids" not in none
    assert rows(full["input_ids"], full["attention_mask"]) == [[0, 5, 6, 7, 8, 9, 1], [0, 5, 4, 3, 1, 8, 8, 7, 1]]
    for one in (compressed, full, none):
        assert rows(one["labels"], one["labels"] != -100) == [[9, 1], [4, 3, 1, 7, 1]]
        assert ((one["labels"] == one["input_ids"]) | (one["labels"] == -100)).all()
        assert ((one["labels"] == -100) | (one["attention_mask"] == 1)).all()


def test_a_text_starts_with_its_tasks_token():
    def batch(mode):
        return CompressionCollator(2, 0, [11], mode=mode, task_start_ids=STARTS)(tasked)

    tasked = [EXAMPLES[0], {**EXAMPLES[1], "task": "question_answering"}, {**EXAMPLES[1], "task": "summarization"}]
    compressed, full, none = batch("compressed"), batch("full_context"), batch("no_context")
    turns = [4, 3, 1, 8, 8, 7, 1]
    # A reconstruction's target is the context as the encoder reads it, its first token included.
    texts = [[20, 8, 11, 9, 1], [21, *turns], [0, *turns]]
    assert rows(compressed["input_ids"], compressed["attention_mask"]) == texts
    assert rows(none["input_ids"], none["attention_mask"]) == texts
    assert rows(compressed["context_input_ids"], compressed["context_attention_mask"]) == [
        [11, 5, 6, 7],
        [11, 5],
        [11, 5],
    ]
    # The context stands in front as it would be compressed; a task without a token keeps BOS in front of everything.
    assert rows(full["input_ids"], full["attention_mask"]) == [
        [11, 5, 6, 7, 20, 8, 11, 9, 1],
        [11, 5, 21, *turns],
        [0, 5, *turns],
    ]
    for one in (compressed, full, none):
        assert rows(one["labels"], one["labels"] != -100) == [[11, 9, 1], [4, 3, 1, 7, 1], [4, 3, 1, 7, 1]]


def test_a_text_without_bos_starts_with_its_prompt():
    examples = [EXAMPLES[0], {**EXAMPLES[0], "prompt_ids": []}, {**EXAMPLES[0], "head_ids": [13]}]
    collator = CompressionCollator(2, 0, bos_before_text=False)
    batch = collator(examples)
    texts = [[8, 9, 1], [0, 9, 1], [13, 8, 9, 1]]
    assert rows(batch["input_ids"], batch["attention_mask"]) == texts
    assert rows(batch["labels"], batch["labels"] != -100) == [[9, 1]] * 3
    # The plain model of the bounds and a teacher read BOS.
    for mode in ("full_context", "no_context"):
        bounds = CompressionCollator(2, 0, mode=mode, bos_before_text=False)(examples[:1])
        assert bounds["input_ids"][0, 0] == 0
    both = CompressionCollator(2, 0, mode="distillation", bos_before_text=False)(examples[:1])
    assert both["input_ids"][0].tolist() == [8, 9, 1]
    assert both["full_input_ids"][0].tolist() == [0, 5, 6, 7, 8, 9, 1]


JOINT = [
    {"context_ids": [5, 6, 7], "reconstruction_ids": [5, 6, 7, 1], "continuation_ids": [8, 9, 1], "id": "a"},
    {"context_ids": [4], "reconstruction_ids": [4, 1], "continuation_ids": [3, 3, 3, 1], "id": "b", "num_cut": 0},
]


@pytest.mark.parametrize("starts", [None, STARTS])
@pytest.mark.parametrize("context_mode", ["compressed", "full_context", "no_context"])
def test_joint_gives_two_texts_about_one_context(context_mode, starts):
    ae, lm = (20, 21) if starts else (0, 0)
    collator = CompressionCollator(
        2, 0, [11], mode="joint", task_start_ids=starts, context_mode=context_mode, with_metadata=True
    )
    batch = collator(JOINT)
    front = [[], []]
    if context_mode == "full_context":
        front = [[11, 5, 6, 7], [11, 4]]
    repeated = [[11, 5, 6, 7, 1], [11, 4, 1]] if starts else [[5, 6, 7, 1], [4, 1]]
    expected = {"reconstruction": repeated, "continuation": [[8, 9, 1], [3, 3, 3, 1]]}
    for task, token in (("reconstruction", ae), ("continuation", lm)):
        ids, labels = batch[f"{task}_input_ids"], batch[f"{task}_labels"]
        texts = [[*before, token, *target] for before, target in zip(front, expected[task], strict=True)]
        if context_mode == "full_context" and not starts:
            texts = [[0, *before[1:], *target] for before, target in zip(front, expected[task], strict=True)]
        assert rows(ids, batch[f"{task}_attention_mask"]) == texts
        assert rows(labels, labels != -100) == expected[task]
        assert ((labels == ids) | (labels == -100)).all()
    assert "input_ids" not in batch
    assert batch["example_ids"] == ["a", "b"]
    if context_mode == "compressed":
        assert rows(batch["context_input_ids"], batch["context_attention_mask"]) == [[11, 5, 6, 7], [11, 4]]
    else:
        assert "context_input_ids" not in batch


def test_a_rows_ratio_depends_on_the_row_only():
    collator = CompressionCollator(2, 0, ratios=[2, 4, 8])
    many = [{**EXAMPLES[0], "id": str(index)} for index in range(50)]
    drawn = collator(many)["ratio"]
    assert set(drawn.tolist()) == {2, 4, 8}
    assert torch.equal(collator(many[::-1])["ratio"], drawn.flip(0))
    assert not torch.equal(CompressionCollator(2, 0, ratios=[2, 4, 8], seed=1)(many)["ratio"], drawn)
