# SPDX-License-Identifier: Apache-2.0
"""Haystack: paragraphs are found by BM25, compressed once, and answered from as memories, in one pipeline.

    pip install -e '.[haystack,corpus]'     # in a clone
    python examples/haystack_memories.py --question "Who founded the ropeworks?" --store paragraphs.lance

What is found a second time, in this run or with the same `--store` in the next, is not compressed again.
"""

import argparse
from pathlib import Path

from haystack import Document, Pipeline
from haystack.components.builders import AnswerBuilder
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from context_compressors.integrations.document_memories import DocumentMemories
from context_compressors.integrations.haystack import MemoryDocumentCompressor, MemoryReader

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "context_compressors" / "demo_documents").glob("*.md"))
QUESTIONS = ["Who founded the ropeworks?", "What destroyed the hemp store in 1868?"]


def build_pipeline(memories: DocumentMemories, paragraphs: list[Document]) -> Pipeline:
    """Find, compress, answer."""
    documents = InMemoryDocumentStore()
    documents.write_documents(paragraphs)
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(documents, top_k=2))
    pipeline.add_component("compressor", MemoryDocumentCompressor(memories))
    pipeline.add_component("reader", MemoryReader(memories, {"max_new_tokens": 24}))
    pipeline.add_component("answers", AnswerBuilder())
    pipeline.connect("retriever", "compressor")
    pipeline.connect("compressor.documents", "reader.documents")
    pipeline.connect("compressor.documents", "answers.documents")
    pipeline.connect("reader.replies", "answers.replies")
    return pipeline


def main() -> None:
    """Read the paragraphs, build the pipeline, ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "smollm2-135m-instruct-ranked-key-values"))
    parser.add_argument("--question", action="append", help="give it again for several")
    parser.add_argument("--ratio", type=int, default=2, help="tokens per slot (default: %(default)s)")
    parser.add_argument("--store", help="where memories are kept (default: in the process)")
    arguments = parser.parse_args()
    pages = {page.stem: page.read_text(encoding="utf-8").split("---\n", 2)[2].split("\n\n") for page in PAGES}
    paragraphs = [Document(content=text, meta={"page": name}) for name in pages for text in pages[name]]
    memories = DocumentMemories(arguments.model, arguments.ratio, arguments.store)
    pipeline = build_pipeline(memories, paragraphs)
    for question in arguments.question or QUESTIONS:
        asked = {name: {"query": question} for name in ("retriever", "reader", "answers")}
        (answer,) = pipeline.run(asked)["answers"]["answers"]
        print(question, "|", answer.data)
        print("   from", [(one.meta["page"], one.meta["memory_id"]) for one in answer.documents])


if __name__ == "__main__":
    main()
