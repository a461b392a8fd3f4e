# SPDX-License-Identifier: Apache-2.0
"""Broken checkpoints: each is refused in one line that names the file."""

import json
import shutil

import pytest

from context_compressors import cli


def _cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def _other_shapes(folder):
    config = json.loads((folder / "config.json").read_text())
    config["decoder_config"]["intermediate_size"] = 12
    (folder / "config.json").write_text(json.dumps(config))


def _no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _link_to_itself(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "model.safetensors cannot be used (SafetensorError"),
        (_other_shapes, "model.safetensors cannot be used (RuntimeError"),
        (
            lambda folder: (folder / "config.json").write_text("[" * 100_000),
            "config.json cannot be used (RecursionError",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{"),
            "tokenizer.json or config.json cannot be used (JSONDecodeError",
        ),
        (_link_to_itself, "no file named model.safetensors"),
        (_no_tokenizer, "has no tokenizer: put its files, such as tokenizer.json, beside the weights"),
    ],
)
def test_a_broken_checkpoint_is_refused_in_one_line_that_names_the_file(
    small_checkpoints, tmp_path, capsys, damage, words
):
    folder, text = tmp_path / "broken", tmp_path / "text.txt"
    shutil.copytree(small_checkpoints / "mean_pooling", folder)
    damage(folder)
    text.write_text("Nora Lind keeps bees.")
    assert cli.main(["ask", str(folder), str(text), "--question", "Who?"]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("context-compressors"))
    assert str(folder) in line
    assert words in line
