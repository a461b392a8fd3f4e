# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests against other packages."""

import contextlib
import ipaddress
import os
import re
import runpy
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]

_TRACKIO = tempfile.TemporaryDirectory(prefix="trackio-")
# Read when these packages are imported: nothing is reported to anybody, and runs are kept in a folder of the tests.
os.environ.update(
    ANONYMIZED_TELEMETRY="False",
    DO_NOT_TRACK="1",
    HAYSTACK_TELEMETRY_ENABLED="False",
    LANGSMITH_TRACING="false",
    TRACKIO_DIR=_TRACKIO.name,
)


@pytest.fixture
def no_network(monkeypatch):
    """Whatever connects to another machine fails."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    connect = socket.socket.connect

    def connect_to_this_machine(self, address):
        is_near = self.family == socket.AF_UNIX or ipaddress.ip_address(address[0]).is_loopback
        assert is_near, f"a connection to {address}"
        return connect(self, address)

    def no_lookup(host, *arguments, **options):
        raise AssertionError(f"the address of {host} was asked for")

    monkeypatch.setattr(socket.socket, "connect", connect_to_this_machine)
    monkeypatch.setattr(socket, "getaddrinfo", no_lookup)


@pytest.fixture(scope="session")
def memories(small_checkpoints):
    """A small compressor, and no memories but those that tests add."""
    from context_compressors.integrations.document_memories import DocumentMemories

    return DocumentMemories(small_checkpoints / "mean_pooling", 4, device="cpu")


@pytest.fixture
def run_example(small_checkpoints, memories, tmp_path, monkeypatch, capsys):
    """Runs an example twice on the small compressor, and compares what it prints with the pipeline's own answer."""
    from context_compressors import MemoryStore

    question, place = "Who founded the ropeworks?", tmp_path / "s.lance"

    def run(name):
        for _ in range(2):
            options = {"model": small_checkpoints / "mean_pooling", "question": question, "store": place, "ratio": 4}
            given = [part for option, value in options.items() for part in (f"--{option}", str(value))]
            monkeypatch.setattr(sys, "argv", [name, *given])
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
            printed = capsys.readouterr().out
            ids = re.findall(r"\('ropeworks_museum', '([^']+)'\)", printed)
            store = MemoryStore.open(place)
            assert sorted(store.ids()) == sorted(ids)
            assert len(ids) == 2
            answer = memories.pipe(question, store=store, ids=ids, max_new_tokens=24)["answer"]
            assert f"{question} | {answer}\n" in printed

    return run


@pytest.fixture
def serve():
    """`serve({name: pipe}, settings, grace, store)`: servers that run until the test ends."""
    from running_server import Running, server

    with contextlib.ExitStack() as stack:

        def start(models, settings=None, grace=10, store=None):
            ((name, pipe),) = models.items()
            running = Running(server.create_app(name, pipe, settings, store), grace)
            stack.callback(running.stop)
            return running

        yield start


@pytest.fixture(scope="module")
def pipe(small_checkpoints):
    """A small compressor's pipeline."""
    from context_compressors import MeanPoolingForCausalLM

    folder = small_checkpoints / "mean_pooling"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return MeanPoolingForCausalLM.from_pretrained(folder).eval().question_answering(tokenizer)


@pytest.fixture
def gate(monkeypatch):
    """While it is closed (`clear`), batches wait for their turn; `batches` tells how many requests each had."""
    from running_server import server_jobs

    event, original = threading.Event(), server_jobs.AnswerJob.run.__func__
    event.set()
    event.batches = []

    def run(cls, jobs):
        assert event.wait(60)
        event.batches.append(len(jobs))
        original(cls, jobs)

    monkeypatch.setattr(server_jobs.AnswerJob, "run", classmethod(run))
    return event
