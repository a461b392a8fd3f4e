# SPDX-License-Identifier: Apache-2.0
"""Compressors on a pretrained base."""

import copy
import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import SnapKVForCausalLM, from_base
from context_compressors.training.losses import logits_function

DOCUMENT = "Once upon a time there was a little dog named Tim. Tim liked to play with a red ball in the park."
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def base_folder(backbone_case, tmp_path):
    """A folder with the tiny base of a case."""
    torch.manual_seed(0)
    folder = tmp_path / "base"
    config = backbone_case.config().decoder_config
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@torch.no_grad()
def test_the_bases_own_logits_are_there_in_bfloat16_too(backbone_case, base_folder, tmp_path):
    method, text = backbone_case.method, torch.arange(5, 17)[None]
    settings: dict = {"attn_implementation": backbone_case.attention}
    model = method.causal_lm_class.from_base(base_folder, **method.easy, **settings)
    base = AutoModelForCausalLM.from_pretrained(base_folder, **settings)
    expected = base(text).logits
    assert model.config._attn_implementation == backbone_case.attention
    assert not model.training
    assert model(text).logits.equal(expected), "adapters start as the identity"
    with model.base_language_model():
        assert model(text).logits.equal(expected)
    assert model(text, context_input_ids=text).logits.isfinite().all()
    backbone = method.model_class.from_base(base_folder, **method.easy, **settings)
    assert backbone(text).last_hidden_state.equal(base.base_model(text).last_hidden_state)
    # From bfloat16, what trains is in float32.
    settings["dtype"] = torch.bfloat16
    model = method.causal_lm_class.from_base(base_folder, **method.easy, **settings)
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    base = AutoModelForCausalLM.from_pretrained(base_folder, **settings)
    with model.base_language_model():
        assert model(text).logits.equal(base(text).logits)
    logits = model(text, context_input_ids=text).logits
    assert logits.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "compressor")
    loaded = method.causal_lm_class.from_pretrained(
        tmp_path / "compressor", attn_implementation=backbone_case.attention
    )
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    assert loaded(text, context_input_ids=text).logits.equal(logits)


@pytest.mark.slow
@torch.no_grad()
def test_a_pretrained_base_compresses_saves_and_loads(form_case, pretrained_base, tmp_path):
    method, tokenizer = form_case.method, AutoTokenizer.from_pretrained(pretrained_base)
    model = method.causal_lm_class.from_base(pretrained_base, **method.easy)
    base = AutoModelForCausalLM.from_pretrained(pretrained_base)
    document = tokenizer(DOCUMENT, return_tensors="pt")
    with model.base_language_model():
        assert model(document["input_ids"]).logits.equal(base(document["input_ids"]).logits)
        assert model.generate(**document, **GREEDY).equal(base.generate(**document, **GREEDY))
    # The base is held once, and beside it the layers of an encoder with weights of its own.
    encoder = model.model.encoder_model
    copied = 0 if encoder is None else sum(p.numel() for n, p in encoder.named_parameters() if "lora_" not in n)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(storages.values()) == 4 * (own + copied + sum(p.numel() for p in base.parameters()))
    question = tokenizer("Tim liked", return_tensors="pt")
    memory = model.compress(**document)
    generated = model.generate(**question, memory=memory, **GREEDY)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generate(**question, memory=memory, **GREEDY).equal(generated)
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == base.config.tie_word_embeddings


@torch.no_grad()
def test_a_method_is_started_by_its_name(tiny_base_config, tmp_path):
    AutoModelForCausalLM.from_config(tiny_base_config()).save_pretrained(tmp_path)
    model = from_base(tmp_path, method="snap_kv", window_size=4)
    assert (type(model), model.config.window_size, model.training) == (SnapKVForCausalLM, 4, False)
    same, ids = SnapKVForCausalLM.from_base(tmp_path, window_size=4), torch.arange(5, 25)[None]
    memory = model.compress(ids, ratio=2)
    assert memory.num_slots.tolist() == [10]
    assert model(ids[:, :3], memory=memory).logits.equal(same(ids[:, :3], memory=same.compress(ids, ratio=2)).logits)
    with pytest.raises(ValueError, match="unknown method 'snapkv'; did you mean 'snap_kv'"):
        from_base(tmp_path, method="snapkv")


@pytest.mark.slow
@torch.no_grad()
def test_an_encoder_of_its_own_starts_as_a_copy(form_case, pretrained_base, tmp_path, slots):
    method = form_case.method
    base_config = json.loads((pretrained_base / "config.json").read_text())
    torch.manual_seed(0)
    shared = method.causal_lm_class.from_base(pretrained_base, **method.easy)
    torch.manual_seed(0)
    apart = method.causal_lm_class.from_base(pretrained_base, **method.easy, encoder_config=base_config)
    ids = torch.arange(5, 30)[None]
    assert slots(apart.compress(ids)).equal(slots(shared.compress(ids)))
    encoder, decoder = apart.model.encoder_model, apart.model.language_model
    assert encoder.embed_tokens.weight.data_ptr() != decoder.embed_tokens.weight.data_ptr()
    apart.save_pretrained(tmp_path)
    loaded = method.causal_lm_class.from_pretrained(tmp_path)
    assert slots(loaded.compress(ids)).equal(slots(shared.compress(ids)))


def test_an_unknown_field_is_refused_with_the_nearest(form_case, tmp_path):
    with pytest.raises(ValueError, match=r"chunksize.*did you mean 'chunk_size'"):
        form_case.method.causal_lm_class.from_base(tmp_path, chunksize=4)


@pytest.mark.slow
def test_a_local_bases_folder_does_not_stand_in_the_checkpoint(method_cases, pretrained_base, tmp_path):
    method = method_cases["mean_pooling"].method
    for base in (pretrained_base, os.path.relpath(pretrained_base)):
        model = method.causal_lm_class.from_base(base, **method.easy)
        assert model.config.base_model_name_or_path == pretrained_base.name
    model.save_pretrained(tmp_path)
    for path in tmp_path.iterdir():
        if path.suffix != ".safetensors":
            assert str(pretrained_base.parent) not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "tied"),
    [(r"language_model\.", False), ("embed_tokens|lm_head", True)],
)
def test_any_part_of_a_bfloat16_base_may_train(form_case, tiny_base_config, tmp_path, pattern, tied):
    method, text = form_case.method, torch.arange(5, 17)[None]
    base = AutoModelForCausalLM.from_config(tiny_base_config(tie_word_embeddings=tied), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    started = method.causal_lm_class.from_base(tmp_path / "base", **method.easy, trainable_parameters=[pattern])
    started.save_pretrained(tmp_path / "compressor")
    loaded = method.causal_lm_class.from_pretrained(tmp_path / "compressor", dtype=torch.bfloat16)
    reference = copy.deepcopy(started).float()
    memory = reference.compress(text)
    expected = reference(text, memory=memory).logits.detach()
    for model in (started, loaded):
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        outputs = model(text, context_input_ids=text, labels=text)
        assert (outputs.logits - expected).norm() < 0.3 * expected.norm()
        outputs.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
        head = logits_function(model)
        assert head(model.model(text, context_input_ids=text).last_hidden_state).dtype == torch.float32
        assert model.generate(text, context_input_ids=text, max_new_tokens=2, min_new_tokens=2).shape == (1, 14)
