# SPDX-License-Identifier: Apache-2.0
"""Published data sets as Parquet in our columns: a few rows of each, in the form that its authors publish."""

import dataclasses
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from record_files import lines, write_files

from context_compressors import cli
from context_compressors.data.convert_published import convert
from context_compressors.data.files import read_records
from context_compressors.data.published_sets import PUBLISHED_SETS
from context_compressors.data.retrieval_sources import JudgedQueries, RetrievalSource
from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource

SECTION = {"title": "T", "section_title": "S", "background": "B"}
PARAGRAPH = {
    "id": "d",
    "context": "c CANNOTANSWER",
    "qas": [
        {"id": "d#0", "question": "q", "answers": [{"text": "a"}, {"text": "a"}, {"text": "b"}], "followup": "y"},
        {"id": "d#1", "question": "r", "answers": [{"text": "CANNOTANSWER"}], "followup": "n"},
    ],
}
QUAC_ROWS = [
    {"id": "d#0", "context": "c CANNOTANSWER", "question": "q", "answers": ["a", "b"]},
    {"id": "d#1", "context": "c CANNOTANSWER", "question": "r", "answers": ["CANNOTANSWER"]},
]
HOPS = {
    "_id": "7",
    "type": "bridge",
    "question": "q",
    "answer": "a",
    "supporting_facts": [["Rome", 0], ["Rome", 1]],
    "context": [["Rome", ["R.", " r."]], ["Oslo", ["O."]]],
}
HOPS_ROW = {"id": "7", "context": "Rome\nR. r.\n\nOslo\nO.", "question": "q", "answers": ["a"]}
DOCUMENT = {"id": "1", "title": "T", "text": "o", "score": "1.5", "hasanswer": False, "isgold": False}
DPR = {"title": "N", "text": "n", "score": 0, "title_score": 0, "passage_id": "9"}
QASPER_ANSWER = {
    "unanswerable": False, "extractive_spans": ["x", "y"], "yes_no": None, "free_form_answer": "", "evidence": [],
    "highlighted_evidence": [],
}  # fmt: skip
QASPER = {
    "title": "T",
    "abstract": "A",
    "full_text": [{"section_name": "One", "paragraphs": ["p", "r"]}, {"section_name": None, "paragraphs": ["s"]}],
    "qas": [
        {
            "question": "q",
            "question_id": "7",
            "answers": [
                {"answer": QASPER_ANSWER, "annotation_id": "1"},
                {"answer": {**QASPER_ANSWER, "extractive_spans": [], "free_form_answer": "f"}},
                {"answer": {**QASPER_ANSWER, "extractive_spans": [], "yes_no": False}},
                {"answer": {**QASPER_ANSWER, "unanswerable": True, "extractive_spans": []}},
            ],
        }
    ],
}
QASPER_ROW = {
    "id": "7", "context": "T\n\nA\n\nOne\np\nr\n\ns", "question": "q", "answers": ["x, y", "f", "no", "unanswerable"],
}  # fmt: skip
PAPER = "Below is a paper. Memorize the paper and answer my question after the paper.\n The paper begins. \n "
BOOK = "Below is some paragraphs in the book, T. Memorize the content and answer my question after the book.\n"
NO_ID = {"id": None, "question": "q"}
OF_LONGBENCH = {
    **dict.fromkeys(("task", "answer_prefix", "max_new_tokens", "all_classes", "length")),
    **NO_ID,
    "context": "c",
    "answers": ["a"],
}

# The head of mteb/scifact's card.
MTEB_CARD = """---
configs:
- config_name: default
  data_files:
  - split: test
    path: qrels/test.jsonl
- config_name: corpus
  data_files:
  - split: corpus
    path: corpus.jsonl
- config_name: queries
  data_files:
  - split: queries
    path: queries.jsonl
---
"""


def as_columns(items):
    """A list of mappings as the Hub has it."""
    return {name: [item[name] for item in items] for name in items[0]}


