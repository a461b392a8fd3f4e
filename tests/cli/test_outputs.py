# SPDX-License-Identifier: Apache-2.0
"""Existing outputs are refused before anything is loaded, unless `--overwrite` is given."""

import pytest

from context_compressors import cli


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("evaluate", ["/nope", "--data", "generated", "--keep-answers"]), ("compare", ["/nope", "--output"])],
)
def test_a_file_that_is_there_is_kept_and_a_folder_is_none(tmp_path, capsys, command, arguments):
    file = tmp_path / "kept.json"
    file.write_text("mine")
    assert cli.main([command, *arguments, str(file)]) == 1
    assert f"{file} is there: name another file, or pass --overwrite" in capsys.readouterr().err
    assert cli.main([command, *arguments, str(tmp_path), "--overwrite"]) == 1
    assert f"{tmp_path} is a folder: name a file" in capsys.readouterr().err
    # Then it is the model, or the file that is read, that is missing.
    assert cli.main([command, *arguments, str(file), "--overwrite"]) == 1
    assert "nope" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_compressor_is_not_fitted_over_another(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_text("mine")
    arguments = ["fit", "/nope", "--data", "generated", "--output", str(tmp_path)]
    assert cli.main(arguments) == 1
    assert f"{tmp_path} holds an earlier run (model.safetensors)" in capsys.readouterr().err
    assert cli.main([*arguments, "--overwrite"]) == 1
    assert "there is no model '/nope'" in capsys.readouterr().err
