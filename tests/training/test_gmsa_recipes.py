# SPDX-License-Identifier: Apache-2.0
"""Recipes of GMSA and TCP-AE: the paper's tables, its two stages and its ablations."""

import itertools
import json
from pathlib import Path

import pytest
import small_recipes
import torch
import yaml
from small_recipes import parse
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers.optimization import get_scheduler

import context_compressors.training
from context_compressors.configuration.configuration_gmsa import GMSAConfig
from context_compressors.configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig
from context_compressors.data.sources import DataSource
from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM
from context_compressors.modeling.modeling_tcp_autoencoder import TCPAutoencoderForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.tokenizer import train_tokenizer
from context_compressors.training.train import build_trainer, main

RECIPES = Path(context_compressors.training.__file__).parent / "recipes"
CONFIGS = {"gmsa": GMSAConfig, "tcp_autoencoder": TCPAutoencoderConfig}
CLASSES = {"gmsa": GMSAForCausalLM, "tcp_autoencoder": TCPAutoencoderForCausalLM}
LLAMA, QWEN = "meta-llama/Llama-2-7b-chat-hf", "Qwen/Qwen2-7B-Instruct"
BASES = {"llama2_7b": (LLAMA, None), "qwen2_7b": (QWEN, None), "llama2_7b_qwen2_7b": (QWEN, LLAMA)}
# Table 6, and the steps of each stage in Appendix D; of the last two the paper gives no steps.
DATA = {
    "pwc": (512, 10_000, 5_000),
    "qa": (3072, 20_000, 1_000),
    "narrativeqa": (32_768, 10_000, 5_000),
    "cnn_dailymail": (1024, 10_000, 5_000),
}
ABLATIONS = {
    "appended_tokens": {"appended_tokens": 128},
    "no_alignment": {"lsa_layers": 0},
    "encoder_layers_16": {"encoder_layers": 16},
    "encoder_layers_32": {"encoder_layers": 32},
    **{f"lsa_layers_{number}": {"lsa_layers": number} for number in (2, 3, 4, 5)},
}


def test_every_base_data_set_and_ablation_has_a_recipe():
    found = {
        folder: {path.stem for path in (RECIPES / "gmsa" / folder).glob("*.yaml")} for folder in ("bases", "data")
    }
    assert found["bases"] == set(BASES)
    assert found["data"] == {f"{name}_{stage}" for name in DATA for stage in ("autoencoding", "keft")}
    ablations = {path.stem for path in (RECIPES / "gmsa" / "ablations").glob("*.yaml")}
    assert ablations == {*ABLATIONS, "no_autoencoding"}


@pytest.mark.parametrize(
    ("method", "base", "data"), [*itertools.product(["gmsa"], BASES, DATA), ("tcp_autoencoder", "llama2_7b", "pwc")]
)
def test_recipes_hold_tables_5_and_6(method, base, data, tmp_path):
    first = [f"gmsa/{method}.yaml", f"gmsa/bases/{base}.yaml"]
    length, steps, more_steps = DATA[data]
    for stage, batch, rate in (("autoencoding", 4, 1e-4), ("keft", 16, 1e-5)):
        model, sources, args = parse(*first, f"gmsa/{stage}.yaml", f"gmsa/data/{data}_{stage}.yaml", folder=tmp_path)
        assert (args.optim, args.learning_rate, args.lr_scheduler_type) == ("adamw_torch", rate, "linear")
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == batch
        assert args.max_grad_norm == 2.0
        assert (args.objective, args.ratio_mode, sources.prompts) == ("compression", "per_sample", "gmsa")
        assert sources.max_context_tokens == length
        assert args.max_steps == (steps if stage == "autoencoding" else more_steps)
        assert (model.method, model.dtype, args.bf16) == (method, "bfloat16", True)
        tasks = {task for source in sources.parsed_sources() for task in source.tasks}
        if stage == "keft":
            # Base and configuration come with the checkpoint of the first stage.
            assert (model.base, model.encoder, model.method_config) == (None, None, None)
            assert model.checkpoint_config == {"training_stage": "keft"}
            assert tasks == {"summarisation" if data == "cnn_dailymail" else "question_answering"}
        else:
            assert (model.base, model.encoder) == BASES[base]
            assert tasks == {"reconstruction"}
            assert (sources.min_context_tokens, sources.max_target_tokens) == (length, length + 1)
    if data == "qa":
        assert [source.max_samples for source in sources.parsed_sources()] == [15_000] * 3


@pytest.mark.parametrize("method", CONFIGS)
def test_the_papers_settings_are_the_defaults(method, tmp_path):
    model, *_ = parse(f"gmsa/{method}.yaml", "gmsa/autoencoding.yaml", folder=tmp_path)
    config = CONFIGS[method](**model.method_config)
    assert config.to_dict() == CONFIGS[method]().to_dict()


