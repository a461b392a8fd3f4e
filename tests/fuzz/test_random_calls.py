# SPDX-License-Identifier: Apache-2.0
"""Random calls of every method: each row of a batch is compressed and read as that row alone."""

import os
import random
from functools import cache, partial
from itertools import product

import decal_models
import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiny_bases import VOCAB_SIZE
from tiny_models import METHOD_CASES, TRAINING_FREE_CASES

from context_compressors import CompressedContext

# A number, or the same 120 examples each time.
WANTED = os.environ.get("FUZZ_EXAMPLES")
# Functions that return a model, method by method, so that each method gets as many examples as any other.
MODELS = [
    [partial(getattr, each, "model") for each in case.all_of_its_method]
    + [cache(partial(case.build, chunk_size=size)) for size in (1, 4, 7) if not case.method.windows]
    for case in METHOD_CASES
]
MODELS.append([partial(getattr, case, "model") for case in TRAINING_FREE_CASES])
DECAL = product(decal_models.SETTINGS, ("sdpa", "eager"), (None, 1, 4, 7))
MODELS.append(
    [cache(partial(decal_models.build, setting, attention, chunk_size=size)) for setting, attention, size in DECAL]
)


def random_rows(draw, lengths, first_tokens=(9,)):
    """Rows of any token ids, those of BOS, EOS and pads among them."""
    rows = [torch.tensor([draw.randrange(VOCAB_SIZE) for _ in range(length)], dtype=torch.long) for length in lengths]
    for row in rows:
        row[:1] = draw.choice(first_tokens)
    return rows


def padded(draw, rows):
    """Ids and mask `(batch_size, width)`, with pads left, right or anywhere, of any value."""
    side, width = draw.choice(["left", "right", "anywhere"]), max(map(len, rows)) + draw.randint(0, 3)
    ids = torch.full((len(rows), width), draw.choice([0, 1, -100, 10**6]))
    mask = torch.zeros(len(rows), width, dtype=draw.choice([torch.int64, torch.bool]))
    for number, row in enumerate(rows):
        places = {"left": range(width - len(row), width), "right": range(len(row))}
        places = list(places.get(side) or sorted(draw.sample(range(width), len(row))))
        ids[number, places], mask[number, places] = row, 1
    return ids, mask


def assert_same_row(memory, row, alone):
    count = int(memory.num_slots[row])
    assert count == int(alone.num_slots)
    assert int(memory.num_context_tokens[row]) == int(alone.num_context_tokens)
    assert memory.position_ids[row, :count].tolist() == alone.position_ids[0, :count].tolist()
    parts, of_row = ([m.embeddings] if m.key_values is None else sum(m.key_values, ()) for m in (memory, alone))
    for some, own in zip(parts, of_row, strict=True):
        torch.testing.assert_close(some[row, ..., :count, :], own[0, ..., :count, :], atol=5e-4, rtol=1e-3)
        assert not some[row, ..., count:, :].any(), "padding slots are zero"


@pytest.mark.slow
@torch.no_grad()
@hypothesis.settings(
    max_examples=int(WANTED or 120),
    derandomize=WANTED is None,
    print_blob=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_a_batch_is_its_rows_alone(seed):
    draw = random.Random(seed)
    model, num_rows = draw.choice(draw.choice(MODELS))(), draw.randint(1, 3)
    config, way = model.config, draw.choice(["context", "memory", "shared"])
    by_row = [draw.choice(config.compression_ratios) for _ in range(num_rows)]
    if way != "context" and draw.random() < 0.3:
        # Memory tokens that the method has not learned cannot be had: it has those of its smallest ratio.
        by_row = [draw.randint(min(config.compression_ratios), 40)] * num_rows
    ratio = by_row[0] if len(set(by_row)) == 1 else torch.tensor(by_row)

    # One or several documents of each row, and a text that may begin with BOS, EOS or a task token.
    documents = [
        random_rows(draw, [draw.randint(0, 16) for _ in range(num_rows)])
        for _ in range(1 if way == "context" else draw.randint(1, 3))
    ]
    compress = partial(model.compress, allow_untrained_ratio=way != "context")
    batches = [padded(draw, rows) for rows in documents]
    memory = CompressedContext.concatenate([compress(*batch, ratio=ratio) for batch in batches])
    if config.is_encoder_decoder:
        first_tokens = [config.decoder_start_token_id]
    else:
        first_tokens = [config.bos_token_id, config.eos_token_id, 9, *config.task_token_ids.values()]
    texts = random_rows(draw, [draw.randint(1, 7) for _ in range(num_rows)], first_tokens)
    ids, mask = padded(draw, texts)
    given = {"input_ids": ids, "attention_mask": mask, "memory": memory}
    if way == "context":
        del given["memory"]
        given |= {"context_input_ids": batches[0][0], "context_attention_mask": batches[0][1], "ratio": ratio}
    elif way == "shared":
        given["memory"] = memory.rows(0)

    logits = model(**given).logits
    for row, text in enumerate(texts):
        source = 0 if way == "shared" else row
        of_row = [compress(rows[source][None], ratio=by_row[source]) for rows in documents]
        alone = {"input_ids": text[None], "attention_mask": torch.ones_like(text)[None]}
        alone["memory"] = CompressedContext.concatenate(of_row)
        assert_same_row(memory, source, alone["memory"])
        torch.testing.assert_close(logits[row, mask[row].bool()], model(**alone).logits[0], atol=5e-4, rtol=1e-3)
