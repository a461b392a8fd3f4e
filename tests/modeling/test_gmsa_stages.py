# SPDX-License-Identifier: Apache-2.0
"""The two stages of GMSA and TCP-AE: what trains in each, its checkpoints, and its size."""

import copy

import pytest
import torch
from gmsa_cases import TEXT, both, on_every_base, trainable
from tiny_bases import ids_of
from torch.nn import functional
from transformers import GPT2Config, Phi3Config

from context_compressors.configuration.configuration_gmsa import GMSAConfig
from context_compressors.configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig
from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM, GMSAModel
from context_compressors.modeling.modeling_tcp_autoencoder import TCPAutoencoderModel

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


# --- the two stages ---


@both
@on_every_base
def test_first_stage_trains_adapter_and_alignment(base, method, case_on):
    model = case_on(method, base).build()
    names = trainable(model)
    parts = {"layer_semantic_alignment"} if method == "gmsa" else {"slot_mlp", "memory_embeddings"}
    own = {name for name, _ in model.named_parameters() if name.split(".")[1] in parts}
    adapter = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert names == own | adapter
    assert adapter
    assert all(name.startswith("model.encoder_model.layers.0.") for name in adapter)


@both
@on_every_base
def test_second_stage_trains_query_key_and_value_maps_of_every_decoder_layer(base, method, case_on):
    model = case_on(method, base).build(training_stage="keft")
    kinds = ["weight", "bias"] if base.startswith("qwen2") else ["weight"]
    assert trainable(model) == {
        f"model.language_model.layers.{layer}.self_attn.{part}_proj.{kind}"
        for layer in range(2)
        for part in "qkv"
        for kind in kinds
    }


@both
def test_second_stage_trains_a_fused_map(method, method_cases):
    base = Phi3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    case = method_cases[method]
    config = case.method.config_class(decoder_config=base, **{**case.fields, "training_stage": "keft"})
    model = case.method.causal_lm_class(config)
    assert trainable(model) == {f"model.language_model.layers.{i}.self_attn.qkv_proj.weight" for i in range(3)}
    assert model(TEXT, context_input_ids=ids_of(9)).logits.isfinite().all()


def test_second_stage_needs_maps_of_known_names():
    base = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4)
    fields = {"decoder_config": base, "encoder_layers": 1, "encoder_lora": None, "training_stage": "keft"}
    with pytest.raises(ValueError, match=r"'gpt2' has none of the known names.*trainable_parameters"):
        TCPAutoencoderModel(TCPAutoencoderConfig(**fields))
    model = TCPAutoencoderModel(TCPAutoencoderConfig(**fields, trainable_parameters=[r"language_model.*c_attn"]))
    assert len(trainable(model)) == 4
    with pytest.raises(ValueError, match=r"'gpt2' has no \['embed_tokens', 'layers', 'norm'\]"):
        GMSAModel(GMSAConfig(decoder_config=base, encoder_layers=1, encoder_lora=None))


def test_second_stage_in_bfloat16_computes_in_the_bases_type(method_cases, tmp_path):
    case = method_cases["gmsa"]
    exact = case.build(training_stage="keft")
    exact.save_pretrained(tmp_path)
    model = GMSAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation=case.attention)
    for name, parameter in model.named_parameters():
        # Adapters are held in float32 always.
        is_float32 = parameter.requires_grad or "lora_" in name
        assert parameter.dtype == (torch.float32 if is_float32 else torch.bfloat16), name
    inputs = {"input_ids": TEXT, "context_input_ids": ids_of(11)}
    logits, expected = model(**inputs).logits, exact(**inputs).logits
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).norm() < 0.3 * expected.norm()
    # The same as with weights of one type throughout.
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    torch.testing.assert_close(logits, plain(**inputs).logits, atol=0.15, rtol=0.1)
    assert model.generate(**inputs, **GREEDY).shape == (1, 9)
    model.train()
    labels = TEXT.clone()
    model(**inputs, labels=labels).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == trainable(model)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    exact.train()(**inputs, labels=labels).loss.backward()
    found, wanted = (torch.cat([m.get_parameter(n).grad.flatten() for n in gradients]) for m in (model, exact))
    assert functional.cosine_similarity(found, wanted, dim=0) > 0.8


def test_a_first_stage_checkpoint_starts_the_second(method_cases, tmp_path):
    from context_compressors.training.loading import changed_config, check_resumed

    first = method_cases["gmsa"].build()
    first.save_pretrained(tmp_path)
    config = GMSAConfig.from_pretrained(tmp_path)
    second = GMSAForCausalLM.from_pretrained(tmp_path, config=changed_config(config, {"training_stage": "keft"}))
    assert config.training_stage == "autoencoding"
    assert second.config.training_stage == "keft"
    assert {name.rsplit(".", 2)[-2] for name in trainable(second)} == {"q_proj", "k_proj", "v_proj"}
    inputs = {"input_ids": TEXT, "context_input_ids": ids_of(9)}
    assert second(**inputs).logits.equal(first(**inputs).logits)
    check_resumed(first, str(tmp_path))
    with pytest.raises(ValueError, match=r"training_stage 'autoencoding', this recipe says 'keft'"):
        check_resumed(second, str(tmp_path))
    with pytest.raises(ValueError, match=r"'trainingstage'; did you mean 'training_stage'"):
        changed_config(config, {"trainingstage": "keft"})
    with pytest.raises(ValueError, match=r"`training_stage` must be one of"):
        changed_config(config, {"training_stage": "third"})
