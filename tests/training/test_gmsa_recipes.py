# SPDX-License-Identifier: Apache-2.0
"""Recipes of GMSA and TCP-AE: the paper's tables, its two stages and its ablations."""

import pytest
import small_recipes
import torch
import yaml
from tiny_tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, MistralConfig

from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer, main

LLAMA, QWEN = "meta-llama/Llama-2-7b-chat-hf", "Qwen/Qwen2-7B-Instruct"
# Table 6, and the steps of each stage in Appendix D; of the last two the paper gives no steps.


# --- what trains in a second ---

SMALL = {**small_recipes.SMALL, "min_context_tokens": 16, "max_context_tokens": 60, "max_target_tokens": 61}


@pytest.fixture
def small(tmp_path):
    """Recipes that bring the paper's settings down to what trains in a second."""

    def write(name, tasks, **fields):
        file = tmp_path / f"{name}.yaml"
        source = {"generated": True, "tasks": tasks, "weight": 1}
        evaluation = {"eval_sources": [{**source, "split": "test"}], "num_eval_examples": 2, "eval_strategy": "steps"}
        file.write_text(yaml.safe_dump({**SMALL, "sources": [source], **evaluation, **fields}))
        return str(file)

    own = {"encoder_layers": 1, "encoder_lora": {"rank": 2}}
    return {
        "documents": write("documents", ["reconstruction"], method_config=own),
        "questions": write("questions", ["question_answering"]),
    }


@pytest.mark.slow
def test_two_models_with_two_tokenizers_train(small, base_folder, tmp_path):
    """The encoder of another family reads the context in its own tokens, the decoder restores it in its own."""
    tokenizer = train_tokenizer(vocab_size=300, num_texts=10, first=3)
    encoder = tmp_path / "encoder"
    torch.manual_seed(1)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=300, num_hidden_layers=3, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(encoder)
    tokenizer.save_pretrained(encoder)
    files = ["gmsa/gmsa.yaml", "gmsa/autoencoding.yaml", small["documents"], "--base", str(base_folder)]
    trained = tmp_path / "trained"
    arguments = [*files, "--encoder", str(encoder), "--output_dir", str(trained)]
    trainer = build_trainer(*parse_recipe(arguments))
    example = trainer.train_dataset[0]
    text = trainer.processing_class.decode(example["context_ids"])
    assert tokenizer.decode(example["encoder_context_ids"]) == text
    assert example["encoder_context_ids"] != example["context_ids"]
    batch = trainer.data_collator([example])
    # Equation 4: no BOS on either side.
    assert batch["context_input_ids"][0].tolist() == example["encoder_context_ids"]
    whole = [*example["prompt_ids"], *example["target_ids"]]
    assert batch["input_ids"][0].tolist() == whole
    labels = batch["labels"][0]
    assert labels[labels != -100].tolist() == [*example["context_ids"], trainer.processing_class.eos_token_id]
    main(arguments)
    model = GMSAForCausalLM.from_pretrained(trained)
    assert model.encoder_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert model.config.encoder_config.hidden_size == 48
    second = ["gmsa/gmsa.yaml", "gmsa/keft.yaml", small["questions"], "--checkpoint", str(trained)]
    trainer = build_trainer(*parse_recipe([*second, "--output_dir", str(tmp_path / "second")]))
    assert "encoder_context_ids" in trainer.train_dataset[0]
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0
