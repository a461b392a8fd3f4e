# SPDX-License-Identifier: Apache-2.0
"""DeCAL's checkpoints where this package is not: both Auto classes, and a second generation trained as remote code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from context_compressors.configuration.configuration_decal import DeCALConfig
from context_compressors.modeling.modeling_decal import DeCALForConditionalGeneration

T5_FIELDS = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "dropout_rate": 0.0,
}
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}

SCRIPT = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSeq2SeqLM

source, target, inputs, outputs = sys.argv[1:]
given = load_file(inputs)
model = AutoModelForSeq2SeqLM.from_pretrained(source, trust_remote_code=True)
encoder = AutoModel.from_pretrained(source, trust_remote_code=True)
for loaded in (model, encoder):
    assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
assert not [name for name, _ in encoder.named_parameters() if "decoder" in name]
context = {"input_ids": given["ids"], "attention_mask": given["mask"]}
with torch.no_grad():
    memory = model.compress(**context, ratio=3)
    found = {"slots": memory.embeddings, "encoder_slots": encoder.compress(**context, ratio=3).embeddings}
    found["logits"] = model(given["question"], memory=memory).logits
    greedy = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    found["greedy"] = model.generate(given["question"], memory=memory, **greedy)
save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, outputs)
model.save_pretrained(target)
"""

TRAIN = """
import sys
from transformers import AutoModelForSeq2SeqLM

source, target = sys.argv[1:]
model = AutoModelForSeq2SeqLM.from_pretrained(source, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)

from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments
from tokenizers import Tokenizer, models

tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>")), pad_token="<pad>"
)
rows = [{"input_ids": list(range(5, 14 + i)), "labels": [20 + i, 21 + i, 1]} for i in range(6)]
arguments = Seq2SeqTrainingArguments(
    output_dir=target, max_steps=2, learning_rate=1e-2, per_device_train_batch_size=2, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
)
trainer = Seq2SeqTrainer(
    model=model, args=arguments, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer, model)
)
trainer.train()
model.save_pretrained(target)
"""


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = DeCALForConditionalGeneration(DeCALConfig(decoder_config=T5_FIELDS, compression_ratios=(2, 3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def given():
    generator = torch.Generator().manual_seed(1)
    ids, question = (torch.randint(2, 64, shape, generator=generator) for shape in ((2, 11), (2, 4)))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"ids": ids, "mask": mask, "question": question}


@torch.no_grad()
def outputs_here(model, given):
    memory = model.compress(given["ids"], given["mask"], ratio=3)
    return {
        "slots": memory.embeddings,
        "encoder_slots": memory.embeddings,
        "logits": model(given["question"], memory=memory).logits,
        "greedy": model.generate(given["question"], memory=memory, **GREEDY),
    }


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run(command, tmp_path):
    environment = {"HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1", "PATH": os.environ.get("PATH", "")}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def loads_alike(folder, again, model, given, clean_python, tmp_path):
    """In a process without this package the folder gives this model's outputs, and saves itself again."""
    inputs, outputs = tmp_path / "inputs.safetensors", tmp_path / f"{again.name}.safetensors"
    save_file(given, inputs)
    run([clean_python, "-I", "-c", SCRIPT, folder, again, inputs, outputs], tmp_path)
    found, expected = load_file(outputs), outputs_here(model, given)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_both_auto_classes_load_it_without_this_package_and_it_saves_again(model, given, clean_python, tmp_path):
    model.save_pretrained(tmp_path / "first")
    loads_alike(tmp_path / "first", tmp_path / "second", model, given, clean_python, tmp_path)
    assert files(tmp_path / "first") == files(tmp_path / "second")
    loads_alike(tmp_path / "second", tmp_path / "third", model, given, clean_python, tmp_path)
    assert files(tmp_path / "first") == files(tmp_path / "third")


@pytest.mark.slow
def test_a_checkpoint_is_trained_as_remote_code_and_its_child_names_it(model, given, clean_python, tmp_path):
    parent, child = tmp_path / "parent", tmp_path / "child"
    model.save_pretrained(parent)
    run([sys.executable, "-c", TRAIN, parent, child], tmp_path)
    weights = [load_file(folder / "model.safetensors") for folder in (parent, child)]
    assert weights[0].keys() == weights[1].keys()
    assert all(not weights[1][name].equal(tensor) for name, tensor in weights[0].items())
    assert json.loads((child / "config.json").read_text())["parent_model_name_or_path"] == "parent"
    assert "| Fine-tuned from | parent |" in (child / "README.md").read_text()
    here = AutoModelForSeq2SeqLM.from_pretrained(child)
    loads_alike(child, tmp_path / "grandchild", here, given, clean_python, tmp_path)
    assert not outputs_here(here, given)["logits"].allclose(outputs_here(model, given)["logits"], atol=1e-4)
