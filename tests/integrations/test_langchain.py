# SPDX-License-Identifier: Apache-2.0
"""LangChain compresses what a retriever finds, and answers from the memories: `make test-integrations`."""

import asyncio
import json

import pytest

pytest.importorskip("langchain_core", reason="LangChain has an environment of its own: make test-integrations")

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableParallel, RunnablePassthrough

from context_compressors.integrations.langchain import ChatMemoryReader, MemoryDocumentCompressor, memory_message

pytestmark = pytest.mark.usefixtures("no_network")

LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8}
DOCUMENTS = [
    Document(page_content="Nora Lind keeps bees.", metadata={"page": 1}, id="bees"),
    Document(page_content="", metadata={"page": 2}),
    Document(page_content="The mill burned down in 1902.", metadata={"page": 3, "memory_id": "of another text"}),
]


class Shelf(BaseRetriever):
    """Finds the documents with a word of the question, the last one first."""

    def _get_relevant_documents(self, query, *, run_manager):
        words = query.lower().strip("?").split()
        return [one for one in DOCUMENTS[::-1] if any(word in one.page_content.lower() for word in words)]


def test_documents_keep_order_and_text_and_the_chat_model_answers_as_the_pipeline_does(memories):
    pipe = memories.pipe
    compressor = MemoryDocumentCompressor(memories=memories)
    chat = ChatMemoryReader(memories=memories, generation=LENGTH)
    compressed = compressor.compress_documents(DOCUMENTS, "When?")
    for before, after in zip(DOCUMENTS, compressed, strict=True):
        assert (after.page_content, after.id) == (before.page_content, before.id)
        assert after.metadata["page"] == before.metadata["page"]
    bees, nothing, mill = (document.metadata.get("memory_id") for document in compressed)
    assert nothing is None
    assert DOCUMENTS[2].metadata["memory_id"] == "of another text" != mill
    assert [Document(**json.loads(document.model_dump_json())) for document in compressed] == compressed

    def expected(question, *names):
        rows = [pipe.compress(DOCUMENTS[name].page_content, ratio=4).quantize("int8").dequantize() for name in names]
        return pipe(question, memory=rows, join="likeliest", **LENGTH)["answer"]

    retriever = Shelf() | compressor.compress_documents
    found = retriever.invoke("Bees mill?")
    assert [document.metadata["memory_id"] for document in found] == [mill, bees]
    chain = (
        RunnableParallel(documents=retriever, question=RunnablePassthrough())
        | (lambda asked: [memory_message(asked["question"], asked["documents"])])
        | chat
        | StrOutputParser()
    )
    both, one = expected("Bees mill?", 2, 0), expected("Bees?", 0)
    assert chain.batch(["Bees mill?", "Bees?", "Bees mill?"], config={"max_concurrency": 2}) == [both, one, both]
    assert "".join(chain.stream("Bees?")) == one != ""
    message = memory_message("Bees mill?", found)
    assert asyncio.run(chat.ainvoke([message])).content == both
    stop = both[4:6]
    always = ChatMemoryReader(memories=memories, generation={**LENGTH, "stop": [stop]})
    assert always.invoke([message]).content == both[: both.index(stop)].rstrip()
    # Without documents, and with some that have no text, the question stands alone.
    alone = pipe("Bees?", context="", **LENGTH)["answer"]
    assert chat.invoke("Bees?").content == chat.invoke([memory_message("Bees?", compressed[1:2])]).content == alone


def test_a_conversation_is_read_behind_its_memories_and_what_cannot_be_read_is_refused(memories, monkeypatch):
    chat, pipe = ChatMemoryReader(memories=memories, generation=LENGTH), memories.pipe
    compressed = MemoryDocumentCompressor(memories=memories).compress_documents(DOCUMENTS[:1])
    talk = [
        SystemMessage("Be brief."),
        memory_message("Bees?", compressed),
        AIMessage("Nora's."),
        HumanMessage(["Whose", {"type": "text", "text": "bees?"}]),
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Bees?"},
        {"role": "assistant", "content": "Nora's."},
        {"role": "user", "content": "Whose\nbees?"},
    ]
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    for tokenizer in (pipe.tokenizer, pipe._question_tokenizer):
        monkeypatch.setattr(tokenizer, "chat_template", template)
    memory = pipe.compress(DOCUMENTS[0].page_content, ratio=4).quantize("int8")
    assert chat.invoke(talk).content == pipe(messages=plain, memory=memory, **LENGTH)["answer"]
    for wrong, message in (
        ([HumanMessage([{"type": "memory", "memory_id": "x"}, "Bees?"])], r"no memories with the ids \['x'\]"),
        ([HumanMessage([{"type": "image", "url": "x"}])], "content is text"),
        ([HumanMessage("Bees?"), ToolMessage("x", tool_call_id="1")], "got one of 'tool'"),
        ([HumanMessage("Bees?"), AIMessage("Nora's.")], "must be the user's"),
    ):
        with pytest.raises(ValueError, match=message):
            chat.invoke(wrong)
    with pytest.raises(ValueError, match="without a 'memory_id' in its metadata: compress it first, 'Nora"):
        memory_message("Bees?", DOCUMENTS[:1])


def test_the_example_answers_from_what_it_compressed_once(run_example):
    run_example("langchain_memories.py")
