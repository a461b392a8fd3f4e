# SPDX-License-Identifier: Apache-2.0
"""`generate` after a memory: caches, beams, streams, and many questions of one document."""

import copy

import decal_models
import pytest
import torch
from random_memories import tensors_of
from tiny_models import METHODS, ON_EVERY_BASE, TRAINING_FREE, Case
from transformers import GenerationConfig, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from context_compressors.modeling.parts.base_pass import CACHE

NEW_TOKENS = 6
GREEDY = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture
def texts(random_rows, pad_rows):
    """Three contexts, one of them empty, and three questions, padded on the left."""
    context_ids, context_mask = pad_rows(random_rows([11, 0, 6]))
    rows = random_rows([5, 3, 4], seed=1)
    rows[0][0] = 1
    input_ids, attention_mask = pad_rows(rows, "left")
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "context_input_ids": context_ids,
        "context_attention_mask": context_mask,
    }


def greedy_by_hand(model, texts, num_tokens):
    """Each token from a forward pass over everything so far."""
    texts = dict(texts)
    for _ in range(num_tokens):
        logits = model(**texts).logits[:, -1].clone()
        logits[:, model.config.eos_token_id] = -torch.inf
        texts["input_ids"] = torch.cat([texts["input_ids"], logits.argmax(dim=-1, keepdim=True)], dim=1)
        texts["attention_mask"] = torch.nn.functional.pad(texts["attention_mask"], (0, 1), value=1)
    return texts["input_ids"]


@torch.no_grad()
def test_every_way_to_generate_greedily_gives_the_same_ids(backbone_case, texts):
    model = backbone_case.model
    expected = greedy_by_hand(model, texts, NEW_TOKENS)
    for settings in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert model.generate(**texts, **GREEDY, **settings).tolist() == expected.tolist(), settings


