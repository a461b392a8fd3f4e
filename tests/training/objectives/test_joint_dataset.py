# SPDX-License-Identifier: Apache-2.0
import pyarrow
import pyarrow.parquet
import pytest

from context_compressors.data.synthetic_documents import generate_document
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.joint_pretraining import JointDataset

GENERATED = {"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}
TEXT = {"path": "text.parquet", "tasks": ["continuation", "reconstruction"], "weight": 1}
TEXTS = [generate_document(seed, num_tokens=40 + 120 * seed).text for seed in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    table = pyarrow.Table.from_pylist([{"text": text} for text in [*TEXTS, ""]])
    pyarrow.parquet.write_table(table, path / "text.parquet")
    return str(path)


def make(tokenizer, folder, *sources, num_examples=30, seed=0, batch_size=1, **fields):
    fields = {"min_document_tokens": 40, "max_document_tokens": 120, **fields}
    data = DataArguments(sources=list(sources), data_dir=folder, **fields)
    return JointDataset(data, tokenizer, num_examples, seed=seed, batch_size=batch_size)


@pytest.mark.parametrize("source", [GENERATED, TEXT])
def test_a_document_is_cut_in_the_middle(tokenizer, folder, source):
    dataset = make(tokenizer, folder, source)
    whole = [encode(tokenizer, text) for text in TEXTS]
    lengths, ends = [], []
    for index in range(30):
        example = dataset[index]
        context, completion = example["context_ids"], example["continuation_ids"]
        ends.append(completion[-1] == tokenizer.eos_token_id)
        completion = completion[: len(completion) - ends[-1]]
        assert example["reconstruction_ids"] == [*context, tokenizer.eos_token_id]
        # The encoder also reads BOS.
        length = 1 + len(context) + len(completion)
        lengths.append(length)
        assert 1 + len(context) == length // 2
        document = context + completion
        if source is TEXT:
            places = [(text, i) for text in whole for i in range(len(text)) if document == text[i : i + len(document)]]
            assert places
            # Only where the text itself ends, EOS does.
            assert ends[-1] == any(i + len(document) == len(text) for text, i in places)
    assert sum(ends) < 5
    assert 40 <= min(lengths) < 60
    assert 100 < max(lengths) <= 120
