# SPDX-License-Identifier: Apache-2.0
"""Import of benchmarks in their tests."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from byte_tokenizers import byte_tokenizer, tiny_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Import a benchmark, such as "sinkhorn.measure", as `python -m` does: with the repository on the module path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="module")
def comparison(script: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """Make the comparison that writes into a folder, of a command line."""
    run, plan = script("comparison.run"), script("comparison.plan")

    def made(folder: Path, *options: str) -> Any:
        arguments = run.build_parser().parse_args(["--data", str(folder), "--output", str(folder), *options])
        return plan.Comparison(arguments, plan.read_table())

    return made


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    return byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="module")
def base(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model with random weights."""
    torch.manual_seed(0)
    config = tiny_llama(tokenizer, max_position_embeddings=1024)
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
