# SPDX-License-Identifier: Apache-2.0
"""Somebody else's PEFT adapter on a compressor, and quantized bases."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
pytestmark = pytest.mark.filterwarnings("ignore:.*with PEFT for a second time", "ignore:.*config")


def wrap(model, **settings):
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


def train(model, inputs, steps=3, rate=0.5):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in range(steps):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.slow
def test_the_new_adapter_alone_trains_and_reloads(form_case, inputs, tmp_path):
    model = form_case.build()
    expected = model(**inputs).logits.detach()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wrapped = wrap(model)
    # It starts as the identity.
    torch.testing.assert_close(wrapped(**inputs).logits, expected, atol=1e-4, rtol=0)
    new = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert new
    assert all(".default." in name for name in new)
    train(wrapped, inputs)
    for name, parameter in wrapped.named_parameters():
        name = name.removeprefix("base_model.model.")
        if ".default." not in name:
            assert parameter.equal(before.get(name, before.get(name.replace(".base_layer", "")))), name
    trained = wrapped(**inputs).logits
    assert not trained.allclose(expected, atol=1e-3)
    generated = wrapped.generate(**inputs, **GREEDY)
    with wrapped.disable_adapter():
        # The compressor's own adapters stay on.
        torch.testing.assert_close(wrapped(**inputs).logits, expected, atol=1e-4, rtol=0)
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(form_case.build(), tmp_path).eval()
    torch.testing.assert_close(again(**inputs).logits, trained, atol=1e-5, rtol=0)
    assert again.generate(**inputs, **GREEDY).equal(generated)


@pytest.mark.slow
def test_merging_a_new_adapter_changes_nothing_and_leaves_the_methods_own(form_case, inputs, tmp_path):
    expected = form_case.build()
    before = {name for name, parameter in expected.named_parameters() if parameter.requires_grad}
    expected = expected(**inputs).logits
    # The method's parts among them.
    wrapped = wrap(form_case.build(), target_modules="all-linear")
    torch.manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if ".lora_B.default." in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    unmerged = wrapped(**inputs).logits
    assert not unmerged.allclose(expected, atol=1e-2)
    wrapped.merge_adapter()
    torch.testing.assert_close(wrapped(**inputs).logits, unmerged, atol=1e-4, rtol=0)
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(**inputs).logits, expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="`merge_and_unload`"):
        wrapped.base_model.model.merge_adapters()
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, unmerged, atol=1e-4, rtol=0)
    assert {name for name, parameter in merged.named_parameters() if parameter.requires_grad} == before
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again(**inputs).logits.equal(merged(**inputs).logits)
    assert again.model_id == merged.model_id


@pytest.mark.slow
@pytest.mark.only(lambda case: case.method.name in ("mean_pooling", "activation_beacon"))
@pytest.mark.parametrize("include_base", [True, False], ids=["whole", "light"])
def test_a_folder_with_the_new_adapter_alone_loads_with_its_compressor(
    method_case, inputs, tmp_path, local_hub, start_light, include_base
):
    model = start_light(method_case, local_hub)
    model.save_pretrained(tmp_path / "base", include_base=include_base)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = wrap(model, init_lora_weights=False, lora_dropout=0.5).eval()
    # As `SFTTrainer(peft_config=...)` does.
    wrapped.save_pretrained(tmp_path / "adapter")
    for model_class in (AutoModelForCausalLM, method_case.method.causal_lm_class):
        again = model_class.from_pretrained(tmp_path / "adapter")
        assert again(**inputs).logits.equal(wrapped(**inputs).logits)
        assert not any(parameter.requires_grad for parameter in again.parameters())


def test_the_compressor_itself_is_not_saved_with_a_strangers_adapter(method_cases, tmp_path):
    model = method_cases["icae"].build()
    wrap(model)
    with pytest.raises(ValueError, match=r"adapters \['default'\], which are not its own"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def _quantization(kind):
    if kind == "torchao":
        pytest.importorskip("torchao", reason="torchao is not installed")
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=kind == "4-bit", load_in_8bit=kind == "8-bit")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["4-bit", "8-bit", "torchao"])
@pytest.mark.parametrize("include_base", [True, False], ids=["whole", "light"])
def test_a_quantized_base_reads_trains_and_saves(
    form_case, inputs, tmp_path, local_hub, start_light, kind, include_base
):
    load = {"quantization_config": _quantization(kind), "device_map": "cpu"}
    model = start_light(form_case, local_hub)
    model.save_pretrained(tmp_path / "first", include_base=include_base)
    quantized, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "first", **load), model(**inputs).logits
    assert (quantized(**inputs).logits - expected).norm() < 0.3 * expected.norm()
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in quantized.named_parameters() if parameter.requires_grad} == own
    assert {quantized.get_parameter(name).dtype for name in own} == {torch.float32}
    before = {name: quantized.get_parameter(name).detach().clone() for name in own}
    train(quantized, inputs, steps=2, rate=0.1)
    assert any(not quantized.get_parameter(name).equal(before[name]) for name in own)
    trained = quantized(**inputs).logits
    if form_case.fields.get("encoder_lora"):
        with pytest.raises(ValueError, match="merged into quantized weights"):
            quantized.merge_adapters()
    quantized.save_pretrained(tmp_path / "second")
    loading = {"device_map": "cpu"} if include_base else load
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second", **loading)
    torch.testing.assert_close(again(**inputs).logits, trained)
    if not include_base:
        # Nothing in the folder is quantized: it goes on any base's type.
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
        assert plain(**inputs).logits.isfinite().all()
