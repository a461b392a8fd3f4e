# SPDX-License-Identifier: Apache-2.0
"""The models and the data file that the tests of the evaluation share."""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaForCausalLM

from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM

# Tests import the helper modules beside them by name.
sys.path.append(str(Path(__file__).parent))

from naive_twin import ROWS, make_base, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A compressor with adapters that matter, a teacher, and the base of the compressor, as folders."""
    root = tmp_path_factory.mktemp("models")
    make_base(tokenizer, 0).save_pretrained(root / "base")
    make_base(tokenizer, 1).save_pretrained(root / "teacher")
    model = MeanPoolingForCausalLM.from_base(str(root / "base"), compression_ratios=(2, 4))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(root / "tiny-compressor")
    for name in ("tiny-compressor", "teacher"):
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def model(folders):
    return MeanPoolingForCausalLM.from_pretrained(folders / "tiny-compressor").eval()


@pytest.fixture(scope="module")
def teacher(folders):
    return LlamaForCausalLM.from_pretrained(folders / "teacher").eval()


@pytest.fixture(scope="module")
def token_model(tokenizer, folders):
    """A compressor with task tokens, whose embeddings matter."""
    tokens = {"[AE]": len(tokenizer), "[LM]": len(tokenizer) + 1}
    base = str(folders / "base")
    model = MeanPoolingForCausalLM.from_base(base, compression_ratios=(2, 4), task_token_ids=tokens)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def qa_file(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "qa_rows.parquet")
    return tmp_path / "qa_rows.parquet"
