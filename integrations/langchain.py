# SPDX-License-Identifier: Apache-2.0
"""LangChain: documents that carry the id of their memory, and a chat model that reads memories by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .document_memories import MEMORY_ID, DocumentMemories, memory_ids, with_memory_id

try:
    from langchain_core.callbacks import CallbackManagerForLLMRun, Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from pydantic import ConfigDict, Field
except ImportError as error:
    raise ImportError("this needs `langchain-core`: pip install -e '.[langchain]' in the clone") from error

_ROLES = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant"}


class MemoryDocumentCompressor(BaseDocumentCompressor):
    """Compresses documents once, and writes the id of each one's memory, if it is not blank, into its metadata."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    memories: DocumentMemories

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return copies of documents that carry the ids of their memories; `query` and `callbacks` are not read."""
        ids = self.memories.compress(
            [document.page_content for document in documents],
            [document.metadata.get(MEMORY_ID) for document in documents],
        )
        return [
            document.model_copy(update={"metadata": with_memory_id(document.metadata, id_)})
            for document, id_ in zip(documents, ids, strict=True)
        ]


class ChatMemoryReader(BaseChatModel):
    """A chat model that reads memories in place of texts: the compressor's own decoder.

    The user's messages name memories in content blocks `{"type": "memory", "memory_id": ...}`, see [`memory_message`].

    ```python
    chat = ChatMemoryReader(memories=memories, generation={"max_new_tokens": 32})
    chat.invoke([memory_message("Who wrote it?", documents)])
    ```

    `generation` has arguments of `generate`; by default, greedily and at most 64 new tokens.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    memories: DocumentMemories
    generation: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "context-compressor"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # What a cache of answers goes by.
        return {"model": self.memories.pipe.model.model_id, "generation": self.generation}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = {**self.generation, **kwargs, **({} if stop is None else {"stop": stop})}
        answer = self.memories.answer(*_read(messages), **options)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])


def memory_message(question: str, documents: Sequence[Document]) -> HumanMessage:
    """Return a message that asks about compressed documents; `ValueError` for one that was not compressed."""
    ids = memory_ids([document.page_content for document in documents], [document.metadata for document in documents])
    blocks = [{"type": "memory", MEMORY_ID: id_} for id_ in ids]
    return HumanMessage([*blocks, {"type": "text", "text": question}])


def _read(messages: Sequence[BaseMessage]) -> tuple[list[dict[str, str]], list[str]]:
    """Messages as the pipeline takes them, and the ids that they name."""
    plain, ids = [], []
    for message in messages:
        roles = [role for kind, role in _ROLES.items() if isinstance(message, kind)]
        if not roles:
            raise ValueError(f"messages are the system's, the user's and the assistant's, got one of {message.type!r}")
        texts = []
        for part in [message.content] if isinstance(message.content, str) else message.content:
            block: dict[str, Any] = {"type": "text", "text": part} if isinstance(part, str) else part
            kind = block.get("type")
            if kind == "memory" and roles == ["user"] and isinstance(block.get(MEMORY_ID), str):
                ids.append(block[MEMORY_ID])
            elif kind == "text" and isinstance(block.get("text"), str):
                texts.append(block["text"])
            else:
                what = "content is text, and in the user's messages {'type': 'memory', 'memory_id': ...}"
                raise ValueError(f"{what}, got {part!r} in one of {message.type!r}")
        plain.append({"role": roles[0], "content": "\n".join(texts)})
    return plain, ids
