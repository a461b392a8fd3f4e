# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex compresses what a retriever finds, and answers from the memories: `make test-integrations`."""

import asyncio
import json

import pytest

pytest.importorskip("llama_index.core", reason="LlamaIndex has an environment of its own: make test-integrations")

from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from context_compressors.integrations.llama_index import MemoryPostprocessor, MemorySynthesizer

pytestmark = pytest.mark.usefixtures("no_network")

LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8}
TEXTS = {"bees": "Nora Lind keeps bees.", "blank": "  ", "mill": "The mill burned down in 1902."}


class Shelf(BaseRetriever):
    """Finds all nodes, the last one first."""

    def _retrieve(self, query_bundle):
        nodes = [TextNode(id_=name, text=text, metadata={"name": name}) for name, text in TEXTS.items()]
        return [NodeWithScore(node=node, score=0.5) for node in nodes[::-1]]


def test_nodes_keep_order_and_text_and_the_query_engine_answers_as_the_pipeline_does(memories):
    pipe, postprocessor = memories.pipe, MemoryPostprocessor(memories=memories)
    found = Shelf().retrieve("Bees?")
    nodes = postprocessor.postprocess_nodes(found, query_str="Bees?")
    assert [(node.node_id, node.text, node.score) for node in nodes] == [(n.node_id, n.text, n.score) for n in found]
    mill, blank, bees = (node.metadata.get("memory_id") for node in nodes)
    assert (blank, found[0].metadata) == (None, {"name": "mill"})
    assert json.loads(nodes[0].node.to_json())["metadata"] == {"name": "mill", "memory_id": mill}
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert nodes[0].node.get_content(mode) == found[0].node.get_content(mode)

    synthesizer = MemorySynthesizer(memories, generation=LENGTH)
    engine = RetrieverQueryEngine(Shelf(), response_synthesizer=synthesizer, node_postprocessors=[postprocessor])
    rows = [pipe.compress(TEXTS[name], ratio=4).quantize("int8").dequantize() for name in ("mill", "bees")]
    expected = pipe("Bees?", memory=rows, join="likeliest", **LENGTH)["answer"]
    response = engine.query("Bees?")
    assert response.response == expected != ""
    assert [node.node_id for node in response.source_nodes] == ["mill", "blank", "bees"]
    assert response.metadata["bees"]["memory_id"] == bees
    assert asyncio.run(engine.aquery("Bees?")).response == expected
    alone = pipe("Bees?", context="", **LENGTH)["answer"]
    assert synthesizer.synthesize("Bees?", nodes[1:2]).response == alone
    assert synthesizer.get_response("Bees?", [TEXTS["mill"], TEXTS["bees"]]) == expected
    with pytest.raises(ValueError, match="without a 'memory_id' in its metadata: compress it first, 'The mill"):
        synthesizer.synthesize("Bees?", found)


def test_the_example_answers_from_what_it_compressed_once(run_example):
    run_example("llama_index_memories.py")
