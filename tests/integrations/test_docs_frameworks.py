# SPDX-License-Identifier: Apache-2.0
"""docs/frameworks.md runs as it stands: `make test-integrations`."""

import pages
import pytest

for name in ("langchain_core", "llama_index.core", "haystack"):
    pytest.importorskip(name, reason="frameworks have an environment of their own: make test-integrations")


def test_the_page_on_frameworks_runs(small_checkpoints, tmp_path, monkeypatch, no_network):
    pages.stand_in_checkpoints(small_checkpoints, tmp_path)
    monkeypatch.chdir(tmp_path)
    names, _ = pages.run_page(pages.DOCS / "frameworks.md")
    memories, found = names["memories"], names["found"]
    # One question about one set of documents, in three frameworks.
    assert len(memories.store) == len(found) == 2
    ids = [document.metadata["memory_id"] for document in found]
    expected = memories.answer(names["question"], ids, max_new_tokens=24)
    assert names["answer"] == "".join(names["pieces"]) == names["response"].response == names["replies"][0] == expected
    assert names["again"].get_component("reader").memories is memories