def test_learning_rate_falls_linearly_from_the_first_step(tmp_path):
    *_, args = parse("gmsa/gmsa.yaml", "gmsa/autoencoding.yaml", "gmsa/data/pwc_autoencoding.yaml", folder=tmp_path)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps)
    assert [scheduler.lr_lambdas[0](step) for step in (0, 5_000, 10_000)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_its_own_fields(name, tmp_path):
    model, *_ = parse("gmsa/gmsa.yaml", f"gmsa/ablations/{name}.yaml", "gmsa/autoencoding.yaml", folder=tmp_path)
    config = GMSAConfig(**model.method_config)
    assert config.to_dict() == GMSAConfig(**ABLATIONS[name]).to_dict()
    assert config.to_dict() != GMSAConfig().to_dict()


def test_without_autoencoding_the_second_stage_starts_from_the_base(tmp_path):
    files = ["gmsa/gmsa.yaml", "gmsa/keft.yaml", "gmsa/ablations/no_autoencoding.yaml", "gmsa/bases/llama2_7b.yaml"]
    model, _, args = parse(*files, "gmsa/data/pwc_keft.yaml", folder=tmp_path)
    assert (model.base, model.checkpoint, model.checkpoint_config) == (LLAMA, None, None)
    assert GMSAConfig(**model.method_config).to_dict() == GMSAConfig(training_stage="keft").to_dict()
    assert args.learning_rate == 1e-5


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


def changed(before, after):
    before, after = (dict(model.named_parameters()) for model in (before, after))
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.slow
@pytest.mark.parametrize("method", CLASSES)
def test_autoencoding_then_knowledge_extraction(method, small, base_folder, tmp_path):
    folders = {stage: tmp_path / stage for stage in ("start", "autoencoding", "keft")}
    first = [f"gmsa/{method}.yaml", "gmsa/autoencoding.yaml", small["documents"], "--base", str(base_folder)]
    build_trainer(*parse_recipe([*first, "--output_dir", str(tmp_path / "out")])).save_model(str(folders["start"]))
    main([*first, "--output_dir", str(folders["autoencoding"])])
    second = [f"gmsa/{method}.yaml", "gmsa/keft.yaml", small["questions"], "--save_strategy", "steps"]
    second += ["--save_steps", "1", "--checkpoint", str(folders["autoencoding"])]
    main([*second, "--output_dir", str(folders["keft"])])
    start, middle, end = (CLASSES[method].from_pretrained(folder) for folder in folders.values())
    assert changed(start, middle) == {name for name, p in middle.named_parameters() if p.requires_grad}
    tuned = {f"model.language_model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qkv"}
    assert changed(middle, end) == tuned == {name for name, p in end.named_parameters() if p.requires_grad}
    assert (middle.config.training_stage, end.config.training_stage) == ("autoencoding", "keft")
    log = json.loads((folders["keft"] / "training_summary.json").read_text())["log"]
    assert any("loss_mixed_ratios" in entry for entry in log)
    # Evaluation is at each ratio.
    assert any({"eval_loss_ratio_4", "eval_loss_ratio_8"} <= set(entry) for entry in log)
    # A checkpoint of the second stage does not go on with the recipe of the first.
    resume = ["--resume_from_checkpoint", str(folders["keft"] / "checkpoint-1")]
    with pytest.raises(ValueError, match=r"training_stage 'keft', this recipe says 'autoencoding'"):
        main([*first, *resume, "--output_dir", str(tmp_path / "wrong")])
    main([*second, *resume, "--output_dir", str(tmp_path / "again")])
    again = CLASSES[method].from_pretrained(tmp_path / "again")
    for name, parameter in end.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter, atol=1e-6, rtol=1e-5, msg=name)


def test_a_changed_configuration_goes_with_a_checkpoint(small, base_folder, tmp_path):
    files = ["gmsa/gmsa.yaml", "gmsa/autoencoding.yaml", small["documents"], "--output_dir", str(tmp_path)]
    change = ["--checkpoint_config", "{training_stage: keft}"]
    with pytest.raises(ValueError, match="checkpoint_config goes with a checkpoint"):
        build_trainer(*parse_recipe([*files, *change, "--base", str(base_folder)]))


@pytest.mark.slow
@pytest.mark.parametrize("method", CLASSES)
def test_embedded_recipes_train(method, base_folder, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"sources": [{"generated": True, "tasks": ["reconstruction"], "weight": 1}]}))
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(base_folder, num_hidden_layers=4)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(base_folder).save_pretrained(tmp_path / "base")
    options = ["--max_steps", "1", "--save_strategy", "no", "--use_cpu", "true"]
    first, second = ([*options, "--output_dir", str(tmp_path / name)] for name in ("first", "second"))
    main([f"embedded/{method}.yaml", str(overlay), "--base", str(tmp_path / "base"), *first])
    files = [f"embedded/{method}.yaml", "embedded/keft.yaml", str(overlay), "--checkpoint", str(tmp_path / "first")]
    trainer = build_trainer(*parse_recipe([*files, *second]))
    assert trainer.model.config.training_stage == "keft"
    assert trainer.model.config.compression_ratios == (4, 8)
    # Every context of these recipes, BOS included, has room.
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    assert batch["context_input_ids"].shape[1] <= 49
    assert -(-49 // 4) <= 16
    assert set(batch["ratio"].tolist()) <= {4, 8}
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0


@pytest.mark.parametrize("method", CLASSES)
def test_embedded_recipes_have_the_texts_and_budget_of_icae(method, tmp_path):
    (_, ours, one), (_, theirs, other) = (
        parse(f"embedded/{name}.yaml", "--data_dir", "data", folder=tmp_path) for name in (method, "icae")
    )
    mixture = [[(s.label, s.weight, s.licence) for s in data.parsed_sources()] for data in (ours, theirs)]
    assert mixture[0] == mixture[1]
    for name in ("max_context_tokens", "min_context_tokens", "max_target_tokens", "length_schedule"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("max_steps", "per_device_train_batch_size", "learning_rate", "warmup_steps", "seed"):
        assert getattr(one, name) == getattr(other, name)


@pytest.mark.slow
def test_two_models_with_two_tokenizers_train(small, base_folder, tmp_path):
    """The encoder of another family reads the context in its own tokens, the decoder restores it in its own."""
    sources = [DataSource(generated=True, tasks=("reconstruction",))]
    tokenizer = train_tokenizer(sources, vocab_size=300, num_texts=10, seed=3)
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
