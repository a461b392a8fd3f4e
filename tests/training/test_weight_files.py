# SPDX-License-Identifier: Apache-2.0
import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from context_compressors.training.weight_files import store_weights_as


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
