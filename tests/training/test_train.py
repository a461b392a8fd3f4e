# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_recipes import GENERATED, new_model, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.optimization import get_scheduler

import context_compressors.training
from context_compressors.cli import train as train_command
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.data.document_ids import document_id
from context_compressors.data.prompts import TASKS
from context_compressors.data.sources import DataSource
from context_compressors.modeling.modeling_compression_tokens import CompressionTokensForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.arguments import parse_recipe, read_recipe, recorded_recipe
from context_compressors.training.fields import DataArguments, ModelArguments, TrainingFields
from context_compressors.training.loading import load_compressor
from context_compressors.training.run_record import latest_checkpoint
from context_compressors.training.train import build_trainer, main

RECIPES = Path(context_compressors.training.__file__).parent / "recipes"
_TOKENS = [(f"compression_tokens/{attention}",) for attention in ("causal", "bidirectional")]
SETTINGS = [("teacher",), (), ("single_ratio",), *_TOKENS, *((*tokens, "single_ratio") for tokens in _TOKENS)]
BASES = sorted(path.stem for path in (RECIPES / "mean_pooling" / "bases").glob("*.yaml"))
EMBEDDED = sorted(path.stem for path in (RECIPES / "embedded").glob("*.yaml"))


@pytest.mark.slow
def test_paper_recipes_hold_table_6(tmp_path):
    for setting, base in itertools.product(SETTINGS, BASES):
        first = ["mean_pooling/multi_ratio.yaml", *(f"mean_pooling/{name}.yaml" for name in setting)]
        files = [*first, f"mean_pooling/bases/{base}.yaml", "mean_pooling/data.yaml"]
        model, data, args = parse_recipe([*files, "--output_dir", str(tmp_path), "--use_cpu", "true"])
        assert (args.learning_rate, args.max_steps, args.warmup_steps) == (2e-4, 48_000, 2_400)
        assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.max_grad_norm) == (0.9, 0.95, 0.0, 1.0)
        assert (data.max_context_tokens, data.max_target_tokens) == (1024, 256)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
        assert data.parsed_sources()
        assert "/" in model.base
        if setting == ("teacher",):
            assert (args.objective, model.method, model.method_config) == ("teacher", None, None)
            assert (model.teacher_lora["rank"], model.teacher_lora["alpha"]) == (16, 16)
            continue
        assert (args.objective, args.ratio_mode) == ("distillation", "all")
        ratios = [4] if "single_ratio" in setting else [4, 8, 16, 32, 64, 128]
        lora = {"encoder_lora": {"rank": 16, "alpha": 16}, "decoder_lora": {"rank": 16, "alpha": 16}}
        attention = [name.partition("/")[2] for name in setting if name.startswith("compression_tokens/")]
        assert model.method == ("compression_tokens" if attention else "mean_pooling")
        own = {"token_attention": attention[0]} if attention else {}
        assert model.method_config == {"compression_ratios": ratios, **lora, **own}


