# SPDX-License-Identifier: Apache-2.0
"""The tests that transformers runs its own models through, of the version that is installed.

PyPI's source distribution has `ModelTesterMixin`, and leaves out `tests/generation` with `GenerationTesterMixin`. A
clone of transformers at the version's tag has both: name it in TRANSFORMERS_SOURCE.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import transformers

PACKAGE = "tests_of_transformers"
DOWNLOADS = Path(__file__).resolve().parents[2] / "build"


def source_folder() -> Path:
    """Return the folder with the sources, downloaded if need be.

    Raises:
        OSError: They cannot be had.
    """
    if "TRANSFORMERS_SOURCE" in os.environ:
        return Path(os.environ["TRANSFORMERS_SOURCE"])
    name = f"transformers-{transformers.__version__}"
    if not (DOWNLOADS / name).is_dir():
        wanted = name.replace("-", "==")
        command = [sys.executable, "-m", "pip", "download", wanted, "--quiet", "--dest", str(DOWNLOADS)]
        command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise OSError(f"PyPI's source distribution of {wanted} cannot be had (offline?): {run.stderr[-300:]}")
        with tarfile.open(DOWNLOADS / f"{name}.tar.gz") as archive:
            archive.extractall(DOWNLOADS, filter="data")
    return DOWNLOADS / name


def load() -> tuple[Any, Any]:
    """Return `ModelTesterMixin`, and `GenerationTesterMixin` or None where the sources lack it.

    Raises:
        OSError: The sources cannot be had.
    """
    tests = source_folder() / "tests"
    for name, folder in (("", ""), (".generation", "generation"), (".exporters", "exporters")):
        package = types.ModuleType(PACKAGE + name)
        package.__path__ = [str(tests / folder)]
        sys.modules[package.__name__] = package
    absent = {"generation.test_utils": "GenerationTesterMixin", "exporters.test_export": "ExportTesterMixin"}
    for module, mixin in absent.items():
        if not (tests / f"{module.replace('.', '/')}.py").is_file():
            stand_in = types.ModuleType(f"{PACKAGE}.{module}")
            setattr(stand_in, mixin, type(mixin, (), {}))
            sys.modules[stand_in.__name__] = stand_in
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    generation = common.GenerationTesterMixin
    return common.ModelTesterMixin, None if generation.__module__ == __name__ else generation
