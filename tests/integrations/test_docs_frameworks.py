# SPDX-License-Identifier: Apache-2.0
"""docs/frameworks.md runs as it stands and prints what it says: `make test-integrations`."""

import pages
import pytest

for name in ("langchain_core", "llama_index.core", "haystack"):
    pytest.importorskip(name, reason="frameworks have an environment of their own: make test-integrations")

PAGE = pages.DOCS / "frameworks.md"


def test_the_page_on_frameworks_runs(small_checkpoints, tmp_path, monkeypatch, no_network):
    pages.stand_in_checkpoints(small_checkpoints, tmp_path)
    monkeypatch.chdir(tmp_path)
    names, _ = pages.run_page(PAGE)
    memories = names["memories"]
    # One question about one set of documents, in three frameworks.
    assert len(memories.store) == len(names["texts"]) == 2
    expected = memories.answer(names["question"], names["ids"], max_new_tokens=24)
    assert names["answer"] == names["response"].response == names["replies"][0] == expected


@pytest.mark.slow
def test_the_page_prints_what_the_checkpoint_answers(smollm2_base, tmp_path):
    outputs = pages.run_on_the_checkpoint(PAGE, tmp_path)
    assert [printed for _, printed in outputs] == [block.content for block, _ in outputs]
