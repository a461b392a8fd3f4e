# SPDX-License-Identifier: Apache-2.0
"""Broken checkpoints and recipes: each is refused in one line that names the file, by every command alike."""

import json
import shutil
from pathlib import Path

import pytest

from context_compressors import cli


def _cut(folder: Path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def _other_shapes(folder: Path):
    _change(folder, lambda decoder: decoder.update(intermediate_size=12))


def _unknown_activation(folder: Path):
    _change(folder, lambda decoder: decoder.update(hidden_act="nope"))


def _change(folder: Path, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["decoder_config"])
    (folder / "config.json").write_text(json.dumps(config))


def _nested_configuration(folder: Path):
    (folder / "config.json").write_text("[" * 100_000)


def _other_tokenizer(folder: Path):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nope"}}')


def _no_json(folder: Path):
    (folder / "tokenizer.json").write_text("{")


def _no_tokenizer(folder: Path):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _link_to_itself(folder: Path):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "model.safetensors cannot be used (SafetensorError"),
        (_other_shapes, "model.safetensors cannot be used (RuntimeError"),
        (_unknown_activation, "model.safetensors cannot be used (KeyError: 'nope')"),
        (_nested_configuration, "config.json cannot be used (RecursionError"),
        (_other_tokenizer, "tokenizer.json or config.json cannot be used (KeyError"),
        (_no_json, "tokenizer.json or config.json cannot be used (JSONDecodeError"),
        (_link_to_itself, "no file named model.safetensors"),
        (_no_tokenizer, "has no tokenizer: put its files, such as tokenizer.json, beside the weights"),
    ],
)
@pytest.mark.parametrize("command", ["ask", pytest.param("compress-corpus", marks=pytest.mark.slow)])
def test_a_broken_checkpoint_is_refused_in_one_line_that_names_the_file(
    small_checkpoints, tmp_path, capsys, damage, words, command
):
    folder, text = tmp_path / "broken", tmp_path / "text.txt"
    shutil.copytree(small_checkpoints / "mean_pooling", folder)
    damage(folder)
    text.write_text("Nora Lind keeps bees.")
    arguments = {
        "ask": [str(folder), str(text), "--question", "Who?"],
        "compress-corpus": [str(text), "--model", str(folder), "--store", str(tmp_path / "store"), "--ratio", "2"],
    }
    assert cli.main([command, *arguments[command]]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("context-compressors")]
    assert len(lines) == 1
    assert str(folder) in lines[0]
    assert words in lines[0]
