# SPDX-License-Identifier: Apache-2.0
"""LangChain: paragraphs are found by BM25, compressed once, and answered from as memories.

    pip install -e '.[langchain,corpus]'     # in a clone
    python examples/langchain_memories.py --question "Who founded the ropeworks?" --store paragraphs.lance

What is found a second time, in this run or with the same `--store` in the next, is not compressed again.
"""

import argparse
from pathlib import Path
from typing import Any

import bm25s
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever

from context_compressors.integrations.document_memories import DocumentMemories
from context_compressors.integrations.langchain import ChatMemoryReader, MemoryDocumentCompressor, memory_message

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "context_compressors" / "demo_documents").glob("*.md"))
QUESTIONS = ["Who founded the ropeworks?", "What destroyed the hemp store in 1868?"]


class BM25(BaseRetriever):
    """The paragraphs that share most words with a question."""

    paragraphs: list[Document]
    k: int = 2

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        index, options = bm25s.BM25(), {"show_progress": False}
        texts = [paragraph.page_content for paragraph in self.paragraphs]
        index.index(bm25s.tokenize(texts, stopwords="en", **options), **options)
        words = bm25s.tokenize([query], stopwords="en", **options)
        return [self.paragraphs[row] for row in index.retrieve(words, k=self.k, **options).documents[0]]


def main() -> None:
    """Read the paragraphs, find, compress, answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "smollm2-135m-instruct-ranked-key-values"))
    parser.add_argument("--question", action="append", help="give it again for several")
    parser.add_argument("--ratio", type=int, default=2, help="tokens per slot (default: %(default)s)")
    parser.add_argument("--store", help="where memories are kept (default: in the process)")
    arguments = parser.parse_args()
    pages = {page.stem: page.read_text(encoding="utf-8").split("---\n", 2)[2].split("\n\n") for page in PAGES}
    paragraphs = [Document(page_content=text, metadata={"page": name}) for name in pages for text in pages[name]]
    memories = DocumentMemories(arguments.model, arguments.ratio, arguments.store)
    compressor = MemoryDocumentCompressor(memories=memories)
    retriever = BM25(paragraphs=paragraphs) | compressor.compress_documents
    chat = ChatMemoryReader(memories=memories, generation={"max_new_tokens": 24}) | StrOutputParser()
    for question in arguments.question or QUESTIONS:
        found = retriever.invoke(question)
        print(question, "|", chat.invoke([memory_message(question, found)]))
        print("   from", [(one.metadata["page"], one.metadata["memory_id"]) for one in found])


if __name__ == "__main__":
    main()
