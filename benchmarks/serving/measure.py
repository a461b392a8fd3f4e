# SPDX-License-Identifier: Apache-2.0
"""Requests a second and time to the first token of `context-compressors serve`, from text and from memories.

    python -m benchmarks.serving.measure
    python -m benchmarks.serving.measure --clients 1 --tokens 256 1024 4096

Starts the server with the checkpoint, and asks it as a program would: each client asks about a document, waits for the
last token and asks again. The document stands in the request as text, or was made a memory before the clock starts.
Answers are streamed; the first token is what the first event with text brings, waiting for a turn included. Beside
what the clock says stands the server's own processor time, for a request and for making a memory, on which other
programs of the machine have little influence.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from tqdm.auto import tqdm
from transformers import AutoTokenizer

from benchmarks.common.tools import add_place_arguments, positive_int, save_and_report, script_parser, tells_errors
from context_compressors import generate_document
from context_compressors.reporting.tables import markdown_table

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "smollm2-135m-instruct-mean-pooling"
WAYS, DTYPE, BATCH_SIZE = ("text", "4x", "8x"), "float32", 8
_QUESTION = "What is this text about?"
# Longest generated document; longer texts are several of them.
_PART_TOKENS = 1024


class Server:
    """The command, at a free port of this machine.

    Args:
        checkpoint: what it serves.
        options: further arguments.
    """

    def __init__(self, checkpoint: str, options: Sequence[str]):
        command = [sys.executable, "-P", "-m", "context_compressors.cli", "serve", checkpoint, "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line.startswith("serving at "):
            raise OSError(f"the server did not start: {' '.join(command)}")
        self._place = line.split()[2].removeprefix("http://")

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        """The answer to a request, as it comes."""
        connection = http.client.HTTPConnection(self._place, timeout=3600)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{response.status}: {response.read().decode()}")
        return response

    def processor_seconds(self) -> float:
        """Of its process so far."""
        connection = http.client.HTTPConnection(self._place, timeout=3600)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total"))

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def document(seed: int, num_tokens: int, tokenizer: Any) -> str:
    """A text of at most so many tokens, and of some tens fewer at the least."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    num_parts = -(-num_tokens // _PART_TOKENS)
    options = {"num_tokens": num_tokens // num_parts, "split": "test", "count_tokens": count}
    return " ".join(generate_document(1000 * seed + part, **options).text for part in range(num_parts))


def ask(server: Server, content: Any, new_tokens: int) -> float:
    """Return the seconds to the first token of an answer, which is read to its end."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": new_tokens, "stream": True}
    start, first = time.perf_counter(), None
    for line in server.post("/v1/chat/completions", body):
        event = line.removeprefix(b"data: ").strip()
        if event.startswith(b"{"):
            choice = json.loads(event)["choices"][0]
            if first is None and (choice["delta"].get("content") or choice["finish_reason"]):
                first = time.perf_counter() - start
    return time.perf_counter() - start if first is None else first


def contents(server: Server, texts: Sequence[str], way: str) -> tuple[list[Any], float]:
    """Return the content of requests for "text" or a ratio such as "4x", and processor seconds to make a memory."""
    if way == "text":
        return [f"{text}\n\n{_QUESTION}" for text in texts], 0.0
    start = server.processor_seconds()
    made = json.load(server.post("/v1/memories", {"text": list(texts), "ratio": int(way.removesuffix("x"))}))
    seconds = (server.processor_seconds() - start) / len(texts)
    question = {"type": "text", "text": _QUESTION}
    return [[{"type": "memory", "memory_id": memory["id"]}, question] for memory in made["data"]], seconds


def measure(
    server: Server, texts: Sequence[str], clients: int, way: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One row: clients that have the texts in turn, in one of the ways."""
    held, compression = contents(server, texts, way)

    def client(number: int) -> list[float]:
        content = held[number % len(held)]
        return [ask(server, content, arguments.new_tokens) for _ in range(arguments.rounds)]

    start, processor = time.perf_counter(), server.processor_seconds()
    with ThreadPoolExecutor(clients) as pool:
        times = [seconds for of_client in pool.map(client, range(clients)) for seconds in of_client]
    seconds, processor = time.perf_counter() - start, server.processor_seconds() - processor
    row = {"clients": clients, "way": way, "requests": len(times), "seconds": seconds}
    row |= {"requests_per_second": len(times) / seconds, "processor_seconds": processor / len(times)}
    return row | {"compression_processor_seconds": compression, "first_token_p50": median(times)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table."""
    header = ["tokens", "clients", "from", "requests a second", "first token p50", "processor, a request", "a memory"]
    names = ["first_token_p50", "processor_seconds", "compression_processor_seconds"]
    lines = [
        [f"{row['tokens']:,}", str(row["clients"]), row["way"], f"{row['requests_per_second']:.2f}"]
        + [f"{row[name]:.2f} s" if row[name] else "" for name in names]
        for row in rows
    ]
    return markdown_table(header, lines)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", default=str(CHECKPOINT), help="default: that of this repository")
    add("--clients", type=positive_int, nargs="+", default=[1, 8, 64], help="default: 1 8 64")
    add("--tokens", type=positive_int, nargs="+", default=[512], help="of a document (default: 512)")
    add("--documents", type=positive_int, default=64, help="different ones, at most (default: 64)")
    add("--new-tokens", type=positive_int, default=16, help="longest answer (default: 16)")
    add("--rounds", type=positive_int, default=3, help="requests of each client (default: 3)")
    add_place_arguments(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    options = [
        "--dtype",
        DTYPE,
        "--config",
        f"{{batch_size: {BATCH_SIZE}, timeout: 3600, max_tokens: 1000000}}",
        "--device",
        arguments.device,
    ]
    server, rows = Server(arguments.checkpoint, options), []
    try:
        measure(server, [document(0, 64, tokenizer)], 1, "text", arguments)  # warms up
        sizes = [(tokens, clients) for tokens in arguments.tokens for clients in arguments.clients]
        for tokens, clients in tqdm(sizes, disable=not sys.stderr.isatty()):
            texts = [document(1 + number, tokens, tokenizer) for number in range(min(clients, arguments.documents))]
            for way in WAYS:
                rows.append({"tokens": tokens, **measure(server, texts, clients, way, arguments)})
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    finally:
        server.stop()
    arguments.checkpoint = Path(arguments.checkpoint).name
    save_and_report(__file__, arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
