# SPDX-License-Identifier: Apache-2.0
"""Collections of every kind end in a store, each row once, whatever fails and whoever is killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file

from context_compressors import CorpusCompressor, MemoryStore, cli
from context_compressors.corpus.compress_corpus import CorpusJob, CorpusReport, compress_locally, write_rows
from context_compressors.corpus.corpus_rows import CorpusColumns, corpus_parts, read_part


@pytest.fixture(scope="module")
def model(small_checkpoints):
    return str(small_checkpoints / "mean_pooling")


@pytest.fixture
def collection(tmp_path):
    """Parquet with two row groups, JSONL with a row that is none, texts in folders, one of them not in UTF-8."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    table = pyarrow.table({"text": [f"Page {i}." for i in range(5)], "key": list(range(5)), "n": [0.5] * 5})
    pyarrow.parquet.write_table(table, folder / "pages.parquet", row_group_size=3)
    lines = [json.dumps({"text": "one", "key": "x", "n": 1}), "", "{no", "[]", json.dumps({"text": 7, "key": "y"})]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "sub" / "a.txt").write_text("A text.", encoding="utf-8")
    (folder / "sub" / "b.md").write_bytes(b"\xff\xfe")
    (folder / "other.bin").write_bytes(b"")
    return folder


def rows_of(inputs, **columns):
    chosen = CorpusColumns(**columns)
    return [row for part in corpus_parts(inputs, chosen) for row in read_part(part, chosen)]


def test_rows_of_files_and_folders_have_the_names_of_their_places_and_bad_ones_say_why(collection):
    rows = rows_of([str(collection)], metadata=("n",))
    names = [*(f"pages.parquet:{i}" for i in range(5)), *(f"rows.jsonl:{i}" for i in range(4))]
    assert [row["id"] for row in rows] == [*names, "sub/a.txt", "sub/b.md"]
    assert [row["text"] for row in rows] == [*(f"Page {i}." for i in range(5)), "one", *[None] * 3, "A text.", None]
    assert [row["error"] is None for row in rows] == [row["text"] is not None for row in rows]
    errors = ["not JSON", "no JSON object with columns", "no text in column 'text', but 7", "no text in UTF-8"]
    assert [rows[i]["error"].split(":")[0] for i in (6, 7, 8, 10)] == errors
    assert json.loads(rows[0]["metadata"]) == {"n": 0.5}
    files = [str(collection / name) for name in ("pages.parquet", "rows.jsonl")]
    assert [row["id"] for row in rows_of(files, id="key")] == [*"01234", "x", "rows.jsonl:1", "rows.jsonl:2", "y"]


def test_rows_with_half_a_character_or_nested_too_deep_are_failures_of_their_own(tmp_path):
    rows = [{"key": "a", "text": "A text.", "n": 1}, {"key": "b", "text": "A text.", "n": "\ud83d"}]
    rows += [{"key": "c\ud83d", "text": "A text."}, {"key": "d", "text": "half \ud83d"}]
    path = tmp_path / "caf\udce9.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "[" * 100_000, json.dumps({"text": "The last."})]))
    found = rows_of([str(path)], id="key", metadata=("n",))
    pyarrow.Table.from_pylist(found)
    assert [row["id"] for row in found] == ["a", "b", "c\\ud83d", "d", *(f"caf\\udce9.jsonl:{i}" for i in (4, 5))]
    assert [row["text"] for row in found] == ["A text."] * 3 + [None] * 3
    assert "half of a character" in found[3]["error"]
    assert "not JSON: maximum recursion depth" in found[4]["error"]
    assert rows_of([str(path)])[5]["text"] == "The last."


def test_rows_have_any_character_that_utf_8_holds(tmp_path):
    texts = ["First paragraph.\n\nSecond.", "Tab\tCRLF\r\nend\n", "\U0001f600 \u2028 \x85", "NUL \0", "back\\nslash"]
    rows = [{"text": text, "key": f"{number}\n{text}", "note": text} for number, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        found = rows_of([str(tmp_path / name)], id="key", metadata=("note",))
        assert [(row["text"], row["id"], row["error"]) for row in found] == [
            (row["text"], row["key"], None) for row in rows
        ]
        assert [json.loads(row["metadata"])["note"] for row in found] == texts


@pytest.mark.slow
def test_a_broken_row_group_is_a_failure_and_the_others_go_on(tmp_path):
    path = tmp_path / "pages.parquet"
    texts = [f"page {number} " + "honey " * 20 for number in range(6)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), path, row_group_size=2, use_dictionary=False, compression="gzip"
    )
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.data_page_offset
    content[start + 30 : start + column.total_compressed_size] = bytes(column.total_compressed_size - 30)
    path.write_bytes(content)
    rows = rows_of([str(path)])
    assert [row["text"] for row in rows if not row["error"]] == [*texts[:2], *texts[4:]]
    assert [row["id"] for row in rows if row["error"]] == ["pages.parquet:2"]
    assert "the rest of row group 1 cannot be read" in next(row["error"] for row in rows if row["error"])


def test_shards_of_hub_data_sets_are_parts(monkeypatch):
    data = Dataset.from_dict({"context": [f"text {i}" for i in range(7)]}).to_iterable_dataset(num_shards=3)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split, streaming: data)
    rows = rows_of(["owner/name:dev"], text="context")
    assert sorted(row["text"] for row in rows) == [f"text {i}" for i in range(7)]
    assert rows[0]["id"] == "owner/name:dev:0:0"
    assert len({row["id"] for row in rows}) == 7


