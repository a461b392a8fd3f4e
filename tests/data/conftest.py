# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of generated documents."""

import pytest
from tiny_tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer()
