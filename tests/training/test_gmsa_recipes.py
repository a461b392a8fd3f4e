# SPDX-License-Identifier: Apache-2.0
"""GMSA with an encoder of another family, which reads the context in its own tokens."""

import pytest
import small_recipes
import torch
import yaml
from tiny_tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, MistralConfig

from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer, main

SMALL = {**small_recipes.SMALL, "min_context_tokens": 16, "max_context_tokens": 60, "max_target_tokens": 61}


@pytest.mark.slow
def test_two_models_with_two_tokenizers_train(base_folder, tmp_path):
    tokenizer = train_tokenizer(vocab_size=300, num_texts=10, first=3)
    encoder, trained = tmp_path / "encoder", tmp_path / "trained"
    torch.manual_seed(1)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=300, num_hidden_layers=3, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(encoder)
    tokenizer.save_pretrained(encoder)
    own = {"encoder_layers": 1, "encoder_lora": {"rank": 2}}
    source = {"generated": True, "tasks": ["reconstruction"], "weight": 1}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**SMALL, "sources": [source], "method_config": own}))
    arguments = ["gmsa/gmsa.yaml", "gmsa/autoencoding.yaml", str(tmp_path / "small.yaml"), "--base", str(base_folder)]
    arguments += ["--encoder", str(encoder), "--output_dir", str(trained)]
    trainer = build_trainer(*parse_recipe(arguments))
    example = trainer.train_dataset[0]
    text = trainer.processing_class.decode(example["context_ids"])
    assert tokenizer.decode(example["encoder_context_ids"]) == text
    assert example["encoder_context_ids"] != example["context_ids"]
    batch = trainer.data_collator([example])
    # Equation 4: no BOS on either side.
    assert batch["context_input_ids"][0].tolist() == example["encoder_context_ids"]
    assert batch["input_ids"][0].tolist() == [*example["prompt_ids"], *example["target_ids"]]
    labels = batch["labels"][0]
    assert labels[labels != -100].tolist() == [*example["context_ids"], trainer.processing_class.eos_token_id]
    main(arguments)
    model = GMSAForCausalLM.from_pretrained(trained)
    assert model.encoder_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert model.config.encoder_config.hidden_size == 48
