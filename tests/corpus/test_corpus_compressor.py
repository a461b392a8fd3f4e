# SPDX-License-Identifier: Apache-2.0
"""Columns of texts in, columns of memories out: in order, with nothing lost, as engines for collections call it."""

import pickle
import random

import pytest
import torch
from transformers import AutoTokenizer

from context_compressors import CorpusCompressor, KVZipForCausalLM, MeanPoolingConfig, MeanPoolingForCausalLM
from context_compressors.corpus.memory_columns import memory_of_columns
from context_compressors.modeling.parts.packing import length_batches

RANDOM = random.Random(0)
TEXTS = ["".join(RANDOM.choices("abc def", k=length)) for length in (9, 0, 40, 1, 17, 40, 3)]
BAD = [None, 7, "half \ud800"]


@pytest.fixture(scope="module")
def folder(small_checkpoints):
    return small_checkpoints / "mean_pooling"


@pytest.fixture(scope="module")
def pipe(folder):
    return CorpusCompressor(folder, device="cpu").pipe


def test_batches_hold_every_row_once_the_longest_first_and_no_more_tokens_than_allowed():
    for num_rows, batch_size, batch_tokens in ((0, 3, 5), (1, None, 1), (50, 7, None), (50, None, 90), (50, 4, 60)):
        lengths = [RANDOM.randrange(40) for _ in range(num_rows)]
        batches = length_batches(lengths, batch_size, batch_tokens)
        assert sorted(row for batch in batches for row in batch) == list(range(num_rows))
        longest = [max(lengths[row] for row in batch) for batch in batches]
        assert longest == sorted(longest, reverse=True)
        for batch, most, following in zip(batches, longest, [*batches[1:], []], strict=False):
            assert batch == sorted(batch)
            assert len(batch) <= (batch_size or 50)
            assert len(batch) == 1 or len(batch) * most <= (batch_tokens or 10_000)
            full = len(batch) == batch_size or (len(batch) + 1) * most > (batch_tokens or 10_000)
            assert full or not following, "no batch ends before it must"


