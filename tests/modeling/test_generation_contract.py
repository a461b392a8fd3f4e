# SPDX-License-Identifier: Apache-2.0
"""transformers' promises of `generate` hold behind a memory, for every method and way to generate."""

import copy

import decal_models
import pytest
import torch
from tiny_bases import VOCAB_SIZE
from tiny_models import METHODS, ON_EVERY_BASE, TRAINING_FREE, Case

from context_compressors.modeling.parts.cache_name import CACHE

NEW_TOKENS = 5
LENGTH = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
GREEDY = {**LENGTH, "do_sample": False}
# Other ways to the same ids.
AS_GREEDY = {
    "no_cache": {"use_cache": False},
    "dynamic_cache": {"cache_implementation": "dynamic"},
    "static_cache": {"cache_implementation": "static"},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
    "all_logits": {"output_scores": True, "output_logits": True},
}
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


def test_caches_drafts_and_outputs_leave_greedy_ids_as_they_are(model, texts):
    for index in range(2):
        asked = row(texts, index)
        expected = model.generate(**asked, **GREEDY).tolist()
        for way, settings in AS_GREEDY.items():
            found = model.generate(**asked, **GREEDY, **settings, return_dict_in_generate=True)
            assert found.sequences.tolist() == expected, way


def test_samples_follow_the_seed_and_the_memory(model, texts):
    memory = model.compress(texts["context_input_ids"], texts["context_attention_mask"])
    asked = {"input_ids": texts["input_ids"], "attention_mask": texts["attention_mask"], "memory": memory}

    def sample(seed, settings, **given):
        torch.manual_seed(seed)
        return model.generate(**given, **LENGTH, **settings)

    for way, (settings, number) in SAMPLING.items():
        first, *others = (sample(seed, settings, **texts) for seed in (0, 1, 2))
        assert first.shape == (3 * number, texts["input_ids"].shape[1] + NEW_TOKENS), way
        assert first.max() < VOCAB_SIZE, way
        assert any(not first.equal(other) for other in others), way
        assert sample(0, settings, **asked).equal(first), way


def test_inputs_and_the_memory_stay_as_they_are(model, texts):
    memory = model.compress(texts["context_input_ids"], texts["context_attention_mask"])
    asked = {"input_ids": texts["input_ids"], "attention_mask": texts["attention_mask"]}
    given = [*asked.values(), *tensors_of(memory)]
    before = [tensor.clone() for tensor in given]
    for settings in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        first = model.generate(**asked, memory=memory, **GREEDY, **settings)
        assert all(now.equal(then) for now, then in zip(given, before, strict=True))
        assert model.generate(**asked, memory=memory, **GREEDY, **settings).equal(first)
    assert model.generation_config.max_new_tokens is None


def test_outputs_have_an_entry_for_each_step_and_layer(model, texts):
    for settings in ({}, {"use_cache": False}, {"num_beams": 3}):
        check_outputs(model, texts, settings)


def check_outputs(model, texts, settings):
    asked = {"output_hidden_states": True, "output_attentions": True, "output_scores": True, "output_logits": True}
    outputs = model.generate(**texts, **GREEDY, **settings, **asked, return_dict_in_generate=True)
    rows, width = 3 * settings.get("num_beams", 1), texts["input_ids"].shape[1]
    assert outputs.sequences.shape == (3, width + NEW_TOKENS)
    if model.config.is_encoder_decoder:
        # The decoder reads a start token, and no column of pads.
        width = 1 + int(texts["attention_mask"].sum(dim=1).max())
    for name in ("scores", "logits"):
        assert [tuple(of_step.shape) for of_step in outputs[name]] == [(rows, VOCAB_SIZE)] * NEW_TOKENS
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    layers, heads = 2, 4
    grows = settings.get("use_cache") is False
    for step, states in enumerate(outputs[f"{prefix}hidden_states"]):
        length = width + step if grows or not step else 1
        assert [tuple(of_layer.shape) for of_layer in states] == [(rows, length, 32)] * (layers + 1), step
    # Where each head has its own key/values, no weights are returned.
    is_by_head = model.compress(texts["context_input_ids"], texts["context_attention_mask"]).head_ids is not None
    for step, weights in enumerate(() if is_by_head else outputs[f"{prefix}attentions"]):
        assert [of_layer.shape[:2] for of_layer in weights] == [(rows, heads)] * layers
        assert all((of_layer.shape[2] == 1) == bool(step and not grows) for of_layer in weights)
    if prefix:
        assert [len(of_step) for of_step in outputs.cross_attentions] == [layers] * NEW_TOKENS
    if "num_beams" in settings:
        assert outputs.sequences_scores.shape == (3,)
        assert outputs.beam_indices.shape == (3, NEW_TOKENS)
    assert (outputs.get(CACHE) is None) == grows


def test_pads_in_float64_with_eager_attention(model, texts):
    """Its softmax is float32, in which the least float64 of a masked score is minus infinity."""
    twin = copy.deepcopy(model).double()
    is_text = texts["attention_mask"].bool()
    logits = twin(**texts).logits[is_text]
    torch.testing.assert_close(logits.float(), model(**texts).logits[is_text], atol=1e-4, rtol=1e-4)
    assert twin.generate(**texts, **GREEDY).equal(model.generate(**texts, **GREEDY))


def test_scores_are_those_of_a_pass_over_the_whole_text(model, texts):
    asked = row(texts, 0)
    outputs = model.generate(**asked, **GREEDY, output_logits=True, return_dict_in_generate=True)
    read = outputs.sequences[:, :-1]
    if model.config.is_encoder_decoder:
        read = torch.cat([torch.full((1, 1), decal_models.START), read], dim=1)
    logits = model(**{**asked, "input_ids": read}).logits[:, -NEW_TOKENS:]
    torch.testing.assert_close(torch.stack(outputs.logits, dim=1), logits, atol=1e-4, rtol=1e-4)
    chosen = model.compute_transition_scores(outputs.sequences, outputs.logits, normalize_logits=True)
    expected = logits.log_softmax(dim=-1).gather(2, outputs.sequences[:, -NEW_TOKENS:, None])[..., 0]
    torch.testing.assert_close(chosen, expected, atol=1e-4, rtol=1e-4)


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
