# SPDX-License-Identifier: Apache-2.0
"""Recipes of ComprExIT: the paper's tables, its two phases, its ablations and bounds."""

import json
from pathlib import Path

import pytest
import small_recipes
import torch
import yaml
from small_recipes import parse
from transformers import AutoTokenizer, LlamaConfig
from transformers.optimization import get_scheduler

import context_compressors.training
from context_compressors import cli
from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.data.prompts import format_prompt
from context_compressors.modeling.modeling_comprexit import ComprExITForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer, main

RECIPES = Path(context_compressors.training.__file__).parent / "recipes"
BASES = {"llama3.2_1b": "meta-llama/Llama-3.2-1B", "llama3.2_3b": "meta-llama/Llama-3.2-3B"}
ABLATIONS = {
    "window_attention": {"slot_aggregation": "window_attention"},
    "last_layer": {"token_anchors": "last_layer"},
    "one_layer_mean": {"token_anchors": 8, "slot_aggregation": "mean"},
    "one_layer_attention": {"token_anchors": 8, "slot_aggregation": "window_attention"},
    "literal_equations": {"literal_equations": True},
    "shuffled_receivers": {"shuffled_receivers": True},
    "uniform_mass": {"uniform_sender_share": 1.0},
}
PROMPT_TUNING = ["comprexit/fine_tuning.yaml", "comprexit/prompt_tuning.yaml"]
on_each_base = pytest.mark.parametrize("base", BASES)


def test_prompt_tuning_has_the_budget_of_the_authors_scripts(tmp_path):
    model, data, args = parse(*PROMPT_TUNING, "comprexit/bases/llama3.2_1b.yaml", folder=tmp_path)
    tokens = [f"<|prompt_{index}|>" for index in range(32)]
    assert list(model.method_config["task_token_ids"]) == tokens
    assert data.context_prefix == "".join(tokens)
    assert (data.max_context_tokens + 1, args.learning_rate) == (512 + 32, 1e-4)


def test_no_space_stands_between_question_and_instruction():
    question = format_prompt("question_answering", "When was it lit?", path="comprexit")
    assert question.startswith("Question: When was it lit?Answer the question directly with a short span only")
    assert ComprExITConfig().question_prompt == format_prompt("question_answering", "{question}", path="comprexit")


def test_every_base_and_ablation_has_a_recipe():
    assert {path.stem for path in (RECIPES / "comprexit" / "bases").glob("*.yaml")} == set(BASES)
    assert {path.stem for path in (RECIPES / "comprexit" / "ablations").glob("*.yaml")} == set(ABLATIONS)


@on_each_base
def test_pretraining_holds_table_7(base, tmp_path):
    files = ["comprexit/comprexit.yaml", f"comprexit/bases/{base}.yaml", "comprexit/pretraining.yaml"]
    model, data, args = parse(*files, folder=tmp_path)
    assert (model.method, model.base, model.dtype) == ("comprexit", BASES[base], "bfloat16")
    assert (args.objective, args.optim) == ("compression", "adamw_torch")
    assert (args.learning_rate, args.max_grad_norm, args.weight_decay) == (1e-4, 20.0, 0.0)
    # 1e9 tokens in samples of 512 + 128, a batch of 2,048 on four devices.
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (16, 32)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 4 == 2048
    assert 2048 * 640 == 1_310_720
    assert args.max_steps == 10**9 // 1_310_720 == 762
    assert args.warmup_steps == round(0.05 * 762)
    assert (data.max_context_tokens + 1, data.max_target_tokens, data.pack_texts) == (512, 128, True)
    assert [source.tasks for source in data.parsed_sources()] == [("continuation",)]
    config = ComprExITConfig(**model.method_config)
    assert (config.compression_ratios, config.window_size, config.transport_iterations) == ((4,), 128, 30)
    assert (config.metric_size, config.gate_size) == (256, 256)
    assert config.to_dict() == ComprExITConfig().to_dict(), "the paper's settings are the defaults"


