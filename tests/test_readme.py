# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as it stands, and what it points to is there."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from context_compressors import MeanPoolingForCausalLM

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def checkpoints(tmp_path: Path) -> dict[str, str]:
    """Tiny stand-ins for the checkpoints that the README names, which a test can train in a second."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folders = {"Qwen/Qwen3-0.6B": tmp_path / "base", "checkpoints/mean_pooling": tmp_path / "compressor"}
    base, compressor = folders.values()
    LlamaForCausalLM(config).save_pretrained(base)
    MeanPoolingForCausalLM.from_base(str(base), compression_ratios=[2, 4, 8, 16]).save_pretrained(compressor)
    for folder in folders.values():
        tokenizer.save_pretrained(folder)
    # An encoder of another width, whose tokens have other ids.
    folders["HuggingFaceTB/SmolLM2-135M"] = other = tmp_path / "encoder"
    config.hidden_size, config.num_hidden_layers, config.head_dim = 24, 8, 12
    LlamaForCausalLM(config).save_pretrained(other)
    backend.model = models.BPE(vocab={letter: index for index, letter in enumerate(reversed(alphabet))}, merges=[])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(other)
    return {name: str(folder) for name, folder in folders.items()}


@pytest.mark.slow
def test_python_code_runs_in_order(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    names = {"document": "Nora keeps eleven bees. " * 8, "question": "What does Nora keep?"}
    names["data"] = [{"context": names["document"], "question": names["question"], "answer": "bees"}] * 4
    for code in CODE:
        for name, folder in checkpoints.items():
            code = code.replace(f'"{name}"', f'"{folder}"')
        exec(code, names)
        if "inputs" not in names:  # what the first block's reader has at hand
            names["inputs"] = names["tokenizer"](names["document"], return_tensors="pt")
            for name in "ab":
                names["memory"].save(f"{name}.safetensors")
    assert len(CODE) >= 5
    assert int(names["slots"].num_slots) == -(-len(names["document"]) // 4)
    assert int(names["memory"].num_slots) == 2 * -(-len(names["document"]) // 8)
    assert names["answer"].shape[1] > len(names["question"])
    assert torch.isfinite(torch.tensor(names["trainer"].state.log_history[-1]["train_loss"]))
    assert (tmp_path / "outputs/my-compressor/final/modeling_mean_pooling.py").is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?://)([^)]+)\)", TEXT))))
def test_links_lead_to_files(target: str):
    assert (ROOT / target).is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", TEXT, re.MULTILINE))))
def test_make_targets_exist(target: tuple[str, str]):
    assert re.search(rf"^{''.join(target)}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