@torch.no_grad()
def test_step_by_step_with_a_cache_equals_one_pass(place_case, texts):
    model = place_case.model
    memory = model.compress(texts["context_input_ids"], texts["context_attention_mask"])
    ids, mask = texts["input_ids"], texts["attention_mask"]
    together = model(input_ids=ids, attention_mask=mask, memory=memory).logits
    first = 5
    offset = model.model.text_position_offset(memory, ids[:, :first], mask[:, :first])
    outputs = model(input_ids=ids[:, :first], attention_mask=mask[:, :first], memory=memory, use_cache=True)
    steps = [outputs.logits]
    for end in range(first + 1, ids.shape[1] + 1):
        outputs = model(
            input_ids=ids[:, end - 1 : end],
            attention_mask=mask[:, :end],
            memory=memory,
            cache=outputs[CACHE],
            text_position_offset=offset,
        )
        steps.append(outputs.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(steps, dim=1)[real], together[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_static_cache_of_the_callers_holds_the_slots_too(form_case, random_rows, name):
    model, text = form_case.model, random_rows([4], seed=1)[0][None]
    memory = model.compress(random_rows([9])[0][None])
    cache = StaticCache(config=model.config.decoder_config, max_cache_len=5 + 4 + NEW_TOKENS)
    cached = model.generate(input_ids=text, memory=memory, **{name: cache}, **GREEDY)
    assert cache.get_seq_length() > text.shape[1]
    assert cached.tolist() == model.generate(input_ids=text, memory=memory, **GREEDY).tolist()


@torch.no_grad()
def test_pads_without_a_mask_are_found_by_their_id(method_cases, texts, random_rows, pad_rows):
    model = method_cases["icae"].on(variant="enhanced").model
    rows = random_rows([5, 3, 4], seed=1)
    rows[1][0] = model.config.reconstruction_token_id
    context = {name: texts[name] for name in ("context_input_ids", "context_attention_mask")}
    for side in ("left", "right"):
        ids, mask = pad_rows(rows, side)
        expected = model.generate(ids, attention_mask=mask, **context, **GREEDY)
        assert model.generate(ids, **context, **GREEDY).equal(expected), side


@torch.no_grad()
def test_a_question_read_in_chunks_has_no_pads(form_case, texts, random_rows):
    model, question = form_case.model, random_rows([7], seed=1)[0][None]
    context = {"context_input_ids": texts["context_input_ids"][:1]}
    expected = model.generate(question, **context, **GREEDY)
    assert model.generate(question, **context, **GREEDY, prefill_chunk_size=3).equal(expected)
    with pytest.raises(ValueError, match=r"`prefill_chunk_size` \(3\) needs questions of one length"):
        model.generate(**texts, **GREEDY, prefill_chunk_size=3)
    own = GenerationConfig(**GREEDY, prefill_chunk_size=3)
    assert model.generate(question, **context, generation_config=own).equal(expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mean_pooling", "ranked_key_values"])
def test_a_chats_opening_that_chunks_would_split_is_read_as_in_one_pass(method_cases, name, random_rows):
    opening = [3, 9, 7, 4]
    own = {"opening_ids": opening} if name == "ranked_key_values" else {}
    model = method_cases[name].build(slots_after_ids=opening[2:], **own)
    rows = torch.cat([torch.tensor([opening] * 2), torch.stack(random_rows([5, 5], seed=1))], dim=1)
    given = {"memory": model.compress(torch.stack(random_rows([9, 9])), ratio=2), **GREEDY, "output_logits": True}
    whole = model.generate(rows, **given, return_dict_in_generate=True)
    for size in (1, 3, 5):
        chunks = model.generate(rows, **given, return_dict_in_generate=True, prefill_chunk_size=size)
        assert chunks.sequences.equal(whole.sequences), size
        torch.testing.assert_close(chunks.logits[0], whole.logits[0], atol=1e-4, rtol=1e-4)


def test_hidden_states_and_attentions_as_asked_by_call_or_configuration(form_case, inputs):
    model = form_case.on(attention="eager").build()
    every = model(**inputs, output_hidden_states=True, output_attentions=True)
    some = model(**inputs, output_hidden_states=[0, 2]).hidden_states
    assert [None if states is None else True for states in some] == [True, None, True]
    assert all(some[layer].equal(every.hidden_states[layer]) for layer in (0, 2))
    assert model(**inputs).hidden_states is model(**inputs).attentions is None
    model.config.output_hidden_states = model.config.output_attentions = True
    found = model(**inputs)
    for field in ("hidden_states", "attentions"):
        assert len(found[field]) == len(every[field])
        assert all(one.equal(other) for one, other in zip(found[field], every[field], strict=True))
    assert model(**inputs, output_hidden_states=False).hidden_states is None


LENGTH = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
# Ways to other ids, each with the number of sequences that it returns for a row.
DETERMINISTIC = {
    "greedy": ({}, 1),
    "processors": ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]}, 1),
    "beams": ({"num_beams": 3, "length_penalty": 2.0}, 1),
    "best_beams": ({"num_beams": 3, "num_return_sequences": 2, "early_stopping": True}, 2),
    "beams_without_cache": ({"num_beams": 2, "use_cache": False}, 1),
    "beams_in_a_static_cache": ({"num_beams": 2, "cache_implementation": "static"}, 1),
}
SAMPLING = {
    "samples": ({"do_sample": True, "top_k": 10, "temperature": 0.7}, 1),
    "several_samples": ({"do_sample": True, "top_p": 0.9, "num_return_sequences": 3}, 3),
    "sampled_beams": ({"do_sample": True, "num_beams": 2}, 1),
}
MODELS = {method.name: Case(method, attention="eager") for method in METHODS + TRAINING_FREE}
# Their readers have code of their own; those of the others are run before a release.
READERS = ("snap_kv", "decal", "voco", "ranked_key_values", "activation_beacon", "kv_zip")


def marks(name):
    if name in ON_EVERY_BASE:
        return ()
    return pytest.mark.slow if name in READERS else (pytest.mark.slow, pytest.mark.release)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in (*MODELS, "decal")])
def model(request):
    return decal_models.build(attention="eager") if request.param == "decal" else MODELS[request.param].model


def row(texts, index):
    """One row alone, without its pads."""
    names = (("input_ids", "attention_mask"), ("context_input_ids", "context_attention_mask"))
    return {ids: texts[ids][index][texts[mask][index].bool()][None] for ids, mask in names}


def test_a_batch_gives_what_its_rows_give_alone(model, texts):
    for way, (settings, number) in DETERMINISTIC.items():
        together = model.generate(**texts, **GREEDY, **settings)
        assert together.shape == (3 * number, texts["input_ids"].shape[1] + NEW_TOKENS), way
        assert together[:, :-NEW_TOKENS].equal(texts["input_ids"].repeat_interleave(number, dim=0)), way
        for index in range(3):
            alone = model.generate(**row(texts, index), **GREEDY, **settings)
            of_row = together[index * number : (index + 1) * number, -alone.shape[1] :]
            assert of_row.tolist() == alone.tolist(), way