@on_each_base
def test_fine_tuning_goes_on_for_one_epoch_without_warmup(base, tmp_path):
    files = ["comprexit/comprexit.yaml", f"comprexit/bases/{base}.yaml", "comprexit/fine_tuning.yaml"]
    model, data, args = parse(*files, folder=tmp_path)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 4 == 512
    assert (args.max_steps, args.num_train_epochs, args.learning_rate, args.warmup_steps) == (-1, 1, 1e-4, 0)
    # Both come with the checkpoint of the pretraining.
    assert (model.method, model.base, model.method_config) == ("comprexit", None, None)
    assert (data.max_context_tokens + 1, data.max_target_tokens, data.first_answer) == (512, 128, True)
    assert data.overlong_contexts == "truncate_left"
    assert [source.tasks for source in data.parsed_sources()] == [("question_answering",)]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, 1000)
    assert scheduler.lr_lambdas[0](0) == 1.0


@pytest.mark.parametrize("stage", ["pretraining", "fine_tuning"])
def test_the_baselines_differ_in_method_and_the_rate_of_pretraining_only(stage, tmp_path):
    settings = []
    for folder, method in (("comprexit", "comprexit"), ("comprexit_baselines", "icae")):
        files = [f"{folder}/{method}.yaml", "comprexit/bases/llama3.2_1b.yaml", f"comprexit/{stage}.yaml"]
        model, data, args = parse(*files, folder=tmp_path)
        assert args.learning_rate == (3e-5 if (method, stage) == ("icae", "pretraining") else 1e-4)
        names = ("max_steps", "num_train_epochs", "warmup_steps", "max_grad_norm", "per_device_train_batch_size")
        settings.append((model.base, vars(data), [getattr(args, name) for name in names]))
    assert settings[0] == settings[1]


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_its_own_fields(name, tmp_path):
    base = LlamaConfig(num_hidden_layers=16)
    files = ["comprexit/comprexit.yaml", f"comprexit/ablations/{name}.yaml", "comprexit/pretraining.yaml"]
    model, *_ = parse(*files, folder=tmp_path)
    config = ComprExITConfig(decoder_config=base, **model.method_config)
    plain = ComprExITConfig(decoder_config=base, **{**ABLATIONS[name]})
    assert config.to_dict() == plain.to_dict()
    assert config.to_dict() != ComprExITConfig(decoder_config=base).to_dict()


# --- what trains in a second ---

SMALL = {**small_recipes.SMALL, "warmup_steps": 0, "min_context_tokens": 16, "max_context_tokens": 60}


@pytest.fixture
def small(tmp_path, base_folder):
    """A recipe that brings a paper's settings down to what trains in a second."""

    def write(name, task, **fields):
        file = tmp_path / f"{name}.yaml"
        sources = [{"generated": True, "tasks": [task], "weight": 1}]
        file.write_text(yaml.safe_dump({**SMALL, "sources": sources, **fields}))
        return str(file)

    own = {"window_size": 16, "gate_size": 8, "metric_size": 8}
    return {
        "documents": write("documents", "continuation", base=str(base_folder), method_config=own),
        "questions": write("questions", "question_answering"),
        "bound": write("bound", "question_answering", base=str(base_folder)),
    }


@pytest.mark.slow
def test_next_tokens_then_questions(small, tmp_path):
    first, second = tmp_path / "pretrained", tmp_path / "tuned"
    method = "comprexit/comprexit.yaml"
    main([method, "comprexit/pretraining.yaml", small["documents"], "--output_dir", str(first)])
    tuning = [method, "comprexit/fine_tuning.yaml", small["questions"], "--checkpoint", str(first)]
    main([*tuning, "--output_dir", str(second)])
    before, after = (ComprExITForCausalLM.from_pretrained(folder) for folder in (first, second))
    assert after.config.window_size == 16
    parameters = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        # A bias in front of a softmax has no gradient but rounding.
        if not name.endswith(("layer_gate.layer.bias", "sender_score.1.bias")):
            assert parameter.requires_grad != torch.equal(parameter, parameters[name]), name
    log = json.loads((second / "training_summary.json").read_text())["log"]
    assert any("loss_ratio_4" in entry for entry in log)
    # Questions start with BOS, which moves in front of the slots.
    trainer = build_trainer(*parse_recipe([*tuning, "--output_dir", str(tmp_path / "again")]))
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert batch["input_ids"][0, 0] == after.config.bos_token_id
    labels = batch["labels"][0][batch["labels"][0] != -100]
    assert labels[-1] == after.config.eos_token_id


