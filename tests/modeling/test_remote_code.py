# SPDX-License-Identifier: Apache-2.0
"""The code of a checkpoint: few files, only what the method reaches."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_imports

from context_compressors.configuration.methods import METHODS, config_class
from context_compressors.modeling import model_class
from context_compressors.modeling.checkpoint.remote_code import _LEFT_OUT, write_code

CONFIGURATION = '''
"""Configuration."""
from __future__ import annotations

LIMIT = 3


def _check(value):
    return value < LIMIT


class ToyConfig:
    @classmethod
    def default_custom_pipelines(cls):
        return {}

    def fits(self, value):
        return _check(value)
'''
MODEL = """
from __future__ import annotations

from math import tau as circle
from typing import TYPE_CHECKING

from ..configuration.configuration_toy import ToyConfig
from .parts.numbers import HIGHEST, is_low

if TYPE_CHECKING:
    from collections.abc import Iterable


class ToyModel:
    config_class = ToyConfig

    @classmethod
    def auto_map(cls):
        return {"AutoConfig": "configuration_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}

    def values(self, numbers: Iterable[int]):
        from .parts.late import double

        return [double(number) for number in numbers if is_low(number)], HIGHEST, round(circle)
"""
NUMBERS = '''
from __future__ import annotations

# The highest number.
HIGHEST = 5


def is_low(value):
    """Say whether a number fits.

    Args:
        value: any.
    """
    return value <= HIGHEST


def unused():
    return missing_everywhere()
'''
LATE = """
def double(number):
    return 2 * number
"""


def toy_classes(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> tuple[type, type]:
    """The classes of a package with the layout of this one, and its code written by `write_code`."""
    files = {
        "configuration/configuration_toy.py": CONFIGURATION,
        "modeling/modeling_toy.py": MODEL,
        "modeling/parts/numbers.py": NUMBERS,
        "modeling/parts/late.py": LATE,
    }
    name = f"toy_{folder.name}".replace("-", "_")
    for path, text in files.items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(texts.get(file.stem, text))
    monkeypatch.syspath_prepend(folder)
    # As if it were this package: others are copied as they are.
    monkeypatch.setattr("context_compressors.modeling.checkpoint.remote_code.__name__", name)
    config = importlib.import_module(f"{name}.configuration.configuration_toy").ToyConfig
    return importlib.import_module(f"{name}.modeling.modeling_toy").ToyModel, config


def test_three_files_hold_what_the_method_reaches(tmp_path, monkeypatch):
    written = tmp_path / "written"
    written.mkdir()
    write_code(*toy_classes(tmp_path, monkeypatch), written)
    assert {path.name for path in written.iterdir()} == {
        "configuration_toy.py",
        "modeling_toy.py",
        "compressor_base.py",
    }
    assert get_relative_imports(written / "compressor_base.py") == []
    base = (written / "compressor_base.py").read_text()
    assert "# The highest number.\nHIGHEST = 5\n" in base
    assert '"""Say whether a number fits."""\n    return value <= HIGHEST\n' in base
    assert "unused" not in base
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("written.modeling_toy").ToyModel()
    assert model.values([4, 5, 6]) == ([8, 10], 5, 6)
    assert [model.config_class().fits(value) for value in (2, 3)] == [True, False]


def test_two_things_of_one_name_are_refused(tmp_path, monkeypatch):
    late = LATE.replace("return 2", "return HIGHEST") + "\n\nHIGHEST = 6\n"
    classes = toy_classes(tmp_path, monkeypatch, late=late)
    with pytest.raises(ValueError, match=r"late\.py: rename \['HIGHEST'\]|numbers\.py: rename \['HIGHEST'\]"):
        write_code(*classes, tmp_path)


def test_files_that_would_import_each_other_are_refused(tmp_path, monkeypatch):
    late = "def double(number):\n    from ...configuration.configuration_toy import ToyConfig\n    return ToyConfig\n"
    configuration = CONFIGURATION + "    def later(self):\n        from ..modeling.parts.late import double\n"
    configuration += "        return double(1)\n"
    classes = toy_classes(tmp_path, monkeypatch, late=late, configuration_toy=configuration)
    with pytest.raises(ValueError, match="cycle"):
        write_code(*classes, tmp_path)


def test_a_class_of_another_package_is_copied_with_what_it_imports(tmp_path, monkeypatch):
    toy, written = tmp_path / "toys", tmp_path / "written"
    toy.mkdir(), written.mkdir()
    (toy / "configuration_own.py").write_text("class OwnConfig:\n    pass\n")
    (toy / "modeling_own.py").write_text("from .configuration_own import OwnConfig\nclass Own:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("toys.modeling_own")
    write_code(own.Own, own.OwnConfig, written)
    assert {path.name: path.read_text() for path in written.iterdir()} == {
        path.name: path.read_text() for path in toy.glob("*.py")
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_code_of_a_method_is_three_files_and_perhaps_one_more(method, tmp_path):
    write_code(model_class(method), config_class(method), tmp_path)
    files = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    own = {f"configuration_{method}", f"modeling_{method}", "compressor_base"}
    assert own <= files.keys()
    assert len(files) <= 4
    assert sum(text.count("\n") for text in files.values()) <= 6_700
    libraries = {"torch", "transformers", "safetensors", "numpy", "huggingface_hub", *sys.stdlib_module_names}
    for text in files.values():
        compile(text, method, "exec")
        assert not [name for name in _LEFT_OUT if f"self.{name}(" in text]
        for node in ast.parse(text).body:
            # Definitions alone: nothing runs when a checkpoint's code is imported.
            assert not isinstance(node, ast.For | ast.While | ast.With), ast.unparse(node)
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= libraries
            elif isinstance(node, ast.ImportFrom):
                top = node.module.partition(".")[0]
                assert top in (files if node.level else libraries), ast.unparse(node)
