# SPDX-License-Identifier: Apache-2.0
"""The server of `context-compressors serve`, over HTTP and with OpenAI's client: `make test-integrations`."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import string
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1] / "modeling"))

import decal_models
import pages
from tiny_models import METHODS, TRAINING_FREE, Case

from context_compressors import CorpusCompressor, MeanPoolingForCausalLM, MemoryStore

REASON = "the server has an environment of its own: make test-integrations"
openai = pytest.importorskip("openai", reason=REASON)
httpx = pytest.importorskip("httpx", reason=REASON)
uvicorn = pytest.importorskip("uvicorn", reason=REASON)
server = pytest.importorskip("context_compressors.serving.server", reason=REASON, exc_type=ImportError)
server_jobs = pytest.importorskip("context_compressors.serving.server_jobs")
ServerSettings = server.ServerSettings

NAMES = ["Nora Zill", "Olaf Berg", "Elin Moe", "Ada Holm", "Ivar Dal", "Siri Lund", "Per Vik", "Tone Aas"]
TEXTS = [f"{name} keeps {3 + 2 * i} bees at Sandvik." for i, name in enumerate(NAMES)]
QUESTION = "Who keeps bees?"
PAGE = pages.DOCS / "server.md"


class Running:
    """A server in a thread, at a free port of this machine."""

    def __init__(self, app, grace=10):
        config = uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=grace)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
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


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(models, settings=None, grace=10, **fields):
            running = Running(server.create_app(models, settings, **fields), grace)
            stack.callback(running.stop)
            return running

        yield start


@pytest.fixture(scope="module")
def pipe(small_checkpoints):
    folder = small_checkpoints / "mean_pooling"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return MeanPoolingForCausalLM.from_pretrained(folder).eval().question_answering(tokenizer)


@pytest.fixture
def gate(monkeypatch):
    """While it is closed (`clear`), batches wait for their turn; `batches` tells how many requests each had."""
    event, original = threading.Event(), server_jobs.AnswerJob.run.__func__
    event.set()
    event.batches = []

    def run(cls, jobs):
        assert event.wait(60)
        event.batches.append(len(jobs))
        original(cls, jobs)

    monkeypatch.setattr(server_jobs.AnswerJob, "run", classmethod(run))
    return event


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


def test_the_openai_client_asks_memories_and_streams_and_reads_what_the_pipeline_answers(serve, pipe):
    running = serve({"m": pipe})
    assert [model.id for model in running.client.models.list()] == ["m"]
    ids = running.compress(TEXTS[:3], ratio=4) + running.compress(TEXTS[3])
    for asked in (ids[:1], ids[:3], ids[3:1:-1]):
        rows = [pipe.compress(TEXTS[ids.index(name)], ratio=2 if name == ids[3] else 4) for name in asked]
        wanted = pipe(QUESTION, memory=rows, join=True, max_new_tokens=12)["answer"]
        whole = running.chat(asked)
        assert whole.choices[0].message.content == wanted
        assert whole.usage.prompt_tokens_details.memory_slots == sum(int(row.num_slots) for row in rows)
        streamed, chunks = text_of(running.chat(asked, stream=True, stream_options={"include_usage": True}))
        assert streamed == wanted
        assert len(chunks) > 3
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    # Three words and not more, and what ends before a text.
    words = running.chat(ids[:1], max_completion_tokens=2)
    assert (words.choices[0].finish_reason, words.usage.completion_tokens) == ("length", 2)
    full = running.chat(ids[:1]).choices[0].message.content
    for stop in (full[2:4], [full[3:], "never"]):
        cut = full[: full.index(stop if isinstance(stop, str) else stop[0])].strip()
        assert running.chat(ids[:1], stop=stop).choices[0].message.content == cut
        assert text_of(running.chat(ids[:1], stop=stop, stream=True))[0] == cut
    # What is drawn with a seed is drawn again, whoever else asks.
    drawn = [running.chat(ids[:1], temperature=1.5, seed=7).choices[0].message.content for _ in range(2)]
    assert drawn[0] == drawn[1] != running.chat(ids[:1], temperature=1.5, seed=8).choices[0].message.content
    status, described = running.ask("GET", f"/v1/memories/{ids[0]}")
    assert (status, described["ratio"], described["num_tokens"]) == (
        200,
        4,
        pipe.compress(TEXTS[0]).num_context_tokens,
    )
    assert running.ask("DELETE", f"/v1/memories/{ids[0]}")[1]["deleted"]
    for method in ("GET", "DELETE"):
        assert running.refusal(404, method, f"/v1/memories/{ids[0]}")["code"] == "memory_not_found"
    with pytest.raises(openai.NotFoundError, match=r"there is no memory 'mem-.* was the oldest"):
        running.chat(ids[:1], stream=True)
    assert running.metric("tokens_total") > 0
    assert running.ask("GET", "/health")[1]["status"] == "ok"


def tiny_tokenizer():
    """One token a character."""
    names = ["<pad>", "<s>", "</s>", *string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    names += [f"<unused_{index}>" for index in range(128 - len(names))]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_every_form_of_memory_is_served_in_batches_and_from_a_store_and_another_models_is_refused(
    serve, gate, tmp_path
):
    methods = {method.name: method for method in METHODS + TRAINING_FREE}
    built = {
        "key/values": Case(methods["five_hundred_x"]).build(decoder_config={}, task_token_ids={}),
        "selected": Case(methods["snap_kv"]).build(),
        "encoder-decoder": decal_models.build(),
    }
    pipes = {name: model.question_answering(tiny_tokenizer()) for name, model in built.items()}
    forms = {name: CorpusCompressor(pipe, memory_dtype="float16").form for name, pipe in pipes.items()}
    stored = {
        name: MemoryStore.find_or_create(tmp_path / f"{i}.lance", form) for i, (name, form) in enumerate(forms.items())
    }
    for stores in ({}, stored):
        running = serve(pipes, stores=stores)
        for number, (name, pipe) in enumerate(pipes.items()):
            ids = running.compress(TEXTS[:4], model=name, ratio=3)
            rows = [pipe.compress(text, ratio=3) for text in TEXTS[:4]]
            if stores:
                rows = [stores[name].get([memory_id]).to(dtype=torch.float32) for memory_id in ids]
            groups = ([0], [1], [2, 3], [3, 2, 0])
            options = {"max_new_tokens": 6}
            wanted = [
                pipe(QUESTION, memory=[rows[i] for i in group], join=True, **options)["answer"] for group in groups
            ]
            gate.clear()
            gate.batches.clear()
            answers = [None] * len(groups)

            def ask(place, running=running, name=name, ids=ids, groups=groups, answers=answers):
                chosen = [ids[i] for i in groups[place]]
                answers[place] = running.chat(chosen, model=name, max_tokens=6).choices[0].message.content

            together([lambda place=place: ask(place) for place in range(len(groups))], gate, running)
            assert answers == wanted
            # The first came when nobody else was there.
            assert sorted(gate.batches) == [1, len(groups) - 1]
            other = list(pipes)[number - 1]
            with pytest.raises(openai.BadRequestError, match=f"was made by the model '{name}': '{other}' cannot read"):
                running.chat(ids[:1], model=other)
    # Without a memory a decoder reads the text alone, behind what opens it.
    for name in ("key/values", "selected"):
        pipe = pipes[name]
        alone = running.chat([], model=name, max_tokens=5)
        ids = pipe.tokenizer(
            pipe.model.config.question_prompt.format(question=QUESTION), return_tensors="pt"
        ).input_ids
        ids = torch.cat([torch.tensor([[pipe.tokenizer.bos_token_id]]), ids], dim=1)
        output = pipe.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        assert alone.choices[0].message.content == pipe.tokenizer.decode(output, skip_special_tokens=True).strip()
    with pytest.raises(openai.BadRequestError, match="'encoder-decoder' answers from memories alone"):
        running.chat([], model="encoder-decoder")
    with pytest.raises(openai.BadRequestError, match="`model` must be one of 'key/values'"):
        running.client.chat.completions.create(model=None, messages=about([]))
    asked = decal_models.build(question_placement="encoder").question_answering(tiny_tokenizer())
    with pytest.raises(ValueError, match=r"compresses a document together with its question.* no memory that could"):
        server.create_app({"m": asked})
    with pytest.raises(ValueError, match="the store is of the model"):
        server.create_app({"m": pipes["selected"]}, stores={"m": stored["key/values"]})


def test_texts_are_kept_at_the_ratios_that_they_select(serve, pipe, small_checkpoints):
    own = pipe.model.config.compression_ratios
    config = pipe.model.config.from_pretrained(small_checkpoints / "mean_pooling", ratio_selector="ratio")
    model = MeanPoolingForCausalLM(config).eval()
    model.load_state_dict(pipe.model.state_dict(), strict=False)
    torch.nn.init.normal_(model.model.ratio_selector.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    rows = [torch.tensor([ids]) for ids in pipe.document_ids(TEXTS)]
    middle = torch.cat([model.model.compress_with_log_ratios(row, None, [2])[1] for row in rows]).median()
    # Between the ratios 2 and 4.
    model.model.ratio_selector.bias.data += 1.585 - middle
    selecting = model.question_answering(pipe.tokenizer)
    running = serve({"m": selecting, "plain": pipe})
    ratios = {card["id"]: card["ratios"] for card in running.ask("GET", "/v1/models")[1]["data"]}
    assert ratios == {"m": [*own, "auto"], "plain": list(own)}
    expected = selecting.compress(TEXTS, ratio="auto")
    assert len(set(expected.ratio.tolist())) > 1
    ids = running.compress(TEXTS, ratio="auto", model="m")
    described = [running.ask("GET", f"/v1/memories/{name}")[1] for name in ids]
    assert [memory["ratio"] for memory in described] == expected.ratio.tolist()
    assert [memory["num_slots"] for memory in described] == expected.num_slots.tolist()
    wanted = selecting(QUESTION, memory=expected[:3], join=True, max_new_tokens=12)["answer"]
    assert running.chat(ids[:3]).choices[0].message.content == wanted
    for ratio, message in (("auto", "'auto', but the checkpoint has no ratio selector"), ("most", "ratio")):
        error = running.refusal(400, "POST", "/v1/memories", {"text": "a", "ratio": ratio, "model": "plain"})
        assert message in error["message"]


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
    place = next(iter(running.server.config.app.user_middleware)).kwargs["server"].places[0]
    broken = place.get(ids[1])
    place._memories[ids[1]] = replace(broken, check=False, embeddings=broken.embeddings * float("nan"))
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
    assert found == [wanted[0], 400, wanted[2], wanted[3]]
    assert gate.batches == [1, 3, 1, 1, 1]
    # So do texts: an empty one has no token here.
    results = {}

    def compress(name, text):
        results[name] = running.ask("POST", "/v1/memories", {"text": text, "ratio": 2})

    original, entered, goes_on = server_jobs.CompressionJob.run.__func__, threading.Event(), threading.Event()

    def run(cls, jobs):
        entered.set()
        assert goes_on.wait(60)
        if any("broken" in text for job in jobs for text in job.texts):
            raise RuntimeError("a secret")
        original(cls, jobs)

    monkeypatch.setattr(server_jobs.CompressionJob, "run", classmethod(run))
    threads = [threading.Thread(target=compress, args=(i, text)) for i, text in enumerate(["a", "b", "broken", "c"])]
    threads[0].start()
    assert entered.wait(60)
    for thread in threads[1:]:
        thread.start()
    running.until(lambda: running.metric("waiting_requests") == 3)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert [results[i][0] for i in range(4)] == [200, 200, 500, 200]
    assert results[2][1]["error"]["type"] == "server_error"
    assert "secret" not in results[2][1]["error"]["message"]
    # A failure in the middle of a stream is told in it, and the server goes on.
    take = server_jobs.AnswerJob.take

    def fail(job, token):
        if len(job._tokens) == 2:
            raise RuntimeError("a secret")
        take(job, token)

    with monkeypatch.context() as patch:
        patch.setattr(server_jobs.AnswerJob, "take", fail)
        with pytest.raises(openai.APIError, match="the server failed at this request"):
            text_of(running.chat([ids[0]], stream=True))
        running.until(lambda: running.metric("running_requests") == 0)
    assert running.chat([ids[0]]).choices[0].message.content == wanted[0]


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
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(**{**running.options, "api_key": "no"}).models.list()
    post = running.client.post
    ids = [post("/memories", body={"text": TEXTS[0], "ratio": 2}, cast_to=object)["data"][0]["id"] for _ in range(3)]
    # There is room for two: the first has gone.
    error = running.refusal(404, "GET", f"/v1/memories/{ids[0]}", headers=key)
    assert f"oldest when the {int(2.5 * size):,} bytes" in error["message"]
    assert running.metric("memory_bytes") == 2 * size
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
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "'system', 'user' or 'assistant'", "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "must be the user's, who asks", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'text', 'memory'", None),
        ({"messages": [*user, {"role": "user", "content": [part]}]}, 400, "name all of them there", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]},
            400,
            "must stand before",
            None,
        ),
        ({"messages": [*user, *user]}, 400, "the tokenizer has no chat template for 2 messages", None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "", None),
    ):
        error = running.refusal(status, "POST", chat, body, key)
        assert message in error["message"], error
        assert param in (None, error["param"]), error
    for body, message in (
        ({"text": TEXTS[0], "ratio": 5}, "it has [2, 4, 8, 16]"),
        ({"text": TEXTS[0] * 20}, "at most 100 are allowed"),
        ({"text": TEXTS[0] * 4}, f"this server keeps {int(2.5 * size):,} in all"),
        ({"text": []}, "at least 1 item"),
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
    assert statuses == ["not answered within 6 seconds (--timeout)"] * 2
    gate.set()
    running.until(lambda: not running.metric("running_requests"))
    assert gate.batches == [1], "what waited had no turn after its time"
    assert running.ask("POST", chat, {"messages": user}, key)[0] == 200
    for name in ("batch_size", "timeout"):
        with pytest.raises(ValueError, match=f"`{name}` must be above 0, got 0"):
            ServerSettings(**{name: 0})
    with pytest.raises(ValueError, match="`models` is empty"):
        server.create_app({})


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
    # One of a batch: the other gets all of its tokens.
    results = {}

    def ask(place):
        results[place] = running.chat(ids[1:], max_tokens=20).usage.completion_tokens

    stream = running.chat(ids[:1], stream=True, max_tokens=10)
    next(iter(stream))
    thread = threading.Thread(target=ask, args=(0,))
    thread.start()
    gone = running.chat(ids[:1], stream=True, max_tokens=500)
    next(iter(gone))
    gone.close()
    thread.join()
    assert results == {0: 20}
    running.until(lambda: running.metric("running_requests") == 0)
    assert len(slow) < 400


def test_a_server_that_stops_ends_what_runs_within_its_grace_and_breaks_off_the_rest(serve, pipe, slow):
    for max_tokens, grace, ending in ((4, 60, ["length"]), (1000, 1, [])):
        running = serve({"m": pipe}, grace=grace)
        ids = running.compress(TEXTS[:1], ratio=2)
        stream = iter(running.chat(ids, stream=True, max_tokens=max_tokens))
        next(stream)
        threading.Thread(target=running.stop).start()
        chunks = []
        with contextlib.suppress(openai.APIError, httpx.HTTPError):
            chunks += stream
        assert [reason for chunk in chunks if (reason := chunk.choices[0].finish_reason)] == ending
        running.thread.join(60)
        assert not running.thread.is_alive()
    assert len(slow) < 500


def test_conversations_stand_in_the_chat_template(serve, pipe):
    tokenizer = AutoTokenizer.from_pretrained(pipe.tokenizer.name_or_path)
    tokenizer.chat_template = pages._CHAT_TEMPLATE
    chat = pipe.model.question_answering(tokenizer)
    running = serve({"m": chat})
    ids = running.compress(TEXTS[:2], ratio=2)
    words = [("system", "Be brief."), ("user", QUESTION), ("assistant", "Nora"), ("user", "And who else?")]
    messages = [{"role": role, "content": text} for role, text in words]
    wanted = chat(messages=messages, memory=chat.compress(TEXTS[:2], ratio=2), join=True, max_new_tokens=9)["answer"]
    sent = [messages[0], *about(ids), *messages[2:]]
    answer = running.client.chat.completions.create(model="m", messages=sent, max_tokens=9)
    assert answer.choices[0].message.content == wanted
    # An answer can be sent back as it came.
    message = answer.choices[0].message.model_dump()
    follow = [
        *sent,
        message,
        {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]},
    ]
    again = running.client.chat.completions.create(model="m", messages=follow, max_tokens=9)
    follow = [*messages, {"role": "assistant", "content": wanted}, {"role": "user", "content": "Why\n?"}]
    wanted = chat(messages=follow, memory=chat.compress(TEXTS[:2], ratio=2), join=True, max_new_tokens=9)["answer"]
    assert again.choices[0].message.content == wanted


def test_the_command_serves_a_store_that_outlives_it_and_stops_at_ctrl_c(small_checkpoints, tmp_path):
    model, store = str(small_checkpoints / "mean_pooling"), str(tmp_path / "s.lance")
    command = [sys.executable, "-P", "-m", "context_compressors.cli", "serve", model]
    found = []
    for round_number in range(2):
        process = subprocess.Popen(
            [*command, "--store", store, "--port", "0", "--device", "cpu"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CONTEXT_COMPRESSORS_API_KEY": "from the environment"},
        )
        line = process.stdout.readline()
        assert line.startswith("serving at http://127.0.0.1:"), process.stderr.read()
        address = line.split()[2]
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="from the environment", max_retries=0)
        if not round_number:
            page = "".join(block.content for block in pages.blocks_of(PAGE.read_text()) if block.language == "python")
            page = page.replace("http://127.0.0.1:8000", address).replace('"none"', '"from the environment"')
            exec(page, names := {})
            assert names["answer"].choices[0].message.content
            client.delete(f"/memories/{names['memory_id']}", cast_to=object)
            body = {"text": TEXTS[0], "ratio": 2}
            memory_id = client.post("/memories", body=body, cast_to=object)["data"][0]["id"]
        answer = client.chat.completions.create(model="mean_pooling", messages=about([memory_id]), max_tokens=8)
        found.append(answer.choices[0].message.content)
        if round_number:
            taken = subprocess.run([*command, "--port", address.rpartition(":")[2]], capture_output=True, text=True)
            assert taken.returncode == 1
            assert "Address already in use" in taken.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, process.stderr.read()
    assert found[0] == found[1]
    kept = MemoryStore.open(store)
    assert kept.texts() == {memory_id: TEXTS[0]}
    assert kept.form.dtype == "int8"
    for arguments, message in (
        ([model], "two models have the name 'mean_pooling'"),
        (["--store", store, "--store", store], "--store must be given once for each model: 2 for 1"),
        (["--timeout", "0"], "`timeout` must be above 0"),
    ):
        refused = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert refused.returncode == 1
        assert message in refused.stderr
