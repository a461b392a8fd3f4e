# SPDX-License-Identifier: Apache-2.0
"""transformers' promises of `generate` hold behind a memory, for every method and way to generate."""

import decal_models
import pytest
import torch
from tiny_models import METHODS, ON_EVERY_BASE, TRAINING_FREE, Case

from context_compressors.modeling.parts.cache_name import CACHE

NEW_TOKENS = 5
LENGTH = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
GREEDY = {**LENGTH, "do_sample": False}
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


@pytest.fixture
def texts(random_rows, pad_rows):
    """Three contexts, and three questions that are padded on the left."""
    context_ids, context_mask = pad_rows(random_rows([11, 4, 6]))
    input_ids, attention_mask = pad_rows(random_rows([5, 3, 4], seed=1), "left")
    context = {"context_input_ids": context_ids, "context_attention_mask": context_mask}
    return {"input_ids": input_ids, "attention_mask": attention_mask, **context}


def row(texts, index):
    """One row alone, without its pads."""
    names = (("input_ids", "attention_mask"), ("context_input_ids", "context_attention_mask"))
    return {ids: texts[ids][index][texts[mask][index].bool()][None] for ids, mask in names}


def tensors_of(memory):
    pairs = memory.key_values or ()
    own = (memory.embeddings, memory.attention_mask, memory.position_ids, *(part for pair in pairs for part in pair))
    return [tensor for tensor in own if tensor is not None]


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
    before = [tensor.clone() for tensor in tensors_of(memory)]
    for way, (settings, number) in SAMPLING.items():
        found = []
        for seed, given in ((0, texts), (0, asked), (1, asked), (2, asked)):
            torch.manual_seed(seed)
            found.append(model.generate(**given, **LENGTH, **settings))
        first, again, *others = found
        assert first.shape == (3 * number, texts["input_ids"].shape[1] + NEW_TOKENS), way
        assert first.equal(again), way
        assert any(not first.equal(other) for other in others), way
    assert all(now.equal(then) for now, then in zip(tensors_of(memory), before, strict=True))


def test_a_row_that_ends_is_padded_while_others_go_on(model, texts):
    free = model.generate(**texts, **GREEDY)[:, -NEW_TOKENS:]
    end = int(free[0, 1])
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": 3}
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
