# SPDX-License-Identifier: Apache-2.0
"""examples/fine_tune.ipynb runs from top to bottom, and shows what it printed: `make test-integrations`."""

import re

import pages
import pytest

pytest.importorskip("nbclient", reason="notebooks have an environment of their own: make test-integrations")

import nbformat
from nbclient import NotebookClient

NOTEBOOK = pages.ROOT / "examples" / "fine_tune.ipynb"


def shown(cell):
    """Kinds of what a cell shows, and how many lines it prints; warnings are the environment's."""
    outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    return sorted({output.output_type for output in outputs}), len(text.splitlines())


def test_the_notebook_fine_tunes_and_its_outputs_are_those_of_a_whole_run(small_checkpoints, tmp_path, monkeypatch):
    pages.stand_in_checkpoints(small_checkpoints, tmp_path)
    (tmp_path / "examples").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    stored = nbformat.read(NOTEBOOK, as_version=4)
    book = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "examples")}}
    NotebookClient(book, timeout=900, kernel_name="python3", resources=resources).execute()
    cells, ran = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (stored, book))
    assert list((tmp_path / "outputs" / "fine_tune" / "final").glob("modeling_*.py"))
    # The small model that runs here writes other answers, of the same form.
    for number, (before, after) in enumerate(zip(cells, ran, strict=True), 1):
        assert before.execution_count == after.execution_count == number
        assert shown(before) == shown(after), before.source
    content = nbformat.writes(stored)
    assert not re.search(r"/(work|root|home|tmp|Users)/", content)
    assert all(output.get("name") != "stderr" for cell in cells for output in cell.outputs)
    scores = [int(score) for score in re.findall(r"(\d+) of 10 right", content)]
    assert len(scores) == 2
    assert scores[0] < scores[1]
