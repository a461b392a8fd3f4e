# SPDX-License-Identifier: Apache-2.0
"""Activation Beacon beside a naive twin; the ids of its windows; a memory that slides."""

import pytest
import torch
from tiny_bases import EOS, base_config, ids_of
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from context_compressors import ActivationBeaconConfig, ActivationBeaconForCausalLM
from context_compressors.modeling.parts.base_pass import CACHE


@pytest.fixture(scope="module")
def beacon(method_cases):
    return method_cases["activation_beacon"]


def small(beacon, **fields):
    """Windows of 8 tokens and beacons behind every 4."""
    return beacon.build(window_size=8, compression_ratios=[4, 2], **fields)


# --- a naive twin ---


def layer_keys(attention, states, own):
    """Queries, keys and values of one token before rotation, each `(num_heads, head_dim)`."""
    found = []
    for name, module in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        linear = own[name] if own is not None and name in own else getattr(attention, module)
        vector = torch.nn.functional.linear(states, linear.weight, linear.bias).view(-1, attention.head_dim)
        norm = getattr(attention, f"{module[0]}_norm", None)
        found.append(vector if norm is None or name == "value" else norm(vector))
    return found


def naive(model, ids, ratio, ends_raw=False):
    """Token by token: keys and values of what stays, and the last states of all tokens.

    Keys are noted before rotation; [what stays, window] is numbered 0, 1, ... With `ends_raw` the last window has no
    beacons, as in training.
    """
    config, lm, maps = model.config, model.model.language_model, model.model.beacon_maps
    layers, size, stays, outputs = lm.layers, config.window_tokens(ratio), [[] for _ in lm.layers], []
    for start in range(0, len(ids), size):
        tokens, states, is_beacon, keep = ids[start : start + size], [], [], []
        is_last = ends_raw and start + size >= len(ids)
        for place, token in enumerate(tokens.tolist()):
            if start == 0 and place < config.num_sinks:
                keep.append(len(states))
            states.append(lm.embed_tokens.weight[token])
            is_beacon.append(False)
            in_group = place % ratio + 1
            if not is_last and (in_group == ratio or place + 1 == len(tokens)):
                keep.append(len(states))
                states.append(model.model.beacon_embedding)
                is_beacon.append(True)
        for number, layer in enumerate(layers):
            attention = layer.self_attn
            own = [maps[number] if beacon else None for beacon in is_beacon]
            made = [
                layer_keys(attention, layer.input_layernorm(state), o) for state, o in zip(states, own, strict=True)
            ]
            seen = [*stays[number], *((k, v) for _, k, v in made)]
            first, new = len(stays[number]), []
            cosine, sine = lm.rotary_emb(states[0][None, None], torch.arange(len(seen))[None])
            for place, (query, _, _) in enumerate(made):
                at = slice(first + place, first + place + 1)
                query = apply_rotary_pos_emb(query[None, :, None], query[None, :, None], cosine[:, at], sine[:, at])[0]
                keys = torch.stack([k for k, _ in seen[: first + place + 1]], dim=1)[None]
                keys = apply_rotary_pos_emb(keys, keys, cosine[:, : at.stop], sine[:, : at.stop])[1]
                values = torch.stack([v for _, v in seen[: first + place + 1]], dim=1)[None]
                keys, values = (x.repeat_interleave(attention.num_key_value_groups, dim=1) for x in (keys, values))
                weights = (query @ keys.transpose(2, 3) * attention.scaling).softmax(dim=-1)
                output = (own[place] or {}) if own[place] is None or "output" in own[place] else {}
                out_map = output["output"] if output else attention.o_proj
                state = states[place] + torch.nn.functional.linear((weights @ values).flatten(), out_map.weight)
                new.append(state + layer.mlp(layer.post_attention_layernorm(state)))
            stays[number] += [made[place][1:] for place in keep]
            states = new
        outputs += [lm.norm(state) for state, beacon in zip(states, is_beacon, strict=True) if not beacon]
    cosine, sine = lm.rotary_emb(outputs[0][None, None], torch.arange(len(stays[0]))[None])
    pairs = []
    for layer in stays:
        keys, values = (torch.stack(part, dim=1)[None] for part in zip(*layer, strict=True))
        pairs.append((apply_rotary_pos_emb(keys, keys, cosine, sine)[1], values))
    return pairs, torch.stack(outputs)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("base", ["llama-sdpa", "qwen3-eager"])
def test_slots_and_states_are_the_naive_twins(base, case_on):
    """Values and gradients, through all windows, with keys noted before their rotation and behind Qwen3's norms."""
    case, ids = case_on("activation_beacon", base), ids_of(15)[0]
    for fields in ({}, {"num_sinks": 1, "beacon_maps": ["query", "key", "value", "output"]}):
        model = case.build(window_size=6, compression_ratios=[4, 3], **fields).train()
        memory = model.compress(ids[None], ratio=4)
        states = model.model.read_windows(ids[None], None, [3])[0]
        pairs, by_hand = naive(model, ids, 4)[0], naive(model, ids, 3, ends_raw=True)[1]
        torch.testing.assert_close(memory.key_values, tuple(pairs), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states, by_hand, atol=2e-5, rtol=1e-4)
        weights = torch.randn_like(states)
        expected = gradients(model, (by_hand * weights).sum())
        for name, gradient in gradients(model, (states * weights).sum()).items():
            torch.testing.assert_close(gradient, expected[name], atol=2e-3, rtol=1e-3, msg=name)