# Data set, the files that are published (texts, or records of a Parquet file), further arguments, what is written.
FORMS = [
    (
        "mrqa",
        {
            "train/HotpotQA.jsonl.gz": lines(
                {"header": {"dataset": "HotpotQA", "split": "train"}},
                {
                    "id": "",
                    "context": " c ",
                    "context_tokens": [["c", 0]],
                    "qas": [
                        {"qid": "1", "question": "q", "answers": ["a", "b"], "detected_answers": []},
                        {"qid": "2", "question": "r", "answers": ["a"], "detected_answers": []},
                    ],
                },
            ),
            "train/SQuAD.jsonl.gz": lines(
                {"header": {"dataset": "SQuAD", "split": "train"}},
                {"context": "d", "qas": [{"qid": "3", "question": "q", "answers": ["a"], "detected_answers": []}]},
            ),
            "dev/SQuAD.jsonl.gz": lines({"header": {"dataset": "SQuAD", "split": "dev"}}),
        },
        {},
        [
            {"subset": "HotpotQA", "id": "1", "context": "c", "question": "q", "answers": ["a", "b"]},
            {"subset": "HotpotQA", "id": "2", "context": "c", "question": "r", "answers": ["a"]},
            {"subset": "SQuAD", "id": "3", "context": "d", "question": "q", "answers": ["a"]},
        ],
    ),
    ("quac", {"val_v0.2.json": json.dumps({"data": [{**SECTION, "paragraphs": [PARAGRAPH]}]})},
     {"split": "validation"}, QUAC_ROWS),
    ("quac", {"train.parquet": [{
        "dialogue_id": "d", "context": "c CANNOTANSWER", "turn_ids": ["d#0", "d#1"], "questions": ["q", "r"],
        "answers": {"texts": [["a", "a", "b"], ["CANNOTANSWER"]], "answer_starts": [[0, 0, 2], [2]]},
    }]}, {}, QUAC_ROWS),
    ("squad", {"train-v1.1.json": json.dumps({"data": [{"title": "T", "paragraphs": [PARAGRAPH]}], "version": "1.1"})},
     {}, QUAC_ROWS),
    ("squad_v2", {"dev-v2.0.json": json.dumps({"data": [{"title": "T", "paragraphs": [{**PARAGRAPH, "qas": [
        {"id": "n", "question": "n", "answers": [], "is_impossible": True}, *PARAGRAPH["qas"]]}]}]})},
     {"split": "validation"}, QUAC_ROWS),
    ("hotpotqa", {"hotpot_train_v1.1.json": json.dumps([HOPS, HOPS]), "hotpot_dev_distractor_v1.json": "[]"},
     {}, [HOPS_ROW] * 2),
    ("hotpotqa", {"hotpot_dev_distractor_v1.json": json.dumps([HOPS])},
     {"split": "validation", "supporting_passages": True}, [{**HOPS_ROW, "context": "Rome\nR. r."}]),
    ("hotpotqa", {"hotpot_train_v1.1.json": json.dumps([HOPS])},
     {"separate_passages": True}, [{**HOPS_ROW, "context": ["Rome\nR. r.", "Oslo\nO."]}]),
    ("2wikimqa", {"dev.json": json.dumps([{**HOPS, "evidences": [["a", "b", "c"]]}])}, {"split": "validation"},
     [HOPS_ROW]),
    ("2wikimqa", {"train.parquet": [
        {**HOPS, "context": json.dumps(HOPS["context"]), "supporting_facts": json.dumps(HOPS["supporting_facts"])}
    ]}, {}, [HOPS_ROW]),
    (
        "nq",
        {"nq-open-20_total_documents_gold_at_9.jsonl.gz": lines({
            "question": "q", "answers": ["a", "b"],
            "ctxs": [DOCUMENT, {**DOCUMENT, "title": "G", "text": "g", "isgold": True}],
            "nq_annotated_gold": {"title": "G", "long_answer": "g"},
        })},
        {"split": "test"},
        [{**NO_ID, "context": "T\no\n\nG\ng", "answers": ["a", "b"]}],
    ),
    ("pwc", {"PwC_train.jsonl": lines({"input": "c", "prompt": "q", "answer": "a"})}, {},
     [{**NO_ID, "context": "c", "answers": ["a"]}]),
    (
        "narrativeqa",
        {
            "qaps.csv": "document_id,set,question,answer1,answer2,question_tokenized\n"
            "d1,train,q,a,b,q\nd2,valid,r,a,b,r\n",
            "third_party/wikipedia/summaries.csv": 'document_id,set,summary,tokenized\n'
            'd1,train," c, ""d""",c\nd2,valid,e,e\n',
        },
        {},
        [{**NO_ID, "context": 'c, "d"', "answers": ["a", "b"]}],
    ),
    ("narrativeqa_stories", {"train.parquet": [{
        "document": {"id": "d", "summary": {"text": "s", "title": "t"}, "text": "c"},
        "question": {"text": "q", "tokens": ["q"]}, "answers": [{"text": "a", "tokens": ["a"]}],
    }]}, {}, [{**NO_ID, "context": "c", "answers": ["a"]}]),
    ("pubmedqa", {"ori_pqaa.json": json.dumps({
        "21": {"QUESTION": "q", "CONTEXTS": ["c", "d"], "LABELS": [], "LONG_ANSWER": "a", "final_decision": "no"},
        "22": {"QUESTION": "r", "CONTEXTS": ["e"], "LABELS": [], "LONG_ANSWER": "b", "final_decision": "yes"},
    }, indent=1)}, {}, [
        {"id": "21", "context": "c\nd", "question": "q", "answers": ["a"]},
        {"id": "22", "context": "e", "question": "r", "answers": ["b"]},
    ]),
    ("qasper", {"qasper-train-v0.3.json": json.dumps({"1909.1": QASPER})}, {}, [QASPER_ROW]),
    ("qasper", {"train.parquet": [{
        "id": "1909.1", **QASPER, "full_text": as_columns(QASPER["full_text"]),
        "qas": as_columns([{**QASPER["qas"][0], "answers": as_columns(
            [{"answer": given["answer"]} for given in QASPER["qas"][0]["answers"]]
        )}]),
    }]}, {}, [QASPER_ROW]),
    ("quality", {"QuALITY.v1.0.1.htmlstripped.train": lines({"article_id": "1", "article": "c", "questions": [
        {"question": "q", "question_unique_id": "1_A", "options": ["a", "b"], "gold_label": 2, "difficult": 0}
    ]})}, {}, [{"id": "1_A", "context": "c", "question": "q", "answers": ["b"]}]),
    ("quality_choices", {"QuALITY.v1.0.1.htmlstripped.train": lines({"article_id": "1", "article": "c", "questions": [
        {"question": "q", "question_unique_id": "1_A", "options": ["a", "b"], "gold_label": 2, "difficult": 0},
        {"question": "r", "question_unique_id": "1_B", "options": ["a", "b"]},
    ]})}, {}, [{"id": "1_A", "context": "c", "question": "q\n\nChoices:\nA. a\nB. b", "answers": ["B. b"]}]),
    ("quality", {"train.parquet": [{"article": "c", "question": "q", "options": ["a", "b"], "answer": 1}]},
     {}, [{**NO_ID, "context": "c", "answers": ["b"]}]),
    ("longalpaca", {"LongAlpaca-12k.json": json.dumps([
        {"instruction": f"{PAPER}c \n d \n Now the paper ends. \nq", "output": "a", "input": "", "file": "f"},
        {"instruction": "Name three fruits.", "output": "x"},
        {"instruction": f"{BOOK} e \n Now the material ends. r", "output": "b"},
    ])}, {}, [
        {**NO_ID, "context": "c \n d", "answers": ["a"]},
        {"id": None, "question": "r", "context": "e", "answers": ["b"]},
    ]),
    ("qmsum", {"jsonl/val.jsonl": lines({
        "topic_list": [], "general_query_list": [{"query": "q", "answer": "a"}],
        "specific_query_list": [{"query": "r", "answer": "b", "relevant_text_span": [["0", "1"]]}],
        "meeting_transcripts": [{"speaker": "A", "content": "x"}, {"speaker": "B", "content": "y"}],
    })}, {"split": "validation"}, [
        {**NO_ID, "context": "A: x\nB: y", "answers": ["a"]},
        {"id": None, "question": "r", "context": "A: x\nB: y", "answers": ["b"]},
    ]),
    ("cnn_dailymail", {"3.0.0/test-00000-of-00001.parquet": [{"article": "c", "highlights": "s", "id": "7"}]},
     {"split": "test"}, [{"id": "7", "context": "c", "summary": "s"}]),
    ("xsum", {"train.jsonl": lines({"document": "c", "summary": "s", "id": "7"})}, {},
     [{"id": "7", "context": "c", "summary": "s"}]),
    ("arxiv", {"val.txt": lines({
        "article_id": "7", "article_text": ["c .", "d ."], "abstract_text": ["<S> s . </S>", "<S> t . </S>"],
        "section_names": ["one"], "sections": [["c ."], ["d ."]], "labels": None,
    })}, {"split": "validation"}, [{"id": "7", "context": "c .\nd .", "summary": "s .\nt ."}]),
    ("pubmed", {"train.parquet": [{"article": "c", "abstract": "s"}]}, {},
     [{"id": None, "context": "c", "summary": "s"}]),
    (
        "mediasum",
        {
            "news_dialogue.json": json.dumps([
                {"id": f"NPR-{n}", "program": "P", "date": "2006-01-02", "url": "u", "title": "t", "summary": f"s{n}",
                 "utt": ["Hello.", "Hi."], "speaker": ["A, host", "B"]} for n in (1, 2)
            ]),
            "train_val_test_split.json": json.dumps({"train": ["NPR-1"], "val": ["NPR-2"], "test": []}),
        },
        {"split": "validation"},
        [{"id": "NPR-2", "context": "A, host: Hello.\nB: Hi.", "summary": "s2"}],
    ),
    ("longbench", {"data/hotpotqa_test.jsonl": lines({
        "input": "q", "context": "c", "answers": ["a"], "length": 7, "dataset": "hotpotqa", "language": "en",
        "all_classes": None, "_id": "x",
    })}, {"split": "test"}, [{**OF_LONGBENCH, "task": "hotpotqa", "length": 7, "id": "x"}]),
    ("longbench", {"test.parquet": [{
        "context": "c", "question": "q", "answers": ["a"], "answer_prefix": "Type:", "all_classes": ["a", "b"],
        "task": "trec", "max_new_tokens": 64,
    }]}, {"split": "test"}, [
        {**OF_LONGBENCH, "task": "trec", "answer_prefix": "Type:", "max_new_tokens": 64, "all_classes": ["a", "b"]},
    ]),
    ("ruler", {"4096/test-00000-of-00001.parquet": [{
        "context": "c", "question": "q", "answer_prefix": "It is", "answer": ["a"], "task": "niah_single_1",
        "max_new_tokens": 128,
    }]}, {"split": "test"}, [{
        "task": "niah_single_1", "answer_prefix": "It is", "max_new_tokens": 128,
        **NO_ID, "context": "c", "answers": ["a"],
    }]),
    ("samsum", {"train.json": json.dumps([
        {"id": "1", "summary": "s", "dialogue": "A: x\r\nB: y"}, {"id": "2", "summary": "s", "dialogue": None},
        {"id": "3", "summary": " ", "dialogue": "A: x"},
    ])}, {}, [{"id": "1", "context": "A: x\r\nB: y", "summary": "s"}]),
    ("billsum", {"us_train_data_final_OFFICIAL.jsonl": lines(
        {"bill_id": "7", "text": "c", "summary": "s", "title": "t", "text_len": 1, "sum_len": 1}
    )}, {}, [{"id": None, "context": "c", "summary": "s"}]),
    ("booksum", {"train.parquet": [{"bid": 1, "chapter": "c", "summary": '{"summary": "s"}', "summary_text": "s"}]},
     {}, [{"id": None, "context": "c", "summary": "s"}]),
]  # fmt: skip


