# SPDX-License-Identifier: Apache-2.0
"""The recipes of the mean-pooling paper hold its tables, and train; so do those of every base and of embedded use."""

import itertools
from pathlib import Path

import pytest
import torch
import yaml
from small_recipes import parse
from transformers.optimization import get_scheduler

import context_compressors.training
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.training.arguments import parse_recipe, read_recipe
from context_compressors.training.train import build_trainer

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
        model, data, args = parse(*files, folder=tmp_path)
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
        "textmachinelab/quail": 10_246, "ehovy/race": 87_749, "rajpurkar/squad_v2": 86_821, "sggetao/PwC": 241_563,
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
    long, kept = sources[: len(table_8)], sources[len(table_8) :]
    assert {source.label: source.weight for source in long} == table_8
    assert sum(table_8.values()) == 23_025
    assert {source.label for source in long if source.max_samples == 5_000} == {
        name for name, number in table_8.items() if number == 5_000
    }
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
    # All sources have questions and summaries.
    assert data.schedule_contexts
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
        model, _, args = parse(*files, folder=tmp_path)
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
    _, _, args = parse("mean_pooling/multi_ratio.yaml", folder=tmp_path)
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
