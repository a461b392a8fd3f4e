# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex: nodes that carry the id of their memory, and a response synthesizer that reads memories by id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from .document_memories import MEMORY_ID, DocumentMemories, memory_ids, with_memory_id

try:
    from llama_index.core.base.response.schema import RESPONSE_TYPE
    from llama_index.core.llms import MockLLM
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.response_synthesizers import BaseSynthesizer
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, QueryType
    from llama_index.core.types import RESPONSE_TEXT_TYPE
except ImportError as error:
    raise ImportError("this needs `llama-index-core`: pip install -e '.[llama-index]' in the clone") from error


class MemoryPostprocessor(BaseNodePostprocessor):
    """Compresses nodes once, and writes the id of each one's memory into its metadata, which no model sees."""

    memories: DocumentMemories

    @classmethod
    def class_name(cls) -> str:
        """Return the name for LlamaIndex's serialization."""
        return "MemoryPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        ids = self.memories.compress(_texts(nodes), [node.metadata.get(MEMORY_ID) for node in nodes])
        return [_with_memory_id(node, id_) for node, id_ in zip(nodes, ids, strict=True)]


class MemorySynthesizer(BaseSynthesizer):
    """Answers from the memories of nodes with the compressor's own decoder; `ValueError` for one not compressed.

    ```python
    engine = RetrieverQueryEngine(
        retriever, response_synthesizer=MemorySynthesizer(memories), node_postprocessors=[MemoryPostprocessor(...)]
    )
    ```

    `generation` has arguments of `generate`; by default, greedily and at most 64 new tokens.
    """

    def __init__(self, memories: DocumentMemories, generation: dict[str, Any] | None = None):
        # No other language model is asked, and without one here LlamaIndex would look for OpenAI's.
        super().__init__(llm=MockLLM())
        self.memories, self.generation = memories, generation or {}

    def synthesize(self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> RESPONSE_TYPE:
        """Answer a question from nodes; see `BaseSynthesizer`."""
        return super().synthesize(query, nodes, *args, memory_ids=_ids(nodes), **kwargs)

    async def asynthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any
    ) -> RESPONSE_TYPE:
        """Answer a question without waiting for it."""
        return await super().asynthesize(query, nodes, *args, memory_ids=_ids(nodes), **kwargs)

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        memory_ids: Sequence[str] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Return the answer from memories; texts are compressed where no ids are given."""
        ids = memory_ids
        if ids is None:
            ids = [id_ for id_ in self.memories.compress(text_chunks) if id_ is not None]
        return self.memories.answer(query_str, ids, **{**self.generation, **response_kwargs})

    async def aget_response(self, *args: Any, **kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Return the answer without waiting for it."""
        return await asyncio.to_thread(self.get_response, *args, **kwargs)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        """The checkpoint has its own."""


def _texts(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [node.node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]


def _ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return memory_ids(_texts(nodes), [node.metadata for node in nodes])


def _with_memory_id(node: NodeWithScore, memory_id: str | None) -> NodeWithScore:
    update = {
        "metadata": with_memory_id(node.metadata, memory_id),
        "excluded_llm_metadata_keys": list({*node.node.excluded_llm_metadata_keys, MEMORY_ID}),
        "excluded_embed_metadata_keys": list({*node.node.excluded_embed_metadata_keys, MEMORY_ID}),
    }
    return NodeWithScore(node=node.node.model_copy(update=update), score=node.score)
