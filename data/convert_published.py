# SPDX-License-Identifier: Apache-2.0
"""Parquet files in our columns from data sets as they are published, on the Hub or in their authors' files."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tqdm.auto import tqdm

from ..configuration.nearest_names import check_choice
from .columns import complete_rows, has_column, is_list, with_our_columns
from .files import matching_paths, read_records, record_tables
from .published_sets import PUBLISHED_SETS, TASK_COLUMNS, PublishedSet
from .rows import in_known_columns, with_answer_lists
from .sources import DataSource

Record = Mapping[str, Any]

_BATCH_ROWS = 256
# GMSA, Appendix E: 20 documents for each question of NaturalQuestions, one of which has the answer.
_NQ_DOCUMENTS = 20
_LONG_ALPACA = re.compile(
    r"^(?:Below|There).*?\n(?:\s*The (?:first )?paper begins\.)?(.*)"
    r"Now the (?:second )?(?:paper|material|review guideline) ends\.(.*)$",
    re.DOTALL,
)
_TEXT = pyarrow.string()
# Of columns that are no texts.
_KINDS: Mapping[str, pyarrow.DataType] = {
    **dict.fromkeys(("answers", "all_classes"), pyarrow.list_(_TEXT)),
    **dict.fromkeys(("max_new_tokens", "length"), pyarrow.int64()),
}


@dataclass
class Conversion:
    """The result of a conversion: the file, the rows written, and those left out by the column that they lack."""

    path: Path
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} without {name}" for name, count in self.skipped.items())
        written = f"wrote {self.rows:,} row{'s' * (self.rows != 1)} to {self.path}"
        return written + (f"; left out {reasons}" if reasons else "")


def convert(
    name: str,
    output: str | os.PathLike[str],
    *,
    split: str = "train",
    source: str | None = None,
    supporting_passages: bool = False,
    separate_passages: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Write a published data set as Parquet in our columns; its metadata names title, license, origin and counts.

    Args:
        name: a name of `PUBLISHED_SETS`.
        split: "train", "validation" or "test", or as the data set calls it.
        source: a file or pattern with what was published; `None` reads the Hub, as a stream.
        supporting_passages, separate_passages: see [`DataSource`].
    """
    check_choice("data set", name, PUBLISHED_SETS)
    entry, done = PUBLISHED_SETS[name], Conversion(Path(output))
    if source is None and entry.hub is None:
        raise ValueError(f"{entry.title} is not on the Hub: get it from {entry.home}, and name its file (--source)")
    check_choice(f"split of {entry.title}:", split, entry.splits)
    if done.path.suffix != ".parquet" or (done.path.exists() and not overwrite):
        raise ValueError(f"the output must be a new .parquet file, or --overwrite one, got {done.path}")
    rows = DataSource(name=entry.place, supporting_passages=supporting_passages, separate_passages=separate_passages)
    kinds = {**_KINDS, **({"context": _KINDS["answers"]} if separate_passages else {})}
    schema = pyarrow.schema([(name, kinds.get(name, _TEXT)) for name in (*entry.keeps, *TASK_COLUMNS[entry.task])])
    origin = {"title": entry.title, "license": entry.license, "split": split}
    origin["source"] = entry.place if source is None else f"files of {entry.hub or entry.home}"
    done.path.parent.mkdir(parents=True, exist_ok=True)
    draft = done.path.with_name(f"{done.path.name}.{os.getpid()}.part")
    try:
        with pyarrow.parquet.ParquetWriter(draft, schema.with_metadata(origin), compression="zstd") as writer:
            for batch in record_tables(_rows(entry, split, source), _BATCH_ROWS, source or entry.place):
                table = _complete(_ours(batch, entry, rows), entry, rows, done.skipped)
                if not table.num_rows:
                    continue
                columns = {name: table[name] for name in schema.names if name in table.column_names}
                nothing = pyarrow.nulls(table.num_rows)
                cast = [columns.get(entry.name, nothing).cast(entry.type) for entry in schema]
                writer.write_table(pyarrow.table(cast, schema=schema))
                done.rows += table.num_rows
            if not done.rows:
                raise ValueError(f"there is no row to write: {done}")
            writer.add_key_value_metadata({"skipped": json.dumps(done.skipped)})
        draft.replace(done.path)
    finally:
        draft.unlink(missing_ok=True)
    return done


