# SPDX-License-Identifier: Apache-2.0
"""Recipes of COCOM and PISCO: the papers' values, and the way through their stages on passages."""

import json

import pytest
import small_recipes
import torch
import yaml
from transformers import MistralConfig

from context_compressors import CompressionTokensForCausalLM, ICAEForCausalLM
from context_compressors.hub_cards.cards import method_text
from context_compressors.modeling import model_class
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import main

LORA = {"rank": 16, "alpha": 32, "dropout": 0.1, "target_modules": "all-linear"}
RUNS = {
    "cocom/pretraining": ["cocom/cocom.yaml", "cocom/pretraining.yaml"],
    "cocom/fine_tuning": ["cocom/cocom.yaml", "cocom/fine_tuning.yaml"],
    "pisco": ["pisco/pisco.yaml"],
}
SMALL = {
    **small_recipes.SMALL,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "prompts": "default",
    "prompt_format": "plain",
}


def parse(run, folder):
    return parse_recipe([*RUNS[run], "--output_dir", str(folder), "--use_cpu", "true"])


def test_the_recipes_have_the_papers_values(tmp_path):
    for run in RUNS:
        model, data, args = parse(run, tmp_path)
        assert (args.learning_rate, args.warmup_steps, args.weight_decay, args.max_grad_norm) == (1e-4, 0.05, 0.1, 1)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 128, run
        if run != "cocom/fine_tuning":
            fields = model.method_config
            assert (fields["chunk_size"], fields["compression_ratios"], fields["slot_markers"]) == (
                128,
                [16],
                {"after": 1},
            )
            assert fields["encoder_lora"] == fields["decoder_lora"] == LORA
        if run != "cocom/pretraining":
            assert (args.objective, data.max_context_tokens, args.num_train_epochs) == ("compression", 5 * 128, 1)
    model, data, args = parse("cocom/pretraining", tmp_path)
    # The authors have no BOS in front of the slots.
    assert "bos_before_slots" not in model.method_config
    assert (args.objective, args.alpha, args.max_steps * 128) == ("joint", 0.5, 10_000_000)
    assert data.max_document_tokens == data.min_document_tokens == 2 * 128


def test_cards_tell_the_systems_apart_from_their_methods(tmp_path):
    """A checkpoint with the values of a system has that system's text on its card."""
    base = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    for run, system in (("cocom/pretraining", "cocom"), ("pisco", "pisco")):
        model, *_ = parse(run, tmp_path)
        config = model_class(model.method).config_class(decoder_config=base, **model.method_config)
        assert config.card_text == system
        assert "@" in method_text(system).partition("```bibtex")[2]
        assert type(config)(decoder_config=base).card_text == model.method


@pytest.mark.slow
def test_both_train_on_lists_of_passages_from_stage_to_stage(base_folder, tmp_path):
    passages = [f"Berth {number} belongs to Nora." for number in range(3)]
    row = {"context": passages, "question": "Whose is berth 1?", "answers": ["Nora's"]}
    for name in ("passages_train", "answers_train"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    generated = {"sources": [{"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}]}
    lengths = {"min_document_tokens": 32, "max_document_tokens": 48}
    lora = {"encoder_lora": {"rank": 2}, "decoder_lora": {"rank": 2}}
    out = {run: tmp_path / "out" / run for run in RUNS}
    for run, files in RUNS.items():
        small = {**SMALL, "data_dir": str(tmp_path), "output_dir": str(out[run])}
        if run == "cocom/fine_tuning":
            small["checkpoint"] = str(out["cocom/pretraining"])
        else:
            small |= {"base": str(base_folder), "method_config": {**lora, "chunk_size": 16}}
        if run == "cocom/pretraining":
            small |= generated | lengths
        file = tmp_path / "small.yaml"
        file.write_text(yaml.safe_dump(small))
        main([*files, str(file)])
    cocom = CompressionTokensForCausalLM.from_pretrained(out["cocom/fine_tuning"])
    before = CompressionTokensForCausalLM.from_pretrained(out["cocom/pretraining"])
    assert (cocom.config.shared_adapter, list(cocom.config.task_token_ids)) == (True, ["[AE]"])
    moved = [n for n, p in cocom.named_parameters() if not p.equal(dict(before.named_parameters())[n])]
    assert {name.split(".")[-2] for name in moved if "lora_B" in name} == {"shared"}
    assert "model.marker_embeddings" in moved
    pisco = ICAEForCausalLM.from_pretrained(out["pisco"])
    assert {name for name, weight in pisco.named_parameters() if weight.requires_grad and "lora" not in name} == {
        "model.memory_embeddings"
    }
    ids = torch.arange(5, 15)[None]
    assert pisco.compress(ids).num_slots.tolist() == [1 + 1], "the memory token of a chunk of 16, and the separator"
    assert pisco.compress(ids, chunk_lengths=[[4, 6]]).num_slots.tolist() == [4]
