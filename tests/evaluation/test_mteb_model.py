# SPDX-License-Identifier: Apache-2.0
"""The retriever that MTEB takes, without MTEB: `tests/integrations/test_mteb.py` has it evaluated."""

import pytest
import torch

from context_compressors import DeCALConfig, DeCALForRetrieval
from context_compressors.data.retrieval_sources import TextEncoder
from context_compressors.evaluation.mteb_model import MTEBRetriever
from context_compressors.modeling.parts.late_interaction import chamfer

WORDS = ("otter", "heron", "badger", "salmon", "lynx", "raven")
TEXTS = [f"A {word} sleeps at noon." * (1 + row % 3) for row, word in enumerate(WORDS)]


@pytest.fixture(scope="module")
def retriever(tokenizer):
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    config = DeCALConfig(decoder_config={**shape, "dropout_rate": 0.0}, compression_ratios=[2, 4])
    return DeCALForRetrieval(config).eval()


def test_queries_and_documents_are_cut_to_their_lengths_and_compared_by_chamfer(retriever, tokenizer):
    encoder = MTEBRetriever(retriever, tokenizer, ratio=4, max_query_tokens=8, max_document_tokens=16)
    batches = [{"text": TEXTS[:4]}, {"text": TEXTS[4:]}]
    sides = [
        encoder.encode(batches, prompt_type=kind, batch_size=2, hf_split="test") for kind in ("query", "document")
    ]
    for length, vectors in zip((8, 16), sides, strict=True):
        for text, found in zip(TEXTS, vectors, strict=True):
            ids = torch.tensor([TextEncoder(tokenizer, length)(text)[0]])
            torch.testing.assert_close(found, retriever.encode(ids, ratio=4).vectors[0])
    scores = encoder.similarity(*sides)
    masks = [torch.ones(1, len(side[0]), dtype=torch.long) for side in sides]
    wanted = chamfer(sides[0][0][None], masks[0], sides[1][0][None], masks[1])[0, 0]
    torch.testing.assert_close(scores[0, 0], wanted)
    torch.testing.assert_close(encoder.similarity_pairwise(*sides), scores.diagonal())
