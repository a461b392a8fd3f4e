# SPDX-License-Identifier: Apache-2.0
"""Every row is the same alone, in a batch, and wherever its pads stand."""

import pytest
import torch
from harsh_attention import BLIND, harsh_sdpa
from parameters import assert_same_gradients
from parameters import gradients as take_gradients

CONTEXT_LENGTHS, TEXT_LENGTHS = [13, 5, 1, 9], [4, 7, 2, 5]
NEW_TOKENS = 4


def assert_near(found, expected, where):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=lambda text: f"{where}: {text}")


def real(memory, row):
    mask = memory.attention_mask[row]
    assert mask.sort(descending=True).values.equal(mask)
    return mask.bool()


@torch.no_grad()
def test_slots_and_logits_do_not_depend_on_the_batch_or_its_padding(case, random_rows, pad_rows, slots):
    model, contexts, texts = case.model, random_rows(CONTEXT_LENGTHS), random_rows(TEXT_LENGTHS, seed=1)
    texts[1][0] = 1  # a BOS, which some settings move in front of the slots, and others reconstruct from
    memories = [model.compress(row[None], ratio=2) for row in contexts]
    expected = [
        model(input_ids=text[None], memory=memory).logits[0] for text, memory in zip(texts, memories, strict=True)
    ]
    for padding in ("left", "right", "interior"):
        (ids, mask), (text_ids, text_mask) = pad_rows(contexts, padding), pad_rows(texts, padding)
        context = {"context_input_ids": ids, "context_attention_mask": mask}
        batched = model.compress(ids, mask, ratio=2)
        logits = model(input_ids=text_ids, attention_mask=text_mask, **context, ratio=2).logits
        for i, (context, alone) in enumerate(zip(contexts, memories, strict=True)):
            where, places = f"padded {padding}, row {i}", real(batched, i)
            assert_near(slots(batched)[i, places], slots(alone)[0], where)
            assert batched.position_ids[i, places].tolist() == alone.position_ids[0].tolist(), where
            assert batched.num_context_tokens[i] == len(context), where
            assert not slots(batched)[i, ~places].any(), f"{where}: padding slots are zero"
            assert_near(logits[i, text_mask[i].bool()], expected[i], where)


def test_generated_ids_do_not_depend_on_the_batch_or_its_padding(place_case, random_rows, pad_rows):
    model, contexts, texts = place_case.model, random_rows([13, 5]), random_rows([4, 7], seed=1)
    texts[1][0] = 1
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    alone = [
        model.generate(input_ids=text[None], context_input_ids=context[None], **settings)[0].tolist()
        for context, text in zip(contexts, texts, strict=True)
    ]
    assert [ids[:-NEW_TOKENS] for ids in alone] == [text.tolist() for text in texts]
    for padding in ("left", "right"):
        ids, mask = pad_rows(contexts, padding)
        text_ids, text_mask = pad_rows(texts, padding)
        memory = model.compress(ids, mask)
        batched = model.generate(input_ids=text_ids, attention_mask=text_mask, memory=memory, **settings)
        # Right-padded questions are moved to the right, against the new tokens.
        assert [row[-len(ids) :].tolist() for row, ids in zip(batched, alone, strict=True)] == alone, padding


def test_an_empty_context_has_no_slots_and_still_generates(place_case, random_rows, pad_rows, slots):
    case, model = place_case, place_case.model
    contexts, texts = random_rows([7, 0, 3]), random_rows([3, 3, 3], seed=1)
    ids, mask = pad_rows(contexts, "left")
    memory = model.compress(ids, mask)
    # 6 tokens in a chunk, 3 memory tokens for each chunk however short it is.
    is_fixed = case.fields.get("memory_tokens") == "fixed"
    assert memory.num_slots.tolist() == ([6, 0, 3] if is_fixed else [4, 0, 2])
    assert slots(memory).isfinite().all()
    text = torch.stack(texts)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    batched = model.generate(input_ids=text, memory=memory, **settings)
    plain = model.generate(input_ids=text[1:2], **settings)
    assert batched[1].tolist() == plain[0].tolist(), "without slots the decoder is a plain language model"
    everything_empty = model.generate(
        input_ids=text, context_input_ids=torch.zeros((3, 0), dtype=torch.long), **settings
    )
    assert everything_empty[1].tolist() == plain[0].tolist()


def test_an_empty_context_leaves_the_other_rows_gradients_alone(backbone_case, random_rows, pad_rows):
    def gradients(lengths):
        model = backbone_case.build().train()
        contexts = random_rows([7, 5])
        ids, mask = pad_rows([context[:length] for context, length in zip(contexts, lengths, strict=True)])
        text = torch.stack(random_rows([4, 4], seed=1))
        labels = text.clone()
        labels[1] = -100
        model(input_ids=text, context_input_ids=ids, context_attention_mask=mask, labels=labels).loss.backward()
        # Scorers learn from every context, whatever its answer.
        return {name: g for name, g in take_gradients(model).items() if ".scorers." not in name}

    assert_same_gradients(gradients([7, 0]), gradients([7, 5]))


@pytest.mark.costly
@torch.no_grad()
def test_what_stands_at_a_pad_does_not_matter(method_case, random_rows, pad_rows):
    """A tokenizer's pad id may lie outside the model's table."""
    model, contexts, texts = method_case.model, random_rows(CONTEXT_LENGTHS), random_rows(TEXT_LENGTHS, seed=1)
    for padding in ("left", "right", "interior"):
        logits = []
        for value in (0, -100, 10**6):
            (ids, mask), (text_ids, text_mask) = pad_rows(contexts, padding, value), pad_rows(texts, padding, value)
            outputs = model(
                input_ids=text_ids, attention_mask=text_mask, context_input_ids=ids, context_attention_mask=mask
            )
            logits.append(outputs.logits[text_mask.bool()])
        assert logits[0].equal(logits[1]), f"-100, padded {padding}"
        assert logits[0].equal(logits[2]), f"10**6, padded {padding}"


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
        # The mean over a batch's targets, all but the first of each text.
        for part in parts:
            share = 1 if len(parts) == 1 else (part["input_ids"].shape[1] - 1) / 10
            (model(**part, ratio=2, use_cache=False).loss * share).backward()
        found[name] = take_gradients(model)
    for side in ("left", "right"):
        assert_same_gradients(found[side], found["alone"])


@pytest.mark.parametrize("attention", WITH_FLEX)
def test_texts_of_a_packed_row_without_a_context_do_not_see_each_other(attention, method_cases):
    model = method_cases["mean_pooling"].on(attention=attention).build()
    first, second = torch.arange(5, 9)[None], torch.arange(3, 8)[None]
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    packed = model(input_ids=torch.cat([first, second], dim=1), position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in (first, second)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
