# SPDX-License-Identifier: Apache-2.0
"""The command line in front of any model: nearest names, help with examples, errors in one line, documents."""

import io

import pyarrow
import pyarrow.parquet
import pytest

from context_compressors import cli
from context_compressors.cli.compress import Document, read_documents
from context_compressors.training.run_record import check_output_dir

# --- finding the command ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["comprss"], "unknown command 'comprss'; did you mean 'compress'?"),
        (["publish", "cart"], "unknown command 'publish cart'; did you mean 'publish card'?"),
        (["--hlep"], "unknown option '--hlep'; did you mean '--help'?"),
        (["qqq"], f"allowed: {', '.join(sorted(cli._COMMANDS))}"),
        ([], "usage: context-compressors"),
    ],
)
def test_a_wrong_command_is_refused_with_the_nearest_one(argv, message, capsys):
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compress", "m", "a.txt", "--ration", "4"], "unknown option '--ration'; did you mean '--ratio'?"),
        (["compress", "m", "a.txt", "--ratio", "0"], "'0' is not a whole number of at least 1"),
        (["compress", "m", "a.txt", "--dtype", "int8"], "'int8'"),
        (["ask", "m"], "sources"),
        (["compress", "m", "a.txt", "--device", "gpu"], "cannot be used here"),
    ],
)
def test_a_wrong_option_exits_with_2_and_the_nearest_one(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_an_empty_key_opens_no_server(monkeypatch, capsys):
    monkeypatch.setenv("CONTEXT_COMPRESSORS_API_KEY", "")
    assert cli.main(["serve", "model"]) == 1
    assert "the key (--api-key, or else $CONTEXT_COMPRESSORS_API_KEY) is empty" in capsys.readouterr().err


def test_every_command_has_help_with_examples(capsys):
    for command in cli._COMMANDS:
        with pytest.raises(SystemExit) as exit_info:
            cli.main([*command.split(), "--help"])
        assert exit_info.value.code == 0, command
        output = capsys.readouterr().out
        assert f"context-compressors {command} " in output.partition("examples:")[2], command


def test_an_error_is_one_line_unless_the_traceback_is_asked_for(capsys):
    argv = ["compress", "model", "nowhere.txt"]
    assert cli.main(argv) == 1
    assert capsys.readouterr().err.startswith("context-compressors compress: error: nowhere.txt is not there")
    with pytest.raises(ValueError, match=r"nowhere\.txt is not there"):
        cli.main(["--traceback", *argv])


# --- reading documents ---


def test_documents_come_from_text_jsonl_parquet_and_standard_input(tmp_path, monkeypatch):
    text, jsonl, parquet = tmp_path / "first.txt", tmp_path / "rows.jsonl", tmp_path / "table.parquet"
    text.write_text("The mill stands by the river.", encoding="utf-8")
    jsonl.write_text('{"context": "one"}\n\n{"context": "two", "other": 1}\n', encoding="utf-8-sig")
    pyarrow.parquet.write_table(pyarrow.table({"context": ["three", "four"], "n": [1, 2]}), parquet)
    monkeypatch.setattr("sys.stdin", io.StringIO("five"))
    assert read_documents([str(text), str(jsonl), str(parquet), "-"]) == [
        Document("first", "The mill stands by the river."),
        Document("rows-000001", "one"),
        Document("rows-000002", "two"),
        Document("table-000001", "three"),
        Document("table-000002", "four"),
        Document("stdin", "five"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n", "'a' is empty"),
        ("a.txt", b"\xff\xfe\x00", "not a text file in UTF-8"),
        ("a.jsonl", b'{"contxt": "x"}', "row 1 has no text in column 'context'; did you mean 'contxt'"),
        ("a.jsonl", b"{", "a.jsonl cannot be read, after record 0"),
        ("a.jsonl", b"[1]", "is not a mapping from columns"),
        (".", b"", "a folder, not a file"),
        ("a.parquet", b"no", "a.parquet cannot be read, after record 0"),
        ("b/c.txt", b"", "is not there"),
    ],
)
def test_an_unreadable_document_is_refused(name, content, message, tmp_path):
    path = tmp_path / name
    if content:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents([str(path)])


# --- existing outputs ---


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
    # What a kill left of a first checkpoint is no earlier run.
    (tmp_path / "checkpoint-1").mkdir()
    check_output_dir(tmp_path, overwrite=False)
    (tmp_path / "model.safetensors").write_text("mine")
    arguments = ["fit", "/nope", "--data", "generated", "--output", str(tmp_path)]
    assert cli.main(arguments) == 1
    assert f"{tmp_path} holds an earlier run (model.safetensors)" in capsys.readouterr().err
    assert cli.main([*arguments, "--overwrite"]) == 1
    assert "there is no model '/nope'" in capsys.readouterr().err
