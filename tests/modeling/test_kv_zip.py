# SPDX-License-Identifier: Apache-2.0
"""KVzip beside naive twins: which pairs stay, and how heads that keep unlike numbers of them are read."""

from itertools import pairwise

import pytest
import torch
from harsh_attention import harsh_flex
from tiny_bases import FAR_APART, ids_of
from tiny_models import TRAINING_FREE, Case, plain_model
from torch.nn import functional
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from context_compressors import CompressedContext
from context_compressors.corpus.memory_store import MemoryStore
from context_compressors.modeling.compressor.headwise_reading import _BY_HEADS, attend_by_heads
from context_compressors.modeling.parts.base_pass import with_sight

KV_ZIP = Case(next(method for method in TRAINING_FREE if method.name == "kv_zip"))
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


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
    plain, heads = plain_model(model, "eager"), config.decoder_config.num_key_value_heads
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


def naive_by_head(memory, row=0):
    """Keys and values of each head of a row, `(num_pairs, head_dim)`, head behind head of all layers."""
    num_slots = int(memory.num_slots[row])
    owners = memory.head_ids[row, :num_slots].T.flatten()
    flat = [
        torch.stack([pair[side][row, :, :num_slots] for pair in memory.key_values]).flatten(0, 2) for side in (0, 1)
    ]
    return [tuple(states[owners == head] for states in flat) for head in range(memory.head_ids.shape[2])]


def pairs_of(memory, whole):
    """(layer, head, token) of a memory's pairs, found among those of the whole context by their values."""
    if memory.head_ids is None:
        by_head = [pair for layer in memory.key_values for pair in zip(layer[0][0], layer[1][0], strict=True)]
    else:
        by_head = naive_by_head(memory)
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
    counts = [[len(keys) for keys, _ in naive_by_head(memory, row)] for row in range(3)]
    assert [sum(row) for row in counts] == [slots * memory.head_ids.shape[2] for slots in (9, 3, 0)]
    num_heads, width = memory.head_ids.shape[2], memory.key_values[0][0].shape[3]
    # Keys and values in float32, and of each pair two bytes for its head and one for the ratio that still keeps it.
    assert memory.nbytes == 12 * num_heads * (2 * width * 4 + 3)
    assert len(set(counts[0])) > 1, "heads keep unlike numbers"


def read_padded(module, query, key, value, attention_mask, scaling, pairs=None, softcap=None, **kwargs):
    """A naive twin of [`attend_by_heads`]: each layer's heads are padded to the fullest one, and masked."""
    (rows, heads), num_queries = key.shape[:2], query.shape[2]
    seen = torch.ones(num_queries, num_queries).tril().bool() if attention_mask is None else attention_mask
    if attention_mask is None:
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
    elif seen.is_floating_point():
        seen = seen == 0
    seen = seen.expand(rows, heads, num_queries, -1)
    if pairs is not None:
        groups, first_position = pairs
        width = max(group.keys.shape[2] for group in groups)
        behind_opening = (kwargs["position_ids"] >= first_position).expand(rows, -1)[:, None, :, None]
        padded = [key.new_zeros(rows * heads, width, key.shape[3]) for _ in range(2)]
        mask = torch.zeros(rows * heads, width, dtype=torch.bool)
        for group in groups:
            own = group.keys.shape[2]
            is_real = torch.ones_like(group.keys[:, 0, :, 0]).bool() if group.is_real is None else group.is_real
            for states, part in zip(padded, (group.keys, group.values), strict=True):
                states[group.heads, :own] = part[:, 0]
            mask[group.heads, :own] = is_real
        key, value = (
            torch.cat([states.unflatten(0, (rows, heads)), text], dim=2)
            for states, text in zip(padded, (key, value), strict=True)
        )
        seen = torch.cat([mask.unflatten(0, (rows, heads))[:, :, None] & behind_opening, seen], dim=3)
    group_size = query.shape[1] // heads
    key, value, seen = (states.repeat_interleave(group_size, dim=1) for states in (key, value, seen))
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~seen, torch.finfo(query.dtype).min).softmax(dim=-1)
    return (weights @ value).transpose(1, 2), weights


