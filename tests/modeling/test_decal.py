# SPDX-License-Identifier: Apache-2.0
"""DeCAL against a second T5 that is written out by hand, against plain T5, and under padding, saving and questions."""

import dataclasses
import math

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from context_compressors import CompressedContext, DeCALConfig, DeCALForConditionalGeneration, DeCALModel
from context_compressors.modeling.pooling import num_slots
from context_compressors.modeling.relative_positions import latent_position_ids, mask_bias, relative_position_bias

VOCAB_SIZE, START = 128, 0
T5_FIELDS = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": START,
    "dropout_rate": 0.0,
}
CCPROXY = {"latent_placement": "appended", "latent_pooling": False, "encoder_attention": "causal"}
SETTINGS = {
    "decal": {},
    "no_pooling": {"latent_pooling": False},
    "appended": {"latent_placement": "appended"},
    "ccproxy": CCPROXY,
    "attention_pooling": {"compression": "attention_pooling"},
    "baseline": {"compression": "none", "compression_ratios": 1},
}
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def build(setting="decal", attention="sdpa", seed=0, decoder_config=None, **fields):
    """A tiny model in evaluation mode, with nothing at a start value that could hide a mistake."""
    torch.manual_seed(seed)
    fields = {"compression_ratios": (2, 3, 8), **SETTINGS[setting], **fields}
    config = DeCALConfig(decoder_config={**T5_FIELDS, **(decoder_config or {})}, **fields)
    config._attn_implementation = attention
    model = DeCALForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="module", params=list(SETTINGS))
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def decal():
    return build()


@pytest.fixture
def question(random_rows):
    return torch.stack(random_rows([4, 4], seed=1))


@pytest.fixture
def t5_folder(tmp_path):
    torch.manual_seed(0)
    config = T5Config(**{**T5_FIELDS, "dropout_rate": 0.1}, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def raises(*parts):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))


# --- section 3 by hand ---


def naive_bucket(relative, num_buckets, max_distance):
    """T5's buckets: half of them for keys behind the query; then each distance, then logarithmically wider ones."""
    half = num_buckets // 2
    first, distance = (half if relative > 0 else 0), abs(relative)
    exact = half // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(max_distance / exact) * (half - exact)
    return first + min(exact + int(steps), half - 1)


def naive_norm(states, weight):
    return weight * states / torch.sqrt((states * states).mean(dim=-1, keepdim=True) + 1e-6)


def naive_attention(module, queries, states, bias):
    """T5's attention of one row: no scale, no bias in its maps."""
    heads = []
    for head in range(module.n_heads):
        rows = slice(head * module.key_value_proj_dim, (head + 1) * module.key_value_proj_dim)
        query, key, value = (
            x @ getattr(module, name).weight[rows].T for name, x in zip("qkv", (queries, states, states), strict=True)
        )
        heads.append((query @ key.T + bias[head]).softmax(dim=-1) @ value)
    return torch.cat(heads, dim=-1) @ module.o.weight.T


def naive_stack(stack, states, positions, causal):
    """T5's encoder of one row at the given positions."""
    table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    buckets = [[naive_bucket(key - query, len(table), 20) for key in positions] for query in positions]
    bias = table[torch.tensor(buckets)].permute(2, 0, 1)
    if causal:
        bias = bias + torch.full_like(bias, -1e30).triu(1)
    for block in stack.block:
        attention, feed_forward = block.layer
        states = states + naive_attention(
            attention.SelfAttention, *[naive_norm(states, attention.layer_norm.weight)] * 2, bias
        )
        maps = feed_forward.DenseReluDense
        inner = naive_norm(states, feed_forward.layer_norm.weight)
        gate = torch.nn.functional.gelu(inner @ maps.wi_0.weight.T, approximate="tanh")
        states = states + (gate * (inner @ maps.wi_1.weight.T)) @ maps.wo.weight.T
    return naive_norm(states, stack.final_layer_norm.weight)