def test_every_published_form_becomes_our_columns(tmp_path):
    for number, (name, files, options, expected) in enumerate(FORMS):
        folder, output = tmp_path / str(number), tmp_path / "out" / f"{number}.parquet"
        write_files(folder, files)
        place = str(folder / options.get("source", ""))
        done = convert(name, output, **{**options, "source": place})
        table = pyarrow.parquet.read_table(output)
        assert table.to_pylist() == expected, name
        assert done.rows == {str(output): len(expected)}
        entry, found = (
            PUBLISHED_SETS[name],
            {key.decode(): text.decode() for key, text in table.schema.metadata.items()},
        )
        split = options.get("split", "train")
        assert (found["licence"], found["title"], found["split"]) == (entry.licence, entry.title, split)
        # What was written is a source as it stands.
        task = "question_answering" if "question" in table.column_names else "summarisation"
        assert read_rows(DataSource(path=str(output), tasks=(task,))).num_rows == len(expected)
    assert {name for name, *_ in FORMS} >= {name for name, entry in PUBLISHED_SETS.items() if entry.file_rows}
    # Of SAMSum's three rows one has no dialogue, and one no summary.
    skipped = {number: name for number, (name, *_) in enumerate(FORMS) if name in ("samsum", "longalpaca")}
    for number, name in skipped.items():
        metadata = pyarrow.parquet.read_metadata(tmp_path / "out" / f"{number}.parquet").metadata
        lacks = {"samsum": {"context": 1, "summary": 1}, "longalpaca": {"context": 1}}[name]
        assert json.loads(metadata[b"skipped"]) == lacks


