# SPDX-License-Identifier: Apache-2.0
"""How the tests of the benchmarks import a benchmark."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Import a benchmark as its own command line does: with its folder in front of the module path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
