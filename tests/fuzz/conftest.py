# SPDX-License-Identifier: Apache-2.0
"""Helpers of the fuzzed properties."""

import sys
from pathlib import Path

import pytest

# Tests import the helper modules beside them, and the tables of tiny models, by name.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "modeling")]
# Their assertions show their values, as those of tests do.
pytest.register_assert_rewrite("calls")
