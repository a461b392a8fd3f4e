# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from context_compressors import MeanPoolingForCausalLM
from context_compressors.training.weight_files import average_weights, store_weights_as


def tiny():
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**fields, num_attention_heads=2, num_key_value_heads=2))


def test_weights_are_stored_small_and_read_back_as_they_were_trained(tmp_path):
    model = tiny()
    for name, shard_size in (("one", "1GB"), ("many", "10KB")):
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=shard_size)
        before = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        store_weights_as(torch.bfloat16, folder)
        files = list(folder.glob("*.safetensors"))
        assert sum(path.stat().st_size for path in files) < 0.6 * before
        tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.equal(model.get_parameter(name).bfloat16().float())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_the_average_of_several_models(tmp_path):
    models = [tiny(), tiny()]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter += 1
    folders = [tmp_path / "a", tmp_path / "b"]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    models[0].save_pretrained(tmp_path / "mean")
    average_weights(folders, tmp_path / "mean", [1, 3])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mean")
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, models[0].get_parameter(name) + 0.75)


def test_models_that_cannot_be_averaged_are_refused(tmp_path):
    tiny().save_pretrained(tmp_path / "a")
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match="b does not have the weights of"):
        average_weights([tmp_path / "b"], tmp_path / "a")
    for shares in ([1.0, 2.0], [0.0]):
        with pytest.raises(ValueError, match="one share for each model"):
            average_weights([tmp_path / "a"], tmp_path / "a", shares)


@pytest.mark.slow
@torch.no_grad()
def test_light_checkpoints_are_stored_small_and_averaged_on_their_own_base(tmp_path):
    models = []
    for seed, base in enumerate(["base", "base", "other"]):
        model = tiny()
        if base == "other":
            model.lm_head.weight.data += 1
        model.save_pretrained(tmp_path / base)
        torch.manual_seed(seed)
        models.append(MeanPoolingForCausalLM.from_base(tmp_path / base, compression_ratios=[2]))
        models[-1].save_pretrained(tmp_path / str(seed), include_base=False)
    models[0].save_pretrained(tmp_path / "mean", include_base=False)
    store_weights_as(torch.bfloat16, tmp_path / "mean")
    average_weights([tmp_path / "0", tmp_path / "1"], tmp_path / "mean")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mean", base_model=tmp_path / "base")
    for name, parameter in loaded.named_parameters():
        mean = (models[0].get_parameter(name) + models[1].get_parameter(name)) / 2
        expected = mean.bfloat16().float() if parameter.requires_grad else mean
        torch.testing.assert_close(parameter, expected)
    with pytest.raises(ValueError, match="another base model"):
        average_weights([tmp_path / "2"], tmp_path / "mean")
