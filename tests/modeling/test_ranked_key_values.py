# SPDX-License-Identifier: Apache-2.0
"""Ranked key/values beside naive twins: scores, which pairs stay, what scorers learn, and where the text stands."""

import copy
from types import SimpleNamespace

import pytest
import torch
from test_kv_zip import highest, naive_attention, pairs_of
from tiny_bases import FAR_APART, ids_of
from tiny_models import plain_model
from transformers import DynamicCache, StaticCache

from context_compressors import CompressedContext
from context_compressors.modeling.parts.base_pass import CACHE

LEAST = 1e-4
# 36 tokens of context have positions of their own.
FEW_POSITIONS = {
    "opening_ids": [3, 9, 7, 4],
    "slots_after_ids": [7, 4],
    "chunk_size": 8,
    "decoder_config": {"max_position_embeddings": 40},
}


def reader_of(model):
    """The base with the adapter, as the library has it."""
    merged = copy.deepcopy(model)
    merged.merge_adapters()
    return plain_model(merged, "eager").requires_grad_(False)


def behind(opening, ids):
    """One row of both."""
    return torch.cat([torch.tensor(opening, dtype=torch.long), ids])[None]


def naive_scores(model, plain, ids):
    """Of each (layer, head, token) the score, in loops over all three."""
    found, opening = {}, model.config.opening_ids
    states = plain(behind(opening, ids), output_hidden_states=True).hidden_states
    for layer, scorer in enumerate(model.model.scorers):
        normed = plain.model.layers[layer].input_layernorm(states[layer][0, len(opening) :])
        for head, (weight, bias) in enumerate(zip(scorer.weight, scorer.bias, strict=True)):
            for token, state in enumerate(normed):
                found[layer, head, token] = weight @ state + bias
    return found


def whole_of(plain, ids, opening=()):
    """All keys and values of a context, each head's in its own place."""
    layers = plain(behind(opening, ids), use_cache=True)[CACHE].layers
    pairs = [(layer.keys[:, :, len(opening) :], layer.values[:, :, len(opening) :]) for layer in layers]
    return SimpleNamespace(key_values=pairs)


