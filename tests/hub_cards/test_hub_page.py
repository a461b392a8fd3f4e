# SPDX-License-Identifier: Apache-2.0
"""What stands beside a card on the Hub: the handler of an endpoint, and a script that fits a compressor."""

import json
import re
import runpy
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoTokenizer

from context_compressors import MeanPoolingForCausalLM
from context_compressors.hub_cards.handler import EndpointHandler

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = "The Harbour Museum opened in 1974 in a former rope factory."


@pytest.mark.slow
def test_an_endpoint_answers_from_a_context_and_from_its_memory(small_checkpoints):
    folder = str(small_checkpoints / "mean_pooling")
    handler, parameters = EndpointHandler(folder), {"ratio": 4}
    model = MeanPoolingForCausalLM.from_pretrained(folder)
    pipe = model.question_answering(AutoTokenizer.from_pretrained(folder))
    expected = pipe("When?", context=DOCUMENT, ratio=4, max_new_tokens=8)
    short = {"max_new_tokens": 8}
    assert (
        handler({"inputs": {"question": "When?", "context": DOCUMENT}, "parameters": parameters | short}) == expected
    )
    memory = json.loads(json.dumps(handler({"inputs": {"context": DOCUMENT}, "parameters": parameters})))
    assert handler({"inputs": {"question": "When?", **memory}, "parameters": short}) == expected
    with pytest.raises(ValueError, match='either "context" or "memory"'):
        handler({"inputs": "When?"})


@pytest.mark.slow
def test_the_script_fits_a_compressor_and_names_what_it_needs(small_checkpoints, tmp_path, monkeypatch):
    script = ROOT / "examples" / "fit_compressor.py"
    block = re.search(r"^# /// script\n(.*?)^# ///$", script.read_text(), re.DOTALL | re.MULTILINE)[1]
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    for requirement in map(Requirement, metadata["dependencies"]):
        assert distribution(requirement.name).version in requirement.specifier
    assert (
        script.parent / metadata["tool"]["uv"]["sources"]["context-compressors"]["path"] / "pyproject.toml"
    ).exists()
    (tmp_path / "notes.md").write_text("\n\n".join(f"{DOCUMENT} Room {n} has {n} ships. " * 8 for n in range(6)))
    words = [small_checkpoints / "base", "--data", tmp_path / "notes.md", "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["fit", *map(str, words), "--contexts", "1"])
    runpy.run_path(str(script), run_name="__main__")
    assert AutoConfig.from_pretrained(tmp_path / "out").method == "ranked_key_values"
    assert "It was fitted to few texts" in (tmp_path / "out" / "README.md").read_text()
