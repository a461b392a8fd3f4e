# SPDX-License-Identifier: Apache-2.0
"""The trainings of the comparison at toy size: one budget for all methods."""

from pathlib import Path

import pytest
import yaml
from byte_tokenizers import CHAT_TEMPLATE
from transformers import AutoModelForCausalLM

from context_compressors.training.arguments import parse_recipe, read_recipe
from context_compressors.training.train import build_trainer

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


@pytest.fixture
def chat_base(base: Path, tokenizer, tmp_path: Path) -> Path:
    """The tiny base as an instruct model."""
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder)
    own = type(tokenizer).from_pretrained(base)
    own.chat_template = CHAT_TEMPLATE
    own.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_all_methods_learn_from_the_same_examples_in_the_same_order(
    script, comparison, chat_base: Path, tmp_path: Path
):
    plan, systems = script("comparison.plan"), comparison(tmp_path)
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(SMALL))
    seen, schedules, ratios = {}, {}, {}
    for name in (name for name, entry in systems.table["family"].items() if entry.get("trains", True)):
        recipe = [*plan.SHARED, *systems.recipe_of(name), "smollm2/cpu.yaml"]
        entry = systems.table["family"][name]
        leader = entry.get("behind")
        start = ["--base", "null", "--checkpoint", str(tmp_path / leader)] if leader else ["--base", str(chat_base)]
        options = [*start, "--output_dir", str(tmp_path / name)]
        options += ["--encoder", str(chat_base)] if "sentence_encoder" in entry else []
        model, data, args = parse_recipe([*recipe, *options])
        schedules[name] = (data, args.lr_scheduler_type, args.warmup_steps)
        # Of a checkpoint the ratios are its own.
        has_all = leader or model.method_config["compression_ratios"] == systems.table["ratios"]
        ratios[name] = (args.ratio_schedule, args.ratio_mode) if has_all else ()
        if entry.get("round", 1) == 1:
            is_shallow = "encoder_layers" in str(read_recipe(recipe[-2]))
            changes = {"method_config": {"encoder_layers": 1}} if is_shallow else {}
            small.write_text(yaml.safe_dump({**SMALL, **changes}))
            trainer = build_trainer(*parse_recipe([*recipe, str(small), *options]))
            if any(other.get("behind") == name for other in systems.table["family"].values()):
                trainer.save_model(str(tmp_path / name))
            seen[name] = [dict(example) for example in trainer.train_dataset]
    first = next(iter(seen))
    assert len(seen[first]) == 8
    # Some have more in them: xRAG's are in its encoder's tokens, too.
    keys = seen[first][0].keys()
    read = {name: [{key: example[key] for key in keys} for example in examples] for name, examples in seen.items()}
    assert [name for name, examples in read.items() if examples != read[first]] == []
    assert [name for name, schedule in schedules.items() if schedule != schedules[first]] == []
    assert {name for name, schedule in ratios.items() if not schedule} == {
        *(f"mean_pooling_{ratio}x" for ratio in (2, 4, 8)),
        "xrag",
    }
    assert {schedule for schedule in map(str, ratios.values()) if schedule != "()"} == {str(ratios[first])}
