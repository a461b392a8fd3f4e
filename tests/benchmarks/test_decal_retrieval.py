# SPDX-License-Identifier: Apache-2.0
"""The retrieval benchmark on tables of a few rows."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from context_compressors import DeCALConfig, DeCALForRetrieval
from context_compressors.data.sources import DataSource
from context_compressors.training.tokenizer import train_tokenizer

WORDS = ("otter", "heron", "badger", "salmon")


@pytest.fixture
def retrieval(script):
    return script("decal.retrieval")


@pytest.fixture
def data(tmp_path: Path) -> str:
    tables = {
        "corpus": {
            "id": [str(i) for i in range(4)],
            "title": list(WORDS),
            "text": [f"One {word} sleeps under cold stones until dusk." for word in WORDS],
        },
        "queries_test": {"id": ["7", "8", "9"], "query": ["salmon dusk", "heron stones", "nothing asked"]},
        "qrels_test": {"query_id": ["7", "8"], "doc_id": ["3", "1"], "score": [1, 1]},
    }
    for name, columns in tables.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"retrieval_scifact_{name}.parquet")
    return str(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    tokenizer = train_tokenizer([DataSource(generated=True, tasks=("reconstruction",))], vocab_size=300, num_texts=10)
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    model = DeCALForRetrieval(DeCALConfig(decoder_config=shape, compression_ratios=[2, 4]))
    model.save_pretrained(tmp_path / "decal_2x")
    tokenizer.save_pretrained(tmp_path / "decal_2x")
    return str(tmp_path / "decal_2x")


def test_rows_are_bm25_and_each_ratio_with_what_it_saves(retrieval, data, checkpoint, tmp_path, capsys):
    output = tmp_path / "results.json"
    toy = ["--data", data, "--device", "cpu", "--output", str(output)]
    assert retrieval.main([*toy, "--checkpoints", checkpoint]) == 0
    content = json.loads(output.read_text())
    bm25, first, second = content["rows"]
    assert bm25["model"] == "BM25"
    assert bm25["ndcg_at_10"] == pytest.approx(100)
    assert bm25["queries"] == 2
    for row, ratio in ((first, 2), (second, 4)):
        assert (row["model"], row["query_ratio"], row["document_ratio"]) == ("decal_2x", ratio, ratio)
        assert 0 <= row["ndcg_at_10"] <= 100
        assert (row["queries_cut"], row["documents_cut"]) == (0, 0)
        assert 0.8 * ratio < row["storage_saving"] <= ratio
        assert 0.6 * ratio**2 < row["scoring_saving"] <= ratio**2
        assert row["index_bytes_float32"] == pytest.approx(4 * 32 * 4 * row["vectors_per_document"], rel=1e-3)
    assert str(tmp_path) not in output.read_text()
    assert "decal_2x" in capsys.readouterr().out


def test_what_is_not_there_is_said(retrieval, data, tmp_path, capsys):
    assert retrieval.main(["--data", str(tmp_path / "elsewhere")]) == 1
    assert "there is no file" in capsys.readouterr().err
    assert retrieval.main(["--data", data, "--checkpoints", str(tmp_path / "none"), "--device", "cpu"]) == 1
    assert "error:" in capsys.readouterr().err