def naive_windows(states, ratio):
    return [states[start : start + ratio].mean(dim=0) for start in range(0, len(states), ratio)]


def naive_slots(model, ids, ratio):
    """The slots of one row without pads."""
    encoder, config = model.model, model.config
    embeddings = encoder.encoder.embed_tokens.weight[ids]
    tokens = list(range(len(ids)))
    if config.compression != "latents":
        states = naive_stack(encoder.encoder, embeddings, tokens, causal=False)
        if config.compression == "none":
            return states
        pooling, queries = encoder.attention_pooling, torch.stack(naive_windows(states, ratio))
        no_bias = torch.zeros(4, len(queries), len(states))
        return naive_norm(
            queries + naive_attention(pooling.attention, queries, states, no_bias), pooling.layer_norm.weight
        )
    latents, positions = [], []
    for index, pooled in enumerate(naive_windows(embeddings, ratio)):
        pooled = pooled if config.latent_pooling else torch.zeros_like(pooled)
        latents.append(naive_norm(encoder.latent_vector + pooled, encoder.latent_norm.weight))
        window = tokens[index * ratio : (index + 1) * ratio]
        positions.append(sum(window) // len(window))
    causal = config.encoder_attention == "causal"
    if config.latent_placement == "appended":
        states = torch.cat([embeddings, torch.stack(latents)])
        return naive_stack(encoder.encoder, states, tokens + positions, causal)[len(ids) :]
    states = torch.cat([torch.stack(latents), embeddings])
    return naive_stack(encoder.encoder, states, positions + tokens, causal)[: len(latents)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_slots_and_gradients_are_those_of_a_t5_by_hand(setting, attention, random_rows, pad_rows):
    model = build(setting, attention)
    ratios = (1,) if setting == "baseline" else (2, 3, 8)
    rows = random_rows([11, 3, 1])
    ids, mask = pad_rows(rows, "left")
    for ratio in ratios:
        model.zero_grad()
        outputs = model.model(ids, mask, ratio=ratio)
        weights = torch.randn(outputs.last_hidden_state.shape)
        (outputs.last_hidden_state * weights).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
        model.zero_grad()
        total = 0
        for row, found, slot_mask, weight in zip(
            rows, outputs.last_hidden_state, outputs.attention_mask, weights, strict=True
        ):
            expected = naive_slots(model, row, ratio)
            assert int(slot_mask.sum()) == len(expected) == num_slots(len(row), ratio)
            torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=1e-4)
            assert not found[len(expected) :].any()
            total = total + (expected * weight[: len(expected)]).sum()
        total.backward()
        expected_gradients = {n: p.grad for n, p in model.model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=2e-4, rtol=2e-3, msg=name)


@pytest.mark.parametrize(
    ("num_tokens", "ratio", "positions"), [(10, 4, [1, 5, 8]), (7, 2, [0, 2, 4, 6]), (5, 8, [2]), (3, 1, [0, 1, 2])]
)
def test_a_latent_stands_at_the_integer_mean_of_its_tokens(num_tokens, ratio, positions):
    mask = torch.ones(1, len(positions), dtype=torch.long)
    assert latent_position_ids(torch.tensor([num_tokens]), mask, ratio).tolist() == [positions]


@pytest.mark.parametrize(
    ("ratio", "first", "last", "total"),
    [
        (2, [0, 2, 4], [1020, 1022], 261632),
        (4, [1, 5, 9], [1017, 1021], 130816),
        (8, [3, 11, 19], [1011, 1019], 65408),
    ],
)
def test_positions_over_a_long_context(ratio, first, last, total):
    ids = latent_position_ids(torch.tensor([1024]), torch.ones(1, 1024 // ratio, dtype=torch.long), ratio)[0].tolist()
    assert (ids[:3], ids[-2:], sum(ids)) == (first, last, total)


def test_positions_of_rows_of_other_lengths_and_ratios():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    ids = latent_position_ids(torch.tensor([10, 10, 0]), mask, torch.tensor([4, 8, 2]))
    assert ids.tolist() == [[1, 5, 8], [3, 8, 0], [0, 0, 0]]


def test_buckets_are_four_times_t5s():
    """Section 4.1, for a configuration from nothing; the numbers are T5's own function's at 128 and 512."""
    config = DeCALConfig().decoder_config
    assert (config.relative_attention_num_buckets, config.relative_attention_max_distance) == (128, 512)
    table = torch.nn.Embedding.from_pretrained(torch.arange(128.0)[:, None])
    relative = [0, -1, -31, -32, -64, -128, -256, -511, -512, -4096, 1, 5, 32, 64, 128, 256, 512]
    positions = torch.tensor([[0, *relative]])
    bias = relative_position_bias(table, positions, 128, 512)
    assert bias.shape == (1, 1, 18, 18)
    assert bias[0, 0, 0, 1:].tolist() == [0, 1, 31, 32, 40, 48, 56, 63, 63, 63, 65, 69, 96, 104, 112, 120, 127]


def test_latents_at_the_start():
    """l = LayerNorm(v + P(x)) with T5's norm, which subtracts no mean."""
    model = DeCALModel(DeCALConfig(decoder_config={**T5_FIELDS, "d_model": 2}))
    torch.nn.init.zeros_(model.latent_vector)
    embeddings = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    latents, mask = model.latents(embeddings, torch.ones(1, 3, dtype=torch.long), 2)
    expected = torch.tensor([[[0.7844644802093169, 1.1766967203139753], [0.9053574455832601, 1.086428934699912]]])
    torch.testing.assert_close(latents, expected)
    assert mask.tolist() == [[1, 1]]


def test_one_vector_and_one_norm_are_all_that_is_added():
    config = DeCALConfig(decoder_config={"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16})
    with torch.device("meta"):
        model = DeCALForConditionalGeneration(config)
        baseline = DeCALForConditionalGeneration(DeCALConfig(decoder_config=config.decoder_config, compression="none"))
    count, plain = (sum(p.numel() for p in m.parameters()) for m in (model, baseline))
    assert count - plain == 2048
    biases = {n: p.numel() for n, p in model.named_parameters() if "relative_attention_bias" in n}
    assert list(biases.values()) == [2048, 2048]  # one table in each stack, of plain T5 512


@pytest.mark.parametrize(("length", "ratio", "slots"), [(1024, 4, 256), (4096, 8, 512), (4096, 2, 2048), (10, 4, 3)])
def test_the_ratio_holds_for_any_length(length, ratio, slots, monkeypatch):
    model = build(compression_ratios=(ratio,)).model
    seen = []
    monkeypatch.setattr(
        model, "_encoder_states", lambda embeddings, *_: seen.append(embeddings.shape[1]) or embeddings
    )
    outputs = model(torch.full((1, length), 9))
    assert outputs.last_hidden_state.shape == (1, slots, 32)
    assert seen == [length + slots]


def test_every_token_reaches_every_slot(model, random_rows):
    ids = torch.stack(random_rows([12]))
    before = model.compress(ids).embeddings
    for place in (0, 5, 11):
        changed = ids.clone()
        changed[0, place] = 5 + (changed[0, place] + 1) % (VOCAB_SIZE - 5)
        after = model.compress(changed).embeddings
        assert ((after - before).abs().amax(dim=-1) > 1e-6).all(), place


def test_a_causal_encoder_sees_nothing_that_comes_later():
    model = build("ccproxy").model
    embeddings = torch.randn(1, 8, 32)
    mask, positions = torch.ones(1, 8, dtype=torch.long), torch.arange(8)[None]
    before = model._encoder_states(embeddings, mask, positions)
    embeddings[0, 5] += 1
    changed = (model._encoder_states(embeddings, mask, positions) - before).abs().amax(dim=-1)[0] > 1e-6
    assert changed.tolist() == [False] * 5 + [True] * 3


def test_a_row_of_pads_alone_sees_them_so_that_no_softmax_is_empty():
    bias = mask_bias(torch.zeros(1, 1, 2, 2), torch.tensor([[1, 0], [0, 0]]))
    lowest = torch.finfo(torch.float32).min
    assert bias[:, 0].tolist() == [[[0, lowest], [0, lowest]], [[0, 0], [0, 0]]]


# --- plain T5 ---


@pytest.mark.parametrize(("projection", "tied"), [("gated-gelu", False), ("relu", True)], ids=["v1.1", "v1.0"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_without_compression_it_is_the_t5_it_was_made_from(
    projection, tied, attention, tmp_path, pad_rows, random_rows
):
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(T5Config(**T5_FIELDS, feed_forward_proj=projection, tie_word_embeddings=tied))
    if not tied:
        # As in T5 v1.1's checkpoints; transformers ties the two in new models.
        t5.lm_head.weight = torch.nn.Parameter(torch.randn_like(t5.lm_head.weight))
    t5.eval().save_pretrained(tmp_path)
    model = DeCALForConditionalGeneration.from_base(tmp_path, compression="none", attn_implementation=attention)
    assert model.config.tie_word_embeddings is tied
    ids, mask = pad_rows(random_rows([9, 4]), "right")
    labels = torch.stack(random_rows([6, 6], seed=2))
    labels[1, 4:] = -100
    ours, theirs = (m(input_ids=ids, attention_mask=mask, labels=labels) for m in (model, t5))
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.loss, theirs.loss)
    for settings in ({}, {"num_beams": 3}):
        generated = (m.generate(ids, attention_mask=mask, **GREEDY, **settings) for m in (model, t5))
        assert torch.equal(*generated)
    back = model.as_t5()
    torch.testing.assert_close(back(input_ids=ids, attention_mask=mask, labels=labels).logits, theirs.logits)


def test_compression_can_start_at_fine_tuning(t5_folder, tmp_path, random_rows):
    """From a plain T5, or from a T5 baseline of this project, the base's buckets stay."""
    baseline = DeCALForConditionalGeneration.from_base(t5_folder, compression="none")
    baseline.save_pretrained(tmp_path / "baseline")
    labels = torch.stack(random_rows([6]))
    for base in (t5_folder, tmp_path / "baseline"):
        for setting in ("decal", "ccproxy", "attention_pooling"):
            model = DeCALForConditionalGeneration.from_base(base, **SETTINGS[setting])
            assert isinstance(model.config.decoder_config, T5Config)
            assert model.config.decoder_config.relative_attention_num_buckets == 16
            for name, parameter in baseline.named_parameters():
                assert parameter.equal(model.get_parameter(name)), name
            assert model(input_ids=labels, labels=labels).loss.isfinite()
    encoder = DeCALModel.from_base(t5_folder)
    assert encoder.encoder.embed_tokens.weight.equal(baseline.get_input_embeddings().weight)
    # Like a token's embedding, so that a norm of it is not of rounding errors.
    assert 0.1 < encoder.latent_vector.std() / encoder.encoder.embed_tokens.weight.std() < 10


def test_fresh_weights_start_as_t5s(random_rows):
    torch.manual_seed(0)
    model = DeCALForConditionalGeneration(DeCALConfig(decoder_config={**T5_FIELDS, "d_model": 256})).eval()
    assert 0.95 < model.get_input_embeddings().weight.std() < 1.05
    assert model.model.latent_norm.weight.eq(1).all()
    ids = torch.stack(random_rows([16]))
    # Close to a guess: T5 v1.1's output table starts at 1 / sqrt(d_model).
    assert model(input_ids=ids, labels=ids).loss < 1.5 * math.log(VOCAB_SIZE)


# --- padding and batches ---


def test_padding_changes_nothing(model, random_rows, pad_rows):
    rows, texts = random_rows([13, 5, 1]), random_rows([4, 2, 6], seed=1)
    alone = [model.compress(row[None]) for row in rows]
    answers = [model.generate(text[None], memory=memory, **GREEDY) for text, memory in zip(texts, alone, strict=True)]
    for side in ("left", "right", "middle"):
        ids, mask = pad_rows(rows, side, value=VOCAB_SIZE + 7)
        memory = model.compress(ids, mask)
        assert memory.num_context_tokens.tolist() == [13, 5, 1]
        for index, expected in enumerate(alone):
            row = memory.rows(index)
            torch.testing.assert_close(row.embeddings, expected.embeddings, atol=1e-5, rtol=1e-4)
            assert row.position_ids.equal(expected.position_ids)
        text_ids, text_mask = pad_rows(texts, "left" if side == "left" else "right", value=VOCAB_SIZE + 7)
        generated = model.generate(text_ids, attention_mask=text_mask, memory=memory, **GREEDY)
        for row, answer in zip(generated, answers, strict=True):
            assert row[-5:].equal(answer[0, -5:])


def test_each_row_may_have_its_own_ratio(decal, random_rows, pad_rows):
    rows = random_rows([13, 6])
    memory = decal.compress(*pad_rows(rows), ratio=torch.tensor([3, 8]))
    for index, ratio in enumerate((3, 8)):
        alone = decal.compress(rows[index][None], ratio=ratio)
        torch.testing.assert_close(memory.rows(index).embeddings, alone.embeddings, atol=1e-5, rtol=1e-4)


def test_several_ratios_in_one_call(decal, random_rows):
    ids = torch.stack(random_rows([13]))
    for ratio, memory in zip((2, 8), decal.compress(ids, ratio=[2, 8]), strict=True):
        assert memory.embeddings.equal(decal.compress(ids, ratio=ratio).embeddings)


def test_chunks_are_compressed_apart(random_rows):
    model = build(chunk_size=6)
    ids = torch.stack(random_rows([15]))
    parts = [model.compress(ids[:, start : start + 6]).embeddings for start in (0, 6, 12)]
    torch.testing.assert_close(model.compress(ids).embeddings, torch.cat(parts, dim=1), atol=1e-5, rtol=1e-4)


def test_a_context_of_no_tokens_gives_no_slots_and_still_answers(model, question):
    memory = model.compress(question[:, :0])
    assert memory.num_slots.tolist() == [0, 0]
    answers = model.generate(question, memory=memory, **GREEDY)
    mixed = model.compress(question, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    assert mixed.num_slots[1] == 0
    assert model.generate(question, memory=mixed, **GREEDY)[1].equal(answers[1])
    logits = model(input_ids=question, memory=memory).logits[1:]
    torch.testing.assert_close(model(input_ids=question, memory=mixed).logits[1:], logits, atol=1e-5, rtol=1e-4)


def test_an_empty_row_sends_no_nan_into_the_gradients(random_rows):
    model = build().train()
    ids = torch.stack(random_rows([6, 6]))
    mask = torch.tensor([[1] * 6, [0] * 6])
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# --- generation ---


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_caches_change_nothing(attention, question, random_rows, pad_rows):
    """Also where the decoder has another number of layers than the encoder."""
    model = build(attention=attention, decoder_config={"num_decoder_layers": 3})
    context = dict(zip(("context_input_ids", "context_attention_mask"), pad_rows(random_rows([13, 5])), strict=True))
    expected = model.generate(question, **context, **GREEDY)
    assert expected.shape == (2, 9)
    assert expected[:, :4].equal(question)
    memory = model.compress(*context.values())
    for settings in ({"use_cache": False}, {"cache_implementation": "static"}, {"use_cache": True}):
        assert model.generate(question, memory=memory, **GREEDY, **settings).equal(expected)
    beams = model.generate(question, memory=memory, num_beams=3, num_return_sequences=2, **GREEDY)
    assert beams.shape == (4, 9)
    rows = [
        model.generate(question[i : i + 1], memory=memory.rows(i), num_beams=3, num_return_sequences=2, **GREEDY)
        for i in range(2)
    ]
    assert beams.equal(torch.cat(rows))
    output = model.generate(question, memory=memory, return_dict_in_generate=True, output_scores=True, **GREEDY)
    assert output.sequences.equal(expected)
    assert len(output.scores) == 5


def test_greedy_text_is_the_likeliest_of_forward(decal, question, random_rows):
    memory = decal.compress(torch.stack(random_rows([13, 13])))
    generated = decal.generate(question, memory=memory, **GREEDY)
    text = torch.cat([torch.full((2, 1), START), generated], dim=1)
    logits = decal(input_ids=text, memory=memory).logits
    scores = logits[:, 4:-1].clone()
    scores[:, :, 1] = -torch.inf  # min_new_tokens keeps EOS away
    assert scores.argmax(-1).equal(generated[:, 4:])


def test_the_start_token_stands_in_front_once(decal, question, random_rows):
    memory = decal.compress(torch.stack(random_rows([13])))
    expected = decal.generate(question, memory=memory, **GREEDY)
    started = torch.cat([torch.full((2, 1), START), question], dim=1)
    assert decal.generate(started, memory=memory, **GREEDY)[:, 1:].equal(expected)
    assert decal.generate(input_ids=question, memory=memory, **GREEDY).equal(expected)
    nothing_asked = decal.generate(memory=memory, **GREEDY)
    assert nothing_asked.shape == (1, 5)
    assert decal.generate(torch.stack(random_rows([13])), **GREEDY)[:, 1:].equal(nothing_asked)


def test_both_forms_of_forward_agree(decal, random_rows, pad_rows):
    ids, mask = pad_rows(random_rows([13, 5]))
    targets = torch.stack(random_rows([6, 6], seed=3))
    first = decal(input_ids=ids, attention_mask=mask, labels=targets, ratio=3)
    text = torch.cat([torch.full((2, 1), START), targets], dim=1)
    labels = torch.cat([torch.full((2, 1), -100), targets], dim=1)
    context = {"context_input_ids": ids, "context_attention_mask": mask, "ratio": 3}
    second = decal(input_ids=text, labels=labels, **context)
    third = decal(input_ids=text, labels=labels, memory=decal.compress(ids, mask, ratio=3))
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(second.loss, third.loss)
    torch.testing.assert_close(first.logits, second.logits[:, :-1])
    assert decal(input_ids=text, logits_to_keep=2, **context).logits.equal(second.logits[:, -2:])


# --- questions in the encoder ---


def test_a_memory_with_a_question_in_it_answers_that_question_only(question, random_rows, pad_rows, tmp_path):
    model = build(question_placement="encoder")
    ids, mask = pad_rows(random_rows([13, 5]), "left")
    memory = model.compress(ids, mask, question_input_ids=question)
    # The question stands in front of the context and counts.
    assert memory.num_context_tokens.tolist() == [17, 9]
    joined = model.compress(torch.cat([question, ids], dim=1), torch.cat([torch.ones_like(question), mask], dim=1))
    assert memory.embeddings.equal(joined.embeddings)
    answers = model.generate(question, memory=memory, **GREEDY)
    assert answers[:, :4].equal(question)
    context = {"context_input_ids": ids, "context_attention_mask": mask}
    assert model.generate(question, **context, **GREEDY).equal(answers)
    memory.save(tmp_path / "memory.safetensors")
    loaded = CompressedContext.load(tmp_path / "memory.safetensors", model_id=model.model_id)
    padded, text_mask = pad_rows(list(question), "right", value=9)
    assert model.generate(padded, attention_mask=text_mask, memory=loaded, **GREEDY)[:, -5:].equal(answers[:, -5:])
    assert model.generate(question[1:], memory=loaded.rows(1), **GREEDY).equal(answers[1:])
    with raises("row 1", "another question"):
        model.generate(question[[0, 0]], memory=memory)
    with raises("row 0", "no question", "question_input_ids"):
        model.generate(question, memory=joined)
    with raises("questions"):
        CompressedContext.concatenate([memory, joined])
    assert CompressedContext.concatenate([memory, memory]).question_fingerprints.equal(memory.question_fingerprints)


def test_without_a_question_there_is_nothing_to_refuse(random_rows):
    model = build(question_placement="encoder")
    memory = model.compress(torch.stack(random_rows([13])))
    assert model.generate(memory=memory, **GREEDY).shape == (1, 5)


def test_questions_for_the_decoder_are_not_compressed(decal, question):
    with raises("question_placement='encoder'", "'decoder'"):
        decal.compress(question, question_input_ids=question)


def test_questions_in_the_encoder_are_checked(question):
    model = build(question_placement="encoder")
    with raises("`question_input_ids` has no token in row 1"):
        model.compress(question, question_input_ids=question, question_attention_mask=torch.tensor([[1] * 4, [0] * 4]))
    with raises("`question_input_ids` has 2 rows", "3"):
        model.compress(question[[0, 0, 1]], question_input_ids=question)


# --- saving ---


@torch.no_grad()
def test_one_folder_serves_both_auto_classes(model, question, random_rows, tmp_path):
    ids = torch.stack(random_rows([13, 13]))
    model.save_pretrained(tmp_path)
    memory = model.compress(ids)
    expected = model.generate(question, memory=memory, **GREEDY)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is DeCALForConditionalGeneration
    assert loaded.generate(question, memory=memory, **GREEDY).equal(expected)
    encoder = AutoModel.from_pretrained(tmp_path)
    assert type(encoder) is DeCALModel
    assert not [name for name, _ in encoder.named_parameters() if "decoder" in name]
    # The encoder alone makes memories that the whole model reads.
    memory = encoder.compress(ids)
    assert memory.model_id == encoder.model_id == model.model_id
    assert loaded.generate(question, memory=memory, **GREEDY).equal(expected)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    config = DeCALConfig.from_pretrained(tmp_path)
    assert config.to_dict() == model.config.to_dict()


@torch.no_grad()
def test_weights_load_in_the_type_that_is_asked_for(decal, question, random_rows, tmp_path):
    decal.save_pretrained(tmp_path)
    loaded = DeCALForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    ids = torch.stack(random_rows([13, 13]))
    memory, expected = loaded.compress(ids), decal.compress(ids)
    assert memory.dtype == torch.bfloat16
    assert (memory.embeddings - expected.embeddings).norm() < 0.1 * expected.embeddings.norm()
    assert loaded.generate(question, memory=memory, **GREEDY).shape == (2, 9)
    assert loaded.model_id == decal.model_id


# --- training ---


@pytest.mark.parametrize(
    "setting", ["decal", *(pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS if name != "decal")]
)
def test_the_stock_trainer_moves_every_weight(setting, tmp_path, random_rows):
    model = build(setting)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = random_rows([9, 4, 12, 7])
    data = [{"input_ids": row.tolist(), "labels": row[:5].tolist()} for row in rows]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>")), pad_token="<pad>"
    )
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer, model)
    )
    assert math.isfinite(trainer.train().training_loss)
    still = [name for name, parameter in model.named_parameters() if parameter.detach().equal(before[name])]
    assert not still


@pytest.mark.parametrize("setting", ["decal", "attention_pooling"])
def test_gradient_checkpointing_changes_no_gradient(setting, random_rows):
    ids = torch.stack(random_rows([9, 9]))
    gradients = []
    for checkpointing in (False, True):
        model = build(setting).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_a_chosen_trainable_set_is_kept(tmp_path):
    model = build(trainable_parameters=[r"\.latent_"])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "model.latent_vector",
        "model.latent_norm.weight",
    }
    model.save_pretrained(tmp_path)
    loaded = DeCALForConditionalGeneration.from_pretrained(tmp_path)
    assert sum(parameter.requires_grad for parameter in loaded.parameters()) == 2
    with raises("no_such_part", "match no parameter"):
        build(trainable_parameters=["no_such_part"])


# --- errors ---


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"compression": "tokens"}, ("`compression`", "'latents'", "'none'", "'tokens'")),
        ({"latent_placement": "behind"}, ("`latent_placement`", "'prepended'", "'appended'", "'behind'")),
        ({"latent_pooling": 1}, ("`latent_pooling`", "True or False", "1")),
        ({"encoder_attention": "both"}, ("`encoder_attention`", "'bidirectional'", "'both'")),
        ({"question_placement": "both"}, ("`question_placement`", "'decoder'", "'both'")),
        ({"encoder_attention": "causal"}, ("`latent_placement='appended'`", "'prepended'")),
        ({"compression": "none", "compression_ratios": 2}, ("`compression_ratios` must be 1", "2")),
        ({"compression": "attention_pooling", "latent_pooling": False}, ("'attention_pooling'", "False")),
        ({"encoder_lora": {"rank": 2}}, ("`encoder_lora` must be None", "rank")),
        ({"position_layout": "enhanced"}, ("`position_layout` must be 'default'", "'enhanced'")),
        ({"task_token_ids": {"[AE]": 5}}, ("`task_token_ids` must be {}", "AE")),
        ({"decoder_config": LlamaConfig()}, ("`decoder_config` must be a T5Config", "LlamaConfig")),
    ],
    ids=lambda part: next(iter(part)),
)
def test_wrong_values_of_the_configuration_are_named(fields, parts):
    with raises(*parts):
        DeCALConfig(**fields)


