# SPDX-License-Identifier: Apache-2.0
"""The documents of the comparison: what trains, what chooses and what is reported share none."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from comparison_files import ask, write_answers

from context_compressors.data.document_ids import TrainingDocuments, document_id


@pytest.mark.slow
def test_the_documents_that_train_choose_and_are_reported_are_named_and_kept_apart(
    script, comparison, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    results, page, plan = script("comparison.results"), script("comparison.page"), script("comparison.plan")
    monkeypatch.setattr(plan, "PUBLISHED", tmp_path / "comparison.json")
    systems = comparison(tmp_path / "first", "--reader", "reader")
    ask(systems, tokenizer)
    windows = systems.questions / "openstax.jsonl"
    windows.write_text(windows.read_text().replace('"id": "q', '"id": "book#'))
    text = pyarrow.Table.from_pylist([{"id": "book", "text": "All of the book."}, {"id": "other", "text": "Other."}])
    pyarrow.parquet.write_table(text, systems.data / systems.table["sets"]["openstax"]["path"])
    for place, trained, chose in (
        (systems.peers / "reader", {"0" * 12, "1" * 12}, set()),
        (systems.checkpoint("gmsa", 1), {"0" * 12, "1" * 12, "2" * 12}, {"3" * 12}),
    ):
        place.mkdir(parents=True)
        TrainingDocuments(trained, chose).save(place)
    found = results.gather(systems)["documents_apart"]
    documents = found["documents"]
    assert (documents["trained"], documents["chose"]) == ("2" * 12, "3" * 12), "without those of the reader"
    assert documents["openstax"] == document_id("all of the  book.")
    assert len(documents["squad"].split()) == 12
    assert found["model"] == "reader"
    held_out = found["held_out"]
    assert {name: held_out[name]["trained"] for name in ("reader", "family")} == {"reader": 2, "family": 3}
    assert held_out.keys() == {"reader", "family", "minilm-keep-drop"}
    assert not any(said["shared"] for said in held_out.values())
    # Without a run, and without the data, what is published stays.
    write_answers(systems.peers, "cut", 4, ["bees"] * 12, systems.table)
    page.write(results.gather(systems), tmp_path)
    assert "they are disjoint" in (tmp_path / "README.md").read_text()
    later = comparison(tmp_path / "second", "--reader", "reader")
    ask(later, tokenizer)
    again = results.gather(later)["documents_apart"]
    assert again["documents"] == documents
    assert again["held_out"]["reader"] == found["held_out"]["reader"]
    TrainingDocuments({documents["nq"].split()[0]}).save(systems.checkpoint("gmsa", 1))
    with pytest.raises(ValueError, match="1 of 12 documents of 'nq' trained family"):
        results.gather(systems)


def test_the_documents_of_the_committed_file_are_apart(script):
    plan = script("comparison.plan")
    content = plan.read_results(plan.PUBLISHED)
    documents = content.get("documents_apart", {}).get("documents", {})
    parts = {name: set(documents.pop(name, "").split()) for name in ("trained", "chose")}
    parts["reported"] = {id_ for ids in documents.values() for id_ in ids.split()}
    assert sum(map(len, parts.values())) == len(set().union(*parts.values()))
