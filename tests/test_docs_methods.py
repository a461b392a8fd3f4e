# SPDX-License-Identifier: Apache-2.0
"""docs/methods/: every method has its page, whose settings, sizes, recipes and code are those of the package."""

import ast
import json
import re
import runpy
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pages
import pytest
from pages import DOCS, ROOT
from transformers import T5Config, T5ForConditionalGeneration

from context_compressors.configuration.methods import METHODS, config_class
from context_compressors.training.arguments import parse_recipe, read_recipe

TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "methods").glob("*.md"))}
HEADINGS = ["Equations", "Settings", "Example", "Results", "Train"]
_SIZES = json.loads((ROOT / "benchmarks" / "checkpoint_sizes" / "sizes.json").read_text(encoding="utf-8"))["rows"]
SIZES = {row["method"]: row for row in _SIZES}


def says(default: object, actual: object) -> bool:
    """Say whether a default on a page is the configuration's; a page may leave out values of a mapping."""
    if isinstance(default, dict) and isinstance(actual, dict):
        return all(actual[name] == value for name, value in default.items())
    return type(default) is type(actual) and default == actual


@pytest.mark.slow
def test_every_method_of_the_register_has_a_page_with_its_picture_settings_sizes_and_recipes():
    assert sorted(METHODS) == sorted(TEXTS)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for method, text in TEXTS.items():
        assert f"(docs/methods/{method}.md)" in readme, method
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS, method
        assert len(text.splitlines()) <= 120, method
        (alt, picture), *others = re.findall(r"!\[([^]]*)\]\(([^)]+)\)", text)
        assert (len(alt) > 60, picture, others) == (True, f"../images/methods/{method}.svg", []), method
        assert ElementTree.parse(DOCS / "methods" / picture).getroot().tag.endswith("svg"), method
        assert f"(../../modeling/modeling_{method}.py)" in text, method
        settings = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(.+?)` \| ", text, re.MULTILINE)
        assert len(settings) >= 2, method
        config = config_class(method)()
        for names, default in settings:
            for name in re.findall(r"\w+", names):
                assert says(ast.literal_eval(default), getattr(config, name)), f"{method}: {name} is {default}"
        own, slot, words = SIZES[method]["own_parameters"], SIZES[method]["slot_bytes"], " ".join(text.split())
        assert (f"{own / 1e6:.1f}M parameters" if own else "It trains nothing.") in words, method
        assert f"{slot:,} bytes" in words, method
        recipes = re.findall(r"[\w.]+(?:/[\w.]+)+\.yaml", text)
        assert bool(recipes) == config.is_trained, method
        assert all(read_recipe(recipe) for recipe in recipes), method


@pytest.mark.slow
def test_the_code_of_each_page_runs_and_its_trainings_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pages.base_of_letters("Qwen/Qwen3-0.6B", width=16)
    pages.base_of_letters("sentence-transformers/all-MiniLM-L6-v2", width=24, is_reversed=True)
    tokenizer = pages.letters_tokenizer("google/t5-v1_1-large")
    shape = {"vocab_size": len(tokenizer), "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    t5 = T5Config(**shape, **ids, decoder_start_token_id=tokenizer.pad_token_id)
    T5ForConditionalGeneration(t5).save_pretrained("google/t5-v1_1-large")
    for method, text in TEXTS.items():
        names, _ = pages.run_page(DOCS / "methods" / f"{method}.md")
        assert type(names["model"]).__name__ in METHODS[method], method
        memory, markers = names["memory"], names["model"].config.markers_per_chunk
        assert int(memory.num_slots) == -(-int(memory.num_context_tokens) // memory.ratio) + markers, method
        assert isinstance(names["answer"], str), method
        shown = "".join(block.content for block in pages.blocks_of(text) if block.language == "console")
        lines = re.findall(r"^\$ context-compressors train (.+)$", shown.replace("\\\n", " "), re.MULTILINE)
        assert bool(lines) == names["model"].config.is_trained, method
        for line in lines:
            parse_recipe([*shlex.split(line), "--use_cpu", "true"])


SVG = "{http://www.w3.org/2000/svg}"


def test_every_method_has_the_picture_that_the_script_draws_which_stands_alone_and_says_what_it_shows():
    drawn = runpy.run_path(str(DOCS / "method_pictures"))["files"]()
    assert sorted(path.stem for path in drawn) == sorted(METHODS)
    assert sorted((DOCS / "images" / "methods").iterdir()) == sorted(drawn)
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: `python docs/method_pictures`"
        title, description, *_ = ElementTree.fromstring(text)
        assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc"), path.name
        assert re.findall(r"href|@import|https?:(?!//www\.w3\.org/2000/svg\")", text) == [], path.name
