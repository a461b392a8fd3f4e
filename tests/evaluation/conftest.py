# SPDX-License-Identifier: Apache-2.0
"""The models and the data file that the tests of the evaluation share."""

import pytest
import torch
from naive_twin import ROWS, make_base, make_tokenizer
from parameters import disturb
from record_files import write_files
from transformers import LlamaForCausalLM

from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM


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
    disturb(model).save_pretrained(root / "tiny-compressor")
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
    return disturb(model, 0.3)


@pytest.fixture
def qa_file(tmp_path):
    write_files(tmp_path, {"qa_rows.parquet": ROWS})
    return tmp_path / "qa_rows.parquet"
