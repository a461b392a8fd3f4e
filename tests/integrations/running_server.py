# SPDX-License-Identifier: Apache-2.0
"""A server in a thread, which answers over HTTP and to OpenAI's client; who imports this is skipped without these."""

import http.client
import json
import threading
import time

import pytest

REASON = "the server has an environment of its own: make test-integrations"
openai = pytest.importorskip("openai", reason=REASON)
fastapi = pytest.importorskip("fastapi", reason=REASON)
httpx = pytest.importorskip("httpx", reason=REASON)
server = pytest.importorskip("context_compressors.serving.server", reason=REASON, exc_type=ImportError)
server_jobs = pytest.importorskip("context_compressors.serving.server_jobs")
ServerSettings = server.ServerSettings

NAMES = ["Nora Zill", "Olaf Berg", "Elin Moe", "Ada Holm", "Ivar Dal", "Siri Lund", "Per Vik", "Tone Aas"]
TEXTS = [f"{name} keeps {3 + 2 * i} bees at Sandvik." for i, name in enumerate(NAMES)]
QUESTION = "Who keeps bees?"


class Running:
    """A server in a thread, at a free port of this machine."""

    def __init__(self, app, grace=10):
        self.server = server._web_server(app, grace)
        listening = server._listening("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.options = {"base_url": f"http://127.0.0.1:{self.port}/v1", "api_key": "k", "max_retries": 0}
        self.client = openai.OpenAI(**self.options)

    def stop(self):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, method, path, body=None, headers=None):
        """Status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def refusal(self, status, method, path, body=None, headers=None):
        """The error of a refused request."""
        found, answer = self.ask(method, path, body, headers)
        assert found == status, answer
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def compress(self, text, **fields):
        """Ids of new memories."""
        status, answer = self.ask("POST", "/v1/memories", {"text": text, **fields})
        assert status == 200, answer
        return [memory["id"] for memory in answer["data"]]

    def chat(self, ids, question=QUESTION, model="m", **fields):
        messages = about(ids, question)
        return self.client.chat.completions.create(model=model, messages=messages, **{"max_tokens": 12, **fields})

    def metric(self, name):
        lines = self.ask("GET", "/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"context_compressors_{name}"))

    def until(self, condition, seconds=30):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.02)


def about(ids, question=QUESTION):
    parts = [{"type": "memory", "memory_id": name} for name in ids]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def text_of(stream):
    chunks = list(stream)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


def together(calls, gate, running):
    """Run calls in threads, the first of which has its turn alone, and the others when all wait."""
    threads = [threading.Thread(target=call) for call in calls]
    # An answer is here before its batch has ended.
    running.until(lambda: running.metric("running_requests") == 0)
    threads[0].start()
    running.until(lambda: running.metric("running_requests"))
    for thread in threads[1:]:
        thread.start()
    running.until(lambda: running.metric("waiting_requests") == len(calls) - 1)
    gate.set()
    for thread in threads:
        thread.join()
