# SPDX-License-Identifier: Apache-2.0
"""Recipes of PCC: the authors' table, and the way from pretraining by a coin to fine-tuning with fixed markers."""

import json
from pathlib import Path

import pytest
import small_recipes
import torch
import yaml
from byte_tokenizers import byte_tokenizer
from small_recipes import parse
from transformers import AutoModel, AutoTokenizer, GPT2Config

from context_compressors import PCCConfig, PCCForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer, main

GENERATED = {"generated": True, "weight": 1}
SMALL = {
    **small_recipes.SMALL,
    "warmup_steps": 0,
    "min_context_tokens": 16,
    "max_context_tokens": 60,
    "max_target_tokens": 64,
}


def test_recipes_hold_the_authors_table(tmp_path):
    for name, encoder in (("lite", "openai-community/gpt2-large"), ("large", None)):
        model, data, args = parse(f"pcc/{name}.yaml", "pcc/pretraining.yaml", folder=tmp_path)
        assert (model.base, model.encoder) == ("meta-llama/Meta-Llama-3-8B-Instruct", encoder)
        fields = dict(model.method_config)
        if encoder is not None:
            fields["encoder_config"] = {"model_type": "gpt2"}
        config = PCCConfig(**fields)
        assert (config.chunk_size, config.memory_tokens, config.num_memory_tokens) == (256, "fixed", 64)
        assert config.train_encoder == (encoder is not None)
        lora = {"rank": 64, "alpha": 32, "dropout": 0.1, "target_modules": "all-linear"}
        assert config.encoder_lora == (lora if encoder is None else None)
        assert config.decoder_lora is None
        assert (args.learning_rate, args.warmup_steps, args.max_grad_norm) == (1e-4, 300, 0.5)
        assert (args.lr_scheduler_type, args.max_steps) == ("cosine", 76_294)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 4 == 256
        # BOS is the 256th token of a segment.
        assert (data.task_per_batch, data.min_context_tokens, data.max_context_tokens) == (True, 255, 255)
        assert [source.tasks for source in data.parsed_sources()] == [("reconstruction", "continuation")]
        model, data, args = parse(f"pcc/{name}.yaml", "pcc/fine_tuning.yaml", folder=tmp_path)
        assert (model.base, model.encoder, model.method_config) == (None, None, None)
        assert (args.learning_rate, args.warmup_steps, args.max_grad_norm) == (5e-5, 100, 0.5)
        assert (args.num_train_epochs, args.max_steps) == (3, -1)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 4 == 128


@pytest.mark.slow
def test_a_chunk_for_the_tokens_in_front_of_a_context_alone_is_warned_of(base_folder, tmp_path, caplog):
    sources = [{**GENERATED, "tasks": ["question_answering"]}]
    fields = {**SMALL, "base": str(base_folder), "sources": sources, "method_config": {"chunk_size": 16}}
    overlay = tmp_path / "overlay.yaml"
    for longest, warned in ((32, True), (31, False), (33, False)):
        overlay.write_text(yaml.safe_dump({**fields, "max_context_tokens": longest}))
        caplog.clear()
        trainer = build_trainer(*parse_recipe(["embedded/icae.yaml", str(overlay), "--output_dir", str(tmp_path)]))
        assert len(trainer.data_collator.context_start_ids) == 1
        assert ("with max_context_tokens 31 there is none of 1" in caplog.text) == warned
    # Of passages each has chunks of its own, and joint pretraining cuts documents of another length.
    (tmp_path / "passages.jsonl").write_text(json.dumps({"context": ["a b", "c"], "question": "d", "answers": ["e"]}))
    listed = [{"path": str(tmp_path / "passages.jsonl"), "tasks": ["question_answering"], "weight": 1}]
    joint = {
        "objective": "joint",
        "sources": [{**GENERATED, "tasks": ["continuation", "reconstruction"]}],
        "min_document_tokens": 20,
        "max_document_tokens": 60,
    }
    for other in ({"sources": listed, "length_schedule": None}, joint):
        overlay.write_text(yaml.safe_dump({**fields, "max_context_tokens": 32, **other}))
        caplog.clear()
        build_trainer(*parse_recipe(["embedded/icae.yaml", str(overlay), "--output_dir", str(tmp_path)]))
        assert "there is none of" not in caplog.text


@pytest.fixture
def gpt2_folder(tmp_path):
    """A small GPT-2 whose tokens are bytes."""
    folder = tmp_path / "gpt2"
    torch.manual_seed(0)
    byte_tokenizer().save_pretrained(folder)
    config = GPT2Config(vocab_size=256, n_embd=24, n_layer=1, n_head=2, n_positions=64)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lite", "large"])
def test_pretraining_then_fine_tuning(name, base_folder, gpt2_folder, tmp_path):
    files = {}
    for stage, tasks in (("pretraining", ["reconstruction", "continuation"]), ("fine_tuning", ["question_answering"])):
        config = {"method_config": {"chunk_size": 32}} if stage == "pretraining" else {}
        files[stage] = tmp_path / f"{stage}.yaml"
        files[stage].write_text(yaml.safe_dump({**SMALL, **config, "sources": [{**GENERATED, "tasks": tasks}]}))
    first, second = tmp_path / "first", tmp_path / "second"
    encoder = ["--encoder", str(gpt2_folder)] if name == "lite" else []
    start = [f"pcc/{name}.yaml", "pcc/pretraining.yaml", str(files["pretraining"]), "--base", str(base_folder)]
    main([*start, *encoder, "--output_dir", str(first)])
    before = PCCForCausalLM.from_pretrained(first)
    assert list(before.config.task_token_ids) == ["[AE]"]
    assert before.config.markers_per_chunk == 2
    own = before.encoder_tokenizer if name == "lite" else AutoTokenizer.from_pretrained(first)
    assert len(own("Nora keeps bees.").input_ids) > 2
    stage = [f"pcc/{name}.yaml", "pcc/fine_tuning.yaml", str(files["fine_tuning"]), "--checkpoint", str(first)]
    main([*stage, "--output_dir", str(second)])
    after = PCCForCausalLM.from_pretrained(second).state_dict()
    moved = {key for key, tensor in before.state_dict().items() if not tensor.equal(after[key])}
    kinds = {"lite": "encoder_model.", "large": "lora_"}
    assert any(kinds[name] in key for key in moved)
    assert {"model.memory_embeddings", "model.converter.0.weight"} <= moved
    fixed = ("language_model", "marker_embeddings", "task_embeddings", "lm_head")
    assert [key for key in moved if any(part in key for part in fixed) and "lora_" not in key] == []


@pytest.mark.slow
def test_the_embedded_recipe_trains(base_folder, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    sources = [{**GENERATED, "tasks": ["question_answering", "reconstruction"]}]
    overlay.write_text(yaml.safe_dump({"sources": sources}))
    files = ["embedded/icae.yaml", "embedded/pcc.yaml", str(overlay)]
    options = ["--base", str(base_folder), "--max_steps", "1", "--save_strategy", "no", "--use_cpu", "true"]
    trainer = build_trainer(*parse_recipe([*files, *options, "--output_dir", str(tmp_path / "out")]))
    assert type(trainer.model).__name__ == "PCCForCausalLM"
    trainer.train()
    assert Path(trainer.args.output_dir).name == "out"
    assert trainer.state.log_history[-1]["train_loss"] > 0
