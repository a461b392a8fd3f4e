# SPDX-License-Identifier: Apache-2.0
"""Fields of recipes and of the command line, alone and together, and refused ones."""

from pathlib import Path

import pytest
import yaml
from small_recipes import GENERATED, parse, write_recipe

from context_compressors import training
from context_compressors.configuration.methods import config_class
from context_compressors.data.sources import DataSource
from context_compressors.training.arguments import parse_recipe, recorded_recipe
from context_compressors.training.train import build_trainer

RECIPES = Path(training.__file__).parent / "recipes"
TABLES = yaml.safe_load(Path(__file__).with_name("paper_recipes.yaml").read_text())


def test_the_command_line_wins_over_recipes_and_a_later_recipe_over_an_earlier(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(f"learning_rate: 1.0e-3\nmax_steps: 5\nsources: {GENERATED}\n")
    second.write_text("max_steps: 7\n")
    argv = [str(first), str(second), "--warmup-steps", "3", "--output_dir", str(tmp_path)]
    argv += ["--length_schedule", "[[0.5, 40]]"]
    _, data, args = parse_recipe([*argv, "--use_cpu", "true", "--bf16", "false"])
    assert (args.learning_rate, args.max_steps, args.warmup_steps) == (1e-3, 7, 3)
    assert data.length_schedule == [[0.5, 40]]
    assert data.parsed_sources() == [DataSource.from_mapping(yaml.safe_load(GENERATED)[0])]


def test_method_config_of_recipes_and_the_command_line_is_put_together(tmp_path):
    files = [tmp_path / f"{name}.yaml" for name in "abc"]
    files[0].write_text("method_config: {chunk_size: 16, compression_ratios: [5]}\n")
    files[1].write_text("method_config: {position_layout: uniform, compression_ratios: [4]}\n")
    files[2].write_text("method_config: null\n")
    rest = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    model, *_ = parse_recipe([*map(str, files[:2]), *rest])
    assert model.method_config == {"chunk_size": 16, "compression_ratios": [4], "position_layout": "uniform"}
    assert parse_recipe([*map(str, files), *rest])[0].method_config is None
    for words in (["--method_config", "{chunk_size: 8}"], ["--method-config={chunk_size: 8}"]):
        model, *_ = parse_recipe([*map(str, files[:2]), *rest, *words])
        assert model.method_config == {"chunk_size": 8, "compression_ratios": [4], "position_layout": "uniform"}


def test_null_on_the_command_line_takes_back_what_a_recipe_says(tmp_path, base_folder):
    fields = {"base": "b", "encoder": "e", "teacher": "t", "tokenizer": str(base_folder), "data_dir": "d"}
    recipe = write_recipe(tmp_path, **fields, prompts="gmsa", context_prefix="### ", save_dtype="bfloat16")
    argv = ["--base", "null", "--encoder", "null", "--teacher", "NULL", "--data_dir=null", "--prompts", "null"]
    argv += ["--context_prefix", "null", "--save_dtype", "null", "--max_target_tokens", "null"]
    model, data, args = parse_recipe([recipe, *argv, "--checkpoint", "c"])
    assert (data.context_prefix, data.max_target_tokens, args.save_dtype) == ("", 256, None)
    assert (model.base, model.encoder, model.teacher, model.checkpoint) == (None, None, None, "c")
    assert (data.data_dir, data.prompts, model.tokenizer) == (None, None, str(base_folder))


@pytest.mark.parametrize(
    ("recipe", "argv", "message"),
    [
        ({"learning_rte": 1}, [], "unknown field 'learning_rte'; did you mean 'learning_rate'"),
        ({}, ["--max_step", "3"], "unknown field '--max_step'; did you mean 'max_steps'"),
        ({"objective": "distilation"}, [], "did you mean 'distillation'"),
        ({"ratio_schedule": [[0.0, [2]]], "ratio_mode": "per_sample"}, [], "got ratio_mode 'per_sample'"),
        ({"task_schedule": [[0.0, ["repeat"]]]}, [], "task_schedule must be a list of .* got"),
        ({"length_schedule": [[0.5, 10], [0.1, 20]]}, [], "length_schedule must be"),
        ({"sources": "text"}, [], "sources must be a list"),
        ({}, ["--method_config", "{compression_ratios: [4"], "method_config is not valid YAML: .*line 1, column"),
    ],
)
def test_wrong_fields_and_values_are_refused(tmp_path, recipe, argv, message):
    with pytest.raises(ValueError, match=message):
        parse_recipe([write_recipe(tmp_path, **recipe), *argv])


@pytest.mark.parametrize("path", sorted(RECIPES.glob("**/*.yaml")), ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_recipe_is_read_and_recorded_as_it_says(path, tmp_path):
    argv = [str(path), "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    recorded = recorded_recipe(argv, parse_recipe(argv))
    # A null takes a field back, which is not recorded.
    given = {name: value for name, value in yaml.safe_load(path.read_text()).items() if value is not None}
    given |= {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    assert {name: recorded[name] for name in given} == given


@pytest.mark.parametrize("setting", TABLES, ids=lambda setting: setting["table"])
def test_recipes_hold_the_papers_tables(setting, tmp_path):
    model, data, args = parse(*setting["recipes"], folder=tmp_path)
    said = {**vars(model), **vars(data), **vars(args)}
    said["batch"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert {name: said[name] for name in setting["values"]} == setting["values"]
    fields = setting.get("method_config", {})
    assert {name: model.method_config[name] for name in fields} == fields
    if model.method_config and model.method != "pcc":
        # Whatever a recipe says, its method knows.
        config_class(model.method)(**model.method_config)
    assert data.sources


def test_wrong_recipes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe 'embeded/icae.yaml'; did you mean 'embedded/icae.yaml'"):
        parse_recipe(["embeded/icae.yaml"])
    with pytest.raises(ValueError, match="the first argument is the recipe"):
        parse_recipe(["--max_steps", "3"])
    recipe = tmp_path / "own.yaml"
    for content, message in (
        (b"- 1\n", "must hold fields and values"),
        (b"method: icae\nbase: [1\n", r"own.yaml is not valid YAML: .*expected ',' or '\]'"),
        ("title: Århus\n".encode("latin-1"), r"own.yaml is not in UTF-8"),
    ):
        recipe.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            parse_recipe([str(recipe)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "compression", "tokenizer": "BASE"}, "give either base .* or checkpoint"),
        ({"objective": "compression", "base": "BASE", "method": "mean_poling"}, "did you mean 'mean_pooling'"),
        ({"objective": "compression", "base": "BASE", "sources": []}, "there are no sources"),
        ({"objective": "teacher", "base": "BASE", "teacher_lora": {"rnk": 2}}, "did you mean 'rank'"),
        ({"objective": "teacher"}, "give a tokenizer, a base or a checkpoint"),
        ({"objective": "denoising", "base": "BASE"}, "objective of mean_pooling: 'denoising'; allowed"),
        ({"base": "BASE", "max_steps": -1, "length_schedule": [[0, 60]]}, "needs max_steps, or num_train_epochs 1"),
        ({"checkpoint": "BASE", "method_config": {"compression_ratios": [2]}}, "method_config is fixed by the check"),
        (
            {"base": "BASE", "ratio_schedule": [[0, [3]]], "method_config": {"compression_ratios": [2]}},
            r"ratios \[3\]",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(tmp_path, base_folder, fields, message):
    fields = {name: str(base_folder) if value == "BASE" else value for name, value in fields.items()}
    with pytest.raises(ValueError, match=message):
        build_trainer(*parse_recipe([write_recipe(tmp_path, **fields)]))


@pytest.mark.parametrize("recipe", ["mean_pooling", "ranked_key_values", "reader"])
def test_what_trains_is_never_what_is_reported_or_chosen_by(recipe, tmp_path):
    _, data, _ = parse_recipe(
        ["smollm2/data.yaml", f"smollm2/{recipe}.yaml", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    )
    for source in map(DataSource.from_mapping, data.sources):
        assert source.generated or "_train" in source.path
        assert source.generated or source.license.split()[0] in ("CC", "CC0", "Apache-2.0")
        assert source.generated or "NC" not in source.license
        if source.path == "qa_squad_train.parquet":
            assert source.rows == [0, 85_000]
