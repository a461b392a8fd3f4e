# SPDX-License-Identifier: Apache-2.0
"""A tokenizer, a language model and a compressor small enough to train in a second."""

import sys
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from context_compressors.data.sources import DataSource
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.arguments import TrainingConfig

# Tests import the helper modules beside them by name.
sys.path.append(str(Path(__file__).parent))

GENERATED = DataSource(generated=True, tasks=("question_answering", "reconstruction"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def base_folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
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
        defaults = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "train_sampling_strategy": "sequential",
            "disable_tqdm": True,
        }
        return TrainingConfig(**{**defaults, **fields})

    return make
