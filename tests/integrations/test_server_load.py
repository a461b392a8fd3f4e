# SPDX-License-Identifier: Apache-2.0
"""Many clients of the server at once: answers in batches, limits, who goes away and what stops."""

import asyncio
import contextlib
import http.client
import json
import select
import socket
import threading
import time
from dataclasses import replace

import pytest
from running_server import (
    NAMES,
    QUESTION,
    TEXTS,
    ServerSettings,
    about,
    openai,
    server,
    server_jobs,
    text_of,
    together,
)

from context_compressors import CorpusCompressor, MemoryStore
from context_compressors.serving.server_memories import StoredMemories


@pytest.fixture
def slow(monkeypatch, pipe):
    """Tokens, which are listed, come every 50 ms, and no answer ends by itself."""
    taken, original = [], server_jobs.AnswerJob.take
    monkeypatch.setattr(pipe.model.generation_config, "eos_token_id", None)

    def take(job, token):
        time.sleep(0.05)
        taken.append(token)
        original(job, token)

    monkeypatch.setattr(server_jobs.AnswerJob, "take", take)
    return taken


def test_64_clients_get_the_answers_of_their_own_memories_and_none_is_lost(serve, pipe):
    texts = [
        f"{NAMES[i % 8]} of house {i} keeps {i * 7 % 90} {['bees', 'owls', 'cats', 'dogs'][i // 8 % 4]}."
        for i in range(64)
    ]
    questions = [QUESTION if i % 2 else f"What does {NAMES[i % 8]} keep?" for i in range(64)]
    singly = [pipe(questions[i], context=texts[i], ratio=2, max_new_tokens=8 + i % 5)["answer"] for i in range(64)]
    assert len(set(singly)) > 32, "answers that are all alike would not tell whose they are"
    running = serve({"m": pipe}, ServerSettings(batch_size=16))

    async def one(client, i):
        memories = await client.post("/memories", body={"text": texts[i], "ratio": 2}, cast_to=object)
        request = {"model": "m", "messages": about([memories["data"][0]["id"]], questions[i]), "max_tokens": 8 + i % 5}
        found = []
        for round_number in range(3):
            if (i + round_number) % 3:
                whole = await client.chat.completions.create(**request)
                found.append(whole.choices[0].message.content)
            else:
                stream = await client.chat.completions.create(**request, stream=True)
                found.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
        return found

    async def all_of_them():
        async with openai.AsyncOpenAI(**running.options) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    answers = asyncio.run(all_of_them())
    assert answers == [[answer] * 3 for answer in singly]
    assert running.metric('requests_total{path="/v1/chat/completions",status="200"}') == 3 * 64


def test_a_request_that_fails_in_a_batch_fails_alone(serve, pipe, gate, monkeypatch):
    running = serve({"m": pipe})
    ids = running.compress(TEXTS[:4], ratio=2)
    wanted = [running.chat([name]).choices[0].message.content for name in ids]
    place = next(iter(running.server.config.app.user_middleware)).kwargs["server"].model.memories
    broken = place.get(ids[1:2])[ids[1]]
    place._memories[ids[1]] = replace(broken, check=False, embeddings=broken.embeddings[..., 1:]), ""
    found = [None] * 4

    def ask(i):
        try:
            # One of them is streamed.
            answer = running.chat([ids[i]], stream=i == 2)
            found[i] = text_of(answer)[0] if i == 2 else answer.choices[0].message.content
        except openai.APIStatusError as error:
            found[i] = error.status_code

    gate.clear()
    gate.batches.clear()
    together([lambda i=i: ask(i) for i in (0, 1, 2, 3)], gate, running)
    assert found == [wanted[0], 500, wanted[2], wanted[3]]
    assert gate.batches == [1, 3, 1, 1, 1]
    # A failure in the middle of a stream is told in it.
    take = server_jobs.AnswerJob.take

    def fail(job, token):
        if len(job._tokens) == 2:
            raise RuntimeError("a secret")
        take(job, token)

    monkeypatch.setattr(server_jobs.AnswerJob, "take", fail)
    with pytest.raises(openai.APIError, match="the server failed at this request"):
        text_of(running.chat([ids[0]], stream=True))


