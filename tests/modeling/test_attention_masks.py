# SPDX-License-Identifier: Apache-2.0
"""No query that sees nothing reaches an attention kernel, whatever the padding and the attention implementation."""

import pytest
import torch
from harsh_attention import BLIND, harsh_sdpa

WITH_FLEX = ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)]


def test_the_stand_in_spoils_values_and_gradients_of_a_query_that_sees_nothing():
    query, key, value = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    output = harsh_sdpa(query, key, value, torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0]]).bool()[None, None])
    assert output.isnan().all(dim=-1)[0, 0].tolist() == [True, False, False]
    output[:, :, 1:].sum().backward()
    assert query.grad.isnan().any()
    assert BLIND.pop("sdpa") == 1


@pytest.mark.parametrize("attention", WITH_FLEX)
def test_loss_and_gradients_are_those_of_the_rows_alone(form_case, attention, random_rows, pad_rows):
    model = form_case.on(attention=attention).build().train()
    contexts, texts = random_rows([13, 0, 5]), random_rows([3, 6, 4], seed=1)
    batches = {}
    for side in ("left", "right"):
        (context_ids, context_mask), (ids, mask) = pad_rows(contexts, side), pad_rows(texts, side)
        context = {"context_input_ids": context_ids, "context_attention_mask": context_mask}
        # In front of a first token stands a pad on one side, and nothing on the other.
        labels = ids.masked_fill((mask == 0) | (mask.cumsum(dim=1) == 1), -100)
        batches[side] = [{"input_ids": ids, "attention_mask": mask, "labels": labels, **context}]
    batches["alone"] = [
        {"input_ids": text[None], "labels": text[None], "context_input_ids": context[None]}
        for context, text in zip(contexts, texts, strict=True)
    ]
    found = {}
    for name, parts in batches.items():
        model.zero_grad()
        # The mean over a batch's targets, all but the first of each text.
        for part in parts:
            share = 1 if len(parts) == 1 else (part["input_ids"].shape[1] - 1) / 10
            (model(**part, ratio=2, use_cache=False).loss * share).backward()
        found[name] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for side in ("left", "right"):
        for name, gradient in found["alone"].items():
            torch.testing.assert_close(found[side][name], gradient, atol=1e-5, rtol=1e-3, msg=f"{side} {name}")
