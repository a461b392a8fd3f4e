# SPDX-License-Identifier: Apache-2.0
"""The server of `context-compressors serve`, over HTTP and with OpenAI's client: `make test-integrations`."""

import os
import signal
import socket
import subprocess
import sys

import decal_models
import pages
import pytest
import torch
from byte_tokenizers import CHAT_TEMPLATE
from running_server import QUESTION, TEXTS, about, openai, server, text_of, together
from tiny_bases import tiny_tokenizer
from tiny_models import METHODS, TRAINING_FREE, Case
from transformers import AutoTokenizer

from context_compressors import CorpusCompressor, MemoryStore, cli


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
    parts = [{"type": "document", "text": text} for text in TEXTS[:2]]
    whole = running.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": [*parts, *about([])[0]["content"]]}], max_tokens=12
    )
    wanted = pipe(QUESTION, context=TEXTS[:2], join=True, full_text=True, max_new_tokens=12)["answer"]
    assert whole.choices[0].message.content == wanted
    assert whole.usage.prompt_tokens_details.memory_slots == 0
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
    described = running.ask("GET", f"/v1/memories/{ids[0]}")[1]
    assert (described["ratio"], described["num_tokens"]) == (4, int(pipe.compress(TEXTS[0]).num_context_tokens))
    # The tool, as a model is offered it and as it calls it.
    (tool,) = running.ask("GET", "/v1/tools")[1]["data"]
    assert tool["function"]["name"] == "expand"
    assert tool["function"]["parameters"]["required"] == ["memory_id"]
    words = TEXTS[0][20:40]
    passage = running.ask("POST", "/v1/tools/expand", {"memory_id": ids[0], "containing": words, "length": 30})[1]
    assert passage["text"] == TEXTS[0][passage["start"] : passage["start"] + 30]
    assert words[:10] in passage["text"]
    assert running.refusal(404, "POST", "/v1/tools/expand", {"memory_id": "none"})["code"] == "memory_not_found"
    assert running.ask("DELETE", f"/v1/memories/{ids[0]}")[1]["deleted"]
    for method in ("GET", "DELETE"):
        assert running.refusal(404, method, f"/v1/memories/{ids[0]}")["code"] == "memory_not_found"
    with pytest.raises(openai.NotFoundError, match=r"there is no memory 'mem-.* was the oldest"):
        running.chat(ids[:1], stream=True)
    assert running.metric("tokens_total") > 0
    assert running.ask("GET", "/health")[1]["status"] == "ok"


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
        for name, pipe in pipes.items():
            running = serve({name: pipe}, store=stores.get(name))
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
    with pytest.raises(openai.BadRequestError, match="'encoder-decoder' answers from memories alone"):
        running.chat([], model="encoder-decoder")
    asked = decal_models.build(question_placement="encoder").question_answering(tiny_tokenizer())
    with pytest.raises(ValueError, match=r"compresses a document together with its question.* no memory that could"):
        server.create_app("m", asked)
    with pytest.raises(ValueError, match="the store is of the model"):
        server.create_app("m", pipes["selected"], store=stored["key/values"])


def test_a_memory_is_read_at_coarser_ratios_than_it_is_kept_at(serve):
    method = next(method for method in TRAINING_FREE if method.name == "kv_zip")
    pipe = Case(method).build().question_answering(tiny_tokenizer())
    running = serve({"m": pipe})
    messages = about(running.compress(TEXTS[:3], ratio=2))
    messages[0]["content"][0]["ratio"], messages[0]["content"][2]["ratio"] = 8, 3
    rows = [pipe.compress(text, ratio=ratio) for text, ratio in zip(TEXTS, (8, 2, 3), strict=False)]
    found = running.client.chat.completions.create(model="m", messages=messages, max_tokens=6)
    assert found.choices[0].message.content == pipe(QUESTION, memory=rows, join=True, max_new_tokens=6)["answer"]
    assert found.usage.prompt_tokens_details.memory_slots == sum(int(row.num_slots) for row in rows)
    messages[0]["content"][1]["ratio"] = 1
    with pytest.raises(openai.BadRequestError, match="`ratio` must be from 2, the memory's own, to 255, got 1"):
        running.client.chat.completions.create(model="m", messages=messages)


def test_conversations_stand_in_the_chat_template(serve, pipe):
    tokenizer = AutoTokenizer.from_pretrained(pipe.tokenizer.name_or_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = pipe.model.question_answering(tokenizer)
    running = serve({"m": chat})
    ids = running.compress(TEXTS[:2], ratio=2)
    words = [("system", "Be brief."), ("user", QUESTION), ("assistant", "Nora"), ("user", "And who else?")]
    messages = [{"role": role, "content": text} for role, text in words]
    wanted = chat(messages=messages, memory=chat.compress(TEXTS[:2], ratio=2), join=True, max_new_tokens=9)["answer"]
    sent = [messages[0], *about(ids), *messages[2:]]
    answer = running.client.chat.completions.create(model="m", messages=sent, max_tokens=9)
    assert answer.choices[0].message.content == wanted


def test_the_command_refuses_a_port_before_it_loads_a_model_and_a_store_in_another_type(
    small_checkpoints, pipe, tmp_path, capsys
):
    with server._listening("127.0.0.1", 0) as taken:
        # Without it asyncio sends no small answer at once.
        assert taken.proto == socket.IPPROTO_TCP
        for port, message in ((99999, "a port is a number from 0 to 65,535"), (taken.getsockname()[1], "in use")):
            assert cli.main(["serve", "not there", "--port", str(port)]) == 1
            assert message in capsys.readouterr().err
    store, model = str(tmp_path / "s.lance"), str(small_checkpoints / "mean_pooling")
    MemoryStore.create(store, pipe.compress("A page."), "int4")
    assert cli.main(["serve", model, "--port", "0", "--store", store, "--device", "cpu"]) == 1
    assert "memories of dtype 'int4', not of 'int8'" in capsys.readouterr().err


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
            blocks = pages.blocks_of((pages.DOCS / "server.md").read_text())
            page = "".join(block.content for block in blocks if block.language == "python")
            page = page.replace("http://127.0.0.1:8000", address).replace('"none"', '"from the environment"')
            exec(page, names := {})
            assert names["answer"].choices[0].message.content
            client.delete(f"/memories/{names['memory_id']}", cast_to=object)
            body = {"text": TEXTS[0], "ratio": 2}
            memory_id = client.post("/memories", body=body, cast_to=object)["data"][0]["id"]
        answer = client.chat.completions.create(model="mean_pooling", messages=about([memory_id]), max_tokens=8)
        found.append(answer.choices[0].message.content)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, process.stderr.read()
    assert found[0] == found[1]
    kept = MemoryStore.open(store)
    assert kept.texts() == {memory_id: TEXTS[0]}
    assert kept.form.dtype == "int8"
