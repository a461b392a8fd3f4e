# SPDX-License-Identifier: Apache-2.0
"""ComprExIT alone: the paper's equations beside a naive twin, its worked numbers, segments and ablations."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.modeling.modeling_comprexit import (
    ComprExITForCausalLM,
    ComprExITModel,
    LayerGate,
    Transmission,
)
from context_compressors.modeling.pooling import mean_pool
from context_compressors.modeling.window_aggregation import WindowAttention, WindowMean

LN2 = math.log(2)
# transformers has no sdpa for Gemma 2.
BASES = ["llama-sdpa", "llama-eager", "qwen2-sdpa", "qwen3-sdpa", "mistral-sdpa", "mistral-eager", "gemma2-eager"]
literally = pytest.mark.parametrize("literal", [False, True], ids=["facts", "printed"])


@pytest.fixture
def comprexit(method_cases):
    return method_cases["comprexit"]


def ids_of(length, seed=0):
    return torch.randint(5, 128, (1, length), generator=torch.Generator().manual_seed(seed))


def random_like(module, seed=0):
    """The module with random parameters, so that no start value hides a mistake."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter) + (1 if parameter.dim() == 1 else 0))
    return module


def transmission(hidden_size=6, seed=0, **fields):
    config = ComprExITConfig(**{"metric_size": 4, "window_size": 8, **fields})
    return random_like(Transmission(hidden_size, config), seed)


def plain_transmission(**fields):
    """W_u = W_g = W_rho = identity and no LayerNorm, as in numbers worked by hand."""
    module = transmission(1, **fields)
    module.metric = module.sender_score = module.value_norm = module.value = nn.Identity()
    return module


# --- size ---


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "expected"),
    [
        (2048, 16, 32, {"gate": 5_249_809, "metric": 528_640, "mass": 6_145, "value": 4_200_448, "mlp": 8_392_704}),
        (3072, 28, 24, {"gate": 11_021_085, "metric": 792_832, "mass": 9_217, "value": 9_446_400, "mlp": 18_880_512}),
    ],
    ids=["llama3.2_1b", "llama3.2_3b"],
)
def test_extra_parameters_on_the_papers_bases(hidden, layers, heads, expected):
    base = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = ComprExITForCausalLM(ComprExITConfig(decoder_config=base))
    names = {
        "layer_gate": "gate",
        "transmission.metric": "metric",
        "transmission.sender_score": "mass",
        "transmission.value": "value",
        "slot_mlp": "mlp",
    }
    found = dict.fromkeys(expected, 0)
    for name, parameter in model.model.named_parameters():
        if parameter.requires_grad:
            part = next(part for prefix, part in names.items() if name.startswith(prefix))
            found[part] += parameter.numel()
    assert found == expected
    extra = sum(found.values())
    assert extra == (18_377_746 if layers == 16 else 40_150_046)
    share = extra / sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert round(share, 6) == (0.014871 if layers == 16 else 0.012497)


# --- equations 4 to 7: the gate ---


@literally
def test_the_structural_prior_starts_uniform(literal):
    config = ComprExITConfig(decoder_config=LlamaConfig(num_hidden_layers=16), literal_equations=literal)
    gate = LayerGate(4, 17, config)
    assert gate.layer_prior.softmax(dim=0).tolist() == pytest.approx([1 / 16] * 16 if literal else [1 / 17] * 17)


@literally
def test_worked_gate_weights(literal):
    """Raw scores 0, x, 2x with x so large that the scaled ones are 0, ln 2, ln 4."""
    config = ComprExITConfig(gate_size=256, literal_equations=literal)
    gate = LayerGate(2, 4 if literal else 3, config)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.zero_()
        # A token's state is (score, 1): the query reads the 1, the layer's side the score.
        gate.context.weight[0, 1] = gate.layer.weight[0, 0] = 1
    factor = 0.7 if literal else 11.2
    scores = ([123.0] if literal else []) + [0, factor * LN2, 2 * factor * LN2]
    _, weights = gate([torch.tensor([[[score, 1.0]]]) for score in scores])
    torch.testing.assert_close(weights[0, 0], torch.tensor([1 / 7, 2 / 7, 4 / 7]))


