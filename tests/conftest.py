# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import os
import sys

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of several workers, and of the processes that they start, would wait for each other. Read by torch's
    # first import.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


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
