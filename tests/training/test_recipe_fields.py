# SPDX-License-Identifier: Apache-2.0
"""What recipes and the command line may say, alone and together, and what is refused."""

import dataclasses
import json

import pytest
import yaml
from small_recipes import GENERATED, write_recipe
from transformers import AutoTokenizer

from context_compressors.cli import train as train_command
from context_compressors.data.sources import DataSource
from context_compressors.training.arguments import parse_recipe, recorded_recipe
from context_compressors.training.fields import DataArguments, ModelArguments, TrainingFields
from context_compressors.training.loading import load_tokenizer
from context_compressors.training.train import build_trainer, main

SCHEDULED = {"method": "mean_pooling", "task_schedule": [[0, ["reconstruction"]], [0.5, ["question_answering"]]]}
CONTINUED = {
    "sources": [{"generated": True, "tasks": ["continuation"], "weight": 1}],
    "method_config": {"chunk_size": 32, "compression_ratios": [4]},
}


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
        "--length_schedule",
        "[[0.5, 40]]",
    ]
    _, data, args = parse_recipe([*argv, "--use_cpu", "true", "--bf16", "false"])
    assert (args.learning_rate, args.max_steps, args.warmup_steps) == (1e-3, 7, 3)
    assert data.length_schedule == [[0.5, 40]]
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
        ({"optimizer": "muun"}, [], "did you mean 'muon'"),
        ({"ratio_mode": "al"}, [], "did you mean 'all'"),
        ({"ratio_schedule": [[0.5, [2]]]}, [], "ratio_schedule must be a list of .* the first fraction 0"),
        ({"ratio_schedule": [[0.0, [0]]]}, [], "ratios at least 1, got"),
        ({"ratio_schedule": [[0.0, [2]], [1.0, [4]]]}, [], "all below 1"),
        ({"ratio_schedule": 2}, [], "ratio_schedule must be a list"),
        ({"task_schedule": [[0.0, ["repeat"]]]}, [], "task_schedule must be a list of .* got"),
        ({"ratio_schedule": [[0.0, [2]]], "ratio_mode": "per_sample"}, [], "got ratio_mode 'per_sample'"),
        ({"dtype": "bfloat"}, [], "did you mean 'bfloat16'"),
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
        ({"label_smoothing_factor": 0.5}, [], "label_smoothing_factor has a part in the loss .* got 0.5 in place"),
        (
            {"loss_type": "dft"},
            [],
            "loss_type has a part in the loss of the objective teacher alone: leave it out, got 'dft'",
        ),
        ({"max_length": 8}, [], "max_length cuts nothing: give max_context_tokens .*, got 8 in place"),
        ({"muon_learning_rate": -1.0}, [], r"muon_learning_rate must be a finite number, 0 or more, got -1\.0"),
        ({"learning_rate": -1.0}, [], r"learning_rate must be a finite number, 0 or more, got -1\.0"),
        ({}, ["--learning_rate", "inf"], "learning_rate must be a finite number, 0 or more, got inf"),
        ({"muon_momentum": 1.5, "optimizer": "muon"}, [], r"muon_momentum must be from 0 to below 1, got 1\.5"),
        ({"optimizer": "muon"}, ["--muon_momentum", "nan"], "muon_momentum must be from 0 to below 1, got nan"),
        ({"muon_learning_rate": 0.003}, [], r"muon_learning_rate goes with optimizer muon, got 0\.003 with 'adamw'"),
        ({"muon_momentum": 0.5}, [], r"muon_momentum goes with optimizer muon, got 0\.5 with 'adamw': leave it out"),
        ({}, ["--kl_weight", "nan"], "kl_weight must be a finite number, 0 or more, got nan"),
        ({}, ["--nll_weight", "inf"], "nll_weight must be a finite number, 0 or more, got inf"),
        ({"objective": "distillation", "kl_weight": 0}, [], "kl_weight and nll_weight are both 0"),
        ({}, ["--contrastive_temperature", "nan"], "contrastive_temperature must be a finite number above 0, got nan"),
        ({"max_steps": 0}, [], "max_steps must be at least 1, or -1 for epochs, got 0"),
        ({"max_steps": -2}, [], "max_steps must be at least 1, or -1 for epochs, got -2"),
        (
            {"max_steps": -1, "num_train_epochs": -1},
            [],
            "num_train_epochs must be a finite number, 0 or more, got -1",
        ),
        ({"gradient_accumulation_steps": 0}, [], "gradient_accumulation_steps must be at least 1, got 0"),
        ({"per_device_train_batch_size": 0}, [], "per_device_train_batch_size must be at least 1, got 0"),
        ({"canonical_prompts": 1}, [], "canonical_prompts must be true or false, got 1"),
    ],
)
def test_wrong_fields_and_values_are_refused(tmp_path, recipe, argv, message):
    with pytest.raises(ValueError, match=message):
        parse_recipe([write_recipe(tmp_path, **recipe), *argv])