@pytest.mark.slow
@torch.no_grad()
def test_scorers_rank_and_while_they_learn_the_attention_of_the_second_reading_does(
    ranked_key_values, random_rows, pad_rows
):
    rows = random_rows([33, 9, 1, 20])
    ids, mask = pad_rows(rows, "left")
    for architecture, attention in FAR_APART:
        case = ranked_key_values.on(architecture=architecture, attention=attention)
        for fields in ({"repeat_size": 16, "opening_ids": [3, 4, 3]}, {"encoder_lora": None}):
            model = case.build(**fields)
            plain, opening, ratios, kept = reader_of(model), model.config.opening_ids, [2, 3, 8], []
            for is_training in (False, True):
                memories = model.train(is_training).compress(ids, mask, ratio=ratios)
                for i, row in enumerate(rows):
                    scores = naive_scores(model, plain, row)
                    if is_training:
                        scores = naive_attention(plain, row, model.config.repeat_size, opening)
                        scores = {pair: max(score, LEAST) for pair, score in scores.items()}
                    for memory in memories:
                        count = -(-len(row) // memory.ratio) * memory.head_ids.shape[2]
                        found = pairs_of(memory.rows(i), whole_of(plain, row, opening))
                        assert found == highest(scores, count), (architecture, fields, is_training, memory.ratio, i)
                        kept.append(found)
            assert kept[: len(kept) // 2] != kept[len(kept) // 2 :]


@pytest.mark.slow
def test_scorers_learn_by_the_squared_error_of_each_row(ranked_key_values, random_rows, pad_rows):
    """Everything else learns by the loss of the text alone. Rows count as their targets do, which are equally many."""
    rows = random_rows([13, 5, 0])
    ids, mask = pad_rows(rows)
    text = ids_of(6, seed=1).expand(3, -1)
    for architecture, attention in FAR_APART:
        model = ranked_key_values.on(architecture=architecture, attention=attention).build(repeat_size=16)
        plain = reader_of(model)
        for row in rows[:2]:
            targets = naive_attention(plain, row, 16)
            errors = [
                (score - torch.tensor(max(targets[pair], LEAST)).log()).square()
                for pair, score in naive_scores(model, plain, row).items()
            ]
            (0.01 * torch.stack(errors).mean() / len(rows)).backward()
        expected = [parameter.grad.clone() for parameter in model.model.scorers.parameters()]
        assert all(gradient.any() for gradient in expected)
        others = []
        for factor, ratio in ((1, 2), (7, 2), (0.5, 8)):
            model.zero_grad()
            given = {"context_input_ids": ids, "context_attention_mask": mask, "ratio": ratio, "labels": text}
            (factor * model.train()(text, **given).loss).backward()
            found = [parameter.grad for parameter in model.model.scorers.parameters()]
            torch.testing.assert_close(found, [factor * one for one in expected], atol=1e-5, rtol=1e-3)
            others.append([p.grad.clone() for name, p in model.named_parameters() if ".lora_" in name])
        torch.testing.assert_close(others[1], [7 * gradient for gradient in others[0]], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_a_whole_context_is_read_as_the_base_with_the_adapter_reads_it(ranked_key_values):
    ids, text = ids_of(13), ids_of(5, seed=1)
    for architecture, attention in FAR_APART:
        model = ranked_key_values.on(architecture=architecture, attention=attention).build()
        memory = model.compress(ids, ratio=1, allow_untrained_ratio=True)
        expected = model(torch.cat([ids, text], dim=1)).logits[:, 13:]
        torch.testing.assert_close(model(text, memory=memory).logits, expected, atol=1e-4, rtol=1e-4)
        half = model.compress(ids, ratio=2)
        assert not torch.allclose(model(text, memory=half).logits, expected, atol=1e-2)
        # Keys keep their places, and the text goes on behind the context.
        assert model.model.text_position_offset(half, text, None).tolist() == [13]


@torch.no_grad()
def test_an_opening_is_read_as_in_front_of_the_context_and_is_in_no_memory(ranked_key_values):
    """A chat's: contexts are read behind it, and texts bring it again, up to its last tokens."""
    opening, ids, rest = [3, 9, 7, 4], ids_of(13), ids_of(5, seed=1)
    text = behind(opening, rest[0])
    for architecture, attention in FAR_APART:
        model = ranked_key_values.on(architecture=architecture, attention=attention).build(
            opening_ids=opening, slots_after_ids=[7, 4]
        )
        memory = model.compress(ids, ratio=1, allow_untrained_ratio=True)
        assert memory.num_slots.tolist() == [13]
        expected = model(torch.cat([behind(opening, ids[0]), rest], dim=1)).logits
        expected = torch.cat([expected[:, :4], expected[:, 17:]], dim=1)
        torch.testing.assert_close(model(text, memory=memory).logits, expected, atol=1e-4, rtol=1e-4)


def naive_logits(plain, row, rest):
    """Of a text behind the opening and a context, chunk by chunk; those of a long one all at the same place."""
    opening, size = FEW_POSITIONS["opening_ids"], FEW_POSITIONS["chunk_size"]
    is_long = len(opening) + len(row) > 40
    taken = size if is_long else len(row)
    first = plain(behind(opening, row[:0]), use_cache=True)
    pairs = [[(layer.keys, layer.values)] for layer in first[CACHE].layers]
    for start in range(0, len(row), size):
        chunk = row[start : start + size]
        positions = torch.cat([torch.arange(4), 4 + (0 if is_long else start) + torch.arange(len(chunk))])[None]
        mask = torch.ones_like(positions)
        read = plain(behind(opening, chunk), attention_mask=mask, position_ids=positions, use_cache=True)
        for of_layer, layer in zip(pairs, read[CACHE].layers, strict=True):
            of_layer.append((layer.keys[:, :, 4:], layer.values[:, :, 4:]))
    cache = DynamicCache()
    for index, of_layer in enumerate(pairs):
        cache.update(*(torch.cat(states, dim=2) for states in zip(*of_layer, strict=True)), index)
    positions = 4 + taken + torch.arange(len(rest))[None]
    mask = torch.ones(1, 4 + len(row) + len(rest))
    behind_it = plain(rest[None], attention_mask=mask, position_ids=positions, **{CACHE: cache})
    return torch.cat([first.logits, behind_it.logits], dim=1)


@pytest.mark.slow
@torch.no_grad()
def test_chunks_of_a_context_beyond_the_bases_positions_stand_at_the_same(ranked_key_values, random_rows, pad_rows):
    """Each right behind the opening, and the text behind all of them; shorter contexts stay as they are."""
    rows, rest = random_rows([50, 13, 37, 36]), ids_of(5, seed=1)[0]
    text = behind(FEW_POSITIONS["opening_ids"], rest).expand(len(rows), -1)
    for architecture, attention in FAR_APART:
        model = ranked_key_values.on(architecture=architecture, attention=attention).build(**FEW_POSITIONS)
        plain = reader_of(model)
        for side in ("left", "right"):
            memory = model.compress(*pad_rows(rows, side), ratio=1, allow_untrained_ratio=True)
            for row, logits in zip(rows, model(text, memory=memory).logits, strict=True):
                torch.testing.assert_close(logits, naive_logits(plain, row, rest)[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"the context needs 54 positions, the encoder has 40 .*: set `chunk_size`"):
        ranked_key_values.build(**{**FEW_POSITIONS, "chunk_size": None}).compress(rows[0][None])
    assert model.config.max_context_tokens(2) is None
    assert ranked_key_values.config(**{**FEW_POSITIONS, "chunk_size": None}).max_context_tokens(2) == 36


@torch.no_grad()
def test_a_long_context_is_read_like_its_chunks_joined_a_loaded_file_and_without_a_cache(ranked_key_values, tmp_path):
    ids, text = ids_of(50), behind(FEW_POSITIONS["opening_ids"], ids_of(5, seed=1)[0])
    model = ranked_key_values.build(**FEW_POSITIONS)
    memory = model.compress(ids, ratio=2)
    memory.save(tmp_path / "long.safetensors")
    joined = CompressedContext.concatenate([model.compress(chunk, ratio=2) for chunk in ids.split(8, dim=1)])
    expected = model(text, memory=memory).logits
    for other in (joined, CompressedContext.load(tmp_path / "long.safetensors")):
        torch.testing.assert_close(model(text, memory=other).logits, expected, atol=1e-4, rtol=1e-4)
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    written = model.generate(text, memory=memory, **given)
    for _ in range(4):
        text = torch.cat([text, model(text, memory=joined).logits[:, -1:].argmax(dim=2)], dim=1)
    assert torch.equal(written, text)
    text = text[:, :-4]
    # The opening is in the first piece.
    assert torch.equal(model.generate(text, context_input_ids=ids, ratio=2, prefill_chunk_size=5, **given), written)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_cache_that_is_emptied_has_forgotten_its_memory(ranked_key_values, attention):
    model = ranked_key_values.on(attention=attention).build(**FEW_POSITIONS)
    text = behind(FEW_POSITIONS["opening_ids"], ids_of(5, seed=1)[0])
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(text, **settings)
    cache = StaticCache(model.config.decoder_config, max_cache_len=60)
    model.generate(text, memory=model.compress(ids_of(20), ratio=2), cache=cache, **settings)
    cache.reset()
    assert model.generate(text, cache=cache, **settings).equal(expected)


def test_a_fit_that_would_leave_no_scorers_is_refused(ranked_key_values):
    model = ranked_key_values.build()
    before = [parameter.clone() for parameter in model.model.scorers.parameters()]
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        model.model.fit_scorers([(ids_of(12), None)])
    assert all(old.equal(new) for old, new in zip(before, model.model.scorers.parameters(), strict=True))