def scored(folder, output, *options):
    """Rows of `evaluate` on questions about a generated document."""
    argv = [str(folder), "--tasks", "question_answering", "--prompts", "memory_tokens", "--data", "generated"]
    argv += ["--documents", "1", "--max-samples", "2", "--max-new-tokens", "2", "--device", "cpu"]
    assert cli.main(["evaluate", *argv, *options, "--output", str(output)]) == 0
    return {row["condition"]: row for row in json.loads(output.read_text())["rows"]}


@pytest.mark.slow
def test_questions_are_asked_after_next_tokens_alone(small, tmp_path):
    """Tables 2 and 6: of the pretraining's checkpoint, which has seen none."""
    folder = tmp_path / "pretrained"
    main(["comprexit/comprexit.yaml", "comprexit/pretraining.yaml", small["documents"], "--output_dir", str(folder)])
    options = ["--zero-shot", "--max-context-tokens", "60", "--truncate-context", "--truncation-side", "left"]
    rows = scored(folder, tmp_path / "scores.json", *options)
    bounds = ["no_context", "full_context", "zero_shot_no_context", "zero_shot_full_context"]
    assert list(rows) == [*bounds, "ratio=4"]
    assert {row["num_truncated"] for row in rows.values()} == {2}
    # The base is frozen, and bare: its scores are the zero-shot ones.
    for name in bounds[:2]:
        assert rows[name]["metrics"] == rows[f"zero_shot_{name}"]["metrics"]


@pytest.mark.slow
def test_prompt_tuning_is_scored_with_its_tokens_in_front_of_the_context(small, tmp_path, monkeypatch):
    folder = tmp_path / "bound"
    files = [*PROMPT_TUNING, small["bound"], "--max_context_tokens", "120"]
    main([*files, "--output_dir", str(folder)])
    prefix = "".join(f"<|prompt_{index}|>" for index in range(32))
    read, generate = [], MeanPoolingForCausalLM.generate
    monkeypatch.setattr(
        MeanPoolingForCausalLM,
        "generate",
        lambda self, **inputs: read.append(inputs["input_ids"]) or generate(self, **inputs),
    )
    rows = scored(folder, tmp_path / "scores.json", "--bounds-only", "--context-prefix", prefix, "--batch-size", "1")
    assert list(rows) == ["no_context", "full_context"]
    config = MeanPoolingForCausalLM.from_pretrained(folder).config
    learned = [config.task_token_ids[f"<|prompt_{index}|>"] for index in range(32)]
    for without, whole in zip(read[::2], read[1::2], strict=True):
        assert not set(without[0].tolist()) & set(learned)
        assert whole[0, :33].tolist() == [config.bos_token_id, *learned]
        assert not set(whole[0, 33:].tolist()) & set(learned)