def naive_gate(gate, states, literal):
    """Equations 4 to 7 token by token and layer by layer, in their own order."""
    if literal:
        states = states[1:]
    prior = torch.exp(gate.layer_prior) / torch.exp(gate.layer_prior).sum()
    batch_size, num_tokens, _ = states[0].shape
    anchors = []
    for row in range(batch_size):
        for token in range(num_tokens):
            h = [state[row, token] for state in states]
            query = gate.context(sum(w * x for w, x in zip(prior, h, strict=True)))
            keys = [gate.layer(x) + e for x, e in zip(h, gate.layer_embeddings, strict=True)]
            scores = torch.stack([query @ key for key in keys]) / 0.7
            alpha = torch.softmax(scores if literal else scores / gate.context.out_features**0.5, dim=0)
            anchors.append(sum(a * gate.anchor(x) for a, x in zip(alpha, h, strict=True)))
    return torch.stack(anchors).unflatten(0, (batch_size, num_tokens))


@literally
def test_the_gate_is_its_naive_twin(literal):
    gate = random_like(LayerGate(6, 5, ComprExITConfig(gate_size=3, literal_equations=literal)))
    states = [torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    found, expected = gate(states)[0], naive_gate(gate, states, literal)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
    gradients = [torch.autograd.grad((y * direction).sum(), list(gate.parameters())) for y in (found, expected)]
    for name, ours, theirs in zip(dict(gate.named_parameters()), *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=name)


# --- equations 8 to 12: transmission ---


def log_sinkhorn(cost, source, target, epsilon, num_iterations):
    f, g = torch.zeros_like(source), torch.zeros_like(target)
    for _ in range(num_iterations):
        f = epsilon * (source.log() - torch.logsumexp((g[None] - cost) / epsilon, dim=1))
        g = epsilon * (target.log() - torch.logsumexp((f[:, None] - cost) / epsilon, dim=0))
    return torch.exp((f[:, None] + g[None] - cost) / epsilon)


def naive_slots(module, anchors, ratio, literal):
    """Equations 8 to 12 of one row, window by window, in their own order."""
    length, slots = ratio * max(1, module.window_size // ratio), []
    for window in anchors.split(length):
        receivers = torch.stack([field.mean(dim=0) for field in window.split(ratio)])
        utility = functional.cosine_similarity(module.metric(window)[:, None], module.metric(receivers)[None], dim=-1)
        mass = module.sender_score(window)[:, 0].softmax(dim=0)
        if not literal:
            mass = 0.95 * mass + 0.05 / len(window)
        capacity = torch.full((len(receivers),), 1 / len(receivers))
        plan = log_sinkhorn(1 - utility, mass, capacity, 0.1, 30)
        values = module.value(module.value_norm(window))
        z = torch.stack([sum(plan[t, k] * values[t] for t in range(len(window))) for k in range(len(receivers))])
        slots.append(z if literal else z / capacity[:, None])
    return torch.cat(slots)


@literally
@pytest.mark.parametrize("ratio", [1, 2, 3, 8, 20])
def test_transmission_is_its_naive_twin(literal, ratio):
    module = transmission(literal_equations=literal)
    lengths = [19, 8, 3, 1]
    anchors = torch.randn(4, 19, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = torch.arange(19) < torch.tensor(lengths)[:, None]
    slots, slot_mask = module(anchors, mask, ratio)
    assert slot_mask.sum(dim=1).tolist() == [-(-length // ratio) for length in lengths]
    expected = torch.cat([naive_slots(module, anchors[i, :n], ratio, literal) for i, n in enumerate(lengths)])
    found = slots[slot_mask.bool()]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    inputs = {"anchors": anchors, **dict(module.named_parameters())}
    gradients = [
        torch.autograd.grad((y * direction).sum(), list(inputs.values()), allow_unused=True) for y in (found, expected)
    ]
    for name, ours, theirs in zip(inputs, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3, msg=name)


@literally
def test_worked_sender_mass(literal):
    module = plain_transmission(literal_equations=literal)
    scores = torch.tensor([0, LN2, math.log(3), 7.0])[None, None, :, None]
    mask = torch.tensor([[[True, True, True, False]]])
    mass = module.sender_mass(scores, mask)[0, 0].tolist()
    expected = [1 / 6, 1 / 3, 1 / 2, 0] if literal else [0.175, 1 / 3, 0.49166666666666664, 0]
    assert mass == pytest.approx(expected, abs=1e-6)


def test_the_senders_start_with_the_same_mass_in_every_window(comprexit):
    torch.manual_seed(0)
    module = ComprExITModel(comprexit.config()).transmission
    mask = torch.tensor([[[True] * 4, [True, True, True, False], [False] * 4]])
    mass = module.sender_mass(torch.randn(1, 3, 4, 32), mask)
    assert mass[0].tolist() == [[0.25] * 4, pytest.approx([1 / 3, 1 / 3, 1 / 3, 0]), [0.0] * 4]


def test_worked_shapes():
    module = transmission(6, window_size=128)
    tokens, mask = module.windows(torch.randn(2, 512, 6), torch.ones(2, 512, dtype=torch.bool), 4)
    assert tokens.shape == (2, 4, 128, 6)
    weights = module.weights(tokens, mask, 4)
    assert weights.shape == (2, 4, 128, 32)
    # Times the receivers' mass of 1/32 it is the plan, whose columns hold that mass each.
    torch.testing.assert_close((weights * 0.03125).sum(dim=2), torch.full((2, 4, 32), 0.03125))
    slots, _ = module(torch.randn(2, 512, 6), torch.ones(2, 512, dtype=torch.bool), 4)
    assert slots.shape == (2, 128, 6)


@pytest.mark.parametrize(
    ("ratio", "lengths", "windows", "num_slots"),
    [
        (4, [300, 130, 128, 1], [[128, 128, 44], [128, 2, 0], [128, 0, 0], [1, 0, 0]], [75, 33, 32, 1]),
        (5, [300], [[125, 125, 50]], [60]),
    ],
)
def test_worked_windows(ratio, lengths, windows, num_slots):
    module = transmission(window_size=128)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    anchors = torch.randn(*mask.shape, 6)
    _, token_mask = module.windows(anchors, mask, ratio)
    assert token_mask.sum(dim=2).tolist() == windows
    _, slot_mask = module(anchors, mask, ratio)
    assert slot_mask.sum(dim=1).tolist() == num_slots


@literally
def test_one_window_by_hand(literal):
    module = plain_transmission(window_size=4, uniform_sender_share=1.0, literal_equations=literal)
    module.sender_score = None
    anchors = torch.tensor([[[1.0, 0], [1, 0], [0, 1], [0, 1]]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    row = torch.tensor([0.2499886505328244, 1.1349467175597594e-05])
    plan = module.weights(anchors[:, None], mask[:, None], 2)[0, 0] * (1 if literal else 0.5)
    torch.testing.assert_close(plan, torch.stack([row, row, row.flip(0), row.flip(0)]))
    near, far = (
        (0.4999773010656488, 2.2698934351195188e-05) if literal else (0.9999546021312976, 4.5397868702390376e-05)
    )
    torch.testing.assert_close(module(anchors, mask, 2)[0][0], torch.tensor([[near, far], [far, near]]))


def test_a_token_reaches_far_slots_of_its_window_and_no_other_window():
    anchors, mask = torch.randn(1, 12, 6), torch.ones(1, 12, dtype=torch.bool)
    changed = anchors.clone()
    changed[0, 1, 0] += 1
    for module, expected in (
        (transmission(window_size=8), [True] * 4 + [False] * 2),
        (random_like(WindowAttention(6, 4)), [True] + [False] * 5),
        (WindowMean(), [True] + [False] * 5),
    ):
        moved = (module(anchors, mask, 2)[0] != module(changed, mask, 2)[0]).any(dim=2)[0]
        assert moved.tolist() == expected, type(module).__name__


def test_without_entropy_bounds_all_slots_of_a_window_are_one():
    """A very strong entropy term makes the plan the outer product of the masses."""
    anchors, mask = torch.randn(1, 8, 6), torch.ones(1, 8, dtype=torch.bool)
    soft = transmission(transport_epsilon=1e4)(anchors, mask, 2)[0]
    torch.testing.assert_close(soft, soft[:, :1].expand_as(soft), atol=1e-3, rtol=0)
    sharp = transmission(transport_epsilon=0.05)(anchors, mask, 2)[0]
    assert (sharp - sharp[:, :1]).abs().max() > 0.1


# --- ablations ---


def test_shuffled_receivers_are_the_same_slots_in_another_order():
    lengths = [21, 10, 3]
    mask = torch.arange(21) < torch.tensor(lengths)[:, None]
    anchors = torch.randn(3, 21, 6)
    in_order, slot_mask = transmission()(anchors, mask, 2)
    mixed, mixed_mask = transmission(shuffled_receivers=True)(anchors, mask, 2)
    assert mixed_mask.equal(slot_mask)
    moved = False
    for row, count in enumerate(slot_mask.sum(dim=1).tolist()):
        for window in range(0, count, 4):
            one, other = (slots[row, window : min(window + 4, count)] for slots in (in_order, mixed))
            distances = torch.cdist(one, other)
            order = distances.argmin(dim=1)
            assert distances.amin(dim=1).max() < 1e-5
            assert sorted(order.tolist()) == list(range(len(one)))
            moved |= order.tolist() != sorted(order.tolist())
    assert moved


def test_uniform_sender_mass_has_nothing_to_learn():
    module = transmission(uniform_sender_share=1.0)
    assert not any("sender_score" in name for name, _ in module.named_parameters())
    mask = torch.tensor([[[True, True, True, True, False]]])
    assert module.sender_mass(torch.randn(1, 1, 5, 6), mask)[0, 0].tolist() == [0.25] * 4 + [0.0]


def test_windowed_attention_is_its_naive_twin():
    module = random_like(WindowAttention(6, 4))
    lengths = [7, 2]
    anchors, mask = torch.randn(2, 7, 6), torch.arange(7) < torch.tensor(lengths)[:, None]
    slots, slot_mask = module(anchors, mask, 3)
    expected = []
    for row, length in enumerate(lengths):
        for block in anchors[row, :length].split(3):
            weights = (module.key(block) @ module.query(block.mean(dim=0)) / 2).softmax(dim=0)
            expected.append(weights @ block)
    torch.testing.assert_close(slots[slot_mask.bool()], torch.stack(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1, 2, "last_layer"])
def test_one_layer_pooled_is_mean_pooling_of_that_layer(comprexit, layer):
    model = comprexit.build(token_anchors=layer, slot_aggregation="mean").model
    ids, mask = ids_of(13), torch.ones(1, 13).long()
    states = model.language_model(ids, output_hidden_states=True).hidden_states
    pooled, _ = mean_pool(states[-1 if layer == "last_layer" else layer], mask, 3)
    torch.testing.assert_close(model.compress(ids, ratio=3).embeddings, model.slot_mlp(pooled), atol=1e-5, rtol=1e-5)
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"slot_mlp"}


# --- the whole method ---


def by_hand(model, ids, ratio):
    """One row with all hidden states at once."""
    states = model.language_model(ids, output_hidden_states=True).hidden_states
    anchors = model.layer_gate(states)[0]
    slots, _ = model.transmission(anchors, torch.ones_like(ids).bool(), ratio)
    return model.slot_mlp(slots)


@torch.no_grad()
@pytest.mark.parametrize("segment_windows", [1, 3])
@pytest.mark.parametrize("base", BASES)
def test_segments_equal_the_hidden_states_of_the_whole_context(
    comprexit, base, segment_windows, random_rows, pad_rows
):
    """In causal segments of 4 and 12 tokens, shorter and longer than a sliding window."""
    architecture, attention = base.split("-")
    case = comprexit.on(architecture=architecture, attention=attention)
    model = case.build(segment_windows=segment_windows).model
    rows = random_rows([37, 12, 5, 0])
    calls = []
    model.language_model.register_forward_pre_hook(lambda *_: calls.append(1))
    memories = model.compress(*pad_rows(rows, "left"), ratio=[2, 3])
    assert len(calls) == -(-37 // (4 * segment_windows))
    for memory, ratio in zip(memories, (2, 3), strict=True):
        for i, row in enumerate(rows[:3]):
            expected = by_hand(model, row[None], ratio)[0]
            found = memory.embeddings[i, memory.attention_mask[i].bool()]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def peak_of_held_states(model, call):
    """Most bytes of hidden states that are alive while the backbone or the gate runs."""
    alive, peak = [], 0

    def measure(*_):
        nonlocal peak
        peak = max(peak, sum(ref().nbytes for ref in alive if ref() is not None))

    def remember(module, arguments, outputs):
        alive.extend(weakref.ref(states) for states in outputs.hidden_states or ())
        measure()

    hooks = [
        model.language_model.register_forward_pre_hook(measure),
        model.language_model.register_forward_hook(remember),
        *(layer.register_forward_pre_hook(measure) for layer in model.language_model.layers),
        model.transmission.register_forward_pre_hook(measure),
    ]
    call()
    for hook in hooks:
        hook.remove()
    return peak


def test_only_one_segments_states_are_held_in_inference(comprexit):
    model, ids = comprexit.build(segment_windows=2).model, ids_of(64)
    num_states, width = 3, 32
    found = peak_of_held_states(model, lambda: model.compress(ids, ratio=2))
    assert found == num_states * 8 * width * 4
    whole = peak_of_held_states(model.train(), lambda: model.compress(ids, ratio=2))
    assert whole == num_states * 64 * width * 4


def test_a_frozen_base_keeps_no_activations(comprexit):
    """What a training step holds of the encoder are its states, and no graph behind them."""
    model = comprexit.build().train()
    held = []
    model.model.language_model.register_forward_hook(lambda _, __, outputs: held.append(outputs.hidden_states))
    model.compress(ids_of(9))
    assert len(held[0]) == 3
    assert not any(states.requires_grad for states in held[0])
    assert model.compress(ids_of(9)).embeddings.requires_grad


def test_later_windows_leave_the_slots_of_earlier_ones_alone(comprexit):
    model, ids = comprexit.build(), ids_of(14)
    before = model.compress(ids, ratio=2).embeddings
    ids[0, 8] = 4
    after = model.compress(ids, ratio=2).embeddings
    assert after[0, :4].equal(before[0, :4])
    assert (after[0, 4:] != before[0, 4:]).any(dim=1).all()


def test_slots_start_about_as_large_as_token_embeddings():
    """On a base of the usual start values: neither lost in rounding nor far outside what the decoder reads."""
    torch.manual_seed(0)
    base = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = ComprExITModel(ComprExITConfig(decoder_config=base)).eval()
    slots = model.compress(torch.randint(5, 512, (1, 256))).embeddings
    ratio = slots.std() / model.get_input_embeddings().weight.std()
    assert 0.3 < ratio < 10
    assert not model.slot_mlp[0].bias.any()
    assert not model.transmission.sender_score[1].weight.any()
    torch.testing.assert_close(model.layer_gate.layer_embeddings.std(), torch.tensor(0.02), atol=0.002, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_method_parts_compute_in_float32_whatever_comes_in(comprexit, dtype):
    model = comprexit.build(decoder_lora=None).model
    anchors, mask = torch.randn(1, 13, 32), torch.ones(1, 13, dtype=torch.bool)
    states = [torch.randn(1, 13, 32) for _ in range(3)]
    expected = model.layer_gate(states)[0], model._slots(anchors, mask, 2)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.layer_gate(states)[0], model._slots(anchors, mask, 2)[0]
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    parts = model.layer_gate, model.transmission, model.slot_mlp
    for part in parts:
        part.to(dtype)
    rounded = model.layer_gate([state.to(dtype) for state in states])[0]
    assert rounded.dtype == torch.float32
    assert (rounded - expected[0]).norm() < 0.05 * expected[0].norm()
    assert (model._slots(anchors, mask, 2)[0] - expected[1]).norm() < 0.05 * expected[1].norm()


# --- what slots are made of ---


@torch.no_grad()
def test_information_flow_is_what_compressing_uses(comprexit, random_rows, pad_rows):
    model = comprexit.build().model
    rows = random_rows([13, 6])
    ids, mask = pad_rows(rows, "left")
    flow, memory = model.information_flow(ids, mask, ratio=3), model.compress(ids, mask, ratio=3)
    assert flow.layer_weights.shape == (2, 13, 3)
    assert flow.allocation.shape == (2, 5, 13)
    for i, row in enumerate(rows):
        states = model.language_model(row[None], output_hidden_states=True).hidden_states
        anchors, weights = model.layer_gate(states)
        torch.testing.assert_close(flow.layer_weights[i, : len(row)], weights[0], atol=1e-5, rtol=0)
        slots, tokens = -(-len(row) // 3), len(row)
        allocation = flow.allocation[i, :slots, :tokens]
        torch.testing.assert_close(allocation.sum(dim=1), torch.ones(slots))
        values = model.transmission.value(allocation @ model.transmission.value_norm(anchors[0]))
        torch.testing.assert_close(model.slot_mlp(values), memory.embeddings[i, :slots], atol=1e-4, rtol=1e-4)
    # The short row's pads have nothing, and windows of 3 tokens stay apart.
    assert not flow.allocation[1, 2:].any()
    assert not flow.allocation[1, :, 6:].any()
    assert not flow.layer_weights[1, 6:].any()
    assert not flow.allocation[0, 0, 3:].any()


def test_information_flow_without_a_gate_has_no_layer_weights(comprexit):
    model = comprexit.build(token_anchors="last_layer", slot_aggregation="mean", chunk_size=16).model
    flow = model.information_flow(ids_of(9), ratio=2)
    assert flow.layer_weights is None
    assert flow.allocation[0, :2].tolist() == [[0.5, 0.5] + [0.0] * 7, [0, 0, 0.5, 0.5] + [0.0] * 5]
    assert flow.allocation[0, 4].tolist() == [0.0] * 8 + [1.0]


def test_information_flow_of_several_chunks_or_of_nothing_is_refused(comprexit):
    model = comprexit.build(chunk_size=8).model
    with pytest.raises(ValueError, match=r"1 to 8 tokens, got 9"):
        model.information_flow(ids_of(9))
    with pytest.raises(ValueError, match="got 0"):
        model.information_flow(ids_of(0))


# --- the configuration ---


def test_defaults_are_the_papers():
    config = ComprExITConfig()
    assert (config.compression_ratios, config.bos_before_slots, config.chunk_size) == ((4,), True, None)
    assert (config.window_size, config.transport_iterations, config.transport_epsilon) == (128, 30, 0.1)
    assert (config.gate_size, config.metric_size, config.gate_temperature) == (256, 256, 0.7)
    assert (config.uniform_sender_share, config.encoder_lora, config.decoder_lora) == (0.05, None, None)
    assert config.task_token_ids == {}
    assert ComprExITConfig(literal_equations=True).uniform_sender_share == 0.0


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("token_anchors", "first", "'gate', 'last_layer' or a layer from 0 to 32"),
        ("token_anchors", 33, "0 to 32"),
        ("token_anchors", -1, "0 to 32"),
        ("token_anchors", True, "0 to 32"),
        ("slot_aggregation", "attention", "transport"),
        ("window_size", 0, "at least 1"),
        ("gate_size", 2.0, "at least 1"),
        ("metric_size", True, "at least 1"),
        ("segment_windows", 0, "at least 1"),
        ("transport_iterations", 0, "at least 1"),
        ("transport_epsilon", 0, "above 0"),
        ("transport_epsilon", float("nan"), "above 0"),
        ("gate_temperature", float("inf"), "above 0"),
        ("uniform_sender_share", 1.1, "0 to 1"),
        ("shuffled_receivers", 1, "True or False"),
        ("literal_equations", None, "True or False"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"`{field}`.*{allowed}.*got {value!r}"):
        ComprExITConfig(**{field: value})


@pytest.mark.parametrize("aggregation", ["mean", "window_attention"])
def test_shuffled_receivers_need_receivers(aggregation):
    with pytest.raises(ValueError, match=f"shuffled_receivers.*got '{aggregation}'"):
        ComprExITConfig(shuffled_receivers=True, slot_aggregation=aggregation)


@torch.no_grad()
def test_every_ablation_changes_the_slots(comprexit):
    """A value of the configuration that nothing reads would pass all other tests of it."""
    ids = ids_of(15)
    fields = {
        "plain": {},
        "window": {"window_size": 12},
        "epsilon": {"transport_epsilon": 1.0},
        "iterations": {"transport_iterations": 1},
        "uniform": {"uniform_sender_share": 0.5},
        "temperature": {"gate_temperature": 2.0},
        "shuffled": {"shuffled_receivers": True},
    }
    plain = comprexit.build().model
    slots = {}
    for name, changes in fields.items():
        model = comprexit.build(**changes).model
        model.load_state_dict(plain.state_dict())
        slots[name] = model.compress(ids, ratio=2).embeddings
    for name in fields.keys() - {"plain"}:
        assert not slots[name].allclose(slots["plain"], atol=1e-3), name