def naive_flash(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """Compute the library's flash attention from its mask of two dimensions or from lengths."""
    if cu_seq_lens_q is not None:
        assert (attention_mask, kwargs["sliding_window"]) == (None, None)
        # What no sequence has is never written.
        output = torch.full_like(query, torch.nan)
        ends = [cu_seq_lens_q.tolist(), kwargs["cu_seq_lens_k"].tolist()]
        for (start_q, start_k), (end_q, end_k) in pairwise(zip(*ends, strict=True)):
            assert end_q - start_q <= kwargs["max_length_q"]
            assert end_k - start_k <= kwargs["max_length_k"]
            if start_q < end_q:
                one = (query[:, :, start_q:end_q], key[:, :, start_k:end_k], value[:, :, start_k:end_k])
                output[:, :, start_q:end_q] = naive_flash(module, *one, None, scaling)[0].transpose(1, 2)
        return output.transpose(1, 2), None
    num_queries, num_tokens = query.shape[2], key.shape[2]
    seen = torch.ones(num_queries, num_tokens, dtype=torch.bool).tril(num_tokens - num_queries)
    if attention_mask is not None:
        seen = with_sight(seen & attention_mask[:, None, None].bool())
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    output = functional.scaled_dot_product_attention(query, key, value, seen, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def read_in_all_ways(model, caches, random_rows, pad_rows):
    """Logits, answers and gradients behind memories of a batch and of a row, texts padded on either side."""
    device, found = model.device, []
    ids, mask = (rows.to(device) for rows in pad_rows(random_rows([33, 9, 0, 20])))
    opening = torch.tensor(getattr(model.config, "opening_ids", []), dtype=torch.long)
    memory = model.eval().compress(ids, mask, ratio=3, allow_untrained_ratio=True)
    for side in ("left", "right"):
        texts = [torch.cat([opening, row]) for row in random_rows([5, 2, 4, 1], seed=1)]
        text, text_mask = (rows.to(device) for rows in pad_rows(texts, side))
        with torch.no_grad():
            found += [model(text, text_mask, memory=memory).logits[text_mask.bool()]]
            given = {"attention_mask": text_mask, "memory": memory, **GREEDY}
            found += [model.generate(text, cache_implementation=kind, **given) for kind in caches]
            alone = texts[0][None].to(device)
            found += [model(alone, memory=memory.rows(0)).logits, model(alone[:, :1], memory=memory.rows(0)).logits]
        if model.model.method_parts:
            model.zero_grad()
            # What a pad reads is anything, and so is what it says of a first token.
            labels = text.masked_fill((text_mask == 0) | (text_mask.cumsum(dim=1) == 1), -100)
            given = {"context_input_ids": ids, "context_attention_mask": mask, "ratio": 3, "labels": labels}
            model.train()(text, text_mask, **given).loss.backward()
            found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            model.eval()
    return found


def ranking_model(method, method_cases, architecture="llama", attention="sdpa"):
    """KVzip, or ranked key/values behind a chat's opening."""
    if method == "kv_zip":
        return KV_ZIP.on(architecture=architecture, attention=attention).build()
    fields = {"opening_ids": [3, 9, 7, 4], "slots_after_ids": [7, 4], "chunk_size": 9}
    return method_cases[method].on(architecture=architecture, attention=attention).build(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kv_zip", "ranked_key_values"])
@pytest.mark.parametrize("base", FAR_APART, ids="-".join)
def test_heads_are_read_as_if_all_were_padded_to_the_fullest(
    base, method, method_cases, random_rows, pad_rows, monkeypatch
):
    model, found = ranking_model(method, method_cases, *base), []
    for function in (attend_by_heads, read_padded):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, _BY_HEADS, function)
        found.append(read_in_all_ways(model, [None, "static"], random_rows, pad_rows))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)


has_flash = torch.cuda.is_available() and is_flash_attn_2_available()


@pytest.mark.parametrize("method", ["kv_zip", "ranked_key_values"])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("flash_attention_2", naive_flash),
        ("flex_attention", harsh_flex),
        pytest.param("flash_attention_2", None, marks=pytest.mark.skipif(not has_flash, reason="no FlashAttention")),
    ],
)
def test_pairs_are_read_by_flash_and_flex_attention(
    name, function, method, method_cases, random_rows, pad_rows, monkeypatch
):
    """FlashAttention, here a stand-in of it, reads each head as a sequence of its own."""
    model = ranking_model(method, method_cases)
    if function is None:
        model = model.to("cuda", torch.bfloat16)
    else:
        monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
    given = (model, [None, "static"] if "flash" in name else [None], random_rows, pad_rows)
    expected = read_in_all_ways(*given)
    monkeypatch.setattr(model.model.language_model.config, "_attn_implementation_internal", name)
    found, tolerance = read_in_all_ways(*given), {"atol": 1e-5, "rtol": 1e-4}
    if function is None:
        # In bfloat16 the likeliest of near tokens may be another one.
        found, expected = ([each for each in some if each.is_floating_point()] for some in (found, expected))
        tolerance = {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(found, expected, **tolerance)


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