def _ours(table: pyarrow.Table, entry: PublishedSet, source: DataSource) -> pyarrow.Table:
    """Published columns under our names; `ValueError` unless all that the task needs are there."""
    if entry.columns and all(has_column(table, theirs) for theirs in entry.columns.values()):
        # Where the set has a column of our name that is something else, as BookSum has.
        table = with_our_columns(table, DataSource(name=entry.place, columns=entry.columns))
    table = in_known_columns(table, source)
    missing = [name for name in TASK_COLUMNS[entry.task] if name != "id" and name not in table.column_names]
    if missing:
        what = f"there is no {' and no '.join(missing)} among the columns {', '.join(table.column_names)}"
        raise ValueError(f"this is not the form that {entry.title} is published in: {what}")
    if source.separate_passages and not is_list(table["context"].type):
        raise ValueError(f"the contexts of {entry.title} are texts: it has no passages that could stay apart")
    return table


def _complete(table: pyarrow.Table, entry: PublishedSet, source: DataSource, skipped: Counter[str]) -> pyarrow.Table:
    """The rows that lack nothing; the others are counted by what they lack first."""
    for name in TASK_COLUMNS[entry.task][1:]:
        kept = complete_rows(table, [name])
        if kept.num_rows < table.num_rows:
            skipped[name] += table.num_rows - kept.num_rows
        table = kept
    return with_answer_lists(table, source) if "answers" in table.column_names and table.num_rows else table


