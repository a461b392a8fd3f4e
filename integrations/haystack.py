# SPDX-License-Identifier: Apache-2.0
"""Haystack: components that compress documents and answer from their memories by id."""

from __future__ import annotations

import dataclasses
from typing import Any

from .document_memories import MEMORY_ID, DocumentMemories, memory_ids, with_memory_id

try:
    from haystack import Document, component, default_from_dict, default_to_dict
except ImportError as error:
    raise ImportError("this needs `haystack-ai`: pip install -e '.[haystack]' in the clone") from error


class _OfMemories:
    """Loading and serialization of components with memories."""

    memories: DocumentMemories

    def warm_up(self) -> None:
        """Load the model."""
        self.memories.pipe  # noqa: B018

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The component of a dictionary; those of one process with the same arguments share model and memories."""
        arguments = data["init_parameters"]
        memories = DocumentMemories.from_dict(arguments["memories"])
        return default_from_dict(cls, {**data, "init_parameters": {**arguments, "memories": memories}})


@component
class MemoryDocumentCompressor(_OfMemories):
    """Compresses documents once, and writes the id of each one's memory into its metadata, as `memory_id`.

    It stands behind a retriever, or in front of a `DocumentWriter`; a blank document gets no memory.
    """

    def __init__(self, memories: DocumentMemories):
        self.memories = memories

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Return copies of documents that carry the ids of their memories."""
        ids = self.memories.compress(
            [document.content for document in documents], [document.meta.get(MEMORY_ID) for document in documents]
        )
        return {
            "documents": [
                dataclasses.replace(document, meta=with_memory_id(document.meta, id_))
                for document, id_ in zip(documents, ids, strict=True)
            ]
        }

    def to_dict(self) -> dict[str, Any]:
        """The component as a dictionary; `ValueError` where its model is a pipeline that was loaded already."""
        return default_to_dict(self, memories=self.memories.to_dict())


@component
class MemoryReader(_OfMemories):
    """Answers a question from the memories of documents with the compressor's decoder, as a generator's `replies`."""

    def __init__(self, memories: DocumentMemories, generation_kwargs: dict[str, Any] | None = None):
        self.memories, self.generation_kwargs = memories, generation_kwargs or {}

    @component.output_types(replies=list[str])
    def run(
        self, query: str, documents: list[Document], generation_kwargs: dict[str, Any] | None = None
    ) -> dict[str, list[str]]:
        """Return one reply; `ValueError` for a document that was not compressed."""
        ids = memory_ids([document.content for document in documents], [document.meta for document in documents])
        asked = {**self.generation_kwargs, **(generation_kwargs or {})}
        return {"replies": [self.memories.answer(query, ids, **asked)]}

    def to_dict(self) -> dict[str, Any]:
        """The component as a dictionary; `ValueError` where its model is a pipeline that was loaded already."""
        return default_to_dict(self, memories=self.memories.to_dict(), generation_kwargs=self.generation_kwargs)
