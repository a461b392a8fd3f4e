# SPDX-License-Identifier: Apache-2.0
"""Ranked key/values from a reader of full texts: its adapter, scorers fitted to it, and what cannot be."""

import copy
import functools
import json
import shutil
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_recipes import write_recipe
from torch.nn import functional
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from context_compressors import ICAEForCausalLM, MeanPoolingForCausalLM, RankedKeyValuesForCausalLM, cli
from context_compressors.data.document_ids import TrainingDocuments
from context_compressors.hub_cards.write_card import write_card
from context_compressors.modeling.compressor.decoder_export import export_decoder
from context_compressors.modeling.compressor.token_rows import check_together
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.fit_scorers import fit_scorers
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.run_counts import RunCounts
from context_compressors.training.train import build_trainer, main

LORA = {"rank": 2, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
NARROW = {**LORA, "target_modules": ["q_proj", "v_proj"]}


def draw(model):
    """Weights of an adapter that change something."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def adapter(base_folder, tmp_path_factory):
    """As PEFT writes it."""
    folder = tmp_path_factory.mktemp("adapter")
    settings = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    draw(get_peft_model(AutoModelForCausalLM.from_pretrained(base_folder), settings)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@torch.no_grad()
def test_a_compressor_answers_as_the_adapter_that_it_starts_from(base_folder, adapter, tokenizer, tmp_path):
    """The shared adapter's compressor reads and answers with it, another's decoder answers with it."""
    ids = torch.arange(5, 17)[None]
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), adapter)(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(base_folder)(ids).logits
    assert not torch.allclose(expected, plain, atol=1e-2)
    ranked = RankedKeyValuesForCausalLM.from_base(base_folder, adapter=adapter, encoder_lora=LORA)
    torch.testing.assert_close(ranked(ids).logits, expected)
    memory = ranked.compress(ids[:, :8], ratio=1, allow_untrained_ratio=True)
    torch.testing.assert_close(ranked(ids[:, 8:], memory=memory).logits, expected[:, 8:], atol=1e-5, rtol=1e-4)
    pooling = MeanPoolingForCausalLM.from_base(base_folder, adapter=adapter, encoder_lora=LORA, decoder_lora=LORA)
    pooling.base_model.warns_of_no_context = False
    torch.testing.assert_close(pooling(ids).logits, expected)
    encoder = [p for name, p in pooling.named_parameters() if "lora_B.encoder" in name]
    assert encoder
    assert not any(parameter.any() for parameter in encoder)
    # What is exported as an adapter starts the next one.
    export_decoder(pooling, tokenizer, tmp_path / "decoder", form="lora")
    icae = ICAEForCausalLM.from_base(base_folder, adapter=tmp_path / "decoder", decoder_lora=LORA)
    icae.base_model.warns_of_no_context = False
    torch.testing.assert_close(icae(ids).logits, expected)


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_is_refused(base_folder, adapter, tmp_path):
    def changed(**fields):
        folder = tmp_path / next(iter(fields))
        shutil.copytree(adapter, folder)
        settings = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**settings, **fields}))
        return folder

    ranked, pooling = RankedKeyValuesForCausalLM.from_base, MeanPoolingForCausalLM.from_base
    for start, given, fields, message in (
        (ranked, adapter, {"encoder_lora": {**LORA, "rank": 4}}, r"rank and alpha \(2, 8\), .* own \(4, 8\)"),
        (ranked, adapter, {"encoder_lora": NARROW}, "sits on other maps than the compressor's, the first is 'base_"),
        (ranked, adapter, {"encoder_lora": None}, "answers without an adapter .*: give `decoder_lora`"),
        (pooling, adapter, {"decoder_lora": None}, "MeanPoolingForCausalLM answers without an adapter"),
        (ranked, changed(use_dora=True), {"encoder_lora": LORA}, "not plain LoRA: its use_dora is True, not False"),
        (
            ranked,
            changed(init_lora_weights="pissa"),
            {"encoder_lora": LORA},
            "its init_lora_weights is 'pissa'",
        ),
        (ranked, changed(bias="all"), {"encoder_lora": LORA}, "its bias is 'all', not 'none'"),
        (ranked, changed(rank_pattern={"q_proj": 4}), {"encoder_lora": LORA}, "its rank_pattern is {'q_proj': 4}"),
    ):
        with pytest.raises(ValueError, match=message):
            start(base_folder, adapter=given, **fields)
    with pytest.raises(OSError, match="adapter_config"):
        ranked(base_folder, adapter=tmp_path, encoder_lora=LORA)


@torch.no_grad()
def test_fitted_scorers_are_the_ridge_regression_of_the_second_readings_attention(base_folder):
    """Against plain linear algebra over all tokens at once, pads left out."""
    torch.manual_seed(1)
    fields = {"encoder_lora": LORA, "opening_ids": [3, 4]}
    model = draw(RankedKeyValuesForCausalLM.from_base(base_folder, **fields)).train()
    ids, mask = torch.randint(5, 300, (3, 14)), torch.ones(3, 14, dtype=torch.long)
    mask[0, :5] = 0
    model.model.fit_scorers([(ids[:2], mask[:2]), (ids[2:], None)], ridge=0.5)
    assert model.training
    model.eval()
    inputs, targets = [], []
    for row, real in zip(ids, mask.bool(), strict=True):
        context = model.model.context_rows(row[real][None], None)
        check_together(context)
        chunks = model.model.chunks_of(context)
        key_values, states = model.model._read(chunks)
        inputs.append(torch.cat(states).double())
        targets.append(model.model._repeated_attention(key_values, chunks)[0].double().view(2, 2, -1))
    inputs, targets = torch.cat(inputs, dim=1), torch.cat(targets, dim=2)
    assert inputs.shape[1] == 9 + 14 + 14
    for layer, scorer in enumerate(model.model.scorers):
        mean_square = inputs[layer].square().sum(dim=0).mean()
        # Ridge regression is least squares with rows of its own.
        rows = torch.cat(
            [functional.pad(inputs[layer], (0, 1), value=1.0), torch.eye(32, 33).double() * (0.5 * mean_square).sqrt()]
        )
        wanted = torch.cat([targets[layer].T, torch.zeros(32, 2).double()])
        solution = torch.linalg.lstsq(rows, wanted).solution
        torch.testing.assert_close(scorer.weight, solution[:-1].T.float(), atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(scorer.bias, solution[-1].float(), atol=1e-4, rtol=1e-3)
    for batches, ridge, message in (([], 0.1, "`batches` have no token"), ([(ids, mask)], 0.0, "got 0.0")):
        with pytest.raises(ValueError, match=message):
            model.model.fit_scorers(batches, ridge=ridge)


def context_rows():
    """Four rows of unlike contexts and answers."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length, num_targets in ((14, 3), (9, 5), (20, 2), (11, 4)):
        ids = torch.randint(5, 300, (length + 2 + num_targets,), generator=generator).tolist()
        rows.append({"context_ids": ids[:length], "prompt_ids": ids[length:-num_targets]})
        rows[-1] |= {"target_ids": ids[-num_targets:], "task": "question_answering"}
    return rows


def step_of(trainer_class, model, tokenizer, tmp_path, num_calls, config=TrainingArguments, **fields):
    """The weights that train after one step of SGD over the four rows in so many calls."""
    collator = CompressionCollator.from_model(model, tokenizer, ratios=None)
    settings = {"max_steps": 1, "learning_rate": 1.0, "optim": "sgd", "max_grad_norm": 0.0, "report_to": "none"}
    settings |= {"remove_unused_columns": False, "use_cpu": True, "save_strategy": "no", "bf16": False}
    settings |= {"per_device_train_batch_size": 4 // num_calls, "gradient_accumulation_steps": num_calls, **fields}
    rows = datasets.Dataset.from_list(context_rows())
    args = config(output_dir=str(tmp_path / "out"), **settings)
    data = {"train_dataset": rows, "data_collator": collator, "processing_class": tokenizer}
    trainer = trainer_class(model=model, args=args, **data)
    trainer.train()
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_a_step_of_several_calls_trains_as_one_call_does(base_folder, tokenizer, tmp_path):
    """With the library's own trainer; the scorers' error is weighted as the answers are."""
    start = draw(RankedKeyValuesForCausalLM.from_base(base_folder, encoder_lora=LORA))
    before = {name: p.detach().clone() for name, p in start.named_parameters()}
    once, split = (step_of(Trainer, copy.deepcopy(start), tokenizer, tmp_path, number) for number in (1, 4))
    for name, parameter in once.items():
        assert (moved := (parameter - before[name]).norm()) > 0
        assert (split[name] - parameter).norm() < 1e-3 * moved, name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_training_step_is_the_eager_one(base_folder, tokenizer, tmp_path, backend):
    start = MeanPoolingForCausalLM.from_base(base_folder, encoder_lora=LORA, decoder_lora=LORA)
    config = functools.partial(SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, use_liger_kernel=False)
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    eager, found = (
        step_of(SFTTrainer, copy.deepcopy(draw(start)), tokenizer, tmp_path, 1, config, **fields)
        for fields in ({}, compiled)
    )
    assert any("lora_" in name for name in eager)
    for name, parameter in eager.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_reader_its_memories_and_fitted_scorers(tmp_path, base_folder):
    """The recipes of the checkpoint on SmolLM2, in small."""
    reader, out = tmp_path / "reader", tmp_path / "out"
    rows = [
        {"context": f"Berth {n} is Nora's.", "question": f"Whose is {n}?", "answers": ["Nora's"]} for n in range(9)
    ]
    (tmp_path / "berths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(tmp_path / "berths.jsonl"), "tasks": ["question_answering"], "weight": 1}]
    fields = {"base": str(base_folder), "learning_rate": 1e-2, "sources": sources}
    lora = {"objective": "teacher", "teacher_lora": LORA}
    main([write_recipe(tmp_path, **fields, **lora), "--output_dir", str(reader)])
    method = {"method": "ranked_key_values", "method_config": {"compression_ratios": [4, 2], "encoder_lora": LORA}}
    recipe = write_recipe(tmp_path, objective="compression", adapter=str(reader), fit_scorers=3, **fields, **method)
    trainer = build_trainer(*parse_recipe([recipe, "--learning_rate", "0"]))
    weights = load_file(reader / "adapter_model.safetensors")
    started = {name: p for name, p in trainer.model.named_parameters() if "lora_" in name}
    assert len(started) == len(weights)
    assert sum(bool(p.any()) for p in started.values()) == len(started)
    # A rate of zero: of all that trains the fit alone changes something, and only scorers.
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    main([recipe, "--learning_rate", "0", "--output_dir", str(out)])
    after = dict(RankedKeyValuesForCausalLM.from_pretrained(out).named_parameters())
    for name, parameter in before.items():
        assert after[name].equal(parameter) != ("scorers." in name), name
    ran = yaml.safe_load((out / "recipe.yaml").read_text())
    assert (ran["adapter"], ran["fit_scorers"]) == ("reader", 3)
    # Without a step the fit is all, and what it reads has trained, too.
    alone = tmp_path / "alone"
    main([recipe, "--max_steps", "-1", "--num_train_epochs", "0", "--fit_scorers", "9", "--output_dir", str(alone)])
    first, last = (
        set(json.loads((folder / "training_documents.json").read_text())["trained"].split())
        for folder in (reader, alone)
    )
    assert first < last
    assert len(last) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, "{% for m in messages %}u {{ m.content }} a{% endfor %}"])
@torch.no_grad()
def test_fit_makes_a_compressor_of_texts_and_leaves_the_model_as_it_is(tmp_path, base_folder, tokenizer, template):
    base, out, words = tmp_path / "base", tmp_path / "out", "one two three four five six seven eight nine ten "
    shutil.copytree(base_folder, base)
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    own.save_pretrained(base)
    for name, start in (("a.md", ""), ("b.md", "\ufeff"), ("c.txt", ""), ("d.txt", "")):
        (tmp_path / name).write_text(f"{start}{name} {words * 3}", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"context": words * 4}) + "\n")
    data = [f"{tmp_path}/*.md", f"Letters={tmp_path}/c.txt", f"{{path: '{tmp_path}/rows.jsonl', rows: [0, 1]}}"]
    settings = ["--contexts", "7", "--max-context-tokens", "40", "--ratios", "2", "4", "--chunk-size", "32"]
    assert cli.main(["fit", str(base), "--data", *data, "--output", str(out), "--dtype", "float32", *settings]) == 0
    model = RankedKeyValuesForCausalLM.from_pretrained(out)
    assert (model.config.compression_ratios, model.config.chunk_size, model.config.encoder_lora) == ((2, 4), 32, None)
    assert model.config.prompt_format == ("plain" if template is None else "chat")
    ids = torch.arange(5, 25)[None]
    plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    torch.testing.assert_close(model(ids).logits, plain)
    new = dict(RankedKeyValuesForCausalLM.from_base(base, encoder_lora=None).named_parameters())
    fitted = {name: p for name, p in model.named_parameters() if "scorers." in name}
    assert fitted
    assert not any(parameter.equal(new[name]) for name, parameter in fitted.items())
    # Its record and its card say what it was fitted to.
    summary = json.loads((out / "training_summary.json").read_text())
    assert (summary["steps"], summary["context_tokens"] > 7 * 20, summary["hours"] > 0) == (0, True, True)
    card = write_card(out, [], ["little"], model_id="me/fitted").read_text()
    assert f"- Steps: none, fitted to contexts\n- Tokens: {summary['context_tokens']:,} of contexts\n" in card
    # The very same as the recipe fits to the very same texts.
    again = tmp_path / "again"
    main(["ranked_key_values/fit.yaml", *json_fields(yaml.safe_load((out / "recipe.yaml").read_text()), base, again)])
    other = dict(RankedKeyValuesForCausalLM.from_pretrained(again).named_parameters())
    assert all(parameter.equal(other[name]) for name, parameter in fitted.items())


