# SPDX-License-Identifier: Apache-2.0
"""Jobs and memories of the server without HTTP; tests/integrations has the rest."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizers import byte_tokenizer
from random_memories import make_memory
from tiny_models import METHODS, TRAINING_FREE, Case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from context_compressors import CorpusCompressor, MemoryStore
from context_compressors.serving import server_memories
from context_compressors.serving.server_jobs import AnswerJob, CompressionJob, ServedModel
from context_compressors.serving.server_memories import ProcessMemories, StoredMemories


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return made


def test_a_chat_names_memories_or_documents_in_front_of_its_words():
    pytest.importorskip("pydantic")
    from context_compressors.serving.server_requests import ChatRequest

    def request(*parts):
        return ChatRequest.model_validate({"messages": [{"role": "user", "content": [*parts]}]})

    document, memory, words = {"type": "document", "text": "A."}, {"type": "memory", "memory_id": "m"}, "Who?"
    text = {"type": "text", "text": words}
    asked = request(document, {**document, "text": "B."}, text)
    assert (asked.documents, asked.memories, asked.messages[0].text) == (["A.", "B."], [], words)
    for parts, message in (((text, document), "must stand before"), ((document, memory, text), "name one kind")):
        with pytest.raises(ValueError, match=message):
            request(*parts)
    methods = {method.name: method for method in METHODS + TRAINING_FREE}
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="</s>")
    for name in ("mean_pooling", "snap_kv"):
        pipe = Case(methods[name]).build().question_answering(tokenizer)
        model = ServedModel("m", pipe, ProcessMemories(2**30))
        messages = [{"role": "user", "content": words}]
        context = {"question": None, "messages": messages, "context": ["A.", "B."], "memory": None, "batch_size": 1}
        wanted = pipe.preprocess(context, join=True, full_text=True)["full_text_ids"][0][0]
        assert model.text_ids(messages, False, ["A.", "B."]) == wanted
        assert model.text_ids(messages, False)[0] == tokenizer.bos_token_id


@pytest.mark.slow
def test_a_long_text_takes_no_more_room_beside_short_ones(small_checkpoints, tmp_path):
    pipe = CorpusCompressor(small_checkpoints / "mean_pooling", device="cpu").pipe
    store = MemoryStore.find_or_create(tmp_path / "s.lance", CorpusCompressor(pipe).form)
    long, short = "Nora Lind sold honey. " * 40, ["Bees.", "A mill."] * 60
    expected = pipe.compress(["A mill."], ratio=2)

    async def run(texts):
        model = ServedModel("m", pipe, memories)
        # Of two requests, one of which nobody waits for.
        jobs = [CompressionJob(model, part, 0, 2, 600, 1) for part in (texts, ["Gone."])]
        jobs[1].is_cancelled = True
        with Largest() as largest:
            CompressionJob.run(jobs)
        return [memory["id"] for memory in await jobs[0].next_event()], largest.num_bytes

    for memories in (ProcessMemories(2**30), StoredMemories(store)):
        _, alone = asyncio.run(run([long]))
        version = store.version
        ids, beside = asyncio.run(run([*short, long]))
        assert beside <= alone
        kept = memories.get([ids[1], "unknown", ids[-1]])
        assert list(kept) == [ids[1], ids[-1]]
        assert memories.text(ids[-1]) == long
        assert kept[ids[1]].embeddings.shape == expected.embeddings.shape
        assert store.version - version == (memories.nbytes == 0), "all of a turn is one version"
    assert list(store.texts(ids).values()) == [*short, long]


def asked(stops=(), is_streamed=False, max_tokens=100):
    limits = {"max_tokens": max_tokens, "max_completion_tokens": None, "temperature": 0, "seed": None}
    options = SimpleNamespace(include_usage=False)
    return SimpleNamespace(**limits, stop=stops, stream=is_streamed, stream_options=options)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_half_a_character_of_a_stop_ends_no_part_of_it(is_streamed):
    tokenizer = SimpleNamespace(decode=lambda ids, **options: bytes(ids).decode(errors="replace"))
    model = SimpleNamespace(name="m", end_ids={-1}, pipe=SimpleNamespace(tokenizer=tokenizer))

    async def run():
        job = AnswerJob(model, [1], [], asked(["問題："], is_streamed), 60, *[lambda *_: None] * 2)
        for byte in "答：蜂蜜。問題：下".encode():
            job.take(byte)
        events = [await job.next_event()]
        while isinstance(events[-1], str):
            events.append(await job.next_event())
        return events

    *parts, answer = asyncio.run(run())
    assert answer.text == "答：蜂蜜。"
    assert "".join(parts) == ("答：蜂蜜。" if is_streamed else "")


def test_further_questions_about_a_memory_find_its_slots_read():
    methods = {method.name: method for method in METHODS}
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="</s>")
    pipe = Case(methods["mean_pooling"]).build().question_answering(tokenizer)
    model, counted = ServedModel("m", pipe, ProcessMemories(2**30)), []
    memories = [pipe.model.compress(torch.arange(5, 5 + length)[None]) for length in (20, 3)]
    texts = [[1, 9, 40], [1, 9, 40, 7, 11]]
    pipe.model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: counted.append(tuple(kwargs["inputs_embeds"].shape[:2])), with_kwargs=True
    )

    async def answers():
        options = (asked(max_tokens=2), 60, *[lambda *_: None] * 2)
        jobs = [AnswerJob(model, text, [memory], *options) for text, memory in zip(texts, memories, strict=True)]
        AnswerJob.run(jobs)
        return [(await job.next_event()).text for job in jobs]

    first = asyncio.run(answers())
    assert counted[:2] == [(1, int(memory.num_slots)) for memory in memories]
    counted.clear()
    assert asyncio.run(answers()) == first
    assert counted[0] == (2, 5)
    pipe.read_slots.max_bytes = 0
    assert asyncio.run(answers()) == first


@pytest.mark.slow
def test_a_store_is_compacted_now_and_then_also_where_the_server_is_started_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(server_memories, "_COMPACTED_EVERY", 8)
    memory = make_memory((3, 5))
    store, calls = MemoryStore.create(tmp_path / "s.lance", memory), []
    compact = MemoryStore.compact
    monkeypatch.setattr(MemoryStore, "compact", lambda *arguments: calls.append(arguments) or compact(*arguments))
    for start in range(0, 6, 2):
        memories = StoredMemories(store)
        for number in (start, start + 1):
            memories.add([f"{number}-a", f"{number}-b"], [memory.rows(0), memory.rows(1)], ["", ""])
        memories.delete(f"{number}-a")
    assert len(calls) == 1
    assert len(store) == 9
    # One that loses against another writer is no failure of a request.
    monkeypatch.setattr(MemoryStore, "compact", lambda *arguments: (_ for _ in ()).throw(OSError("conflict")))
    for number in range(20):
        memories.add([f"more-{number}"], [memory.rows(0)], [""])
    assert len(store) == 29
