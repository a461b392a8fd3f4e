# SPDX-License-Identifier: Apache-2.0
"""A tokenizer, a language model and a compressor small enough to train in a second."""

from pathlib import Path

import pytest
import torch
from byte_tokenizers import SHAPE, tiny_llama
from small_recipes import RUN
from tiny_tokenizer import train_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from context_compressors.data.sources import DataSource
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.arguments import TrainingConfig

GENERATED = DataSource(generated=True, tasks=("question_answering", "reconstruction"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def base_folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {**SHAPE, "num_attention_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    LlamaForCausalLM(tiny_llama(tokenizer, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def language_model(base_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(base_folder)


@pytest.fixture
def compressor(base_folder: Path) -> MeanPoolingForCausalLM:
    torch.manual_seed(0)
    return MeanPoolingForCausalLM.from_base(base_folder, compression_ratios=[2, 4])


@pytest.fixture
def make_config(tmp_path: Path):
    def make(**fields) -> TrainingConfig:
        defaults = {"max_steps": 3, "learning_rate": 1e-2, "train_sampling_strategy": "sequential"}
        return TrainingConfig(**{**RUN, "output_dir": str(tmp_path / "out"), **defaults, **fields})

    return make
