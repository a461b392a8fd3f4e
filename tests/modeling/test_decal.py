# SPDX-License-Identifier: Apache-2.0
"""DeCAL beside a T5 written out by hand, and beside plain T5."""

import math

import pytest
import torch
from decal_models import EOS, GREEDY, SETTINGS, START, T5_FIELDS, build, raises
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from context_compressors import DeCALConfig, DeCALForConditionalGeneration, DeCALModel
from context_compressors.modeling.modeling_decal import relative_position_bias
from context_compressors.modeling.parts.base_pass import CACHE

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
            assert int(slot_mask.sum()) == len(expected) == -(-len(row) // ratio)
            torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=1e-4)
            assert not found[len(expected) :].any()
            total = total + (expected * weight[: len(expected)]).sum()
        total.backward()
        expected_gradients = {n: p.grad for n, p in model.model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=2e-4, rtol=2e-3, msg=name)


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


# --- plain T5 ---


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["decal", "ccproxy", "attention_pooling"])
def test_compression_starts_from_a_plain_t5_and_from_the_baseline(setting, tmp_path, random_rows):
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(**T5_FIELDS, feed_forward_proj="gated-gelu")).save_pretrained(tmp_path / "t5")
    baseline = DeCALForConditionalGeneration.from_base(tmp_path / "t5", compression="none")
    baseline.save_pretrained(tmp_path / "baseline")
    for base in ("t5", "baseline"):
        model = DeCALForConditionalGeneration.from_base(tmp_path / base, **SETTINGS[setting])
        # The base's buckets stay.
        assert model.config.decoder_config.relative_attention_num_buckets == 16
        for name, parameter in baseline.named_parameters():
            assert parameter.equal(model.get_parameter(name)), name


# --- training ---


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["decal", "attention_pooling"])
def test_the_stock_trainer_moves_every_weight(setting, tmp_path, random_rows, tiny_tokenizer):
    model = build(setting)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    data = [{"input_ids": row.tolist(), "labels": row[:5].tolist()} for row in random_rows([9, 4, 12, 7])]
    steps = {"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(output_dir=str(tmp_path), **steps, **quiet),
        train_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer, model),
    )
    assert math.isfinite(trainer.train().training_loss)
    assert not [name for name, parameter in model.named_parameters() if parameter.detach().equal(before[name])]


# --- generation and questions ---


@pytest.fixture(scope="module")
def decal():
    return build()


@pytest.fixture
def question(random_rows):
    return torch.stack(random_rows([4, 4], seed=1))