def test_training_data_are_those_of_tables_4_and_8_and_the_long_stage_of_a_3(tmp_path):
    table_4 = {
        "abisee/cnn_dailymail": 198_732, "knkarthick/dialogsum": 12_452, "knkarthick/samsum": 14_730,
        "EdinburghNLP/xsum": 185_760, "google/boolq": 9_427, "ucinlp/drop": 76_751, "hotpotqa/hotpot_qa": 90_327,
        "deepmind/narrativeqa": 28_299, "qiaojin/PubMedQA": 211_218, "quac_train.parquet": 81_391,
        "textmachinelab/quail": 10_246, "ehovy/race": 87_749, "rajpurkar/squad": 86_821, "sggetao/PwC": 241_563,
    }  # fmt: skip
    table_8 = {
        "FiscalNote/billsum": 5_000, "hotpotqa/hotpot_qa": 5_000, "kmfoda/booksum": 4_055,
        "longalpaca_train.parquet": 3_918, "emozilla/quality": 2_426, "qasper_train.parquet": 2_331,
        "qmsum_train.parquet": 295,
    }  # fmt: skip
    files = ["mean_pooling/multi_ratio.yaml", "mean_pooling/bases/qwen3_1.7b.yaml"]
    own = ["--output_dir", str(tmp_path), "--use_cpu", "true"]
    _, short, _ = parse_recipe([*files, "mean_pooling/data.yaml", *own])
    assert {source.label: source.weight for source in short.parsed_sources()} == table_4
    assert sum(table_4.values()) == 1_335_466
    assert short.overlong_contexts == "skip"
    files += [f"mean_pooling/long_context/{name}.yaml" for name in ("stage", "data")]
    _, data, args = parse_recipe([*files, *own])
    sources = data.parsed_sources()
    long = {source.label: source.weight for source in sources if source.max_samples is None}
    assert long == table_8
    assert sum(table_8.values()) == 23_025
    kept = [source for source in sources if source.max_samples is not None]
    assert {source.label for source in kept} == table_4.keys()
    assert {(source.max_samples, source.weight) for source in kept} == {(2_000, 2_000)}
    # Hotpot's gold paragraphs are the short set, all ten the long one.
    assert [source.supporting_passages for source in sources if source.name == "hotpotqa/hotpot_qa"] == [False, True]
    assert (args.max_steps, args.warmup_steps, args.learning_rate) == (4_800, 240, 2e-4)
    assert (data.max_context_tokens, data.max_target_tokens, data.overlong_contexts) == (8_192, 256, "skip")
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    progressive = [*files[:-1], "mean_pooling/long_context/progressive.yaml", files[-1]]
    _, data, _ = parse_recipe([*progressive, *own])
    lengths = [length for _, length in data.length_schedule]
    assert lengths == sorted(lengths)
    assert lengths[-1] == data.max_context_tokens
    files = ["smollm2/mean_pooling.yaml", "smollm2/data.yaml", "smollm2/long_context.yaml"]
    _, data, args = parse_recipe([*files, *own])
    assert data.max_context_tokens == data.length_schedule[-1][1] == 2_048
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 8
    assert data.parsed_sources()


