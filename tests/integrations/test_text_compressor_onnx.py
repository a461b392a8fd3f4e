# SPDX-License-Identifier: Apache-2.0
"""A text compressor keeps the same words in onnxruntime."""

import pytest
from tiny_encoder import save_encoder

from context_compressors import TextCompressor
from context_compressors.data.synthetic_documents import generate_document

pytest.importorskip("onnxruntime", reason="onnxruntime has an environment of its own: make test-integrations")
pytest.importorskip("onnx", reason="torch writes ONNX files with it")


def test_onnxruntime_keeps_the_same_words(tmp_path):
    folder = save_encoder(tmp_path / "classifier", is_classifier=True)
    compressor = TextCompressor.from_pretrained(folder)
    compressor.export_onnx(tmp_path / "model.onnx")
    exported = TextCompressor.from_pretrained(folder, onnx_file=tmp_path / "model.onnx")
    for num_tokens in (32, 300):
        text = generate_document(5, num_tokens=num_tokens).text
        for question in (None, "Which harbour was built first?"):
            wanted = compressor.word_scores(text, question)
            assert exported.word_scores(text, question) == pytest.approx(wanted, abs=1e-4)
            wanted = compressor.compress_text(text, 3, question=question)
            assert exported.compress_text(text, 3, question=question) == wanted
