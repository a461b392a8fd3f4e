# SPDX-License-Identifier: Apache-2.0
"""A collection from end to end: chunks go into a store, and questions to the five memories that BM25 finds for each.

    python examples/corpus_questions.py checkpoints/smollm2-135m-instruct-ranked-key-values qa_squad_dev.parquet \\
        --chunks 1000 --questions 50 --ratio 4

Each memory is asked alone, and the likeliest answer counts. The same five chunks are asked as text, with the same
decoder. Both are scored by SQuAD's F1, with the seconds of each step. The file is Parquet with the columns `context`,
`question` and `answers`.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from context_compressors import CorpusCompressor, MemoryStore, cli
from context_compressors.corpus.text_search import BM25Search
from context_compressors.evaluation.metrics import squad_scores


def read_questions(path: str, num_chunks: int, num_questions: int) -> tuple[list[str], list[dict[str, Any]]]:
    """The first contexts of a file, and questions about them, one of each of the first contexts."""
    rows = pyarrow.parquet.read_table(path, columns=["context", "question", "answers"]).to_pylist()
    chunks = list(dict.fromkeys(row["context"] for row in rows))[:num_chunks]
    first = {row["context"]: row for row in reversed(rows)}
    step = max(1, len(chunks) // num_questions)
    return chunks, [first[chunk] for chunk in chunks[::step]][:num_questions]


def main() -> None:
    """Compress, search, answer and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a compressor")
    parser.add_argument("data", help="Parquet with context, question and answers")
    parser.add_argument("--chunks", type=int, default=1000, help="contexts in the store (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--memories", type=int, default=5, help="read for each question (default: %(default)s)")
    parser.add_argument("--ratio", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--store", help="kept there (default: nowhere)")
    arguments = parser.parse_args()
    chunks, questions = read_questions(arguments.data, arguments.chunks, arguments.questions)
    with tempfile.TemporaryDirectory() as folder:
        pages, place = Path(folder) / "chunks.parquet", arguments.store or f"{folder}/chunks.lance"
        pyarrow.parquet.write_table(pyarrow.table({"text": chunks}), pages)
        seconds = {"compress": time.perf_counter()}
        command = [str(pages), "--model", arguments.model, "--store", place, "--ratio", str(arguments.ratio)]
        if cli.main(["compress-corpus", *command, "--config", "{dtype: float32}"]):
            raise SystemExit(1)
        seconds = {"compress": time.perf_counter() - seconds["compress"], "search": 0.0, "memories": 0.0, "text": 0.0}
        pipe = CorpusCompressor(arguments.model, dtype="float32").pipe
        store = MemoryStore.open(place, model_id=pipe.model.model_id)
        search, found = BM25Search(store), 0
        answers: dict[str, list[str]] = {"memories": [], "text": []}
        for row in questions:
            start = time.perf_counter()
            ids = [name for name, _ in search.search(row["question"], arguments.memories)]
            texts = store.texts(ids)
            seconds["search"] += time.perf_counter() - start
            found += row["context"] in texts.values()
            asked = {"join": "likeliest", "max_new_tokens": arguments.max_new_tokens}
            start = time.perf_counter()
            answers["memories"].append(pipe(row["question"], store=store, ids=ids, **asked)["answer"])
            middle = time.perf_counter()
            chosen = [texts[name] for name in ids]
            answers["text"].append(pipe(row["question"], context=chosen, full_text=True, **asked)["answer"])
            seconds["text"] += time.perf_counter() - middle
            seconds["memories"] += middle - start
    references = [row["answers"] for row in questions]
    report = {
        "chunks": len(chunks),
        "questions": len(questions),
        "found": found / len(questions),
        "compress_seconds": seconds["compress"],
        **{f"{name}_seconds_per_question": seconds[name] / len(questions) for name in ("search", "memories", "text")},
        **{f"{name}_f1": squad_scores(given, references)["f1"] for name, given in answers.items()},
    }
    print(json.dumps({name: round(value, 3) for name, value in report.items()}))


if __name__ == "__main__":
    main()
