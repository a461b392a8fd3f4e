# SPDX-License-Identifier: Apache-2.0
"""The real instruct base: its tokenizer and template are the published ones, and checkpoints on it need no network."""

import json
import os
import subprocess

import pytest
import regex
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import MeanPoolingForCausalLM

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# What it was trained with: digits one by one, and GPT-2's rule between them.
BETWEEN_DIGITS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
TEXT = "It's 2026: I'll see 12345 of them, don't you?\n\nWe've 3.14 and x1y22 — they'd say 1,000."

pytestmark = pytest.mark.slow


def test_the_tokenizer_is_the_published_one(smollm2_base):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_base)
    pieces = [piece for part in regex.split(r"(\p{N})", TEXT) for piece in BETWEEN_DIGITS.findall(part)]
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in found] == pieces
    tokens = tokenizer.tokenize(TEXT)
    assert [token for token in tokens if regex.search(r"\p{N}", token)] == regex.findall(r"\p{N}", TEXT)
    assert {"'s", "'ll", "'t", "'ve", "'d"} <= set(tokens)
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
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