def test_inputs_that_cannot_be_read_are_refused_before_anything_is_done(collection, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pages.parquet").write_bytes(b"none")
    (tmp_path / "rows.CSV").write_text("id,text\n1,A text.\n")
    pages = str(collection / "pages.parquet")
    for inputs, columns, message in (
        (["missing.parquet"], {}, "missing.parquet is not there"),
        ([str(tmp_path / "empty")], {}, "holds no"),
        ([str(tmp_path / "rows.CSV")], {}, "rows.CSV is a table .* give it as .jsonl or .parquet"),
        ([pages], {"text": "txt"}, "no column 'txt'; did you mean 'text'"),
        ([pages, pages], {}, "two files have the name 'pages.parquet'"),
        ([str(tmp_path / "pages.parquet")], {}, "is not a Parquet file"),
    ):
        with pytest.raises(ValueError, match=message):
            corpus_parts(inputs, CorpusColumns(**columns))


@pytest.mark.slow
def test_the_command_fills_a_store_goes_on_with_it_and_lists_what_failed(collection, model, tmp_path, capsys):
    store, failures = str(tmp_path / "s.lance"), tmp_path / "s.lance.failed.jsonl"
    command = ["compress-corpus", str(collection), "--model", model, "--store", store, "--ratio", "4"]
    assert cli.main([*command, "--config", "{batch_size: 3, commit_seconds: 0, device: cpu}"]) == 0
    assert "7 rows with" in capsys.readouterr().err
    failed = [json.loads(line)["id"] for line in failures.read_text(encoding="utf-8").splitlines()]
    assert sorted(failed) == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3", "sub/b.md"]
    made = MemoryStore.open(store)
    texts = made.texts()
    assert len(texts) == 7
    pipe = CorpusCompressor(model, device="cpu").pipe
    for name in ("pages.parquet:3", "sub/a.txt"):
        alone = pipe.compress(texts[name], ratio=4).quantize("int8")
        # Padded otherwise, sums may be rounded otherwise.
        difference = made.get([name]).dequantize().embeddings - alone.dequantize().embeddings
        assert difference.abs().max() <= 2 * alone.scales.max()
    made.delete(["pages.parquet:0"])
    for options, message in (
        (["--ratio", "2"], "memories at ratio 4, not at 2"),
        (["--config", "{memory_dtype: float16}"], "memories of dtype 'int8', not of 'float16'"),
        (["--config", "{memory_type: int4}"], "unknown field of --config: 'memory_type'; did you mean"),
    ):
        assert cli.main([*command, *options]) == 1
        assert message in capsys.readouterr().err
    assert cli.main([*command, "--config", "{keep_texts: false}"]) == 0
    printed = capsys.readouterr().err
    assert "1 rows with" in printed
    assert "6 rows left out: the store has their ids" in printed
    made.refresh()
    assert (len(made), made.texts()["pages.parquet:0"]) == (7, None)


def test_a_failures_file_is_beside_the_store_or_here_and_can_be_written_before_anything_starts(
    tmp_path, monkeypatch, capsys
):
    def compress_locally(job, devices):
        def reports():
            assert list(tmp_path.rglob("*.failed.jsonl"))
            yield CorpusReport(1, 2, [("a\\ud83d", "why")])

        return reports()

    monkeypatch.setattr("context_compressors.corpus.compress_corpus.compress_locally", compress_locally)
    monkeypatch.setattr("context_compressors.cli.loading.check_ratios", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    command = ["compress-corpus", "in", "--model", "m", "--ratio", "4"]
    for store, place in (("new/dir/s.lance/", "new/dir/s.lance"), ("s3://bucket/in/t.lance", "t.lance")):
        assert cli.main([*command, "--store", store]) == 0
        text = (tmp_path / f"{place}.failed.jsonl").read_text(encoding="utf-8")
        assert json.loads(text) == {"id": "a\\ud83d", "error": "why"}
    assert "left out" not in capsys.readouterr().err
    name = "context_compressors.corpus.compress_corpus.compress_locally"
    monkeypatch.setattr(name, lambda job, devices: iter([CorpusReport(0, 0, [("a", "why"), ("b", "how")])]))
    assert cli.main([*command, "--store", "s.lance"]) == 1
    assert capsys.readouterr().err.endswith("error: 2 of 2 rows failed; the first, 'a': why\n")


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.release)])
def test_a_store_of_another_model_is_not_gone_on_with(model, tmp_path, num_workers):
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "compression_ratios": [4, 2]}))
    weights = load_file(other / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    for name, text in (("a", "The quay is of granite."), ("b", "The ferry runs twice a day.")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    job = CorpusJob((str(tmp_path / "a.jsonl"),), str(tmp_path / "s.lance"), model, 4)
    made = list(compress_locally(job, ["cpu"]))
    assert sum(report.num_rows for report in made) == 1
    names = [CorpusCompressor(path, 4, device="cpu").form.model_id for path in (model, str(other))]
    message = re.escape(f"the store holds memories of the model {names[0]!r}, not of {names[1]!r}")
    changed = replace(job, inputs=(str(tmp_path / "b.jsonl"),), model=str(other))
    with pytest.raises(ValueError, match=message):
        list(compress_locally(changed, ["cpu"] * num_workers))
    # As where another process makes the store meanwhile.
    rows = {"id": ["x"], "text": ["One."]}
    for table in (CorpusCompressor(other, 4)(rows), CorpusCompressor(model, 4, memory_dtype="float16")(rows)):
        with pytest.raises(ValueError, match=r"the store holds memories of (the model|dtype)"):
            write_rows(job.store, table)
    assert len(MemoryStore.open(job.store)) == 1


@pytest.mark.slow
def test_an_id_that_comes_again_is_kept_once_and_counted(model, tmp_path):
    lines = [json.dumps({"text": f"text {i}", "key": key}) for i, key in enumerate("abcab")]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    places = ((str(tmp_path / "rows.jsonl"),), str(tmp_path / "s.lance"))
    job = CorpusJob(*places, model, 2, CorpusColumns(id="key"), batch_size=4, commit_seconds=0)
    total = sum(compress_locally(job, ["cpu"]), CorpusReport())
    assert (total.num_rows, total.num_there, total.failures) == (3, 2, [])
    assert MemoryStore.open(job.store).texts() == {"a": "text 0", "b": "text 1", "c": "text 2"}


@pytest.mark.release
@pytest.mark.slow
def test_a_run_that_is_killed_is_taken_up_again_and_nothing_is_done_twice_or_lost(model, tmp_path):
    texts = [f"This is page {i} of a long book. " * (i % 7 + 1) for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "pages.parquet")
    store = tmp_path / "s.lance"
    command = [sys.executable, "-P", "-m", "context_compressors.cli", "compress-corpus"]
    command += [str(tmp_path / "pages.parquet"), "--model", model, "--store", str(store), "--ratio", "4", "--config"]
    command.append("{batch_size: 4, commit_seconds: 0, device: cpu}")
    # Two workers, which end with their parent.
    process = subprocess.Popen([*command, "--workers", "2"], start_new_session=True)
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline and process.poll() is None:
        found = MemoryStore.find(store)
        if found is not None and len(found) >= 12:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    store = MemoryStore.open(store)
    before, first_version = list(store.ids()), store.version
    assert 12 <= len(before) < 300, "it was killed on the way"
    while Path(f"/proc/{process.pid}").exists() or _children(process.pid):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.1)
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{300 - len(before)} rows with" in result.stderr
    store.refresh()
    assert sorted(store.ids()) == sorted(f"pages.parquet:{i}" for i in range(300))
    assert list(store.ids())[: len(before)] == before
    assert store.version > first_version
    assert list(store.texts([f"pages.parquet:{i}" for i in range(300)]).values()) == texts


def _children(group):
    """Processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        found += [path.parent.name] if process_group == str(group) and state != "Z" else []
    return found