def test_questions_of_dpr_stand_among_twenty_documents(tmp_path):
    rows = [
        {
            "dataset": "nq_train_psgs_w100",
            "question": f"q{n}",
            "answers": ["a"],
            "positive_ctxs": [{**DPR, "title": "G", "text": "g"}, DPR][: 2 if n else 0],
            "negative_ctxs": [DPR] * 30,
            # One is of the same article.
            "hard_negative_ctxs": [{**DPR, "title": "G", "text": "h"}, *[{**DPR, "title": "H", "text": "h"}] * 3],
        }
        for n in range(12)
    ]
    write_files(tmp_path, {"biencoder-nq-train.json": json.dumps(rows)})
    done = convert("nq", tmp_path / "a.parquet", source=str(tmp_path))
    assert done.skipped["context"] == 1
    documents = [
        text.split("\n\n") for text in pyarrow.parquet.read_table(tmp_path / "a.parquet")["context"].to_pylist()
    ]
    assert [sorted(texts) for texts in documents] == [sorted(["G\ng", "G\nh", *["H\nh"] * 3, *["N\nn"] * 15])] * 11
    assert len({texts.index("G\ng") for texts in documents}) > 3
    convert("nq", tmp_path / "b.parquet", source=str(tmp_path))
    assert pyarrow.parquet.read_table(tmp_path / "b.parquet") == pyarrow.parquet.read_table(tmp_path / "a.parquet")
    convert("nq", tmp_path / "c.parquet", source=str(tmp_path), supporting_passages=True)
    assert pyarrow.parquet.read_table(tmp_path / "c.parquet")["context"].to_pylist() == ["G\ng"] * 11


