# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex: paragraphs are found by BM25, compressed once, and answered from as memories.

    pip install -e '.[llama-index,corpus]'     # in a clone
    python examples/llama_index_memories.py --question "Who founded the ropeworks?" --store paragraphs.lance

What is found a second time, in this run or with the same `--store` in the next, is not compressed again.
"""

import argparse
from pathlib import Path

import bm25s
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from context_compressors.integrations.document_memories import DocumentMemories
from context_compressors.integrations.llama_index import MemoryPostprocessor, MemorySynthesizer

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "context_compressors" / "demo_documents").glob("*.md"))
QUESTIONS = ["Who founded the ropeworks?", "What destroyed the hemp store in 1868?"]


class BM25(BaseRetriever):
    """The paragraphs that share most words with a question."""

    def __init__(self, paragraphs: list[TextNode], k: int = 2):
        super().__init__()
        self.paragraphs, self.k, self.index = paragraphs, k, bm25s.BM25()
        self.index.index(self.words([paragraph.text for paragraph in paragraphs]), show_progress=False)

    def words(self, texts: list[str]) -> bm25s.tokenization.Tokenized:
        return bm25s.tokenize(texts, stopwords="en", show_progress=False)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        words = self.words([query_bundle.query_str])
        (rows,), (scores,) = self.index.retrieve(words, k=self.k, show_progress=False)
        found = zip(rows, scores.tolist(), strict=True)
        return [NodeWithScore(node=self.paragraphs[row], score=score) for row, score in found]


def main() -> None:
    """Read the paragraphs, find, compress, answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "smollm2-135m-instruct-ranked-key-values"))
    parser.add_argument("--question", action="append", help="give it again for several")
    parser.add_argument("--ratio", type=int, default=2, help="tokens per slot (default: %(default)s)")
    parser.add_argument("--store", help="where memories are kept (default: in the process)")
    arguments = parser.parse_args()
    pages = {page.stem: page.read_text(encoding="utf-8").split("---\n", 2)[2].split("\n\n") for page in PAGES}
    paragraphs = [TextNode(text=text, metadata={"page": name}) for name in pages for text in pages[name]]
    memories = DocumentMemories(arguments.model, arguments.ratio, arguments.store)
    engine = RetrieverQueryEngine(
        BM25(paragraphs),
        response_synthesizer=MemorySynthesizer(memories, generation={"max_new_tokens": 24}),
        node_postprocessors=[MemoryPostprocessor(memories=memories)],
    )
    for question in arguments.question or QUESTIONS:
        response = engine.query(question)
        print(question, "|", response)
        print("   from", [(one.metadata["page"], one.metadata["memory_id"]) for one in response.source_nodes])


if __name__ == "__main__":
    main()