def test_samples_follow_the_seed_and_leave_the_memory_as_it_is(model, texts):
    memory = model.compress(texts["context_input_ids"], texts["context_attention_mask"])
    asked = {"input_ids": texts["input_ids"], "attention_mask": texts["attention_mask"], "memory": memory}
    before = {name: tensor.clone() for name, tensor in tensors_of(memory).items()}
    for way, (settings, number) in SAMPLING.items():
        found = []
        for seed, given in ((0, texts), (0, asked), (1, asked), (2, asked)):
            torch.manual_seed(seed)
            found.append(model.generate(**given, **LENGTH, **settings))
        first, again, *others = found
        assert first.shape == (3 * number, texts["input_ids"].shape[1] + NEW_TOKENS), way
        assert first.equal(again), way
        assert any(not first.equal(other) for other in others), way
    assert all(tensor.equal(before[name]) for name, tensor in tensors_of(memory).items())


def test_a_row_that_ends_is_padded_while_others_go_on(model, texts):
    free = model.generate(**texts, **GREEDY)[:, -NEW_TOKENS:]
    end = int(free[0, 1])
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": 3}
    # As a least number of tokens does.
    settings["suppress_tokens"] = [model.config.eos_token_id]
    ended = model.generate(**texts, **settings)[:, texts["input_ids"].shape[1] :]
    for expected, found in zip(free.tolist(), ended.tolist(), strict=True):
        expected = expected[: expected.index(end) + 1] if end in expected else expected
        assert found == (expected + [3] * NEW_TOKENS)[: len(found)]


def test_a_text_goes_on_from_its_cache(model, texts):
    """Without a memory; with one, a caller gives the memory and the whole text again."""
    if model.config.is_encoder_decoder:
        pytest.skip("transformers continues no encoder-decoder from its cache")
    question, context = row(texts, 0)["input_ids"], row(texts, 0)["context_input_ids"]
    twice_as_long = {**GREEDY, "max_new_tokens": 2 * NEW_TOKENS, "min_new_tokens": 2 * NEW_TOKENS}
    for given in ({}, {"memory": model.compress(context)}):
        first = model.generate(question, **given, **GREEDY, return_dict_in_generate=True)
        # Without the mask, generated pads would be taken for padding.
        read = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences), **given}
        if given:
            with pytest.raises(ValueError, match="`cache` must be empty when `generate` starts with a memory"):
                model.generate(**read, **GREEDY, **{CACHE: first[CACHE]})
        else:
            read[CACHE] = first[CACHE]
        rest = model.generate(**read, **GREEDY)
        assert rest.tolist() == model.generate(question, **given, **twice_as_long).tolist()


def test_pads_in_float64_with_eager_attention(model, texts):
    """Its softmax is float32, in which the least float64 of a masked score is minus infinity."""
    in_float64 = copy.deepcopy(model).double()
    is_text = texts["attention_mask"].bool()
    logits = in_float64(**texts).logits[is_text]
    torch.testing.assert_close(logits.float(), model(**texts).logits[is_text], atol=1e-4, rtol=1e-4)
    assert in_float64.generate(**texts, **GREEDY).equal(model.generate(**texts, **GREEDY))


class Recorder(BaseStreamer, StoppingCriteria):
    """A streamer and stopping criterion that keeps what it is shown."""

    def __init__(self):
        self.streamed, self.judged, self.has_ended = [], [], False

    def put(self, value):
        self.streamed += value.flatten().tolist()

    def end(self):
        self.has_ended = True

    def __call__(self, input_ids, scores, **kwargs):
        self.judged.append(input_ids[0].tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_streamers_and_stopping_criteria_see_what_is_returned(model, texts):
    recorder = Recorder()
    settings = {"streamer": recorder, "stopping_criteria": [recorder], **GREEDY}
    generated = model.generate(**row(texts, 0), **settings)[0].tolist()
    assert (recorder.streamed, recorder.has_ended) == (generated, True)
    assert recorder.judged == [generated[:end] for end in range(len(generated) - NEW_TOKENS + 1, len(generated) + 1)]
