# SPDX-License-Identifier: Apache-2.0
"""The comparison at toy size: one budget for all methods, answers that a stop does not lose, verdicts and the page."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from context_compressors.modeling import model_class
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer
from context_compressors.training.train import main as train

CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# Read last: sources of a toy, and what keeps it small. Nothing of the methods.
SMALL = {
    "sources": [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}],
    "task_schedule": None,
    "length_schedule": None,
    "max_context_tokens": 96,
    "max_steps": 2,
    "bf16": False,
    "dtype": "float32",
}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}


def comparison(run: ModuleType, folder: Path, *options: str):
    arguments = run.build_parser().parse_args(["--data", str(folder), "--output", str(folder), *options])
    return run.Comparison(arguments, run.read_table())


def trained(table: dict) -> dict:
    return {name: entry for name, entry in table["family"].items() if entry.get("trains", True)}


@pytest.fixture
def chat_base(base: Path, tokenizer, tmp_path: Path) -> Path:
    """The tiny base as an instruct model."""
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder)
    own = type(tokenizer).from_pretrained(base)
    own.chat_template = CHAT
    own.save_pretrained(folder)
    return folder


# --- budget ---


@pytest.mark.slow
def test_all_methods_learn_from_the_same_examples_in_the_same_order(script, chat_base: Path, tmp_path: Path):
    run = script("comparison.run")
    systems = comparison(run, tmp_path)
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(SMALL))
    seen, schedules = {}, {}
    for name in trained(systems.table):
        recipe = [*run._SHARED, *systems.recipe_of(name), "smollm2/cpu.yaml"]
        options = ["--base", str(chat_base), "--output_dir", str(tmp_path / name)]
        _, data, args = parse_recipe([*recipe, *options])
        schedules[name] = (data, args.ratio_schedule, args.ratio_mode, args.lr_scheduler_type, args.warmup_steps)
        if systems.table["family"][name].get("round", 1) == 1:
            is_shallow = "encoder_layers" in recipe_file(recipe[-2]).read_text()
            changes = {"encoder_layers": 1} if is_shallow else {}
            small.write_text(yaml.safe_dump({**SMALL, "method_config": changes}))
            trainer = build_trainer(*parse_recipe([*recipe, str(small), *options]))
            seen[name] = [dict(example) for example in trainer.train_dataset]
    first = next(iter(seen))
    assert len(seen[first]) == 8
    assert [name for name, examples in seen.items() if examples != seen[first]] == []
    assert [name for name, schedule in schedules.items() if schedule != schedules[first]] == []


def recipe_file(name: str) -> Path:
    import context_compressors.training

    return Path(context_compressors.training.__file__).parent / "recipes" / name


@pytest.mark.slow
def test_all_methods_train_about_as_many_parameters(script, tmp_path: Path):
    systems, counts = comparison(script("comparison.run"), tmp_path), {}
    for name, entry in trained(systems.table).items():
        if entry.get("round", 1) == 1:
            recipe = yaml.safe_load(recipe_file(systems.recipe_of(name)[0]).read_text())
            decoder = LlamaConfig(**SMOLLM2, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)
            of_method = model_class(recipe["method"])
            with torch.device("meta"):
                config = of_method.config_class(decoder_config=decoder, **recipe["method_config"])
                model = of_method._from_config(config)
            counts[name] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert len(counts) == 14
    assert all(4_900_000 < count < 5_300_000 for count in counts.values()), counts


@pytest.mark.slow
def test_a_run_is_its_better_trial_gone_on_with_as_if_it_had_not_stopped(
    script, chat_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = script("comparison.run")
    systems = comparison(run, tmp_path, "--base", str(chat_base))
    small, command = tmp_path / "small.yaml", run.Comparison.training_command
    small.write_text(yaml.safe_dump({name: value for name, value in SMALL.items() if name != "max_steps"}))
    systems.table["budget"]["choosing"] = [{"generated": True, "tasks": ["question_answering"], "weight": 1}]
    systems.table["choosing_examples"] = 2

    def toy(self, *args, **options):
        recipes, fields = (found := command(self, *args, **options))[: (first := found.index("--base"))], found[first:]
        return [*recipes, str(small), *fields, "--max_context_tokens", "96"]

    monkeypatch.setattr(run.Comparison, "training_command", toy)
    systems.questions.mkdir()
    run.write_json({"trial_steps": 2, "run": {"steps": 4}}, systems.questions / "budget.json")
    trials = systems.trials("mean_pooling")
    for rate in trials:
        run.train_trial(systems, "mean_pooling", 1, rate)
    folder = systems.run_folder("mean_pooling", 1) / "run"
    # What a stop leaves of a copy.
    (folder / "begun").mkdir(parents=True)
    (folder / "begun" / "trainer_state.json").write_text("{")
    run.train_run(systems, "mean_pooling", 1)
    losses = {rate: run.read_json(trials[rate] / "trial.json")["eval_loss"] for rate in trials}
    rate = min(losses, key=losses.__getitem__)
    assert len(set(losses.values())) == 2
    assert run.summary(folder)["steps"] == 4
    assert not list(systems.folder.glob("family/**/checkpoint-*"))
    train(systems.training_command("mean_pooling", 1, rate, tmp_path / "whole"))
    weights, expected = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "whole"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


# --- peers ---


def questions_file(folder: Path, tokenizer, count: int = 3) -> Path:
    file, lines = folder / "squad.jsonl", []
    for number in range(count):
        context = f"The mill {number} stands by the river. It was built by Nora Zill {number}. Bees live in it."
        lines.append(
            {
                "set": "squad",
                "task": "question_answering",
                "id": f"q{number}",
                "question": "Who built the mill?",
                "references": [f"Nora Zill {number}"],
                "context": context,
                "head_ids": [256, 1],
                "context_ids": tokenizer(context, add_special_tokens=False)["input_ids"],
                "prompt_ids": [5, 6],
                "eos_token_id": 257,
                "max_new_tokens": 4,
            }
        )
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def answers_of(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]


def test_peers_answer_as_generate_does_and_go_on_where_they_stopped(script, base: Path, tokenizer, tmp_path: Path):
    peers, file, output = script("comparison.peers"), questions_file(tmp_path, tokenizer), tmp_path / "cut.jsonl"
    options = ["--reader", str(base), "--base", str(base), "--dtype", "float32", "--questions", f"{file}#2"]
    peers.main(["--system", "cut", "--ratios", "1", "4", "--output", str(output), *options])
    found = answers_of(output)
    assert [(line["id"], line["ratio"]) for line in found] == [("q0", 1), ("q0", 4), ("q1", 1), ("q1", 4)]
    model, question = AutoModelForCausalLM.from_pretrained(base), json.loads(file.read_text().splitlines()[0])
    for line, kept in zip(found, (None, -(-len(question["context_ids"]) // 4)), strict=False):
        context = question["context_ids"][:kept]
        row = torch.tensor([[*question["head_ids"], *context, *question["prompt_ids"]]])
        output_ids = model.generate(row, max_new_tokens=4, do_sample=False, eos_token_id=257, pad_token_id=257)
        assert line["answer"] == tokenizer.decode(output_ids[0, row.shape[1] :], skip_special_tokens=True).strip()
        assert (line["kept_positions"], line["memory_bytes"]) == (len(context), len(tokenizer.decode(context)))
    # Killed in the middle of the third line.
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:2]) + whole[2][:20])
    peers.main(["--system", "cut", "--ratios", "1", "4", "--output", str(output), *options])
    assert answers_of(output) == found
    peers.main(["--system", "no_context", "--ratios", "0", "--output", str(tmp_path / "none.jsonl"), *options])
    assert [line["kept_positions"] for line in answers_of(tmp_path / "none.jsonl")] == [0, 0]


# --- results and page ---


def write_answers(folder: Path, name: str, ratio: int, answers: list[str], table: dict) -> None:
    """A peer's answers to the same questions in all sets."""
    lines = [
        {
            "set": title,
            "id": f"q{number}",
            "ratio": ratio,
            "answer": answer,
            "kept_positions": 20 * ratio,
            "memory_bytes": 100,
            "compress_seconds": 0.1,
            "answer_seconds": 0.2,
        }
        for title, entry in table["sets"].items()
        if entry["task"] == "question_answering"
        for number, answer in enumerate(answers)
    ]
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def test_the_page_says_what_holds_what_does_not_and_what_cannot_be_told(script, tokenizer, tmp_path: Path):
    run, results, page = (script(f"comparison.{name}") for name in ("run", "results", "page"))
    systems = comparison(run, tmp_path)
    for folder in (systems.questions, systems.peers):
        folder.mkdir(parents=True)
    text = questions_file(tmp_path, tokenizer, 12).read_text()
    for title in systems.table["sets"]:
        (systems.questions / f"{title}.jsonl").write_text(text.replace('"squad"', f'"{title}"'))
    right, wrong = [f"Nora Zill {number}" for number in range(12)], ["bees"] * 12
    write_answers(systems.peers, "no_context", 0, wrong, systems.table)
    write_answers(systems.peers, "full_context", 1, right, systems.table)
    for ratio, better, worse in (
        (2, right, wrong),
        (4, wrong, right),
        (8, ["bees", *right[1:]], [right[0], "bees", *right[2:]]),
    ):
        write_answers(systems.peers, "bm25", ratio, better, systems.table)
        write_answers(systems.peers, "longllmlingua", ratio, worse, systems.table)
    content = results.gather(systems, {})
    ordering = next(entry for entry in content["orderings"] if entry["second"] == "longllmlingua")
    assert [entry["verdict"] for entry in ordering["ratios"]] == ["holds", "does not", "cannot be told"]
    assert {entry["verdict"] for entry in content["orderings"][0]["ratios"]} == {"not run"}
    row = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 2, "mean"))
    assert (row["scores"]["f1"], row["scores"]["exact_match"], row["num_questions"]) == (100, 100, 48)
    squad = next(row for row in content["rows"] if (row["system"], row["ratio"], row["set"]) == ("bm25", 2, "squad"))
    assert squad["scores"]["retention"] == 100
    # It picks by the question: the whole text is kept.
    assert row["costs"]["memory_bytes"] == pytest.approx(len(json.loads(text.splitlines()[0])["context"]), abs=2)
    page.write(content, tmp_path / "page")
    written = (tmp_path / "page" / "README.md").read_text()
    assert re.search(
        r"\| BM25 sentences > LongLLMLingua +\| holds: \+\d.*\| does not: -\d.*\| cannot be told: ", written
    )
    assert "cannot be told: +0.0 [" in written
    assert all((tmp_path / "page" / name).is_file() for name in re.findall(r"\]\(([^):]+)\)", written))
    committed = (Path(page.__file__).parent / "README.md").read_text()
    results_file = Path(page.__file__).parent / "comparison.json"
    page.write(json.loads(results_file.read_text()) if results_file.is_file() else None, tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == committed
