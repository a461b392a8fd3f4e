# SPDX-License-Identifier: Apache-2.0
"""KVzip beside naive twins: which pairs stay, and how heads that keep unlike numbers of them are read."""

import copy
from dataclasses import replace

import pytest
import test_threads
import torch
from tiny_bases import FAR_APART, ids_of
from tiny_models import TRAINING_FREE, Case
from transformers import AttentionInterface, AutoModelForCausalLM

from context_compressors import CompressedContext
from context_compressors.corpus.memory_store import MemoryStore
from context_compressors.modeling.memory.headwise_memory import spread_pairs
from context_compressors.modeling.memory.headwise_pairs import gather_pairs
from context_compressors.modeling.parts.cache_name import CACHE

KV_ZIP = Case(next(method for method in TRAINING_FREE if method.name == "kv_zip"))
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def plain_model(model, attention="eager"):
    """The base as the library has it."""
    config = copy.deepcopy(model.config.decoder_config)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    plain.model.load_state_dict(model.model.language_model.state_dict())
    if hasattr(plain, "lm_head"):
        plain.lm_head.load_state_dict(model.lm_head.state_dict())
    return plain


def naive_attention(plain, ids, repeat_size, opening=()):
    """Of each (layer, head, token) the highest attention of the second reading, in loops over whole passes."""
    length, heads, scores, first = len(ids), plain.config.num_key_value_heads, {}, len(opening)
    opening = torch.tensor(opening, dtype=torch.long)
    for start in range(0, length, repeat_size):
        piece = ids[max(0, start - 8) : start + repeat_size]
        attentions = plain(torch.cat([opening, ids, piece])[None], output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            to_context = weights[0, :, first + length :, first : first + length]
            for head, group in enumerate(to_context.unflatten(0, (heads, -1))):
                for token, score in enumerate(group.amax(dim=(0, 1)).tolist()):
                    scores[layer, head, token] = max(scores.get((layer, head, token), 0.0), score)
    return scores


def highest(scores, count):
    """The pairs of the highest scores; of equal ones the first."""
    return set(sorted(scores, key=lambda pair: -scores[pair])[:count])


def naive_kv_zip(model, ids, ratio):
    """(layer, head, token) of the pairs that stay."""
    config, length = model.config, len(ids)
    plain, heads = plain_model(model), config.decoder_config.num_key_value_heads
    scores = naive_attention(plain, ids, config.repeat_size)
    num_kept = -(-length // ratio)
    if config.head_budgets == "shared":
        return highest(scores, num_kept * heads * config.num_hidden_layers)
    kept = set()
    for layer in range(config.num_hidden_layers):
        for head in range(heads):
            pairs = [(layer, head, token) for token in range(length)]
            kept |= highest({pair: scores[pair] for pair in pairs}, num_kept)
    return kept


def pairs_of(memory, whole):
    """(layer, head, token) of a memory's pairs, found among those of the whole context by their values."""
    if memory.head_ids is None:
        by_head = [pair for layer in memory.key_values for pair in zip(layer[0][0], layer[1][0], strict=True)]
    else:
        spread, masks = spread_pairs(memory)
        by_head = [
            (keys[0, head][mask[0, head]], values[0, head][mask[0, head]])
            for (keys, values), mask in zip(spread, masks, strict=True)
            for head in range(keys.shape[1])
        ]
    heads, found = whole.key_values[0][0].shape[1], set()
    for place, (keys, values) in enumerate(by_head):
        layer, head = divmod(place, heads)
        all_keys, all_values = (states[0, head] for states in whole.key_values[layer])
        tokens = torch.cdist(keys, all_keys).argmin(dim=1)
        torch.testing.assert_close(values, all_values[tokens], atol=1e-5, rtol=1e-5)
        found |= {(layer, head, token) for token in tokens.tolist()}
    return found


@pytest.mark.slow
@torch.no_grad()
def test_the_pairs_that_stay_are_those_of_loops_over_layers_heads_and_tokens(random_rows, pad_rows):
    rows = random_rows([33, 9, 1, 20])
    ids, mask = pad_rows(rows, "left")
    for architecture, attention in FAR_APART:
        for fields in ({}, {"repeat_size": 16}, {"head_budgets": "uniform"}):
            model = KV_ZIP.on(architecture=architecture, attention=attention).build(**fields)
            # Whole contexts, whose heads have their own places.
            whole = KV_ZIP.on(architecture=architecture, attention=attention).build(head_budgets="uniform")
            whole = whole.compress(ids, mask, ratio=1)
            for memory in model.compress(ids, mask, ratio=[2, 3, 8]):
                for i, row in enumerate(rows):
                    found = pairs_of(memory.rows(i), whole.rows(i))
                    assert found == naive_kv_zip(model, row, memory.ratio), (architecture, fields, memory.ratio, i)


@torch.no_grad()
def test_slots_are_counted_by_what_all_heads_keep_together(random_rows, pad_rows):
    ids, mask = pad_rows(random_rows([33, 9, 0]))
    model = KV_ZIP.model
    memory = model.compress(ids, mask, ratio=4)
    assert memory.num_slots.tolist() == [9, 3, 0]
    assert [int(row_masks) for row_masks in sum(m.sum(dim=(1, 2)) for m in spread_pairs(memory)[1])] == [
        slots * memory.head_ids.shape[2] for slots in (9, 3, 0)
    ]
    num_heads, width = memory.head_ids.shape[2], memory.key_values[0][0].shape[3]
    # Keys and values in float32, and of each pair two bytes for its head and one for the ratio that still keeps it.
    assert memory.nbytes == 12 * num_heads * (2 * width * 4 + 3)
    counts = [m.sum(dim=2) for m in spread_pairs(memory)[1]]
    assert len(torch.cat(counts, dim=1)[0].unique()) > 1, "heads keep unlike numbers"


def by_heads(module, query, key, value, attention_mask, scaling, **kwargs):
    """Plain attention whose text reads of the context what each head keeps."""
    kept, length = by_heads.kept, by_heads.length
    group = query.shape[1] // key.shape[1]
    output = torch.zeros_like(query)
    for head in range(query.shape[1]):
        for place in range(query.shape[2]):
            seen = [
                token
                for token in range(place + 1)
                if place < length or token >= length or (module.layer_idx, head // group, token) in kept
            ]
            keys, values = key[0, head // group, seen], value[0, head // group, seen]
            weights = (keys @ query[0, head, place] * scaling).softmax(dim=0)
            output[0, head, place] = weights @ values
    return output.transpose(1, 2), None


@torch.no_grad()
def test_each_head_reads_its_own_slots_as_in_loops_over_heads_and_places():
    AttentionInterface.register("by_heads", by_heads)
    for architecture in ("llama", "qwen3"):
        model = KV_ZIP.on(architecture=architecture).build()
        ids, text = ids_of(13), ids_of(5, seed=1)
        for ratio in (2, 5):
            by_heads.kept, by_heads.length = naive_kv_zip(model, ids[0], ratio), 13
            twin = plain_model(model, "by_heads")
            expected = twin(torch.cat([ids, text], dim=1)).logits[:, 13:]
            memory = model.compress(ids, ratio=ratio)
            torch.testing.assert_close(model(text, memory=memory).logits, expected, atol=1e-5, rtol=1e-4)
            # Token by token behind a cache, which the library grows.
            cache, found = None, []
            offset = model.model.text_position_offset(memory, text, None)
            for place in range(5):
                given = {"memory": memory, "text_position_offset": offset, "cache": cache}
                mask = torch.ones(1, place + 1, dtype=torch.long)
                output = model(text[:, place : place + 1], attention_mask=mask, use_cache=True, **given)
                cache = output[CACHE]
                found.append(output.logits)
            torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_heads_that_keep_equally_many_are_read_as_a_memory_without_head_ids():
    shared, uniform = KV_ZIP.build(), KV_ZIP.build(head_budgets="uniform")
    ids, text = ids_of(13), ids_of(5, seed=1)
    memory = uniform.compress(ids, ratio=3)
    keys = memory.key_values[0][0]
    is_kept = torch.ones(1, len(memory.key_values) * keys.shape[1], keys.shape[2], dtype=torch.bool)
    ratios = torch.full(is_kept.shape, 3, dtype=torch.uint8)
    pairs = gather_pairs(memory.key_values, is_kept, ratios, [keys.shape[2]])
    same = replace(memory, **vars(pairs), model_id=shared.model_id, maker=None)
    expected = uniform(text, memory=memory).logits
    torch.testing.assert_close(shared(text, memory=same).logits, expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_memories_are_kept_cut_joined_and_rounded_with_their_heads(tmp_path, random_rows, pad_rows):
    model, text = KV_ZIP.model, ids_of(4, seed=1)
    ids, mask = pad_rows(random_rows([13, 7, 20]))
    memory = model.compress(ids, mask, ratio=3)
    logits = model(text.expand(3, -1), memory=memory).logits

    def check(other, rows, **tolerance):
        found = model(text.expand(len(rows), -1), memory=other).logits
        torch.testing.assert_close(found, logits[rows], **({"atol": 1e-6, "rtol": 1e-5} | tolerance))

    memory.save(tmp_path / "memory.safetensors")
    check(CompressedContext.load(tmp_path / "memory.safetensors", model_id=model.model_id), [0, 1, 2])
    check(memory.rows([2, 1]), [2, 1])
    check(memory.repeat_interleave(2), [0, 0, 1, 1, 2, 2])
    check(CompressedContext.stack([memory.rows(1), memory.rows([0, 2])]), [1, 0, 2])
    check(memory.quantize("int8"), [0, 1, 2], atol=0.2, rtol=0.05)
    store = MemoryStore.create(tmp_path / "store", memory, dtype="float16")
    store.add(["a", "b", "c"], memory)
    check(store.get(["c", "a"]), [2, 0], atol=0.02, rtol=5e-3)
    # The second document behind the first, each by itself.
    whole = [model.compress(row, ratio=1) for row in (ids_of(9), ids_of(7, seed=2))]
    uniform = KV_ZIP.build(head_budgets="uniform")
    expected = CompressedContext.concatenate(
        [uniform.compress(row, ratio=1) for row in (ids_of(9), ids_of(7, seed=2))]
    )
    torch.testing.assert_close(
        model(text, memory=CompressedContext.concatenate(whole)).logits,
        uniform(text, memory=expected).logits,
        atol=1e-5,
        rtol=1e-4,
    )


def test_heads_that_no_layer_has_are_refused():
    memory = KV_ZIP.model.compress(ids_of(13), ratio=3)
    num_heads = memory.head_ids.shape[2]
    for head_ids, error, message in (
        (memory.head_ids + num_heads, ValueError, f"head_ids must be 0 to {num_heads - 1}"),
        (memory.head_ids - 1, ValueError, f"head_ids must be 0 to {num_heads - 1}"),
        (memory.head_ids[:, 1:], ValueError, "head_ids must have shape"),
        (memory.head_ids.float(), TypeError, "head_ids must be an integer tensor"),
    ):
        with pytest.raises(error, match=message):
            replace(memory, head_ids=head_ids)
    mixed = [memory, replace(memory, head_ids=None, coarsest_ratios=None)]
    for join in (CompressedContext.concatenate, CompressedContext.stack):
        with pytest.raises(ValueError, match="kinds of heads"):
            join(mixed)
    with pytest.raises(ValueError, match="`position_layout='default'` numbers the keys of each head anew"):
        KV_ZIP.config(position_layout="default")
    for fields, message in (
        ({"head_budgets": "own"}, r"`head_budgets` must be one of \['shared', 'uniform'\], got 'own'"),
        ({"repeat_size": 8}, "`repeat_size` must be an int of at least 16, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            KV_ZIP.config(**fields)


@pytest.mark.slow
def test_calls_of_all_kinds_are_right_in_eight_threads(tiny_tokenizer):
    assert not test_threads.together(test_threads.calls_of(KV_ZIP.model, tiny_tokenizer))