@pytest.mark.slow
def test_prompt_tuning_trains_tokens_in_front_of_the_whole_context(small, tmp_path):
    files = [*PROMPT_TUNING, small["bound"], "--max_context_tokens", "120"]
    trainer = build_trainer(*parse_recipe([*files, "--output_dir", str(tmp_path / "out")]))
    model = trainer.model
    assert isinstance(model, MeanPoolingForCausalLM)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["model.task_embeddings"]
    assert model.model.task_embeddings.shape[0] == 32
    batch = trainer.data_collator([trainer.train_dataset[0]])
    prompt = [model.config.task_token_ids[f"<|prompt_{index}|>"] for index in range(32)]
    ids = batch["input_ids"][0].tolist()
    assert ids[:33] == [model.config.bos_token_id, *prompt]
    assert not set(ids[33:]) & set(prompt)
    assert "context_input_ids" not in batch
    before = model.model.task_embeddings.detach().clone()
    trainer.train()
    assert (model.model.task_embeddings != before).any(dim=1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ablation", "phase"),
    [
        (None, None),
        ("window_attention", None),
        ("last_layer", None),
        ("uniform_mass", "pretraining"),
        (None, "fine_tuning"),
    ],
)
def test_embedded_recipes_train(ablation, phase, base_folder, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    task = {"pretraining": "continuation", "fine_tuning": "question_answering"}.get(phase, "reconstruction")
    overlay.write_text(yaml.safe_dump({"sources": [{"generated": True, "tasks": [task], "weight": 1}]}))
    files = ["embedded/comprexit.yaml"]
    files += [f"comprexit/ablations/{ablation}.yaml"] * (ablation is not None)
    files += [f"comprexit/small/{phase}.yaml"] * (phase is not None)
    options = ["--max_steps", "1", "--save_strategy", "no", "--use_cpu", "true", "--output_dir", str(tmp_path / "out")]
    start = ["--base", str(base_folder)]
    if phase == "fine_tuning":
        torch.manual_seed(0)
        ComprExITForCausalLM.from_base(base_folder).save_pretrained(tmp_path / "first")
        AutoTokenizer.from_pretrained(base_folder).save_pretrained(tmp_path / "first")
        start = ["--checkpoint", str(tmp_path / "first")]
    trainer = build_trainer(*parse_recipe([*files, str(overlay), *start, *options]))
    assert trainer.model.config.compression_ratios == (4,)
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["comprexit", "icae", "five_hundred_x", "compression_tokens", "mean_pooling"])
def test_restoring_first_is_read_after_the_recipe_of_a_method(method, base_folder, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    tasks = ["continuation", "reconstruction", "question_answering"]
    overlay.write_text(yaml.safe_dump({"sources": [{"generated": True, "tasks": tasks, "weight": 1}]}))
    files = [f"embedded/{method}.yaml", "embedded/restore_first.yaml", str(overlay), "--base", str(base_folder)]
    options = ["--max_steps", "5", "--logging_steps", "1", "--save_strategy", "no", "--use_cpu", "true"]
    options += ["--group_batches", "1"]
    trainer = build_trainer(*parse_recipe([*files, *options, "--output_dir", str(tmp_path / "out")]))
    assert trainer.model.config.model_type == f"{method}_compressor"
    # The first is the one that a checkpoint compresses at by itself.
    assert trainer.model.config.compression_ratios == (4, 2, 1)
    batch = trainer.args.per_device_train_batch_size
    drawn = [trainer.train_dataset[index]["task"] for index in range(5 * batch)]
    assert set(drawn[: 3 * batch]) == {"reconstruction"}
    assert set(drawn[3 * batch :]) == set(tasks)
    trainer.train()
    ratios = [{name for name in entry if name.startswith("loss_ratio")} for entry in trainer.state.log_history[:5]]
    assert ratios[:2] == [{"loss_ratio_1"}, {"loss_ratio_1"}]
    assert all(names in ({"loss_ratio_2"}, {"loss_ratio_4"}) for names in ratios[3:])
    muon = [group for group in trainer.optimizer.param_groups if group["muon"]]
    assert [group["initial_lr"] for group in muon] == [0.006]


def test_the_embedded_recipe_has_the_data_and_budget_of_mean_pooling(tmp_path):
    (_, ours, one), (_, theirs, other) = (
        parse(f"embedded/{method}.yaml", "--data_dir", "data", folder=tmp_path)[:3]
        for method in ("comprexit", "mean_pooling")
    )
    assert ours == theirs
    for name in ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "warmup_steps", "seed"):
        assert getattr(one, name) == getattr(other, name)