def test_untrained_beacons_are_eos_behind_every_group(tmp_path):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(base_config(num_hidden_layers=3)).eval()
    base.save_pretrained(tmp_path)
    fields = {"compression_ratios": [4], "window_size": 16, "beacon_maps": ["query", "key", "value", "output"]}
    model = ActivationBeaconForCausalLM.from_base(tmp_path, **fields)
    ids, eos = ids_of(16)[0], torch.tensor([EOS])
    with_ends = torch.cat([torch.cat([group, eos]) for group in ids.split(4)])
    cache, memory = base(with_ends[None], use_cache=True)[CACHE], model.compress(ids[None])
    for (_, values), layer in zip(memory.key_values, cache.layers, strict=True):
        torch.testing.assert_close(values, layer.values[:, :, 4::5], atol=1e-5, rtol=1e-4)


# --- places and ids ---


def windows_read(model, call, monkeypatch):
    """For each pass of the base its position ids and mask, as lists."""
    found, read = [], model.model.encoder_outputs

    def spy(**inputs):
        found.append((inputs["position_ids"][0].tolist(), int(inputs["attention_mask"].sum())))
        return read(**inputs)

    with monkeypatch.context() as patch:
        patch.setattr(model.model, "encoder_outputs", spy)
        call()
    return found


@torch.no_grad()
def test_windows_and_ids_are_those_of_the_authors_code(beacon, monkeypatch):
    """20 tokens in windows of 8 with beacons behind every 4; then 640 in windows of 64, and a sink."""
    model, ids = small(beacon), ids_of(20)
    trained = windows_read(model, lambda: model.model.read_windows(ids, None, [4]), monkeypatch)
    assert trained == [([*range(10)], 10), ([*range(2, 12)], 12), ([*range(4, 8)], 8)]
    by_window = windows_read(model, lambda: model.model.read_windows(ids_of(30), None, [4, 2]), monkeypatch)
    assert [(row[0], len(row)) for row, _ in by_window] == [(0, 10), (2, 12), (6, 10), (8, 6)]
    compressed = windows_read(model, lambda: model.compress(ids), monkeypatch)
    assert compressed == [*trained[:2], ([*range(4, 9)], 9)]
    assert model.compress(ids).num_slots.tolist() == [5]
    model = small(beacon, num_sinks=1)
    sunk = windows_read(model, lambda: model.compress(ids), monkeypatch)
    assert [ids[0] for ids, _ in sunk] == [0, 3, 5]
    assert model.compress(ids).num_slots.tolist() == [model.config.num_slots(20, 4)] == [6]
    model = beacon.build(window_size=64, compression_ratios=[4], decoder_config={"max_position_embeddings": 512})
    *_, (last, _) = windows_read(model, lambda: model.model.read_windows(ids_of(640), None, [4]), monkeypatch)
    assert (last[0], len(last)) == (144, 64)
    assert model.compress(ids_of(640)).num_slots.tolist() == [160]


# --- a memory that slides ---


@torch.no_grad()
def test_a_text_in_pieces_is_the_text_as_a_whole(beacon):
    for fields in ({}, {"num_sinks": 1}):
        model, ids = small(beacon, **fields), ids_of(22)
        sliding = model.sliding_memory(max_slots=100)
        for piece in ids.split([1, 9, 0, 12], dim=1):
            sliding.append(piece)
            # To look at it changes nothing.
            sliding.memory()
        expected = model.compress(ids).key_values
        torch.testing.assert_close(sliding.memory().key_values, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_sliding_memory_keeps_the_latest_and_its_space(beacon, monkeypatch):
    model, ids = small(beacon, num_sinks=1), ids_of(400)
    sliding, whole = model.sliding_memory(ratio=4, max_slots=7), model.compress(ids[:, :16]).key_values

    def read():
        for piece in ids.split(50, dim=1):
            sliding.append(piece)

    passes = windows_read(model, read, monkeypatch)
    assert len(passes) == 50
    assert max(ids[-1] for ids, _ in passes) == 7 + 10 - 1
    memory = sliding.memory()
    assert (memory.num_slots.tolist(), memory.num_context_tokens.tolist()) == ([7], [400])
    assert memory.position_ids.tolist() == [[*range(7)]]
    # The sink is the text's first token, and the oldest beacons are gone. The first layer's are all the same.
    values, of_start = memory.key_values[-1][1], whole[-1][1]
    assert values[:, :, 0].equal(of_start[:, :, 0])
    assert not values[:, :, 1].equal(of_start[:, :, 1])


@torch.no_grad()
def test_what_does_not_fit_into_the_bases_positions_is_refused(beacon):
    model = beacon.build(decoder_config={"max_position_embeddings": 40}, window_size=8, compression_ratios=[4, 2])
    with pytest.raises(ValueError, match=r"need 44 positions, the base has 40 .* take a higher ratio"):
        model.compress(ids_of(72), ratio=2)
    with pytest.raises(ValueError, match=r"leave 10 positions of the base's 40 to a window .*, got 31"):
        model.sliding_memory(ratio=4, max_slots=31)


# --- bases ---


def test_bases_that_cannot_be_served_are_refused(beacon):
    with pytest.raises(ValueError, match="type 'gpt2' has no such maps of its own"):
        ActivationBeaconForCausalLM(ActivationBeaconConfig(decoder_config=GPT2Config(n_embd=32, n_layer=2, n_head=4)))
    scaled = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    with pytest.raises(ValueError, match="does not tell how keys move"):
        beacon.build(decoder_config=scaled).compress(ids_of(9))
