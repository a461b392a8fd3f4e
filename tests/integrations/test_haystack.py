# SPDX-License-Identifier: Apache-2.0
"""Haystack compresses what a retriever finds, and answers from the memories: `make test-integrations`."""

import pytest

pytest.importorskip("haystack", reason="Haystack has an environment of its own: make test-integrations")

from haystack import Document, Pipeline
from haystack.components.builders import AnswerBuilder
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from context_compressors.integrations.haystack import MemoryDocumentCompressor, MemoryReader

pytestmark = pytest.mark.usefixtures("no_network")

LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8}
DOCUMENTS = [
    Document(content="Nora Lind keeps bees by the mill.", meta={"page": 1}),
    Document(content=None, meta={"page": 2}),
    Document(content="The mill burned down in 1902.", meta={"page": 3, "memory_id": "of another text"}, score=0.5),
]


def test_documents_keep_order_and_text_and_a_pipeline_that_was_written_down_answers(small_checkpoints, memories):
    pipe, compressor = memories.pipe, MemoryDocumentCompressor(memories)
    compressed = compressor.run(DOCUMENTS)["documents"]
    for before, after in zip(DOCUMENTS, compressed, strict=True):
        assert (after.id, after.content, after.score) == (before.id, before.content, before.score)
    _, nothing, mill = (document.meta.get("memory_id") for document in compressed)
    assert nothing is None
    assert DOCUMENTS[2].meta["memory_id"] == "of another text" != mill

    store = InMemoryDocumentStore()
    store.write_documents(DOCUMENTS)
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    pipeline.add_component("compressor", MemoryDocumentCompressor(memories))
    pipeline.add_component("reader", MemoryReader(memories, LENGTH))
    pipeline.add_component("answers", AnswerBuilder())
    pipeline.connect("retriever", "compressor")
    pipeline.connect("compressor.documents", "reader.documents")
    pipeline.connect("compressor.documents", "answers.documents")
    pipeline.connect("reader.replies", "answers.replies")
    question = "Who keeps bees by the mill?"
    asked = {name: {"query": question} for name in ("retriever", "reader", "answers")}
    (answer,) = pipeline.run(asked)["answers"]["answers"]
    found = [document.content for document in answer.documents]
    assert set(found) == {DOCUMENTS[0].content, DOCUMENTS[2].content}

    def expected(texts):
        rows = [pipe.compress(text, ratio=4).quantize("int8").dequantize() for text in texts]
        return pipe(question, memory=rows, join="likeliest", **LENGTH)["answer"]

    assert answer.data == expected(found) != ""
    # What is read from a file has one model and one set of memories, those that this process has already.
    written = pipeline.dumps()
    assert str(small_checkpoints / "mean_pooling") in written
    loaded = Pipeline.loads(written, allowed_modules=["context_compressors.*"])
    components = [loaded.get_component(name) for name in ("compressor", "reader")]
    assert [component.memories for component in components] == [memories, memories]
    assert loaded.run(asked)["answers"]["answers"][0].data == answer.data
    reader = MemoryReader(memories)
    alone = pipe(question, context="", **LENGTH)["answer"]
    assert reader.run(question, compressed[1:2], LENGTH) == {"replies": [alone]}
    with pytest.raises(ValueError, match="without a 'memory_id' in its metadata: compress it first, 'Nora"):
        reader.run(question, DOCUMENTS[:1])


def test_the_example_answers_from_what_it_compressed_once(run_example):
    run_example("haystack_memories.py")