@torch.no_grad()
def test_a_context_of_no_tokens_gives_no_slots_and_still_answers(decal, question):
    memory = decal.compress(question[:, :0])
    assert memory.num_slots.tolist() == [0, 0]
    mixed = decal.compress(question, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    found, expected = (decal(input_ids=question, memory=one).logits[1] for one in (mixed, memory))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    model, mask = build().train(), torch.tensor([[1] * 4, [0] * 4])
    with torch.enable_grad():
        model(input_ids=question, attention_mask=mask, labels=question).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_a_mask_covers_the_text_in_the_cache_too(decal, random_rows):
    memory = decal.compress(torch.stack(random_rows([9])))
    text, mask = torch.tensor([[99, START, 7, 8]]), torch.tensor([[0, 1, 1, 1]])
    cache = decal(text[:, :3], mask[:, :3], memory=memory, use_cache=True)[CACHE]
    last = decal(text[:, 3:], mask, memory=memory, cache=cache).logits
    torch.testing.assert_close(last, decal(text[:, 1:], memory=memory).logits[:, -1:], atol=1e-5, rtol=1e-4)


def test_the_start_token_stands_in_front_once(decal, question, random_rows):
    memory = decal.compress(torch.stack(random_rows([13])))
    expected = decal.generate(question, memory=memory, **GREEDY)
    started = torch.cat([torch.full((2, 1), START), question], dim=1)
    assert decal.generate(started, memory=memory, **GREEDY)[:, 1:].equal(expected)
    assert decal.generate(memory=memory, **GREEDY).shape == (1, 5)


def test_the_eos_of_a_tokenizer_is_no_part_of_a_question(decal, random_rows, pad_rows, monkeypatch):
    memory, rows = decal.compress(torch.stack(random_rows([13]))), random_rows([4, 2], seed=1)
    read, decode = [], decal._decode
    monkeypatch.setattr(decal, "_decode", lambda *args, **kwargs: read.append(args[0]) or decode(*args, **kwargs))
    ids, mask = pad_rows([torch.cat([row, torch.tensor([EOS])]) for row in rows], value=EOS)
    decal.generate(ids, attention_mask=mask, memory=memory, **GREEDY)
    assert [row[row != START].tolist() for row in read[0]] == [row.tolist() for row in rows]


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


def test_the_encoders_states_and_attentions_are_those_of_t5(random_rows, pad_rows):
    model = build("baseline", attention="eager")
    ids, mask = pad_rows(random_rows([13, 5]))
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": torch.full((2, 1), START)}
    settings = {"output_hidden_states": True, "output_attentions": True}
    expected, found = (one(**given, **settings) for one in (model.as_t5().eval(), model))
    for part in ("encoder_hidden_states", "encoder_attentions"):
        for ours, theirs in zip(getattr(found, part), getattr(expected, part), strict=True):
            for row, length in enumerate((13, 5)):
                places = (row, ..., slice(length), slice(length) if part == "encoder_attentions" else slice(None))
                torch.testing.assert_close(ours[places], theirs[places], atol=1e-5, rtol=1e-4)
    assert model(**given).encoder_hidden_states is None


# --- saving ---


@torch.no_grad()
def test_one_folder_serves_both_auto_classes(decal, question, random_rows, tmp_path):
    ids = torch.stack(random_rows([13, 13]))
    decal.save_pretrained(tmp_path)
    expected = decal.generate(question, memory=decal.compress(ids), **GREEDY)
    loaded, encoder = (auto.from_pretrained(tmp_path) for auto in (AutoModelForSeq2SeqLM, AutoModel))
    assert (type(loaded), type(encoder)) == (DeCALForConditionalGeneration, DeCALModel)
    assert not [name for name, _ in encoder.named_parameters() if "decoder" in name]
    # The encoder alone makes memories that the whole model reads.
    memory = encoder.compress(ids)
    assert memory.model_id == encoder.model_id == decal.model_id
    assert loaded.generate(question, memory=memory, **GREEDY).equal(expected)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert DeCALConfig.from_pretrained(tmp_path).to_dict() == decal.config.to_dict()


# --- errors ---


def test_mistakes_are_named(decal, question, random_rows):
    ids = torch.stack(random_rows([13, 13]))
    memory, other = decal.compress(ids), build(seed=1).compress(question)
    for fields, *parts in (
        ({"compression": "tokens"}, "`compression`", "'latents'", "'none'", "'tokens'"),
        ({"encoder_attention": "causal"}, "`latent_placement='appended'`", "'prepended'"),
        ({"encoder_lora": {"rank": 2}}, "`encoder_lora` must be left out", "rank"),
    ):
        with raises(*parts):
            DeCALConfig(**fields)
    for call in (decal, decal.generate):
        for given, *parts in (
            ({"memory": memory, "context_input_ids": ids}, "`context_input_ids` or `memory`, not both"),
            ({"memory": memory, "ratio": 3}, "`ratio` belongs to `context_input_ids`"),
            ({"memory": other}, other.model_id, decal.model_id),
        ):
            with raises(*parts):
                call(input_ids=question, **given)
    with raises("give a context"):
        decal(labels=question)
    with raises("`decoder_input_ids` or `labels`"):
        decal(input_ids=ids)