def test_collections_are_read_from_the_hub_and_the_folders_of_beir_and_ms_marco(tmp_path, monkeypatch):
    write_files(
        tmp_path,
        {
            "beir/corpus.jsonl.gz": lines(
                {"_id": "1", "title": "T", "text": "d", "metadata": {}}, {"_id": "2", "title": "U", "text": ""}
            ),
            "beir/queries.jsonl": lines({"_id": "q", "text": "which"}, {"_id": "r", "text": None}),
            "beir/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\t1\t2\nq\t2\t1\n",
            "marco/collection.tsv": '1\tthe "first\n2\tsecond\n',
            "marco/queries.dev.small.tsv": "q\twhich\n",
            "marco/qrels.dev.small.tsv": "q\t0\t2\t1\n",
            "mteb/README.md": MTEB_CARD,
            "mteb/corpus.jsonl": lines({"_id": "31715818", "title": "T", "text": "d"}),
            "mteb/queries.jsonl": lines({"_id": "1", "text": "which"}),
            "mteb/qrels/test.jsonl": lines({"query-id": "1", "corpus-id": "31715818", "score": 1.0}),
        },
    )
    done = convert("fiqa", tmp_path / "fiqa", split="test", source=str(tmp_path / "beir"))
    assert str(done).endswith("left out 1 without query (queries)")
    convert("msmarco", tmp_path / "msmarco", split="dev", source=str(tmp_path / "marco"))
    hub = dataclasses.replace(PUBLISHED_SETS["scifact"], hub=str(tmp_path / "mteb"))
    monkeypatch.setitem(PUBLISHED_SETS, "scifact", hub)
    convert("scifact", tmp_path / "scifact", split="test")
    for name, split, documents, grades in (
        ("fiqa", "test", [("1", "T d"), ("2", "U")], {"1": 2, "2": 1}),
        ("msmarco", "dev", [("1", 'the "first'), ("2", "second")], {"2": 1}),
        ("scifact", "test", [("31715818", "T d")], {"31715818": 1}),
    ):
        judged = JudgedQueries(RetrievalSource.from_folder(tmp_path / name, split))
        assert (judged.queries, judged.grades, list(judged.documents())) == (["which"], [grades], documents)
    with pytest.raises(ValueError, match=r"did you mean 'test'|allowed: test"):
        RetrievalSource.from_folder(tmp_path / "fiqa", "tset")
    (tmp_path / "fiqa" / "corpus.parquet").unlink()
    with pytest.raises(ValueError, match=r"queries\.parquet is there: pass --overwrite"):
        convert("fiqa", tmp_path / "fiqa", split="test", source=str(tmp_path / "beir"))
    assert not (tmp_path / "fiqa" / "corpus.parquet").exists()
    with pytest.raises(ValueError, match=r"has no corpus: there is no corpus\.jsonl"):
        convert("fiqa", tmp_path / "other", split="test", source=str(tmp_path / "fiqa"))
    with pytest.raises(ValueError, match="a retrieval collection, which where would tear apart"):
        convert("fiqa", tmp_path / "other", where={"id": "1"})


