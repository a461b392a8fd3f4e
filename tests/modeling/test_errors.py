# SPDX-License-Identifier: Apache-2.0
"""Every mistake has an error that names the value and what is allowed."""

import re

import pytest
import torch

from context_compressors.modeling.compressor import validation
from context_compressors.modeling.parts.cache_name import CACHE

CONTEXT, TEXT = torch.arange(5, 15)[None], torch.arange(20, 24)[None]
# What is refused before a method has its turn: one stands for all.
before_any_method = pytest.mark.only(lambda case: case.method.name == "mean_pooling")


def raises(error, *parts):
    """`pytest.raises` with all of `parts` in the message, in order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(part) for part in parts))


@pytest.fixture
def model(form_case):
    return form_case.model


# --- ratios ---


def test_an_untrained_ratio_lists_the_ones_there_are(model):
    for call in (
        lambda: model.compress(CONTEXT, ratio=4),
        lambda: model.compress(CONTEXT, ratio=[2, 4]),
        lambda: model.compress(CONTEXT, ratio=torch.tensor([4])),
        lambda: model(TEXT, context_input_ids=CONTEXT, ratio=4),
        lambda: model.generate(TEXT, context_input_ids=CONTEXT, ratio=4, max_new_tokens=2),
    ):
        with raises(ValueError, "not trained for the ratio 4", "[2, 3, 8]", "allow_untrained_ratio=True"):
            call()
    memory = model.compress(CONTEXT, ratio=4, allow_untrained_ratio=True)
    assert memory.num_slots.tolist() == [3]
    assert model(TEXT, memory=memory).logits.isfinite().all()


@before_any_method
@pytest.mark.parametrize(
    ("ratio", "error", "parts"),
    [
        (0, ValueError, ("from 1 to 65536", "0")),
        (65_537, ValueError, ("from 1 to 65536", "65537")),
        (torch.tensor([0]), ValueError, ("from 1 to 65536", "0")),
        ([], ValueError, ("empty list", "[2, 3, 8]")),
        ("2", TypeError, ("'2'",)),
        (torch.tensor([2, 2]), ValueError, ("1 rows", "(2,)")),
    ],
    ids=repr,
)
def test_impossible_ratios_are_refused_even_if_untrained_ones_are_allowed(model, ratio, error, parts):
    for allow in (False, True):
        with raises(error, *parts):
            model.compress(CONTEXT, ratio=ratio, allow_untrained_ratio=allow)


# --- lengths ---


@pytest.mark.only(lambda case: not (case.method.passages or case.method.windows or case.method.ranks))
def test_a_context_beyond_the_bases_positions_names_both_lengths(method_case):
    model = method_case.build(decoder_config={"max_position_embeddings": 16})
    context = torch.full((1, 17), 9)
    hint = "chunk_size" if model.config.chunk_size is None else "cut the context"
    with raises(ValueError, "17", "16", "max_position_embeddings", hint):
        model.compress(context)
    with raises(ValueError, "17", "16"):
        model(TEXT, context_input_ids=context)
    fits = 10 if method_case.method.memory_tokens else 16  # 5 memory tokens stand behind 10 context tokens
    model.compress(context[:, :fits])
    mask = torch.ones_like(context[:, : fits + 1])
    mask[0, 3] = 0
    model.compress(context[:, : fits + 1], mask)  # pads do not count
    chunked = method_case.build(decoder_config={"max_position_embeddings": 16}, chunk_size=fits)
    assert chunked.compress(context).num_slots.tolist() == [9]


@pytest.mark.only(lambda case: case.method.memory_tokens)
def test_memory_tokens_beyond_the_bases_positions_are_refused(method_case):
    model = method_case.build(decoder_config={"max_position_embeddings": 16})
    with raises(ValueError, "17", "16"):
        model.compress(torch.full((1, 11), 9))


@pytest.mark.only(lambda case: not (case.method.passages or case.method.recurrent or case.method.ranks))
def test_layouts_that_count_on_from_chunk_to_chunk_need_the_positions(method_case):
    settings = {"decoder_config": {"max_position_embeddings": 16}, "chunk_size": 8, "position_layout": "enhanced"}
    model = method_case.build(**settings)
    model.compress(torch.full((1, 15), 9))
    with raises(ValueError, "18", "16"):
        model.compress(torch.full((1, 17), 9))


@pytest.mark.only(lambda case: not (case.method.passages or case.method.windows or case.method.ranks))
def test_a_chunk_longer_than_the_positions_is_refused(method_case):
    model = method_case.build(decoder_config={"max_position_embeddings": 16}, chunk_size=20)
    with raises(ValueError, "18", "16"):
        model.compress(torch.full((1, 18), 9))


def test_memories_beyond_the_decoders_positions_are_read_with_a_warning(form_case, caplog, monkeypatch):
    model = form_case.build(decoder_config={"max_position_embeddings": 16}, chunk_size=8)
    memory = model.compress(CONTEXT[:, :8])
    # A warning that is given once in a process would be gone in the second test.
    monkeypatch.setattr(validation.logger, "warning_once", validation.logger.warning, raising=False)
    for count, warned in ((3, False), (4, True)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            joined = type(memory).concatenate([memory] * count)
            model(TEXT, memory=joined)
        assert ("more positions than the 16 of the decoder" in caplog.text) == warned


# --- questions ---


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])], ids=["no_columns", "pads_only"])
def test_a_question_without_tokens_is_refused(model, mask):
    memory = model.compress(CONTEXT)
    text = TEXT[:, :0] if mask is None else TEXT.expand(2, -1)
    with raises(ValueError, "no token in row", "0" if mask is None else "1"):
        model(text, attention_mask=mask, memory=memory)
    with raises(ValueError, "no token in row", "0" if mask is None else "1"):
        model.generate(text, attention_mask=mask, memory=memory, max_new_tokens=2)


def test_no_question_at_all_is_refused(model):
    memory = model.compress(CONTEXT)
    with raises(ValueError, "`input_ids`", "BOS"):
        model.generate(memory=memory, max_new_tokens=2)
    with raises(ValueError, "`input_ids`"):
        model(memory=memory)
    with raises(ValueError, "`inputs`", "`input_ids`"):
        model.generate(TEXT, input_ids=TEXT, memory=memory, max_new_tokens=2)


def test_context_and_memory_together_are_refused(model):
    memory = model.compress(CONTEXT)
    for call in (model, model.model, model.generate):
        with raises(ValueError, "`context_input_ids` or `memory`"):
            call(input_ids=TEXT, memory=memory, context_input_ids=CONTEXT)


def test_a_ratio_beside_a_memory_is_the_memorys_own(model):
    memory = model.compress(CONTEXT.expand(2, -1), ratio=torch.tensor([2, 3]))
    for call in (model, model.model, model.generate):
        for ratio in (8, torch.tensor([3, 2])):
            with raises(ValueError, "compressed at ratio", "`ratio` is", "leave `ratio` out"):
                call(input_ids=TEXT.expand(2, -1), memory=memory, ratio=ratio)
        call(input_ids=TEXT.expand(2, -1), memory=memory, ratio=torch.tensor([2, 3]))


def test_settings_of_a_context_without_one_are_refused(model):
    memory = model.compress(CONTEXT)
    for call in (model, model.model, model.generate):
        with raises(ValueError, "`ratio` is 999", "`context_input_ids`"):
            call(input_ids=TEXT, ratio=999)
        for given in ({}, {"memory": memory}):
            with raises(ValueError, "`context_attention_mask`", "`context_input_ids`"):
                call(input_ids=TEXT, context_attention_mask=torch.ones_like(CONTEXT), **given)


# --- masks and ids ---


@before_any_method
@pytest.mark.parametrize("shape", [(1, 9), (1, 1, 10, 10)], ids=str)
def test_a_mask_of_another_shape_is_refused(model, shape):
    with raises(ValueError, "`attention_mask`", "(1, 10)", str(shape)):
        model.compress(CONTEXT, torch.ones(shape))
    for call in (model, model.generate):
        with raises(ValueError, "`context_attention_mask`", "(1, 10)", str(shape)):
            call(input_ids=TEXT, context_input_ids=CONTEXT, context_attention_mask=torch.ones(shape))
        with raises(ValueError, "`attention_mask`", "(1, 10)", str(shape)):
            call(input_ids=CONTEXT, attention_mask=torch.ones(shape))


def test_a_mask_of_another_shape_after_a_cache_is_refused(model):
    memory = model.compress(CONTEXT)
    cache = model(TEXT, memory=memory, use_cache=True)[CACHE]
    with raises(ValueError, "(1, 5)", "(1, 1)"):
        model(
            TEXT[:, :1],
            attention_mask=torch.ones(1, 1),
            memory=memory,
            cache=cache,
            text_position_offset=memory.num_slots,
        )
    with raises(ValueError, "`text_position_offset`"):
        model(TEXT[:, :1], memory=memory, cache=cache)


def test_masks_of_ones_and_zeros_are_taken_in_any_type(model):
    mask = torch.tensor([[1, 1, 1, 0]])
    expected = model(TEXT, attention_mask=mask, context_input_ids=TEXT, context_attention_mask=mask).logits
    for kind in (torch.bool, torch.float32):
        other = mask.to(kind)
        logits = model(TEXT, attention_mask=other, context_input_ids=TEXT, context_attention_mask=other).logits
        assert logits.equal(expected), kind


def test_ids_of_four_bytes_are_taken(model):
    memory = model.compress(CONTEXT.int(), CONTEXT.ne(0))
    assert model(TEXT.int(), memory=memory).logits.equal(model(TEXT, context_input_ids=CONTEXT).logits)


def test_an_empty_batch_is_refused(model):
    for call in (model.compress, model, lambda ids: model.generate(ids, max_new_tokens=2)):
        with raises(ValueError, "`input_ids`", "at least one row", "(0, 4)"):
            call(TEXT[:0])


@pytest.mark.parametrize("wrong", [140, -1])
def test_ids_outside_the_vocabulary_are_refused(model, wrong):
    ids = TEXT.clone()
    ids[0, 2] = wrong
    for call in (
        lambda: model.compress(ids),
        lambda: model(ids),
        lambda: model(TEXT, context_input_ids=ids),
        lambda: model.generate(ids, max_new_tokens=2),
    ):
        with raises(ValueError, "input_ids", str(wrong), "128 tokens"):
            call()


def test_other_ids_than_the_task_tokens_are_refused(form_case):
    model = form_case.build(task_token_ids={"[AE]": 128})
    model(torch.tensor([[128, 9]]))
    with raises(ValueError, "129", "[AE]", "128"):
        model(torch.tensor([[129, 9]]))
    with raises(ValueError, "128", "vocabulary"):
        model.compress(torch.tensor([[128, 9]]))  # task tokens belong to the text


@pytest.mark.parametrize("ids", [TEXT[0], TEXT[None]], ids=["one_dimension", "three_dimensions"])
def test_ids_of_other_dimensions_are_refused(model, ids):
    for call in (model.compress, model):
        with raises(ValueError, "(batch_size, num_tokens)", str(tuple(ids.shape))):
            call(ids)
        with raises(TypeError, "`input_ids` must be a tensor", "list"):
            call([[5, 6]])


@pytest.mark.parametrize("name", ["atention_mask", "memry"])
def test_misspelt_arguments_are_refused(model, name):
    with raises(TypeError, name, "did you mean"):
        model(TEXT, **{name: None})


def test_unknown_arguments_of_compress_are_refused(model):
    with raises(TypeError, "rate"):
        model.compress(CONTEXT, rate=4)
    model.compress(CONTEXT, token_type_ids=CONTEXT)


# --- memories ---


def test_the_memory_of_another_model_is_refused(form_case):
    other = form_case.build(seed=1)
    memory = other.compress(CONTEXT)
    for call in (form_case.model, form_case.model.generate):
        with raises(ValueError, other.model_id, form_case.model.model_id):
            call(input_ids=TEXT, memory=memory)


def test_an_unnamed_memory_is_read_by_the_model_that_made_it_alone(form_case):
    model, other = form_case.build(), form_case.build(seed=1)
    model.train()
    memory = model.compress(CONTEXT)
    assert memory.model_id == ""
    model(TEXT, memory=memory.rows(0))
    for reader in (other, other.train()):
        with raises(ValueError, "made by another model, in training mode", reader.model_id):
            reader(TEXT, memory=memory)
    for join in (type(memory).concatenate, type(memory).stack):
        with raises(ValueError, "memories of different models, made in training mode"):
            join([memory, other.compress(CONTEXT)])
        assert (
            model(TEXT.expand(2, -1), memory=join([memory, model.compress(CONTEXT)]).rows(0)).logits.isfinite().all()
        )


@torch.no_grad()
def test_a_cache_with_a_memory_goes_with_it_row_by_row(form_case):
    model, text = form_case.model, TEXT
    memory = model.compress(CONTEXT, ratio=2)
    first = model(text, memory=memory, use_cache=True)
    offset = model.model.text_position_offset(memory, text, None)
    more = {"cache": first[CACHE], "text_position_offset": offset}
    with pytest.raises(ValueError, match=r"`cache` holds the \d+ slots of a memory: give the memory, too"):
        model(text[:, :1], cache=first[CACHE])
    assert model(text[:, :1], memory=memory, **more).logits.shape[1] == 1
    both = model(text.repeat(2, 1), memory=memory, use_cache=True)[CACHE]
    more = {"cache": both, "text_position_offset": offset.repeat(2)}
    with pytest.raises(ValueError, match="`memory` has 1 rows, `input_ids` has 2: behind a cache give a row for each"):
        model(text[:, :1].repeat(2, 1), memory=memory, **more)
    for name, value in (("assistant_model", model), ("assistant_early_exit", 1)):
        with pytest.raises(ValueError, match=f"`{name}` drafts without the memory"):
            model.generate(text, memory=memory, **{name: value})


def test_the_memory_of_another_batch_is_refused(model):
    memory = model.compress(CONTEXT.expand(2, -1))
    for call in (model, model.generate):
        with raises(ValueError, "2 rows", "3"):
            call(input_ids=TEXT.expand(3, -1), memory=memory)
        with raises(ValueError, "2 rows", "1"):
            call(input_ids=TEXT, memory=memory)


@pytest.mark.parametrize("memory", [torch.zeros(1, 5, 32), {"embeddings": None}, "document.safetensors"], ids=type)
def test_other_things_than_a_memory_are_refused(model, memory):
    for call in (model, model.generate):
        with raises(TypeError, "CompressedContext", type(memory).__name__):
            call(input_ids=TEXT, memory=memory)


# --- the model's own settings ---


def test_a_pattern_that_matches_nothing_is_refused(form_case):
    with raises(ValueError, "trainable_parameters", "no_such_part"):
        form_case.build(trainable_parameters=[r"\.lora_B\.", "no_such_part"])


def test_unknown_adapter_targets_are_refused_with_the_ones_there_are(form_case):
    with raises(ValueError, "target_modules", "query", "q_proj"):
        form_case.build(decoder_lora={"target_modules": ["q_proj", "query"]})


def test_adapters_without_peft_say_what_to_install(form_case, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with raises(ImportError, "pip install peft"):
        form_case.build(encoder_lora={"rank": 4})


def test_tensor_parallelism_is_refused(form_case):
    with raises(ValueError, "tensor parallelism", "tp_plan='auto'", "device_map"):
        type(form_case.model).from_pretrained("nowhere", tp_plan="auto")
