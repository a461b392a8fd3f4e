# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of generated documents."""

import pytest
from transformers import PreTrainedTokenizerFast

from context_compressors.data.sources import DataSource
from context_compressors.training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    source = DataSource(generated=True, tasks=("question_answering", "reconstruction"))
    return train_tokenizer([source], vocab_size=400, num_texts=40)