def test_a_body_that_comes_by_drops_has_its_time_as_a_whole(serve, pipe):
    running = serve({"m": pipe}, ServerSettings(timeout=1.5))
    body = json.dumps({"text": TEXTS[0], "ratio": 2}).encode()
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
        head = (
            f"POST /v1/memories HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            for letter in body:
                connection.sendall(bytes([letter]))
                time.sleep(0.2)
                if select.select([connection], [], [], 0)[0]:
                    break
        status = connection.recv(100)
    assert b" 408 " in status.splitlines()[0]
    assert time.monotonic() - start < 6


def test_headers_that_never_end_close_the_connection_and_a_slow_answer_does_not(serve, pipe, slow, monkeypatch):
    monkeypatch.setattr(server, "_HEADER_SECONDS", 0.5)
    running = serve({"m": pipe})
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        assert connection.recv(1000) == b""
    assert running.chat(running.compress(TEXTS[:1], ratio=2), max_tokens=20).usage.completion_tokens == 20


def test_a_compression_that_nobody_waits_for_ends_behind_its_batch(serve, pipe, monkeypatch):
    running, sizes, compress = serve({"m": pipe}, ServerSettings(batch_size=4, timeout=1)), [], pipe.compress

    def slowly(texts, *given, **options):
        sizes.append(len(texts))
        time.sleep(0.3)
        return compress(texts, *given, **options)

    monkeypatch.setattr(pipe, "compress", slowly)
    running.refusal(504, "POST", "/v1/memories", {"text": [*TEXTS] * 5, "ratio": 2})
    running.until(lambda: not running.metric("running_requests"))
    assert set(sizes) == {4}
    assert len(sizes) < 7


def test_limits_are_refusals_that_say_what_is_allowed(serve, pipe, gate):
    size = pipe.compress(TEXTS[0], ratio=2).nbytes
    settings = ServerSettings(
        api_key="k", max_waiting=1, max_tokens=100, max_body_bytes=2000, timeout=6, max_memory_bytes=int(2.5 * size)
    )
    running = serve({"m": pipe}, settings)
    key, chat = {"Authorization": "Bearer k"}, "/v1/chat/completions"
    for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Bearer kk"}, {"Authorization": "k"}):
        error = running.refusal(401, "GET", "/v1/models", headers=wrong)
        assert (error["type"], error["code"]) == ("authentication_error", "wrong_api_key")
    assert running.ask("GET", "/health")[0] == running.ask("GET", "/metrics")[0] == 200
    for path in ("/v1/memories/x", "/openapi.json", "/docs"):
        running.refusal(401, "GET", path)
    error = running.refusal(400, "POST", chat, {"messages": about([])}, key | {"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error["message"]
    post = running.client.post
    ids = [post("/memories", body={"text": TEXTS[0], "ratio": 2}, cast_to=object)["data"][0]["id"] for _ in range(3)]
    # There is room for two: the first has gone.
    error = running.refusal(404, "GET", f"/v1/memories/{ids[0]}", headers=key)
    assert f"oldest when the {int(2.5 * size):,} bytes" in error["message"]
    assert running.metric("memory_bytes") == 2 * (size + len(TEXTS[0].encode()))
    user = [{"role": "user", "content": "Who?"}]
    part = {"type": "memory", "memory_id": ids[2]}
    for body, status, message, param in (
        (b"{no", 400, "the body is no JSON", None),
        (b"x" * 3000, 413, "more than 2,000 bytes", None),
        ({}, 400, "messages: Field required", "messages"),
        ({"messages": []}, 400, "at least 1 item", "messages"),
        ({"messages": user, "n": 2}, 400, "n: Input should be 1, got 2", "n"),
        ({"messages": user, "tools": []}, 400, "tools: is no field of this request, got []", "tools"),
        ({"messages": user, "temperature": 3}, 400, "less than or equal to 2, got 3", "temperature"),
        ({"messages": user, "max_tokens": 99}, 400, "at most 100 are allowed", "messages"),
        ({"messages": user, "model": "x"}, 404, "no model 'x'; this server has 'm'", "model"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "must be the user's, who asks", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'text', 'memory'", None),
        ({"messages": [*user, {"role": "user", "content": [part]}]}, 400, "name all of them there", None),
        ({"messages": [*user, *user]}, 400, "chat template refuses these messages", None),
    ):
        error = running.refusal(status, "POST", chat, body, key)
        assert message in error["message"], error
        assert param in (None, error["param"]), error
    for body, message in (
        ({"text": TEXTS[0], "ratio": 5}, "it has [2, 4, 8, 16]"),
        ({"text": TEXTS[0] * 4}, f"this server keeps {int(2.5 * size):,} in all"),
        ({"text": [""]}, "at least 1 character"),
    ):
        assert message in running.refusal(400, "POST", "/v1/memories", body, key)["message"]
    # One runs and does not end, one waits, a third finds no room; the first two are told that it took too long.
    gate.clear()
    statuses = []

    def ask():
        statuses.append(running.refusal(504, "POST", chat, {"messages": user}, key)["message"])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    running.until(lambda: running.metric("running_requests"))
    threads[1].start()
    running.until(lambda: running.metric("waiting_requests"))
    error = running.refusal(429, "POST", chat, {"messages": user, "stream": True}, key)
    assert error["type"] == "rate_limit_error"
    assert "1 requests wait" in error["message"]
    for thread in threads:
        thread.join()
    assert statuses == ["not answered within 6 seconds (`timeout`)"] * 2
    gate.set()
    running.until(lambda: not running.metric("running_requests"))
    assert gate.batches == [1], "what waited had no turn after its time"
    assert running.ask("POST", chat, {"messages": user}, key)[0] == 200
    with pytest.raises(ValueError, match="`timeout` must be above 0, got 0"):
        ServerSettings(timeout=0)


def test_who_goes_away_is_not_computed_for(serve, pipe, slow):
    running = serve({"m": pipe}, ServerSettings(batch_size=2))
    ids = running.compress(TEXTS[:2], ratio=2)
    stream = running.chat(ids[:1], stream=True, max_tokens=500)
    next(iter(stream))
    # Waits behind it, with another key; hangs up before its turn.
    waiting = http.client.HTTPConnection("127.0.0.1", running.port)
    body = {"messages": about(ids[1:]), "temperature": 1, "max_tokens": 500}
    waiting.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    running.until(lambda: running.metric("waiting_requests") == 1)
    waiting.close()
    running.until(lambda: running.metric("waiting_requests") == 0)
    assert running.metric("running_requests") == 1
    stream.close()
    running.until(lambda: running.metric("running_requests") == 0)
    assert len(slow) < 200
    assert running.metric('requests_total{path="/v1/chat/completions",status="499"}') == 1


@pytest.mark.parametrize(("max_tokens", "grace", "status"), [(4, 60, 200), (1000, 1, 503)])
def test_a_server_that_stops_ends_what_runs_within_its_grace_and_breaks_off_the_rest(
    serve, pipe, slow, max_tokens, grace, status
):
    running, answers = serve({"m": pipe}, grace=grace), []
    ids = running.compress(TEXTS[:1], ratio=2)
    stream = iter(running.chat(ids, stream=True, max_tokens=max_tokens))
    next(stream)
    asked = "POST", "/v1/chat/completions", {"messages": about(ids), "max_tokens": max_tokens}
    whole = threading.Thread(target=lambda: answers.append(running.ask(*asked)))
    whole.start()
    running.until(lambda: running.metric("waiting_requests") == 1)
    threading.Thread(target=running.stop).start()
    if status == 200:
        assert list(stream)[-1].choices[0].finish_reason == "length"
    else:
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
    whole.join(60)
    assert [found for found, _ in answers] == [status]
    assert status == 200 or answers[0][1]["error"]["code"] == "stopping"
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert len(slow) < 500


def test_the_memories_of_a_chat_are_read_once_within_the_limits_and_in_time(serve, pipe, tmp_path, monkeypatch):
    store = MemoryStore.find_or_create(tmp_path / "s.lance", CorpusCompressor(pipe).form)
    running = serve({"m": pipe}, ServerSettings(timeout=3, max_tokens=2000), store=store)
    ids, asked, seconds = running.compress(TEXTS, ratio=2), [], 0
    get = StoredMemories.get

    def slow_get(self, names):
        asked.append(list(names))
        time.sleep(seconds)
        return get(self, names)

    monkeypatch.setattr(StoredMemories, "get", slow_get)
    running.chat([*ids[:2], ids[0]])
    assert asked == [ids[:2]]
    path = "/v1/chat/completions"
    error = running.refusal(400, "POST", path, {"messages": about(ids[:1] * 2001)})
    assert (error["code"], asked) == ("context_length_exceeded", [ids[:2]])
    monkeypatch.setattr(server, "_MEMORIES_AT_ONCE", 1)
    seconds = 1
    # Who goes away, and who has waited long enough; what is not begun is not read.
    gone = http.client.HTTPConnection("127.0.0.1", running.port)
    asked.clear()
    gone.request("POST", path, json.dumps({"messages": about(ids)}), {"Content-Type": "application/json"})
    running.until(lambda: asked)
    gone.close()
    running.until(lambda: running.metric(f'requests_total{{path="{path}",status="499"}}') == 1)
    start = time.monotonic()
    assert running.refusal(504, "POST", path, {"messages": about(ids)})["code"] == "timeout"
    assert time.monotonic() - start < 5
    assert len(asked) < 2 * len(ids)
