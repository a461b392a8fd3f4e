# SPDX-License-Identifier: Apache-2.0
"""Ranked key/values from a reader of full texts: its adapter, scorers fitted to it, and what cannot be."""

import copy
import json
import shutil

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from small_recipes import write_recipe
from torch.nn import functional
from transformers import AutoModelForCausalLM

from context_compressors import RankedKeyValuesForCausalLM, cli
from context_compressors.hub_cards.cards import write_card
from context_compressors.modeling.compressor.validation import measure_rows
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer, main

LORA = {"rank": 2, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


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
        measure_rows(context)
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
    # A checkpoint goes on with an adapter that it has not trained.
    fresh = str(tmp_path / "fresh")
    main([recipe, "--adapter", "null", "--learning_rate", "0", "--output_dir", fresh])
    start = ["--base", "null", "--method_config", "null", "--checkpoint", fresh]
    trainer = build_trainer(*parse_recipe([recipe, *start]))
    assert all(p.equal(before[name]) for name, p in trainer.model.named_parameters() if "lora_" in name)


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
    settings = ["--contexts", "7", "--ratios", "2", "4"]
    assert cli.main(["fit", str(base), "--data", *data, "--output", str(out), *settings]) == 0
    model = RankedKeyValuesForCausalLM.from_pretrained(out)
    assert (model.config.compression_ratios, model.config.encoder_lora) == ((2, 4), None)
    assert model.config.chunk_size == min(2048, model.config.decoder_config.max_position_embeddings // 2)
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
