# SPDX-License-Identifier: Apache-2.0
"""xRAG's embeddings are those of sentence-transformers, of a real sentence encoder: `make test-integrations`."""

import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM

from context_compressors import XRAGForCausalLM

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers has an environment of its own: make test-integrations"
)
packaged = pytest.importorskip("all_minilm_l6_v2", reason="the packaged encoder is there, too")
PASSAGES = [
    "The lighthouse at Sandvik Point was first lit in 1871.",
    "Its keeper kept eleven hives of bees, and sold the honey in Bergen. " * 6,
]


@torch.no_grad()
def test_embeddings_of_passages_are_those_of_sentence_transformers(small_checkpoints, tmp_path):
    encoder, base = tmp_path / "encoder", small_checkpoints / "base"
    with zipfile.ZipFile(packaged.get_model_zip_path()) as archive:
        archive.extractall(encoder)
    wanted = torch.from_numpy(sentence_transformers.SentenceTransformer(str(encoder), device="cpu").encode(PASSAGES))
    options = {"normalize_embeddings": True, "passage_readout": "mean", "compression_ratios": [180]}
    model = XRAGForCausalLM.from_base(base, encoder=encoder, **options).eval()
    bridge = model.model.slot_mlp
    for passage, embedding in zip(PASSAGES, wanted, strict=True):
        context = model.encoder_tokenizer(passage, return_tensors="pt")
        slots = model.compress(**context).embeddings
        torch.testing.assert_close(slots[0], bridge(embedding[None]), atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path / "compressor")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "compressor")
    again = loaded.encoder_tokenizer(PASSAGES[-1], return_tensors="pt")
    torch.testing.assert_close(loaded.compress(**again).embeddings, slots, atol=1e-6, rtol=1e-5)
