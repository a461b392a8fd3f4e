# SPDX-License-Identifier: Apache-2.0
"""The real instruct base: its published tokenizer and template, and offline checkpoints on it."""

import json
import os
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import MeanPoolingForCausalLM

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
pytestmark = pytest.mark.slow


def test_the_tokenizer_is_the_published_one(smollm2_base):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_base)
    # Digits one by one, and GPT-2's rule between them.
    tokens = ["It", "'s", "Ġ", "2", "0", "2", "6", ":", "ĠI", "'ll", "Ġsee"]
    assert tokenizer.tokenize("It's 2026: I'll see") == tokens
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer) == 49152


def test_it_answers_in_its_chat_template(smollm2_base):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_base)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2_base, dtype=torch.float32)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs.input_ids.shape[1] :])


SCRIPT = """
import sys
from transformers import AutoModelForCausalLM

try:
    import context_compressors
    sys.exit("this package can be imported: the environment is not clean")
except ImportError:
    pass
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model.base_model.config.base_model_name_or_path, model.model_id)
"""


@pytest.mark.release
def test_a_light_checkpoint_needs_neither_a_network_nor_this_package(smollm2_base, clean_python, tmp_path):
    model = MeanPoolingForCausalLM.from_base(NAME, dtype=torch.bfloat16, compression_ratios=[2])
    model.save_pretrained(tmp_path / "light")
    entry = json.loads((tmp_path / "light" / "config.json").read_text())["external_weights"]["decoder"]
    assert entry["repo_id"] == NAME
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    command = [clean_python, "-I", "-c", SCRIPT, tmp_path / "light"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [NAME, model.model_id]