@pytest.mark.parametrize(
    ("score", "written", "message"),
    [
        ("1.0", 1, None),
        ("2", 2, None),
        (None, 1, None),
        ("0.5", None, r"the score in row 1 .* must be a whole number, got 0\.5"),
        ("high", None, "the score in row 1 .* must be a number, got 'high'"),
        ("", None, "the score in row 1 .* must be a number, got ''"),
    ],
)
def test_relevance_is_written_as_a_whole_number(tmp_path, score, written, message):
    pairs = [("query-id", "corpus-id", "score"), ("q", "1", "1"), ("q", "1", score)]
    qrels = "".join("\t".join(pair[: 2 if score is None else 3]) + "\n" for pair in pairs)
    files = {"corpus.jsonl": lines({"_id": "1", "text": "d"}), "queries.jsonl": lines({"_id": "q", "text": "w"})}
    write_files(tmp_path / "beir", {**files, "qrels/test.tsv": qrels})
    arguments = {"split": "test", "source": str(tmp_path / "beir")}
    if message is not None:
        with pytest.raises(ValueError, match=message):
            convert("scifact", tmp_path / "out", **arguments)
        return
    convert("scifact", tmp_path / "out", **arguments)
    table = pyarrow.parquet.read_table(tmp_path / "out" / "qrels" / "test.parquet")
    assert table["score"].to_pylist() == [1, written]