def test_rows_of_very_unlike_lengths_are_not_padded_to_each_other():
    lengths = [600, 5000, 90, 4000, 40, 60, 80, 2, 1]
    by_length = length_batches(lengths, 8, most_padding=0.5)
    assert by_length == [[1, 3], [0, 2], [4, 5, 6, 7, 8]]
    in_order = length_batches(lengths, 8, most_padding=0.5, in_order=True)
    assert in_order == [[0], [1], [2], [3], [4, 5, 6, 7, 8]]
    for batch in (*by_length, *in_order):
        pads = len(batch) * max(lengths[row] for row in batch) - sum(lengths[row] for row in batch)
        assert pads <= max(512, sum(lengths[row] for row in batch) / 2)
    assert length_batches([3] * 5, 2, most_padding=0.5, in_order=True) == [[0, 1], [2, 3], [4]]
    assert length_batches([], 2, in_order=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("memory_dtype", ["int8", "float16"])
def test_each_row_holds_what_its_text_alone_is_compressed_to(folder, pipe, memory_dtype):
    compressor = CorpusCompressor(folder, 2, batch_tokens=60, device="cpu", memory_dtype=memory_dtype)
    texts = [*TEXTS[:3], *BAD, *TEXTS[3:]]
    batch = {"id": list(range(10)), "text": texts, "metadata": [f'{{"n": {row}}}' for row in range(10)]}
    table = pickle.loads(pickle.dumps(compressor))(batch)
    assert table["id"].to_pylist() == [str(row) for row in range(10)]
    errors = table["error"].to_pylist()
    assert [error is not None for error in errors] == [text in BAD for text in texts]
    assert errors[3].startswith("TypeError: `text` must be a text")
    assert "half of one (a lone surrogate)" in errors[5]
    good = [row for row, text in enumerate(texts) if text not in BAD]
    memory = memory_of_columns(table.take(good), compressor.form)
    assert table.take(good)["text"].to_pylist() == [texts[row] for row in good]
    assert table.take(good)["metadata"].to_pylist() == [f'{{"n": {row}}}' for row in good]
    for row, place in enumerate(good):
        alone = pipe.compress(texts[place], ratio=2)
        kept = alone.quantize(memory_dtype) if memory_dtype == "int8" else alone
        own = memory.rows(row)
        assert (own.model_id, own.ratio) == (alone.model_id, 2)
        assert int(own.num_context_tokens) == int(alone.num_context_tokens)
        # Beside others and alone the last digits differ, which may round to a neighbour.
        torch.testing.assert_close(
            own.dequantize().embeddings.float(), kept.dequantize().embeddings, atol=0.02, rtol=0.01
        )


def test_heads_that_keep_unlike_numbers_of_key_values_keep_their_names(folder, pipe):
    model = KVZipForCausalLM.from_base(folder.parent / "base").eval()
    zipping = model.question_answering(pipe.tokenizer)
    compressor = CorpusCompressor(zipping, 2, device="cpu", memory_dtype="float16")
    memory = memory_of_columns(compressor({"id": range(len(TEXTS)), "text": TEXTS}), compressor.form)
    for row, text in enumerate(TEXTS):
        alone, own = zipping.compress(text, ratio=2), memory.rows(row)
        for name in ("head_ids", "coarsest_ratios", "num_slots"):
            assert getattr(own, name).tolist() == getattr(alone, name).tolist()


def test_the_first_tokens_of_a_long_text_are_those_of_the_whole_and_not_all_is_read(pipe):
    words = ["".join(RANDOM.choices("abcde", k=RANDOM.randrange(1, 9))) for _ in range(3000)]
    texts = [" ".join(words), "short", "x" * 20_000, " " * 20_000 + "behind spaces", "\n".join(words)]
    for most in (5, 40):
        found, whole = pipe.document_ids(texts, most), pipe.document_ids(texts)
        assert found == [ids[:most] for ids in whole]


def test_a_text_longer_than_a_batch_is_read_in_parts(small_checkpoints, monkeypatch):
    config = MeanPoolingConfig.from_pretrained(small_checkpoints / "mean_pooling", chunk_size=8)
    model = MeanPoolingForCausalLM.from_pretrained(small_checkpoints / "mean_pooling", config=config).eval()
    pipe = model.question_answering(AutoTokenizer.from_pretrained(small_checkpoints / "mean_pooling"))
    sizes, encode, text = [], model.model.encode, "Nora Lind sold honey. " * 20
    ((_, expected),) = CorpusCompressor(pipe, 2).compress([text])
    monkeypatch.setattr(
        model.model, "encode", lambda chunks, *given: sizes.append(chunks.input_ids.numel()) or encode(chunks, *given)
    )
    ((_, found),) = CorpusCompressor(pipe, 2, batch_tokens=20).compress([text])
    assert max(sizes) <= 20 < sum(sizes)
    assert (found.embeddings.int() - expected.embeddings.int()).abs().max() <= 1
    assert model.model.tokens_at_once is None


def test_a_batch_that_fails_is_halved_until_the_bad_row_is_found(folder, pipe, monkeypatch):
    compress, sizes = pipe.compress_ids, []
    bad = pipe.document_ids(TEXTS[4])[0]

    def out_of_memory(rows, *arguments):
        sizes.append(len(rows))
        if len(rows) > 3 or bad in rows:
            raise torch.OutOfMemoryError("too much")
        return compress(rows, *arguments)

    monkeypatch.setattr(pipe, "compress_ids", out_of_memory)
    errors = CorpusCompressor(pipe)({"id": range(7), "text": TEXTS})["error"].to_pylist()
    assert errors == [*[None] * 4, "OutOfMemoryError: too much", None, None]
    # One token that tells what is wrong with all rows, and then all of them at once.
    assert sizes[:2] == [1, 7]


def test_what_is_wrong_with_all_rows_is_refused(folder, pipe):
    with pytest.raises(ValueError, match="was not trained for the ratio 5"):
        next(CorpusCompressor(pipe, 5).compress(TEXTS))
    with pytest.raises(TypeError, match="give the model's folder or Hub id"):
        pickle.dumps(CorpusCompressor(pipe))
    for name, value in (("memory_dtype", "int3"), ("batch_tokens", 0)):
        with pytest.raises(ValueError, match=name):
            CorpusCompressor(folder, **{name: value})
    at_once = [len(rows) for rows, _ in CorpusCompressor(pipe).compress(["a word " * 60] * 20)]
    assert 1 < max(at_once) < 20, "512 tokens on a CPU"