def test_a_teacher_has_what_trls_loss_reads(tmp_path):
    fields = {"objective": "teacher", "base": "base", "label_smoothing_factor": 0.5, "loss_type": "dft"}
    *_, args = parse_recipe([write_recipe(tmp_path, **fields, max_length=None)])
    assert (args.label_smoothing_factor, args.loss_type, args.max_length) == (0.5, "dft", None)
    with pytest.raises(ValueError, match="max_length cuts nothing"):
        parse_recipe([write_recipe(tmp_path, **fields, max_length=8)])


def test_wrong_recipes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe 'embeded/icae.yaml'; did you mean 'embedded/icae.yaml'"):
        parse_recipe(["embeded/icae.yaml"])
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


@pytest.mark.parametrize("argv", [[], ["--help"], ["embedded/icae.yaml", "-h"], ["--help-all"]])
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
        ({"objective": "compression", "base": "BASE", "prompts": "no.yaml"}, "there are no prompts 'no.yaml'"),
        ({"objective": "teacher", "ratio_schedule": [[0.0, [2]]]}, "ratio_schedule .* not to teacher: leave it out"),
        (
            {"objective": "denoising", "method": "decal", "length_schedule": [[0.0, 40]]},
            "length_schedule .* not to denoising: leave it out",
        ),
        ({"objective": "teacher", "tokenizer": "BASE"}, "give a base"),
        ({"objective": "teacher"}, "give a tokenizer, a base or a checkpoint"),
        ({"objective": "denoising", "base": "BASE"}, "objective of a decoder-only compressor: 'denoising'; allowed"),
        ({"objective": "compression", "base": "BASE", "teacher": "BASE"}, "teacher goes with the objective distil"),
        ({"objective": "joint", "task_schedule": [[0.0, ["continuation"]]]}, "not to joint: leave it out"),
        (
            {"method": "mean_pooling", "base": "BASE", "max_steps": -1, "length_schedule": [[0, 60]]},
            "length_schedule is told .* num_train_epochs is 3",
        ),
        (
            {"method": "mean_pooling", "base": "BASE", "max_steps": -1, "task_schedule": [[0, ["reconstruction"]]]},
            "task_schedule is told by the share of one whole pass .* give max_steps, or num_train_epochs 1",
        ),
        (
            {**SCHEDULED, "base": "BASE", "max_steps": -1, "num_train_epochs": 0.5},
            "num_train_epochs is 0.5: give max_steps",
        ),
        ({"method": "decal", "model_config": {"d_modell": 8}, "tokenizer": "BASE"}, "did you mean 'd_model'"),
        (
            {"objective": "teacher", "base": "BASE", "teacher_lora": {"target_modules": 5}},
            "target_modules of teacher_lora must be a text or a list of texts, got 5",
        ),
        (
            {"objective": "segments", "method": "autocompressor", "base": "BASE", "max_steps": -1, **CONTINUED},
            "have no rows of their own to count: give max_steps",
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
    with pytest.raises(ValueError, match=f"(?s){message}"):
        main([write_recipe(tmp_path, **fields)])


COMPRESSION = {"objective": "compression", "method": "mean_pooling"}


@pytest.mark.parametrize(
    ("objective", "field", "value"),
    [
        ("retrieval", "questions_per_example", 4),
        ("retrieval", "context_prefix", "### "),
        ("retrieval", "overlong_contexts", "skip"),
        ("segments", "task_per_batch", True),
        ("teacher", "ratio_mode", "random"),
        *(("teacher", name, {"a": 1}) for name in ("method_config", "checkpoint_config", "model_config")),
        ("teacher", "encoder", "other"),
        *((name, "teacher_lora", {"rank": 2}) for name in ("compression", "distillation")),
        ("compression", "max_query_tokens", 9),
        *(("compression", name, 0.25) for name in ("kl_weight", "nll_weight", "alpha", "noise_density")),
        *(("compression", name, 4) for name in ("training_substeps", "contrastive_temperature", "mean_span_length")),
        ("compression", "random_segments", False),
        ("windows", "pack_texts", True),
        ("joint", "pack_texts", True),
    ],
)
def test_a_field_of_another_objective_is_refused(tmp_path, objective, field, value):
    fields = {"objective": objective, field: value}
    with pytest.raises(ValueError, match=rf"^{field} belongs to the objectives? .*, not to {objective}: leave it out"):
        build_trainer(*parse_recipe([write_recipe(tmp_path, **fields)]))


def test_sources_of_an_evaluation_need_a_time(tmp_path, base_folder):
    fields = {**COMPRESSION, "base": str(base_folder), "eval_sources": yaml.safe_load(GENERATED)}
    with pytest.raises(ValueError, match=r"eval_sources are read at .* give eval_strategy or sample_answers_steps"):
        build_trainer(*parse_recipe([write_recipe(tmp_path, **fields)]))
    build_trainer(*parse_recipe([write_recipe(tmp_path, **fields, eval_strategy="steps", eval_steps=1)]))


FILE, DOCUMENTS, HUB = {"path": "a.jsonl"}, {"generated": True}, {"name": "org/a"}


@pytest.mark.parametrize(
    ("source", "field", "value", "kind"),
    [
        (FILE, "split", "test", "a file"),
        (FILE, "config", "small", "a file"),
        (DOCUMENTS, "rows", [0, 5], "generated documents"),
        (DOCUMENTS, "where", {"a": 1}, "generated documents"),
        (DOCUMENTS, "columns", {"context": "x"}, "generated documents"),
        (DOCUMENTS, "max_samples", 3, "generated documents"),
        (DOCUMENTS, "contexts_per_document", 3, "generated documents"),
        (DOCUMENTS, "config", "one_hop", "generated documents"),
        (DOCUMENTS, "separate_passages", True, "generated documents"),
        (DOCUMENTS, "document_tokens", 99, "generated documents"),
        (HUB, "by", "subset", "a data set of the Hub"),
    ],
)
def test_a_field_that_says_nothing_of_a_source_is_refused(source, field, value, kind):
    data = DataArguments(sources=[{**source, "tasks": ["question_answering"], field: value}])
    with pytest.raises(ValueError, match=rf"^{field} of source .* says nothing of {kind} in training: leave it out"):
        data.parsed_sources()


def test_structured_fields_may_be_json_with_any_character(tmp_path):
    sources = [{"path": "\U0001f600\u2028.txt", "tasks": ["reconstruction"]}]
    for text in (json.dumps(sources), json.dumps(sources, ensure_ascii=False)):
        _, data, _ = parse_recipe([write_recipe(tmp_path), "--sources", text])
        assert data.sources == sources


@pytest.mark.parametrize(
    ("named", "place"), [(None, ("me/base", "v1")), ("me/base", ("me/base", "v1")), ("other", ("other", "main"))]
)
def test_a_bases_tokenizer_is_of_its_revision_and_another_is_not(base_folder, monkeypatch, named, place):
    found, read = [], AutoTokenizer.from_pretrained

    def from_pretrained(place, revision, trust_remote_code):
        found.append((place, revision))
        return read(base_folder)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    model = ModelArguments(base="me/base", base_revision="v1", tokenizer=named)
    load_tokenizer(model)
    assert found == [place]


def test_whole_numbers_may_be_written_as_yaml_reads_them(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=1.0e3, max_context_tokens=64.0, learning_rate=1, max_target_tokens=None)
    _, data, args = parse_recipe([recipe])
    assert (args.max_steps, data.max_context_tokens, args.learning_rate, data.max_target_tokens) == (1000, 64, 1, 256)
    assert {type(args.max_steps), type(data.max_context_tokens)} == {int}


def test_fields_of_the_library_may_be_more_than_texts(tmp_path):
    recipe = write_recipe(tmp_path, run_name=2024, eval_sources=[], length_schedule=[])
    argv = [recipe, "--fsdp"]
    arguments = parse_recipe(argv)
    assert (arguments[2].fsdp, str(arguments[2].run_name)) == (True, "2024")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(recorded_recipe(argv, arguments)))
    assert parse_recipe([str(tmp_path / "again.yaml")])[2].fsdp is True


def test_what_is_empty_is_no_setting(tmp_path, base_folder):
    empty = {name: {} for name in ("method_config", "checkpoint_config", "model_config")}
    fields = {**empty, "objective": "teacher", "base": str(base_folder), "eval_sources": [], "length_schedule": []}
    build_trainer(*parse_recipe([write_recipe(tmp_path, **fields)]))