def test_what_forward_and_generate_refuse(decal, question, random_rows):
    ids = torch.stack(random_rows([13, 13]))
    memory = decal.compress(ids)
    with raises("give a context"):
        decal(labels=question)
    with raises("`decoder_input_ids` or `labels`"):
        decal(input_ids=ids)
    with raises("the decoder's text is `input_ids`"):
        decal(decoder_input_ids=question, memory=memory)
    for call in (decal, decal.generate):
        with raises("`context_input_ids` or `memory`, not both"):
            call(input_ids=question, memory=memory, context_input_ids=ids)
    with raises("`inputs` or as `input_ids`"):
        decal.generate(question, input_ids=question, memory=memory)
    with raises("give a context"):
        decal.generate()
    with raises("not trained for the ratio 4", r"\[2, 3, 8\]"):
        decal(input_ids=ids, labels=question, ratio=4)
    with raises("has the token id 128", "128 tokens"):
        decal.generate(question.clamp(max=0) + VOCAB_SIZE, memory=memory)
    with raises("has no token in row 0"):
        decal.generate(question[:, :0], memory=memory)
    with raises("ratio 2", "`ratio` is 3"):
        decal(input_ids=question, memory=memory, ratio=3)
    with pytest.raises(TypeError, match="did you mean 'context_input_ids'"):
        decal(input_ids=question, context_inputs_ids=ids)
    with pytest.raises(TypeError, match="rate"):
        decal.compress(ids, rate=3)


def test_the_memory_of_another_model_is_refused(decal, question):
    other = build(seed=1).compress(question)
    for call in (decal, decal.generate):
        with raises(other.model_id, decal.model_id):
            call(input_ids=question, memory=other)
    narrow = dataclasses.replace(other, embeddings=other.embeddings[:, :, :16], model_id="")
    with raises("width 16", "width 32"):
        decal(input_ids=question, memory=narrow)
    with raises("2 rows", "1"):
        decal(input_ids=question[:1], memory=decal.compress(question))