def test_each_ablation_of_table_3_changes_its_own_field(tmp_path):
    own = {
        "fixed_decoder": {"decoder_lora": None},
        "fixed_encoder": {"encoder_lora": None},
        "no_encoder": {"encoder_type": "embeddings", "encoder_lora": None},
        "no_linear_layer": {"linear_after_pooling": False},
        "ratio_sampling": {},
    }
    assert {path.stem for path in (RECIPES / "mean_pooling" / "ablations").glob("*.yaml")} == set(own)
    for name, fields in own.items():
        files = ["mean_pooling/multi_ratio.yaml", f"mean_pooling/ablations/{name}.yaml"]
        model, _, args = parse_recipe([*files, "--output_dir", str(tmp_path), "--use_cpu", "true"])
        config = MeanPoolingConfig(**model.method_config)
        assert config.to_dict() == MeanPoolingConfig(**fields).to_dict()
        assert (config.to_dict() == MeanPoolingConfig().to_dict()) == (name == "ratio_sampling")
        assert args.ratio_mode == ("per_sample" if name == "ratio_sampling" else "all")


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        ("compression_tokens/causal",),
        ("compression_tokens/bidirectional", "single_ratio"),
        *((f"ablations/{path.stem}",) for path in sorted((RECIPES / "mean_pooling" / "ablations").glob("*.yaml"))),
    ],
    ids=" ".join,
)
def test_settings_of_the_mean_pooling_paper_train(setting, base_folder, tmp_path):
    """Distilled for a step from the tiny base, as the paper's commands say: what is frozen stays as it was."""
    small = tmp_path / "small.yaml"
    sources = [{"generated": True, "tasks": ["question_answering"], "weight": 1}]
    fields = {"sources": sources, "dtype": "float32", "bf16": False, "max_steps": 2, "warmup_steps": 0}
    fields |= {"max_context_tokens": 60, "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    small.write_text(yaml.safe_dump({**fields, "save_strategy": "no", "logging_steps": 1}))
    files = ["multi_ratio", *setting]
    options = ["--base", str(base_folder), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    trainer = build_trainer(*parse_recipe([*(f"mean_pooling/{name}.yaml" for name in files), str(small), *options]))
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    frozen = {"fixed_decoder": {"decoder"}, "fixed_encoder": {"encoder"}, "no_encoder": {"encoder"}}
    adapters = {name.split(".")[-2] for name in moved if "lora_" in name}
    assert adapters == {"encoder", "decoder"} - frozen.get(setting[0].rpartition("/")[2], set())
    log = trainer.state.log_history[0]
    assert ("kl_per_token_mixed_ratios" in log) == (setting == ("ablations/ratio_sampling",))


def test_icae_of_table_10_goes_on_from_its_pretraining(tmp_path):
    first, options = (
        "mean_pooling/baselines/icae_mistral_7b.yaml",
        ["--output_dir", str(tmp_path), "--use_cpu", "true"],
    )
    model, _, args = parse_recipe([first, "epl/pretraining.yaml", *options])
    config = ICAEConfig(**model.method_config)
    assert (config.compression_ratios, config.chunk_size, config.chunk_slots(512, 4)) == ((4,), 512, 128)
    assert (config.encoder_lora["rank"], config.encoder_lora["alpha"]) == (512, 32)
    assert (model.base, args.objective) == ("mistralai/Mistral-7B-Instruct-v0.2", "joint")
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 16
    model, data, args = parse_recipe([first, "epl/fine_tuning.yaml", "gmsa/data/pwc_keft.yaml", *options])
    assert (model.base, model.method_config, args.objective) == (None, None, "compression")
    assert [source.name for source in data.parsed_sources()] == ["sggetao/PwC"]


def test_every_base_of_the_paper_has_a_recipe():
    assert {read_recipe(f"mean_pooling/bases/{base}.yaml")["base"] for base in BASES} == {
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-8B",
        "google/gemma-2-2b-it",
        "meta-llama/Llama-3.2-1B-Instruct",
    }


def test_learning_rate_schedule_of_table_6(tmp_path):
    _, _, args = parse_recipe(["mean_pooling/multi_ratio.yaml", "--output_dir", str(tmp_path), "--use_cpu", "true"])
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        args.warmup_steps,
        args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    rate = scheduler.lr_lambdas[0]
    rates = [args.learning_rate * rate(step) for step in (1200, 2400, 25200, 48000)]
    assert rates == pytest.approx([1e-4, 2e-4, 1.1e-4, 2e-5], rel=1e-6)


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_recipes_use_data_for_commercial_use_only(name, tmp_path):
    read_after = {
        "activation_beacon": ["embedded/mean_pooling.yaml"],
        "autocompressor": ["embedded/icae.yaml"],
        "joint_pretraining": ["embedded/icae.yaml"],
        "keft": ["embedded/gmsa.yaml"],
        "pcc": ["embedded/icae.yaml"],
        "restore_first": ["embedded/comprexit.yaml"],
        "voco": ["embedded/five_hundred_x.yaml"],
        "segments": ["embedded/icae.yaml", "embedded/autocompressor.yaml"],
        "windows": ["embedded/mean_pooling.yaml", "embedded/activation_beacon.yaml"],
    }
    files = [*read_after.get(name, []), f"embedded/{name}.yaml"]
    model, data, args = parse_recipe([*files, "--output_dir", str(tmp_path)])
    allowed = {
        "text_standardebooks_train", "text_openstax_train", "text_us_gov_blogs_train", "text_factbook_train",
        "text_peps_train", "text_us_presidents_train", "text_eltec_eng_train", "qa_fairytaleqa_train",
        "qa_policyqa_dev", "qa_pubmedqa_labelled",
    }  # fmt: skip
    sources = data.parsed_sources()
    assert {Path(source.path).stem for source in sources if source.path} <= allowed
    assert all(source.split == "train" for source in sources if source.generated)
    assert sources
    assert model.dtype == "float32"
    assert args.bf16 is False


def test_the_command_line_wins_over_recipes_and_a_later_recipe_over_an_earlier(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(f"learning_rate: 1.0e-3\nmax_steps: 5\nsources: {GENERATED}\n")
    second.write_text("max_steps: 7\n")
    argv = [
        str(first),
        str(second),
        "--warmup-steps",
        "3",
        "--output_dir",
        str(tmp_path),
        "--row_mixture",
        "{copy: 2}",
    ]
    _, data, args = parse_recipe([*argv, "--use_cpu", "true", "--bf16", "false"])
    assert (args.learning_rate, args.max_steps, args.warmup_steps) == (1e-3, 7, 3)
    assert data.row_mixture == {"copy": 2}
    assert data.parsed_sources() == [DataSource.from_mapping(yaml.safe_load(GENERATED)[0])]


def test_method_config_of_several_recipes_is_put_together(tmp_path):
    files = [tmp_path / f"{name}.yaml" for name in "abc"]
    files[0].write_text("method_config: {chunk_size: 16, compression_ratios: [5]}\n")
    files[1].write_text("method_config: {position_layout: uniform, compression_ratios: [4]}\n")
    files[2].write_text("method_config: null\n")
    rest = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    model, *_ = parse_recipe([*map(str, files[:2]), *rest])
    assert model.method_config == {"chunk_size": 16, "compression_ratios": [4], "position_layout": "uniform"}
    assert parse_recipe([*map(str, files), *rest])[0].method_config is None
    model, *_ = parse_recipe([*map(str, files[:2]), *rest, "--method_config", "{chunk_size: 8}"])
    assert model.method_config == {"chunk_size": 8}


def test_null_on_the_command_line_takes_back_what_a_recipe_says(tmp_path, base_folder):
    recipe = write_recipe(
        tmp_path,
        base="b",
        encoder="e",
        teacher="t",
        tokenizer=str(base_folder),
        data_dir="d",
        prompts="gmsa",
        context_prefix="### ",
        save_dtype="bfloat16",
    )
    argv = ["--base", "null", "--encoder", "None", "--teacher", "NULL", "--data_dir=null", "--prompts", "none"]
    argv += ["--context_prefix", "null", "--save_dtype", "null", "--max_target_tokens", "null"]
    model, data, args = parse_recipe([recipe, *argv, "--checkpoint", "c"])
    assert (data.context_prefix, data.max_target_tokens, args.save_dtype) == ("", 256, None)
    assert (model.base, model.encoder, model.teacher, model.checkpoint) == (None, None, None, "c")
    assert (data.data_dir, data.prompts, model.tokenizer) == (None, None, str(base_folder))


@pytest.mark.parametrize(
    ("recipe", "argv", "message"),
    [
        ({"alpha": 1.5}, [], "alpha must be from 0 to 1, got 1.5"),
        ({"context_mode": "compresed"}, [], "did you mean 'compressed'"),
        ({"context_mode": "no_context", "objective": "distillation"}, [], "goes with the objectives compression and"),
        ({"max_document_tokens": 0}, [], "max_document_tokens must be at least 1, got 0"),
        ({"learning_rte": 1}, [], "unknown field 'learning_rte' in the recipe; did you mean 'learning_rate'"),
        ({}, ["--max_step", "3"], "unknown field '--max_step'; did you mean 'max_steps'"),
        ({"objective": "distilation"}, [], "did you mean 'distillation'"),
        ({"optimizer": "muun", "objective": "language_modeling"}, [], "did you mean 'muon'"),
        ({"ratio_mode": "al"}, [], "did you mean 'all'"),
        ({"ratio_schedule": [[0.5, [2]]]}, [], "ratio_schedule must be a list of .* the first fraction 0"),
        ({"ratio_schedule": [[0.0, [0]]]}, [], "ratios at least 1, got"),
        ({"ratio_schedule": [[0.0, [2]], [1.0, [4]]]}, [], "all below 1"),
        ({"ratio_schedule": 2}, [], "ratio_schedule must be a list"),
        ({"task_schedule": [[0.0, ["repeat"]]]}, [], "task_schedule must be a list of .* got"),
        ({"ratio_schedule": [[0.0, [2]]], "ratio_mode": "per_sample"}, [], "got ratio_mode 'per_sample'"),
        ({"dtype": "bfloat"}, [], "did you mean 'bfloat16'"),
        ({"max_questions": 0}, [], "max_questions must be at least 1, got 0"),
        ({"min_context_tokens": 2000}, [], r"min_context_tokens must be 1 to max_context_tokens \(60\)"),
        ({"sources": "text"}, [], "sources must be a list"),
        ({"model_config": [1]}, [], "model_config must be a mapping"),
        ({}, ["--method_config", "{compression_ratios: [4"], "method_config is not valid YAML: line 1, column 24: "),
        ({"distillation_chunk_size": 0}, [], "distillation_chunk_size must be at least 1"),
        ({"max_steps": 1.5}, [], r"max_steps must be a whole number, got 1\.5"),
        ({"max_context_tokens": True}, [], "max_context_tokens must be a whole number, got True"),
        ({"questions_per_example": 1.5}, [], r"questions_per_example must be a whole number, got 1\.5"),
        ({"learning_rate": [1]}, [], r"learning_rate must be a number, such as .*, got \[1\]"),
        ({"prompts": ["a"]}, [], r"prompts must be a text, got \['a'\]"),
        ({"canonical_prompts": 1}, [], "canonical_prompts must be true or false, got 1"),
    ],
)
def test_wrong_fields_and_values_are_refused(tmp_path, recipe, argv, message):
    with pytest.raises(ValueError, match=message):
        parse_recipe([write_recipe(tmp_path, **recipe), *argv])


def test_wrong_recipes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe 'embeded/base.yaml'; did you mean 'embedded/base.yaml'"):
        parse_recipe(["embeded/base.yaml"])
    with pytest.raises(ValueError, match="the first argument is the recipe"):
        parse_recipe(["--max_steps", "3"])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold fields and values"):
        parse_recipe([str(tmp_path / "list.yaml")])
    (tmp_path / "open.yaml").write_text("method: icae\nbase: [1\n")
    with pytest.raises(ValueError, match=r"open.yaml is not valid YAML: line 3, column 1: expected ',' or '\]'"):
        parse_recipe([str(tmp_path / "open.yaml")])
    (tmp_path / "latin.yaml").write_bytes("title: Århus\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.yaml is not in UTF-8"):
        parse_recipe([str(tmp_path / "latin.yaml")])


@pytest.mark.parametrize("argv", [[], ["--help"], ["embedded/base.yaml", "-h"], ["--help-all"]])
def test_help_shows_examples_and_our_own_fields_and_those_of_trl_when_all_are_asked_for(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        train_command.main(argv)
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert "examples:" in output
    for group in (ModelArguments, DataArguments, TrainingFields):
        assert all(f"--{entry.name} " in output for entry in dataclasses.fields(group))
    assert ("--learning_rate" in output) == ("--help-all" in argv)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "language_modeling"}, "needs either model_config .* or base"),
        ({**new_model(), "max_steps": -1}, "needs max_steps"),
        ({**new_model(), "model_config": {"hidden_size": 8}}, "needs a model_type"),
        ({**new_model(), "train_tokenizer": {"vocab_size": 10}}, "vocab_size must be at least 259"),
        ({"objective": "compression", "tokenizer": "BASE"}, "give either base .* or checkpoint"),
        ({"objective": "compression", "base": "BASE", "method": "mean_poling"}, "did you mean 'mean_pooling'"),
        (
            {"objective": "compression", "base": "BASE", "method_config": {"compression_ratio": 2}},
            "compression_ratios",
        ),
        ({"objective": "compression", "base": "BASE", "sources": []}, "there are no sources"),
        ({"objective": "teacher", "base": "BASE", "teacher_lora": {"rnk": 2}}, "did you mean 'rank'"),
        (
            {"objective": "teacher", "base": "BASE", "teacher_lora": {"rank": "8"}},
            "rank of teacher_lora must be a whol",
        ),
        ({"objective": "teacher", "base": "BASE", "teacher_lora": {"dropout": 2}}, "dropout of teacher_lora must be"),
        ({**new_model(), "train_tokenizer": {"vocab": 300}}, "did you mean 'vocab_size'"),
        (
            {**new_model(), "train_tokenizer": {"num_texts": "many"}},
            "num_texts of train_tokenizer must be a whole num",
        ),
        ({**new_model(), "prompts": "nonexistent.yaml"}, "there are no prompts 'nonexistent.yaml'"),
        ({**new_model(), "eval_sources": yaml.safe_load(GENERATED)}, "eval_sources .* not to language_modeling"),
        ({**new_model(), "ratio_schedule": [[0.0, [2]]]}, "ratio_schedule .* not to language_modeling: leave it out"),
        (
            {"objective": "denoising", "method": "decal", "length_schedule": [[0.0, 40]]},
            "length_schedule .* not to denoising: leave it out",
        ),
        ({"objective": "teacher", "tokenizer": "BASE"}, "give a base"),
        ({**new_model(), "train_tokenizer": {"seed": -1}}, "seed of train_tokenizer must be a whole number from 0 on"),
        ({"objective": "teacher"}, "give a tokenizer, a base, a checkpoint"),
        ({"objective": "denoising", "base": "BASE"}, "objective of a decoder-only compressor: 'denoising'; allowed"),
        ({"objective": "compression", "base": "BASE", "teacher": "BASE"}, "teacher goes with the objective distil"),
        ({**new_model(), "teacher": "BASE"}, "teacher goes with the objective distillation, not with 'language_mod"),
        (
            {**new_model(), "task_schedule": [[0.0, ["continuation"]]]},
            "not to language_modeling: leave it out",
        ),
        (
            {"method": "mean_pooling", "base": "BASE", "max_steps": -1, "length_schedule": [[0, 60]]},
            "each of the 3 epo",
        ),
        (
            {"method": "mean_pooling", "base": "BASE", "max_steps": -1, "task_schedule": [[0, ["reconstruction"]]]},
            "task_schedule is told by the share of one pass .* give max_steps, or num_train_epochs 1",
        ),
        ({"objective": "compression", "checkpoint": "BASE", "encoder": "BASE"}, "encoder goes with base .* beside"),
        ({"objective": "compression", "checkpoint": "BASE", "encoder_revision": "v1"}, "encoder_revision goes with b"),
        ({"objective": "compression", "checkpoint": "BASE", "base_revision": "v1"}, "base_revision goes with base"),
        (
            {"method": "decal", "model_config": {}, "tokenizer": "BASE", "base_revision": "v1"},
            "base_revision goes with base .* beside model_config",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(tmp_path, base_folder, fields, message):
    fields = {name: str(base_folder) if value == "BASE" else value for name, value in fields.items()}
    with pytest.raises(ValueError, match=message):
        main([write_recipe(tmp_path, **fields)])


def test_whole_numbers_may_be_written_as_yaml_reads_them(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=1.0e3, max_context_tokens=64.0, learning_rate=1, max_target_tokens=None)
    _, data, args = parse_recipe([recipe])
    assert (args.max_steps, data.max_context_tokens, args.learning_rate, data.max_target_tokens) == (1000, 64, 1, 256)
    assert {type(args.max_steps), type(data.max_context_tokens)} == {int}


def test_fields_of_the_library_may_be_more_than_texts(tmp_path):
    recipe = write_recipe(tmp_path, run_name=2024, eval_sources=[], length_schedule=[], **new_model())
    argv = [recipe, "--fsdp"]
    arguments = parse_recipe(argv)
    assert (arguments[2].fsdp, str(arguments[2].run_name)) == (True, "2024")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(recorded_recipe(argv, arguments)))
    assert parse_recipe([str(tmp_path / "again.yaml")])[2].fsdp is True


def test_what_is_empty_is_no_setting(tmp_path):
    fields = {**new_model(), "train_tokenizer": {"vocab_size": 300.0, "num_texts": 2.0e1}, "max_steps": 1}
    assert main([write_recipe(tmp_path, eval_sources=[], length_schedule=[], **fields)]) == 0


def test_language_modelling_puts_its_questions_in_the_recipes_words(tmp_path):
    words = {task: ["\nASKED {question}\nSAID" if task == "question_answering" else "\nGO"] for task in TASKS}
    (tmp_path / "words.yaml").write_text(yaml.safe_dump(words))
    fields = {**new_model(), "prompts": str(tmp_path / "words.yaml"), "row_mixture": {"generated": 1}}
    trainer = build_trainer(*parse_recipe([write_recipe(tmp_path, **fields)]))
    text = trainer.processing_class.decode(trainer.train_dataset[0][0][0])
    assert "\nASKED " in text
    assert "Question" not in text


def test_a_base_model_is_trained_with_its_tokenizer(tmp_path):
    assert main([write_recipe(tmp_path, **new_model())]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == len(tokenizer) == 300
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    summary = json.loads((tmp_path / "out" / "training_summary.json").read_text())
    assert summary["steps"] == 2
    ran = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert ran["max_steps"] == 2
    assert str(tmp_path) not in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.slow
def test_a_teacher_goes_on_with_its_adapter(tmp_path, base_folder):
    first, again = tmp_path / "first", tmp_path / "again"
    fields = {"objective": "teacher", "teacher_lora": {"rank": 2, "alpha": 4}}
    main([write_recipe(tmp_path, **fields, base=str(base_folder), learning_rate=1e-2), "--output_dir", str(first)])
    # A rate of zero: what is saved is what it started from.
    recipe = write_recipe(tmp_path, **fields, checkpoint=str(first), learning_rate=0.0)
    main([recipe, "--output_dir", str(again)])
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (first, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.any() for name, value in before.items() if "lora_B" in name)
    trainer = build_trainer(*parse_recipe([recipe, "--output_dir", str(again)]))
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == len(before)
    assert all("lora_" in name for name in trained)
    with pytest.raises(ValueError, match="goes on from the folder of its adapter, checkpoint, without a base"):
        build_trainer(*parse_recipe([recipe, "--checkpoint", str(base_folder)]))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_teacher_then_distillation_then_going_on(tmp_path, base_folder, lora):
    teacher, student, further = (tmp_path / name for name in ("teacher", "student", "further"))
    fields = {"base": str(base_folder), "learning_rate": 1e-2}
    settings = {} if lora is None else {"teacher_lora": lora}
    main([write_recipe(tmp_path, objective="teacher", **fields, **settings), "--output_dir", str(teacher)])
    recipe = write_recipe(tmp_path, objective="distillation", **fields, method_config={"compression_ratios": [2, 4]})
    main([recipe, "--teacher", str(teacher), "--output_dir", str(student)])
    ran = (student / "recipe.yaml").read_text()
    assert yaml.safe_load(ran)["teacher"] == teacher.name
    assert str(tmp_path) not in ran
    trained = MeanPoolingForCausalLM.from_pretrained(student)
    assert trained.config.compression_ratios in ((2, 4), [2, 4])
    recipe = write_recipe(tmp_path, objective="compression", checkpoint=str(student))
    main([recipe, "--output_dir", str(further)])
    assert (further / "model.safetensors").exists()


@pytest.mark.slow
def test_eval_sources_are_evaluated_and_asked(tmp_path, base_folder, capsys):
    rows = [{"context": f"Berth {n} is Nora's.", "question": f"Whose | {n}?", "answers": ["Nora's"]} for n in range(9)]
    (tmp_path / "berths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = {"path": str(tmp_path / "berths.jsonl"), "tasks": ["question_answering"], "weight": 1}
    recipe = write_recipe(
        tmp_path,
        objective="compression",
        base=str(base_folder),
        method_config={"compression_ratios": [2]},
        eval_sources=[{"generated": True, "split": "test", "tasks": ["reconstruction"], "weight": 1}, held_out],
        sample_answers_steps=2,
        # Of the training alone: the first task is none of theirs.
        task_schedule=[[0.0, ["question_answering"]], [0.5, ["reconstruction"]]],
        num_eval_examples=4,
        eval_strategy="steps",
        eval_steps=2,
    )
    main([recipe])
    log = json.loads((tmp_path / "out" / "training_summary.json").read_text())["log"]
    assert any("eval_loss_ratio_2" in entry for entry in log)
    asked = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines() if "Whose" in line]
    assert [(step.strip("| "), question.strip()) for step, question in asked] == [
        (step, f"Whose \\| {n}?") for step in "02" for n in range(4)
    ]
    documents = json.loads((tmp_path / "out" / "training_documents.json").read_text())
    assert {document_id(row["context"]) for row in rows[:4]} <= set(documents["chose"].split())
    # It trains as it does unasked, and questions that are trained on are none to look at.
    main([recipe, "--sample_answers_steps", "0", "--output_dir", str(tmp_path / "unasked")])
    unasked = json.loads((tmp_path / "unasked" / "training_summary.json").read_text())["log"]
    assert [entry.get("loss") for entry in unasked] == [entry.get("loss") for entry in log]
    with pytest.raises(ValueError, match="sample_answers_steps needs questions that are not trained on"):
        main([recipe, "--eval_sources", "null", "--eval_strategy", "no"])


def test_method_config_belongs_to_a_new_compressor(tmp_path, base_folder):
    recipe = write_recipe(tmp_path, checkpoint=str(base_folder), method_config={"compression_ratios": [2]})
    with pytest.raises(ValueError, match="method_config is fixed by the checkpoint"):
        load_compressor(parse_recipe([recipe])[0])


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_its_own_method(tmp_path, base_folder):
    fields = {"objective": "compression", "max_steps": 1}
    new = {"base": str(base_folder), "method": "compression_tokens", "method_config": {"compression_ratios": [2]}}
    main([write_recipe(tmp_path, **fields, **new), "--output_dir", str(tmp_path / "tokens")])
    recipe = write_recipe(tmp_path, **fields, checkpoint=str(tmp_path / "tokens"))
    assert type(load_compressor(parse_recipe([recipe])[0])) is CompressionTokensForCausalLM
    main([recipe])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "compression_tokens_compressor"
    with pytest.raises(ValueError, match="is of the method compression_tokens, the recipe's method is mean_pooling"):
        main([recipe, "--method", "mean_pooling"])
    with pytest.raises(ValueError, match=r"no checkpoint of a compressor, its model type is 'llama'.*give it as base"):
        main([recipe, "--checkpoint", str(base_folder)])


def losses_of(folder: Path) -> dict[int, float]:
    states = sorted(
        folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1])
    )
    log = json.loads(states[-1].read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in log if "loss" in entry}


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    assert latest_checkpoint(str(tmp_path / "missing")) is None
    for step, state in ((9, "{}"), (10, "{}"), (11, '{"global'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def kill_behind_step_20(command: list[str], folder: Path) -> None:
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while not (folder / "checkpoint-20").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "checkpoint-40").exists()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["language_modeling", "compression", "distillation", "joint"])
def test_a_killed_run_goes_on_with_the_same_loss_curve(tmp_path, base_folder, objective):
    fields = new_model() if objective == "language_modeling" else {"base": str(base_folder), "ratio_mode": "random"}
    fields = {**fields, "objective": objective, "max_steps": 40, "gradient_accumulation_steps": 2}
    if objective != "language_modeling":
        fields["method_config"] = {"compression_ratios": [2, 4]}
    if objective == "joint":
        fields["sources"] = [{"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}]
        fields |= {"min_document_tokens": 24, "max_document_tokens": 80}
    recipe = write_recipe(tmp_path, **fields, save_steps=10, length_schedule=[[0.0, 40], [1.0, 60]], seed=3)
    command = [sys.executable, "-m", "context_compressors.training.train", recipe, "--save_strategy", "steps"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main([*command[3:], "--output_dir", str(whole)])
    if objective == "compression":
        kill_behind_step_20([*command, "--output_dir", str(killed)], killed)
    else:
        # What a kill leaves is the same whatever trains.
        shutil.copytree(whole, killed)
        for step in (30, 40):
            shutil.rmtree(killed / f"checkpoint-{step}")
    argv = [*command[3:], "--output_dir", str(killed), "--resume_from_checkpoint", "latest"]
    main(argv)
    expected = losses_of(whole)
    assert set(losses_of(killed)) == set(expected) == set(range(1, 41))
    for step, loss in losses_of(killed).items():
        assert loss == pytest.approx(expected[step], rel=1e-4), step