def json_fields(recipe, base, output):
    """A recipe that was run, as a command line, with the folders that it does not name."""
    folders = {"base": str(base), "output_dir": str(output), "data_dir": str(base.parent)}
    fields = {name: json.dumps(value).strip('"') for name, value in {**recipe, **folders}.items()}
    return [word for name, value in fields.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("nothing.md", "there is no file"),
        ("latin.txt", "latin.txt cannot be read: 'utf-8' codec can't decode byte 0xe9"),
        ("blank.txt", "all rows are shorter than 2"),
        ("{path: a.md, weigth: 2}", "did you mean 'weight'?"),
    ],
)
def test_fit_refuses_texts_that_are_none(tmp_path, base_folder, monkeypatch, capsys, data, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "a.md").write_text("a b c d e f g h i j")
    assert cli.main(["fit", str(base_folder), "--data", data, "--output", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("has_passages", [False, True])
def test_scorers_are_fitted_to_each_passage_alone(has_passages, base_folder):
    torch.manual_seed(1)
    model = draw(RankedKeyValuesForCausalLM.from_base(base_folder, encoder_lora=LORA))
    other = copy.deepcopy(model)
    ids = torch.randint(5, 300, (1, 14))
    lengths = [torch.tensor([[9, 5]])] if has_passages else []
    model.model.fit_scorers([(ids, None, *lengths)])
    other.model.fit_scorers([(ids[:, :9], None), (ids[:, 9:], None)])
    pairs = zip(model.model.scorers, other.model.scorers, strict=True)
    assert all(a.weight.allclose(b.weight, rtol=1e-3, atol=1e-4) for a, b in pairs) == has_passages


@pytest.mark.parametrize(
    ("num_examples", "num_contexts", "expected"),
    [(400, 240, {0, 1, 3, 398}), (400, 200, set(range(0, 400, 2))), (3, 9, {0, 1, 2})],
)
def test_scorers_are_fitted_to_examples_from_the_whole_training(num_examples, num_contexts, expected):
    read, fitted, passages = [], [], ["chunk_lengths"] * (num_contexts == 9)

    def collate(examples):
        read.extend(examples)
        return {f"context_{name}": torch.ones(1, 1) for name in ("input_ids", "attention_mask", *passages)}

    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        model=SimpleNamespace(base_model=SimpleNamespace(device="cpu", fit_scorers=fitted.extend)),
        train_dataset=range(num_examples),
        data_collator=collate,
        documents=TrainingDocuments(),
        run_counts=RunCounts(),
        is_world_process_zero=lambda: True,
    )
    fit_scorers(trainer, num_contexts)
    assert trainer.run_counts.counts["num_context_tokens"] == len(read)
    assert len(read) == len(set(read)) == min(num_contexts, num_examples)
    assert expected <= set(read)
    assert {len(batch) for batch in fitted} == {2 + len(passages)}


def test_fields_that_go_with_something_else_are_refused(tmp_path, base_folder, adapter):
    recipe = write_recipe(tmp_path, objective="compression", base=str(base_folder), fit_scorers=2)
    with pytest.raises(ValueError, match="ranked_key_values, not with MeanPoolingForCausalLM: leave it out"):
        build_trainer(*parse_recipe([recipe]))
    with pytest.raises(ValueError, match="fit_scorers must be 0 or more, got -1"):
        parse_recipe([recipe, "--fit_scorers", "-1"])
    with pytest.raises(ValueError, match="context_mode 'compressed', not with 'no_context'"):
        build_trainer(*parse_recipe([recipe, "--context_mode", "no_context"]))
    recipe = write_recipe(tmp_path, objective="teacher", base=str(base_folder), adapter=str(adapter))
    with pytest.raises(ValueError, match="adapter is what a compressor starts from; the objective teacher"):
        build_trainer(*parse_recipe([recipe]))
    recipe = write_recipe(tmp_path, objective="compression", checkpoint=str(base_folder), adapter=str(adapter))
    with pytest.raises(ValueError, match="adapter goes with base"):
        build_trainer(*parse_recipe([recipe]))