def test_missing_files_are_refused(tmp_path):
    write_files(tmp_path, {"stories/qaps.csv": "document_id,set\nd,train\n", "talks/news_dialogue.json": "[]"})
    for name, folder, split, message in (
        ("narrativeqa", "stories", "train", "there is no file .*summaries.csv"),
        ("mediasum", "talks", "train", "there is no file .*train_val_test_split.json"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(name, tmp_path / "a.parquet", source=str(tmp_path / folder), split=split)


def test_the_command_reads_the_hub_and_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    rows = [
        {"subset": name, "qid": str(n), "context": "c", "question": "q", "answers": ["a"] if n else []}
        for n, name in enumerate(["SQuAD", "NewsQA", "SQuAD", "SQuAD"])
    ]
    write_files(tmp_path, {"mrqa/train.parquet": rows})
    hub = dataclasses.replace(PUBLISHED_SETS["mrqa"], hub=str(tmp_path / "mrqa"))
    monkeypatch.setitem(PUBLISHED_SETS, "mrqa", hub)
    output = tmp_path / "squad.parquet"
    words = ["data", "mrqa", str(output), "--where", "{subset: SQuAD}"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == (
        f"wrote 2 rows to {output}; left out 1 without answers\nlicence: not stated, each subset has its own\n"
    )
    assert pyarrow.parquet.read_table(output).to_pylist() == [
        {"subset": "SQuAD", "id": name, "context": "c", "question": "q", "answers": ["a"]} for name in "23"
    ]
    whole = output.read_bytes()
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    assert [name for name in PUBLISHED_SETS if f"`{name}`" not in page] == []
    assert cli.main(["data", "--list"]) == 0
    table = capsys.readouterr().out
    assert all(entry.title in table and entry.licence in table for entry in PUBLISHED_SETS.values())
    write_files(tmp_path, {"cut/train.json": '[{"_id": "1", "question"', "other/train.json": '[{"question": "q"}]'})
    cut, other = str(tmp_path / "cut"), str(tmp_path / "other")
    for wrong, message in (
        (words, "squad.parquet is there: pass --overwrite"),
        (["data", "mrqa"], "name a data set and the file to write"),
        (["data", "mrka", "x.parquet"], "unknown data set 'mrka'; did you mean 'mrqa'"),
        (["data", "mrqa", "x.jsonl"], "the output must be a .parquet file"),
        (["data", "squad", "x.parquet", "--split", "validaton"], "did you mean 'validation'"),
        (["data", "quac", "x.parquet"], "QuAC is not on the Hub in a form that can be read: get it from https://quac.ai"),
        ([*words, "--overwrite", "--where", "{subset: Squad}"], "there is no row to write"),
        ([*words, "--overwrite", "--source", "none"], "there is no file"),
        ([*words, "--overwrite", "--separate-passages"], "has no passages that could stay apart"),
        ([*words, "--overwrite", "--source", cut, "--split", "test"], "has no file with the split 'test'"),
        (["data", "hotpotqa", *words[2:3], "--overwrite", "--source", cut], "train.json cannot be read, after"),
        (["data", "hotpotqa", *words[2:3], "--overwrite", "--source", other], "not in the form that HotpotQA is"),
        (["data", "pwc", *words[2:3], "--overwrite", "--source", other], "there is no context and no answers"),
    ):  # fmt: skip
        assert cli.main(wrong) == 1
        assert message in capsys.readouterr().err
    # What was there stays, and nothing half written lies beside it.
    assert output.read_bytes() == whole
    assert list(tmp_path.glob("*.part")) == []
    assert cli.main([*words, "--overwrite"]) == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *args, **options: (_ for _ in ()).throw(ConnectionError("off"))
    )
    assert cli.main([*words, "--overwrite"]) == 1
    assert "cannot be read from the Hub (ConnectionError: off); with a copy of its files" in capsys.readouterr().err


SUMMARY = {"dialogue": "d", "summary": "s"}


@pytest.mark.parametrize(
    ("rows", "where", "written", "skipped"),
    [
        ([{"id": 1}, {"id": 2}, {"id": "x", "kind": "a"}], {"kind": "a"}, ["x"], {}),
        ([{"id": 1, "kind": None}] * 2 + [{"id": "x", "kind": "a"}], {"kind": "a"}, ["x"], {}),
        ([{"id": 1, "kind": "a"}, {"id": 2, "kind": "a"}, {"id": "x"}], {"kind": "a"}, ["1", "2"], {}),
        ([{"id": 1, "summary": ...}, {"id": 2, "summary": ...}, {"id": 3}], None, ["3"], {"summary": 2}),
        ([{"id": 1}, {"id": "a"}, {"id": None}], None, ["1", "a", None], {}),
    ],
)
def test_records_need_not_have_the_same_columns(tmp_path, monkeypatch, rows, where, written, skipped):
    monkeypatch.setattr("context_compressors.data.convert_published._BATCH_ROWS", 2)
    whole = [{key: value for key, value in {**SUMMARY, **row}.items() if value is not ...} for row in rows]
    write_files(tmp_path, {"train.jsonl": lines(*whole)})
    done = convert("samsum", tmp_path / "a.parquet", source=str(tmp_path / "train.jsonl"), where=where)
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["id"].to_pylist() == written
    assert {name: count for name, count in done.skipped.items() if count} == skipped


@pytest.mark.parametrize("name", ["train.csv", "train.json", "train.jsonl", "train.json.gz"])
def test_a_mark_of_the_byte_order_and_a_record_alone_are_read(tmp_path, name):
    record = {"id": "7", **SUMMARY}
    text = "id,dialogue,summary\n7,d,s\n" if name.endswith(".csv") else lines(record)
    for mark in ("", "\ufeff"):
        write_files(tmp_path, {name: mark + text})
        convert("samsum", tmp_path / "a.parquet", source=str(tmp_path / name), overwrite=True)
        assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["id"].to_pylist() == ["7"]


def test_a_carriage_return_in_a_tsv_starts_no_row(tmp_path):
    (tmp_path / "collection.tsv").write_bytes(b'0\tone \rtwo "\r\n\n1\tthree\tfour\n2\n')
    assert list(read_records(tmp_path / "collection.tsv", ("_id", "text"))) == [
        {"_id": "0", "text": 'one \rtwo "'}, {"_id": "1", "text": "three"}, {"_id": "2", "text": None},
    ]  # fmt: skip
