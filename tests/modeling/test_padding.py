# SPDX-License-Identifier: Apache-2.0
"""Every row is the same alone, in a batch, and wherever its pads stand."""

import pytest
import torch

CONTEXT_LENGTHS, TEXT_LENGTHS = [13, 5, 1, 9], [4, 7, 2, 5]
NEW_TOKENS = 4
padded_anywhere = pytest.mark.parametrize("padding", ["left", "right", "interior"])


def real(memory, row):
    mask = memory.attention_mask[row]
    assert mask.sort(descending=True).values.equal(mask)
    return mask.bool()


@torch.no_grad()
@padded_anywhere
def test_slots_do_not_depend_on_the_batch_or_its_padding(case, padding, random_rows, pad_rows, slots):
    rows = random_rows(CONTEXT_LENGTHS)
    ids, mask = pad_rows(rows, padding)
    batched = case.model.compress(ids, mask, ratio=2)
    for i, row in enumerate(rows):
        alone = case.model.compress(row[None], ratio=2)
        places = real(batched, i)
        torch.testing.assert_close(slots(batched)[i, places], slots(alone)[0], atol=1e-4, rtol=0)
        assert batched.position_ids[i, places].tolist() == alone.position_ids[0].tolist()
        assert batched.num_context_tokens[i] == len(row)
        assert not slots(batched)[i, ~places].any(), "padding slots are zero"


@torch.no_grad()
@padded_anywhere
def test_logits_do_not_depend_on_the_batch_or_its_padding(case, padding, random_rows, pad_rows):
    contexts, texts = random_rows(CONTEXT_LENGTHS), random_rows(TEXT_LENGTHS, seed=1)
    texts[1][0] = 1  # a BOS, which some settings move in front of the slots, and others reconstruct from
    ids, mask = pad_rows(contexts, padding)
    text_ids, text_mask = pad_rows(texts, padding)
    batched = case.model(
        input_ids=text_ids, attention_mask=text_mask, context_input_ids=ids, context_attention_mask=mask, ratio=2
    ).logits
    for i, (context, text) in enumerate(zip(contexts, texts, strict=True)):
        alone = case.model(input_ids=text[None], context_input_ids=context[None], ratio=2).logits
        torch.testing.assert_close(batched[i, text_mask[i].bool()], alone[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_generated_ids_do_not_depend_on_the_batch_or_its_padding(case, padding, random_rows, pad_rows):
    contexts, texts = random_rows([13, 5]), random_rows([4, 7], seed=1)
    texts[1][0] = 1
    ids, mask = pad_rows(contexts, padding)
    text_ids, text_mask = pad_rows(texts, padding)
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    memory = case.model.compress(ids, mask)
    batched = case.model.generate(input_ids=text_ids, attention_mask=text_mask, memory=memory, **settings)
    for i, (context, text) in enumerate(zip(contexts, texts, strict=True)):
        alone = case.model.generate(input_ids=text[None], context_input_ids=context[None], **settings)
        assert alone[0, : len(text)].tolist() == text.tolist()
        # Right-padded questions are moved to the right, against the new tokens.
        assert batched[i, -NEW_TOKENS - len(text) :].tolist() == alone[0].tolist()


@torch.no_grad()
def test_a_memory_of_one_row_padded_by_others_is_read_like_its_own(variant_case, random_rows, pad_rows):
    ids, mask = pad_rows(random_rows(CONTEXT_LENGTHS))
    text = random_rows([4], seed=1)[0][None]
    memory = variant_case.model.compress(ids, mask)
    together = variant_case.model(input_ids=text.expand(4, -1), memory=memory).logits
    for i in range(4):
        alone = variant_case.model(input_ids=text, memory=memory.rows(i)).logits
        torch.testing.assert_close(together[i], alone[0], atol=1e-4, rtol=0)


def test_an_empty_context_has_no_slots_and_still_generates(case, random_rows, pad_rows, slots):
    model = case.model
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
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with_empty, without = gradients([7, 0]), gradients([7, 5])
    assert with_empty.keys() == without.keys()
    for name, gradient in with_empty.items():
        torch.testing.assert_close(gradient, without[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("pad_value", [-100, 10**6])
@padded_anywhere
def test_what_stands_at_a_pad_does_not_matter(method_case, pad_value, padding, random_rows, pad_rows):
    """A tokenizer's pad id may lie outside the model's table."""
    model, contexts, texts = method_case.model, random_rows(CONTEXT_LENGTHS), random_rows(TEXT_LENGTHS, seed=1)
    logits = []
    for value in (0, pad_value):
        (ids, mask), (text_ids, text_mask) = pad_rows(contexts, padding, value), pad_rows(texts, padding, value)
        outputs = model(
            input_ids=text_ids, attention_mask=text_mask, context_input_ids=ids, context_attention_mask=mask
        )
        logits.append(outputs.logits[text_mask.bool()])
    assert logits[0].equal(logits[1])
