# SPDX-License-Identifier: Apache-2.0
"""Hooks and fixtures of all tests."""

import gc
import os
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

# Tests import helper modules by name, those beside this file and those in these folders.
HELPERS = ("", "modeling", "training", "evaluation", "integrations", "suites")
sys.path.extend(str(Path(__file__).parent / folder) for folder in HELPERS)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of several workers, and of the processes that they start, would wait for each other. Read by torch's
    # first import.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# Bytecode is kept, whatever the environment says: rewriting assertions takes a third of each worker's collection.
sys.dont_write_bytecode = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make test-integrations` runs before a release: minutes in other processes and in compilers."""
    if "release" in config.option.markexpr:
        return
    release = [item for item in items if item.get_closest_marker("release")]
    config.hook.pytest_deselected(items=release)
    items[:] = [item for item in items if item not in set(release)]


def pytest_collection_finish() -> None:
    # What is imported by now stays, and need not be gone through again and again; models of tests are small.
    gc.freeze()
    gc.set_threshold(10_000, 10, 5)


@pytest.fixture(scope="session", autouse=True)
def remote_code_cache(tmp_path_factory: pytest.TempPathFactory):
    """Code that comes with checkpoints is copied to a folder of the session, and not into the user's cache.

    One for all tests: the package that the copies are in is imported from the first folder only.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        yield


@pytest.fixture(scope="session")
def clean_environment():
    """`clean_environment(folder)`: make a virtual environment with this one's dependencies, without this package.

    It returns a function from a script's name to its path. A line of a .pth file adds a folder alone: the .pth files
    in it, the editable install's among them, are not read.
    """

    def create(folder: Path):
        venv.create(folder, with_pip=False)
        paths = {"base": str(folder), "platbase": str(folder)}
        own = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
        dependencies = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (own / "dependencies.pth").write_text("\n".join(dependencies) + "\n", encoding="utf-8")
        return lambda name: Path(sysconfig.get_path("scripts", scheme="venv", vars=paths)) / name

    return create


@pytest.fixture(scope="session")
def small_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small trained models of tests/checkpoints as a user has them, `base` and `mean_pooling`.

    Both have their weights and tokenizer, and the compressor has its code, that of today.
    """
    # Not at the top: tests of other subjects need no model.
    from transformers import AutoTokenizer

    from context_compressors import MeanPoolingForCausalLM

    source, folder = Path(__file__).parent / "checkpoints", tmp_path_factory.mktemp("small_checkpoints")
    base, compressor = folder / "base", folder / "mean_pooling"
    shutil.copytree(source / "base", base)
    model = MeanPoolingForCausalLM.from_pretrained(source / "mean_pooling", base_model=str(base))
    model.save_pretrained(compressor, include_base=True)
    AutoTokenizer.from_pretrained(base).save_pretrained(compressor)
    return folder


@pytest.fixture(scope="session")
def smollm2_base() -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched if need be.

    Without it the test skips and says why; with REQUIRE_BASE=1 in the environment, as in continuous integration, it
    fails.
    """
    from context_compressors import pretrained_base

    try:
        return pretrained_base("HuggingFaceTB/SmolLM2-135M-Instruct")
    except OSError as error:
        if os.environ.get("REQUIRE_BASE", "0") not in ("", "0"):
            pytest.fail(f"REQUIRE_BASE is set, and the base cannot be had: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but `tiny.gguf`: a Llama with random weights in Q4_1, and a byte-level tokenizer."""
    import tiny_gguf

    folder = tmp_path_factory.mktemp("gguf")
    tiny_gguf.write(folder / "tiny.gguf")
    return folder
