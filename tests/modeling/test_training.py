# SPDX-License-Identifier: Apache-2.0
"""Trainable sets, gradients, and the encoder's view."""

import pytest
import torch
from parameters import assert_same_gradients, trainable
from parameters import gradients as take_gradients
from peft.tuners.lora import Linear

from context_compressors.modeling.parts.lora import AdaptedByPass


@pytest.fixture
def batch(random_rows, pad_rows):
    """Two rows, padded; one context longer than a sliding window."""
    context_ids, context_mask = pad_rows(random_rows([13, 5]), "left")
    texts = random_rows([6, 4], seed=1)
    texts[0][0] = 1
    input_ids, attention_mask = pad_rows(texts, "right")
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill(attention_mask == 0, -100),
        "context_input_ids": context_ids,
        "context_attention_mask": context_mask,
    }


def cosine(found, exact):
    flat = [torch.cat([those[name].flatten() for name in exact]) for those in (found, exact)]
    return torch.nn.functional.cosine_similarity(*flat, dim=0)


def gradients(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return take_gradients(model)


# The slots of memory tokens see the whole context whatever the attention: test_memory_tokens.py has their test. Which
# keys and values stay goes by all that there are.
@pytest.mark.only(lambda case: not (case.method.memory_tokens or case.method.ranks))
def test_a_bidirectional_encoder_sees_what_comes_later(backbone_case, random_rows, pad_rows, slots):
    """Perturbation: the last token changes, and so does the first slot, unless the encoder is causal."""
    method, row = backbone_case.method, random_rows([6])[0]
    changed = row.clone()
    changed[-1] = 4
    cases = [(backbone_case, method.bidirectional)]
    if "causal" in method.hard:
        cases.append((backbone_case.on(variant="causal"), False))
    for case, bidirectional in cases:
        for padded in (False, True):
            found = []
            for ids in (row, changed):
                inputs = pad_rows([ids, row[:3]]) if padded else (ids[None], None)
                found.append(slots(case.model.compress(*inputs, ratio=2))[0])
            moved = (found[0] - found[1]).abs().amax(dim=1) > 1e-3
            expected = [True] * 3 if bidirectional else [False, False, True]
            assert moved.tolist() == expected, f"{case}, padded: {padded}"


@pytest.mark.only(lambda case: "fixed_encoder" in case.method.hard)
def test_a_fixed_encoder_is_the_untouched_base(method_case, random_rows, slots):
    """On a shared base the decoder's adapter must be off while the encoder works."""
    model, context = method_case.on(variant="fixed_encoder").build(), random_rows([9])[0][None]
    before = slots(model.compress(context))
    with model.base_language_model():
        torch.testing.assert_close(slots(model.compress(context)), before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".decoder." in name:
                parameter.zero_()
    assert slots(model.compress(context)).equal(before)


def own_parameters(model):
    """Names of what is neither the base's nor its head's."""
    base_names = {
        f"model.{part}.{name}"
        for part in ("language_model", "encoder_model")
        if (backbone := getattr(model.model, part)) is not None
        for name, _ in backbone.named_parameters()
        if "lora_" not in name
    }
    if getattr(model.config, "train_encoder", False):
        base_names = {name for name in base_names if not name.startswith("model.encoder_model.")}
    return {name for name, _ in model.named_parameters()} - base_names - {"lm_head.weight"}


def put_task_tokens(model, batch):
    """One task token in each row, so that each of their embeddings is used."""
    if model.config.task_token_ids:
        batch["input_ids"][:, 1] = torch.tensor(list(model.config.task_token_ids.values()))
        batch["labels"][:, 1] = -100


def test_method_parts_and_adapters_train_each_with_a_gradient_and_nothing_of_the_base(case, batch):
    model = case.build().train()
    put_task_tokens(model, batch)
    found = gradients(model, batch)
    # Later stages have sets of their own: test_gmsa.py and test_autocompressor.py say which.
    if model.config.stage_parameters is None:
        assert trainable(model) == own_parameters(model)
    assert {model.get_parameter(name).dtype for name in found} == {torch.float32}
    assert set(found) == trainable(model)
    without = [name for name, gradient in found.items() if not gradient.any()]
    assert [name for name in without if not name.endswith(case.method.idle)] == []
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.costly
def test_compress_follows_gradients_in_training_mode_only(method_case, batch, slots):
    model = method_case.build()
    ids, mask = batch["context_input_ids"], batch["context_attention_mask"]
    assert not slots(model.compress(ids, mask)).requires_grad
    memory = model.train().compress(ids, mask)
    assert slots(memory).requires_grad
    text = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    model(**text, memory=memory).loss.backward()
    found, expected = take_gradients(model), gradients(model, batch)
    if model.model.has_own_loss:
        # It counts by rows where contexts come with their labels.
        found, expected = ({n: g for n, g in of.items() if ".scorers." not in n} for of in (found, expected))
    assert_same_gradients(found, expected)


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing_changes_nothing(method_case, batch):
    model, layers_run = method_case.build().train(), []
    for layer in model.model.language_model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: layers_run.append(1))
    expected, num_runs = gradients(model, batch), len(layers_run)
    for settings in (None, {"use_reentrant": True}):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        assert model.is_gradient_checkpointing
        layers_run.clear()
        assert_same_gradients(gradients(model, batch), expected)
        assert len(layers_run) > num_runs, "layers run again"
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing
    assert_same_gradients(gradients(model, batch), expected)


@pytest.mark.costly
@pytest.mark.only(lambda case: not (case.method.own_encoder or case.config().shared_adapter))
def test_a_shared_base_gives_the_gradients_of_two_separate_models(method_case, batch):
    """One set of weights with two adapters, against an encoder and a decoder of their own."""
    model = method_case.build().train()
    apart = method_case.build(encoder_config={}).train()
    weights = model.state_dict()
    for name, parameter in apart.named_parameters():
        source = name.replace("encoder_model.", "language_model.")
        if source not in weights:
            # Where only the other side has an adapter, a map has no `base_layer`.
            module, _, parameter_name = source.rpartition(".")
            source = f"{module}.base_layer.{parameter_name}"
        parameter.data.copy_(weights[source])
    torch.testing.assert_close(apart(**batch).loss, model(**batch).loss)
    found = {name.replace("encoder_model.", "language_model."): g for name, g in gradients(apart, batch).items()}
    assert_same_gradients(found, gradients(model, batch))


def test_dropout_of_each_adapter_acts_in_training_only(form_case, batch):
    model = form_case.build(encoder_lora={"rank": 4, "dropout": 0.5}, decoder_lora={"rank": 4, "dropout": 0.5})
    assert model(**batch).loss.equal(model(**batch).loss)
    model.train()
    assert not model(**batch).loss.equal(model(**batch).loss)


@pytest.mark.costly
def test_bfloat16_trains_with_float32_gradients(method_case, batch, monkeypatch):
    model = method_case.build(dtype=torch.bfloat16).train()
    expected = method_case.build().train()
    assert model(**batch).loss.isfinite()
    found = gradients(model, batch)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    exact = gradients(expected, batch)
    assert set(found) == set(exact)
    assert cosine(found, exact) > 0.8
    with torch.autocast("cpu", torch.bfloat16):
        assert cosine(gradients(model, batch), exact) > 0.8
    # Against PEFT's own forward of an adapted map.
    monkeypatch.setattr(AdaptedByPass, "forward", Linear.forward)
    assert_same_gradients(gradients(expected, batch), exact)


def test_the_loss_is_the_mean_over_labelled_tokens(method_case, batch):
    model = method_case.model
    outputs = model(**batch)
    labels = batch["labels"][:, 1:]
    by_hand = torch.nn.functional.cross_entropy(outputs.logits[:, :-1][labels != -100], labels[labels != -100])
    torch.testing.assert_close(outputs.loss, by_hand)
    scaled = model(**batch, num_items_in_batch=torch.tensor(100)).loss
    torch.testing.assert_close(scaled, by_hand * (labels != -100).sum() / 100)
