# SPDX-License-Identifier: Apache-2.0
"""The code of a checkpoint: few files, with what the method reaches."""

import ast
import importlib
import sys

import pytest

from context_compressors.configuration.methods import METHODS, config_class
from context_compressors.modeling import model_class
from context_compressors.modeling.checkpoint.remote_code import _LEFT_OUT, write_code


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
