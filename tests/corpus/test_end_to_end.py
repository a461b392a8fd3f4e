# SPDX-License-Identifier: Apache-2.0
"""The example on a collection: from chunks to a store, and from questions to answers from five joined memories."""

import json
import runpy
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from context_compressors import CorpusCompressor, MemoryStore
from context_compressors.corpus.text_search import BM25Search

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["Nora Zill", "Olaf Berg", "Elin Moe", "Ada Holm", "Ivar Dal", "Siri Lund", "Per Vik", "Tone Aas"]


@pytest.mark.slow
def test_a_collection_is_compressed_searched_and_answered_from(small_checkpoints, tmp_path, monkeypatch, capsys):
    model, data, place = small_checkpoints / "mean_pooling", tmp_path / "qa.parquet", tmp_path / "s.lance"
    texts = [f"The mill of number {i} was built by {name}." for i, name in enumerate(NAMES)]
    asked = [f"Who built {name}'s?" for name in NAMES]
    columns = {"context": texts, "question": asked, "answers": [[name] for name in NAMES]}
    pyarrow.parquet.write_table(pyarrow.table(columns), data)
    options = "--chunks 7 --questions 3 --max-new-tokens 4 --memories 2 --store"
    monkeypatch.setattr(sys, "argv", ["corpus_questions.py", str(model), str(data), *options.split(), str(place)])
    runpy.run_path(str(ROOT / "examples" / "corpus_questions.py"), run_name="__main__")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["chunks"], report["questions"], report["found"]) == (7, 3, 1.0)
    assert all(0 <= report[f"{side}_f1"] <= 100 for side in ("memories", "text"))
    store = MemoryStore.open(place)
    assert sorted(store.texts().values()) == texts[:7]
    # What the pipeline reads from the store is what it reads of the same memories.
    pipe = CorpusCompressor(model, dtype="float32", device="cpu").pipe
    ids = [name for name, _ in BM25Search(store).search("Ada Holm built the mill", k=5)]
    assert len(ids) == 5
    asked = {"max_new_tokens": 6, "min_new_tokens": 6}
    memories = [store.get([name]).dequantize() for name in ids]
    likeliest = pipe("Who?", memory=memories, join="likeliest", **asked)
    assert pipe("Who?", store=store, ids=ids, **asked) == likeliest
    assert pipe("Who?", store=store, ids=ids, join=False, **asked) == pipe("Who?", memory=memories, **asked)
    for wrong, message in (
        ({"store": store}, "give `store` and `ids` together"),
        ({"store": store, "ids": ids, "context": "x"}, "give either `context`, `memory` or `store`"),
        ({"store": store, "ids": ["x"]}, "the store has no ids 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe("Who?", **wrong)
