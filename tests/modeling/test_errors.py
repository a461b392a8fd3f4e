# SPDX-License-Identifier: Apache-2.0
"""Mistakes at the public edge have an error that names the value and what is allowed."""

import re

import pytest
import torch

from context_compressors.modeling.compressor import validation
from context_compressors.modeling.parts.base_pass import CACHE

CONTEXT, TEXT = torch.arange(5, 15)[None], torch.arange(20, 24)[None]


def raises(error, *parts):
    """`pytest.raises` with all of `parts` in the message, in order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(part) for part in parts))


@pytest.fixture
def model(method_cases):
    return method_cases["mean_pooling"].model


def with_id(wrong):
    ids = TEXT.clone()
    ids[0, 2] = wrong
    return ids


WRONG_CONTEXTS = [
    ({"ratio": 4}, ValueError, ("not trained for the ratio 4", "[2, 3, 8]", "allow_untrained_ratio=True")),
    ({"ratio": torch.tensor([2, 2])}, ValueError, ("1 rows", "(2,)")),
    ({"attention_mask": torch.ones(1, 9)}, ValueError, ("`attention_mask`", "(1, 10)", "(1, 9)")),
    ({"input_ids": with_id(140)}, ValueError, ("input_ids", "140", "128 tokens")),
    ({"input_ids": CONTEXT[0]}, ValueError, ("(batch_size, num_tokens)", "(10,)")),
]


@pytest.mark.parametrize(("wrong", "error", "parts"), WRONG_CONTEXTS)
def test_what_cannot_be_compressed_is_refused(model, wrong, error, parts):
    with raises(error, *parts):
        model.compress(**{"input_ids": CONTEXT, **wrong})


WRONG_TEXTS = [
    ({"input_ids": TEXT[:, :0]}, ValueError, ("no token in row", "0")),
    ({"context_input_ids": CONTEXT}, ValueError, ("`context_input_ids` or `memory`",)),
    ({"ratio": 8}, ValueError, ("`ratio`", "`context_input_ids`", "`memory.at_ratio(ratio)`")),
    ({"memory": "document.safetensors"}, TypeError, ("CompressedContext", "str")),
    ({"input_ids": TEXT.expand(3, -1), "rows": 2}, ValueError, ("2 rows", "3")),
]


@pytest.mark.parametrize(("wrong", "error", "parts"), WRONG_TEXTS)
def test_what_cannot_be_read_or_answered_is_refused(model, wrong, error, parts):
    wrong = dict(wrong)
    memory = model.compress(CONTEXT.expand(wrong.pop("rows", 1), -1))
    for call in (model, model.generate):
        with raises(error, *parts):
            call(**{"input_ids": TEXT, "memory": memory, **wrong})


def test_misspelt_arguments_and_missing_questions_are_refused(model):
    memory = model.compress(CONTEXT)
    with raises(TypeError, "memry", "did you mean"):
        model(TEXT, memry=memory)
    with raises(ValueError, "`input_ids`", "BOS"):
        model.generate(memory=memory, max_new_tokens=2)


def test_an_untrained_ratio_can_be_allowed_and_masks_and_ids_have_any_type(model):
    memory = model.compress(CONTEXT.int(), CONTEXT.ne(0), ratio=4, allow_untrained_ratio=True)
    assert memory.num_slots.tolist() == [3]
    mask = torch.tensor([[1, 1, 1, 0]])
    expected = model(TEXT, attention_mask=mask, memory=memory).logits
    assert model(TEXT.int(), attention_mask=mask.float(), memory=memory).logits.equal(expected)


def test_other_ids_than_the_task_tokens_are_refused(form_case):
    model = form_case.build(task_token_ids={"[AE]": 128})
    model(torch.tensor([[128, 9]]))
    with raises(ValueError, "129", "[AE]", "128"):
        model(torch.tensor([[129, 9]]))
    with raises(ValueError, "128", "vocabulary"):
        model.compress(torch.tensor([[128, 9]]))  # task tokens belong to the text


# --- lengths ---


@pytest.mark.only(lambda case: not (case.method.passages or case.method.windows or case.method.ranks))
def test_a_context_beyond_the_bases_positions_names_both_lengths(method_case):
    model = method_case.build(decoder_config={"max_position_embeddings": 16})
    context = torch.full((1, 17), 9)
    hint = "chunk_size" if model.config.chunk_size is None else "cut the context"
    with raises(ValueError, "17", "16", "max_position_embeddings", hint):
        model.compress(context)
    fits = 10 if method_case.method.memory_tokens else 16  # 5 memory tokens stand behind 10 context tokens
    mask = torch.ones_like(context[:, : fits + 1])
    mask[0, 3] = 0
    model.compress(context[:, : fits + 1], mask)  # pads do not count
    chunked = method_case.build(decoder_config={"max_position_embeddings": 16}, chunk_size=fits)
    assert chunked.compress(context).num_slots.tolist() == [9]


def test_memories_beyond_the_decoders_positions_are_read_with_a_warning(form_case, caplog, monkeypatch):
    model = form_case.build(decoder_config={"max_position_embeddings": 16}, chunk_size=8)
    memory = model.compress(CONTEXT[:, :8])
    # A warning that is given once in a process would be gone in the second test.
    monkeypatch.setattr(validation.logger, "warning_once", validation.logger.warning, raising=False)
    for count, warned in ((3, False), (4, True)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            model(TEXT, memory=type(memory).concatenate([memory] * count))
        assert ("more positions than the 16 of the decoder" in caplog.text) == warned


# --- caches ---


@torch.no_grad()
def test_a_cache_with_a_memory_goes_with_it(form_case):
    model, text = form_case.model, TEXT
    memory = model.compress(CONTEXT, ratio=2)
    cache = model(text, memory=memory, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"`cache` holds the \d+ slots of a memory: give the memory, too"):
        model(text[:, :1], cache=cache)
    with raises(ValueError, "`text_position_offset`"):
        model(text[:, :1], memory=memory, cache=cache)
    with pytest.raises(ValueError, match="`assistant_model` drafts without the memory"):
        model.generate(text, memory=memory, assistant_model=model)


# --- memories ---


def test_an_unnamed_memory_is_read_by_the_model_that_made_it_alone(form_case):
    model, other = form_case.build(), form_case.build(seed=1)
    named = other.compress(CONTEXT)
    for call in (model, model.generate):
        with raises(ValueError, other.model_id, model.model_id):
            call(input_ids=TEXT, memory=named)
    memory = model.train().compress(CONTEXT)
    assert memory.model_id == ""
    model(TEXT, memory=memory.rows(0))
    with raises(ValueError, "made by another model, in training mode", other.model_id):
        other(TEXT, memory=memory)
    unnamed = other.train().compress(CONTEXT)
    for join in (type(memory).concatenate, type(memory).stack):
        with raises(ValueError, "memories of different models, made in training mode"):
            join([memory, unnamed])
        joined = join([memory, model.compress(CONTEXT)]).rows(0)
        assert model(TEXT, memory=joined).logits.isfinite().all()


# --- the model's own settings ---


def test_parts_that_no_model_has_are_refused(form_case):
    with raises(ValueError, "trainable_parameters", "no_such_part"):
        form_case.build(trainable_parameters=[r"\.lora_B\.", "no_such_part"])
    with raises(ValueError, "target_modules", "query", "q_proj"):
        form_case.build(decoder_lora={"target_modules": ["q_proj", "query"]})


def test_tensor_parallelism_is_refused(form_case):
    with raises(ValueError, "tensor parallelism", "tp_plan='auto'", "device_map"):
        type(form_case.model).from_pretrained("nowhere", tp_plan="auto")
