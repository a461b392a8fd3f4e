# SPDX-License-Identifier: Apache-2.0
"""The marks of transformers' own tests."""

import pytest

MARKS = "accelerate_tests flash_attn_test flash_attn_3_test flash_attn_4_test generate torch_compile_test"


def pytest_configure(config: pytest.Config) -> None:
    for name in MARKS.split():
        config.addinivalue_line("markers", f"{name}: of transformers' own tests")