def _rows(entry: PublishedSet, split: str, source: str | None) -> Iterator[Mapping[str, Any]]:
    """Yield the published data as one record for each of our rows."""
    paths: list[Path | None] = [None]
    if source is not None and not (paths := [*map(Path, matching_paths(str(Path(source).expanduser())))]):
        raise ValueError(f"there is no file {source}")
    for path in paths:
        records = _hub_records(entry, split) if path is None else read_records(path)
        # Shown in a terminal alone.
        counted = tqdm(records, unit="row", desc=entry.title, disable=None)
        try:
            yield from counted if entry.rows is None else _ROWS[entry.rows](counted, path and path.parent, split)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            what = f"{source or entry.place} is not in the form that {entry.title} is published in"
            raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def _hub_records(entry: PublishedSet, split: str) -> Iterator[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        stream = load_dataset(entry.hub, entry.config, split=split, streaming=True).with_format("arrow")
        for table in stream.iter(batch_size=_BATCH_ROWS):
            yield from table.to_pylist()
    except (OSError, RuntimeError) as error:
        raise OSError(f"{entry.hub} cannot be read: name a copy of its files (--source): {error}") from error


# --- rows of data sets that are published in a form of their own ---
# Each function takes the records of a file, its folder (none of a data set on the Hub) and the split.


def paragraph_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """QuAC: sections with paragraphs, these with questions."""
    for record in records:
        for paragraph in record["paragraphs"]:
            for question in paragraph["qas"]:
                yield {
                    "id": question["id"],
                    "context": paragraph["context"].strip(),
                    "question": question["question"],
                    "answers": list(dict.fromkeys(answer["text"].strip() for answer in question["answers"])),
                }


def passage_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """2WikiMultihopQA: pairs of title and sentences, in some files as JSON texts, in HotpotQA's columns."""
    for record in records:
        fields: list[Any] = [record.get(name) for name in ("context", "supporting_facts")]
        context, facts = (json.loads(field) if isinstance(field, str) else field for field in fields)
        if not isinstance(context, Mapping):
            context = {"title": [title for title, _ in context], "sentences": [sentences for _, sentences in context]}
        if not isinstance(facts, Mapping):
            facts = {"title": [title for title, _ in facts or ()]}
        yield {
            "id": record.get("_id", record.get("id")),
            "question": record["question"],
            "answer": record.get("answer"),
            "context": context,
            "supporting_facts": {"title": facts["title"]},
        }


def retrieved_passage_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """Yield NaturalQuestions with retrieved documents, or of DPR's the first right one among 19 others."""
    for record in records:
        passages = record.get("ctxs")
        gold = [passage for passage in passages or () if passage.get("isgold")]
        if passages is None:
            gold = list(record["positive_ctxs"][:1])
            others = [*record["hard_negative_ctxs"], *record["negative_ctxs"]][: _NQ_DOCUMENTS - 1]
            place = random.Random(record["question"]).randrange(len(others) + 1)
            # Without its gold document a question is left out.
            passages = [*others[:place], *gold, *others[place:]] if gold else None
        yield {
            "question": record["question"],
            "answers": record["answers"],
            "context": passages
            and {
                "title": [passage["title"] for passage in passages],
                "sentences": [[passage["text"]] for passage in passages],
            },
            # Others may have the same title: an article is cut into many passages.
            "supporting_facts": {
                "title": [passage["title"] for passage in gold],
                "passage": [number for number, passage in enumerate(passages or ()) if passage in gold],
            },
        }


def interview_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """MediaSum's news_dialogue.json: a line for each turn, speaker in front. Its other file tells the splits."""
    splits = json.loads((Path(folder or ".") / "train_val_test_split.json").read_text(encoding="utf-8-sig"))
    kept = set(splits[{"validation": "val"}.get(split, split)])
    for record in records:
        if record["id"] in kept:
            turns = zip(record["speaker"], record["utt"], strict=True)
            document = "\n".join(f"{speaker}: {words}" for speaker, words in turns)
            yield {"id": record["id"], "document": document, "summary": record["summary"]}


def paper_question_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """QASPER's papers; what cannot be answered is "unanswerable"."""
    for record in records:
        parts = record["full_text"]
        sections = ["\n".join([part["section_name"] or "", *part["paragraphs"]]).strip() for part in parts]
        text = "\n\n".join(filter(None, [record["title"], record["abstract"], *sections]))
        for question in record["qas"]:
            answers = [_qasper_answer(annotation["answer"]) for annotation in question["answers"]]
            yield {
                "id": question["question_id"],
                "context": text,
                "question": question["question"],
                "answers": list(dict.fromkeys(filter(None, answers))),
            }


def choice_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """QuALITY's files as LLoCO reads them: options stand behind the question, with letters, as in the answer."""
    for record in records:
        for question in record["questions"]:
            label = question.get("gold_label")
            choices = [f"{letter}. {option}" for letter, option in zip("ABCD", question["options"], strict=False)]
            yield {
                "id": question["question_unique_id"],
                "context": record["article"],
                "question": "\n".join([f"{question['question']}\n\nChoices:", *choices]),
                "answers": [] if label is None else [choices[label - 1]],
            }


def instruction_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """LongAlpaca: the text and the question are in one instruction; without a text it is left out."""
    for record in records:
        match = _LONG_ALPACA.match(record["instruction"])
        text, question = (part.strip() for part in match.groups()) if match else (None, record["instruction"])
        yield {"context": text, "question": question, "answers": record["output"]}


def meeting_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """QMSum: a meeting with the queries about all of it and about its parts."""
    for record in records:
        turns = (f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"])
        text = "\n".join(turns)
        for query in [*record["general_query_list"], *record["specific_query_list"]]:
            yield {"context": text, "question": query["query"], "answers": query["answer"]}


def _qasper_answer(answer: Record) -> str:
    if answer["unanswerable"]:
        return "unanswerable"
    if answer["yes_no"] is not None:
        return "yes" if answer["yes_no"] else "no"
    return ", ".join(answer["extractive_spans"]) or answer["free_form_answer"]


_FUNCTIONS: tuple[Callable[[Iterable[Record], Path | None, str], Iterator[Record]], ...] = (
    *(paragraph_rows, passage_rows, retrieved_passage_rows, interview_rows),
    *(paper_question_rows, choice_rows, instruction_rows, meeting_rows),
)
_ROWS = {function.__name__: function for function in _FUNCTIONS}
