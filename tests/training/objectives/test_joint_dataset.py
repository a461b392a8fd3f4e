# SPDX-License-Identifier: Apache-2.0
import pyarrow
import pyarrow.parquet
import pytest
import torch

from context_compressors.data.synthetic_documents import generate_document
from context_compressors.modeling.compressor.chunking import cut
from context_compressors.modeling.parts.position_layout import decoder_position_ids, encoder_position_ids
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.joint_pretraining import JointDataset

GENERATED = {"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}
TEXT = {"path": "text.parquet", "tasks": ["continuation", "reconstruction"], "weight": 1}
TEXTS = [generate_document(seed, num_tokens=40 + 120 * seed).text for seed in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    table = pyarrow.Table.from_pylist([{"text": text} for text in [*TEXTS, ""]])
    pyarrow.parquet.write_table(table, path / "text.parquet")
    return str(path)


def make(tokenizer, folder, *sources, num_examples=30, seed=0, batch_size=1, **fields):
    fields = {"min_document_tokens": 40, "max_document_tokens": 120, **fields}
    data = DataArguments(sources=list(sources), data_dir=folder, **fields)
    return JointDataset(data, tokenizer, num_examples, seed=seed, batch_size=batch_size)


@pytest.mark.parametrize("source", [GENERATED, TEXT])
def test_a_document_is_cut_in_the_middle(tokenizer, folder, source):
    dataset = make(tokenizer, folder, source)
    whole = [encode(tokenizer, text) for text in TEXTS]
    lengths, ends = [], []
    for index in range(30):
        example = dataset[index]
        context, completion = example["context_ids"], example["continuation_ids"]
        ends.append(completion[-1] == tokenizer.eos_token_id)
        completion = completion[: len(completion) - ends[-1]]
        assert example["reconstruction_ids"] == [*context, tokenizer.eos_token_id]
        # The encoder also reads BOS.
        length = 1 + len(context) + len(completion)
        lengths.append(length)
        assert 1 + len(context) == length // 2
        document = context + completion
        if source is TEXT:
            places = [(text, i) for text in whole for i in range(len(text)) if document == text[i : i + len(document)]]
            assert places
            # Only where the text itself ends, EOS does.
            assert ends[-1] == any(i + len(document) == len(text) for text, i in places)
    assert sum(ends) < 5
    assert 40 <= min(lengths) < 60
    assert 100 < max(lengths) <= 120


@pytest.mark.parametrize(
    ("length", "p", "num_chunks"), [(510, 255, 1), (1021, 510, 1), (2040, 1020, 2), (4080, 2040, 4)]
)
def test_context_and_completion_split(tokenizer, tmp_path, length, p, num_chunks):
    """EPL, Appendix C: p = floor(|X| / 2)."""
    table = pyarrow.table({"text": [" ".join(map(str, range(2000)))]})
    pyarrow.parquet.write_table(table, tmp_path / "text.parquet")
    dataset = make(
        tokenizer, str(tmp_path), TEXT, num_examples=2, min_document_tokens=length, max_document_tokens=length
    )
    batch = CompressionCollator.from_tokenizer(tokenizer, mode="joint")([dataset[0]])
    assert batch["context_input_ids"].shape == (1, p)
    assert batch["reconstruction_labels"].ne(-100).sum() == p  # without [AE] it starts with BOS; EOS is learned
    assert batch["continuation_labels"].ne(-100).sum() == length - p  # it was cut there: no EOS
    chunks = cut(batch["context_input_ids"], torch.ones(1, p, dtype=torch.long), [p], 510, "enhanced")
    assert chunks.chunks_per_row == num_chunks


@pytest.mark.parametrize(("length", "lengths", "counts"), [(1020, [510], [102]), (2040, [510, 510], [102, 102])])
def test_a_reconstruction_has_the_position_ids_that_the_encoder_gave_its_tokens(
    tokenizer, tmp_path, length, lengths, counts
):
    """EPL, Tables 2 and 12: the encoder reads x_0 ... x_1019, BOS first, at 1 ... 1020, and so does the decoder."""
    table = pyarrow.table({"text": [" ".join(map(str, range(2000)))]})
    pyarrow.parquet.write_table(table, tmp_path / "text.parquet")
    limits = {"min_document_tokens": length, "max_document_tokens": length}
    dataset = make(tokenizer, str(tmp_path), TEXT, num_examples=2, **limits)
    starts = {"reconstruction": 500, "continuation": 501}
    batch = CompressionCollator.from_tokenizer(tokenizer, mode="joint", task_start_ids=starts)([dataset[0]])
    context, text = batch["context_input_ids"][0].tolist(), batch["reconstruction_input_ids"][0].tolist()
    assert context[0] == tokenizer.bos_token_id
    assert text == [500, *context, tokenizer.eos_token_id]
    assert batch["reconstruction_labels"][0].tolist() == [-100, *text[1:]]
    encoded = []
    for start, size, count in zip((0, 510), lengths, counts, strict=False):
        encoded += encoder_position_ids(size, count, "enhanced", start)[0].tolist()
    text_ids = decoder_position_ids(lengths, counts, len(text), "enhanced", "embeddings", "reconstruction")[1].tolist()
    assert encoded == list(range(1, length // 2 + 1))
    assert text_ids[:3] == [0, 1, 2]
    assert text_ids[1:-1] == encoded
    # A continuation goes on behind them: its [LM] has the last token's id.
    continuation = batch["continuation_input_ids"][0].tolist()
    later = decoder_position_ids(lengths, counts, len(continuation), "enhanced", "embeddings", "continuation")[1]
    assert continuation[1] not in (tokenizer.bos_token_id, 501)
    assert later[:2].tolist() == [length // 2, length // 2 + 1]


def test_without_a_number_all_rows_come_once(tokenizer, tmp_path):
    for name, texts in (("a", TEXTS * 2), ("b", TEXTS[1:])):
        table = pyarrow.Table.from_pylist([{"id": row, "text": text} for row, text in enumerate(texts)])
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    sources = [{"path": f"{name}.parquet", "tasks": TEXT["tasks"]} for name in "ab"]
    dataset = make(tokenizer, str(tmp_path), *sources, num_examples=None, min_document_tokens=20)
    ids = [dataset[index]["id"] for index in range(len(dataset))]
    assert sorted(ids) == [f"a.parquet/{row}" for row in range(8)] + [f"b.parquet/{row}" for row in range(3)]
    assert ids != sorted(ids, key=lambda name: name[0])


def test_an_example_depends_on_index_and_seed_only(tokenizer, folder):
    first, second = (make(tokenizer, folder, GENERATED, TEXT) for _ in range(2))
    backwards = [second[index] for index in reversed(range(30))]
    assert [first[index] for index in range(30)] == backwards[::-1]
    other = make(tokenizer, folder, GENERATED, TEXT, seed=1)
    assert [other[index] for index in range(30)] != backwards[::-1]


def test_texts_that_are_too_short_are_passed_over(tokenizer, folder):
    dataset = make(tokenizer, folder, TEXT, min_document_tokens=250, max_document_tokens=300)
    short = encode(tokenizer, TEXTS[0])
    assert len(short) < 249
    assert all(len(dataset[index]["context_ids"]) >= 124 for index in range(30))
    with pytest.raises(ValueError, match=r"all rows are shorter than 5000 tokens \(min_document_tokens\)"):
        make(tokenizer, folder, TEXT, min_document_tokens=5000, max_document_tokens=5000)[0]


def test_the_length_limit_grows_and_groups_are_of_like_length(tokenizer, folder):
    def lengths(**fields):
        dataset = make(tokenizer, folder, GENERATED, num_examples=80, **fields)
        return [JointDataset.num_tokens(dataset[index]) for index in range(80)]

    growing = lengths(length_schedule=[[0.0, 44], [1.0, 120]])
    # Context, context again, completion, and EOS behind the second or both.
    assert max(growing[:10]) <= 1.5 * 55 + 2
    assert max(growing[60:]) > 1.5 * 90
    plain, grouped = lengths(), lengths(group_batches=10, batch_size=4)
    assert sorted(plain) == sorted(grouped)
    assert plain != grouped
    spread = [max(grouped[i : i + 4]) - min(grouped[i : i + 4]) for i in range(0, 80, 4)]
    assert sum(spread) < 0.3 * sum(max(plain[i : i + 4]) - min(plain[i : i + 4]) for i in range(0, 80, 4))


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        ({**TEXT, "tasks": ["reconstruction"]}, {}, r"must be the tasks of source 'text.parquet', got \['reconstr"),
        ({**GENERATED, "tasks": ["question_answering"]}, {}, "must be the tasks of source 'generated'"),
        (TEXT, {"min_document_tokens": 3}, r"min_document_tokens must be 4 to max_document_tokens \(120\), got 3"),
        (TEXT, {"min_document_tokens": 121}, "got 121"),
        (GENERATED, {"max_document_tokens": 4080}, "max_document_tokens must be at most 3968 with generated"),
    ],
)
def test_wrong_arguments_are_refused(tokenizer, folder, source, fields, message):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, folder, source, **fields)
