# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets that are published in a form of their own, in the columns that `published_sets` maps.

Each function takes the records of a file, the folder that the file is in (none of a data set on the Hub) and the
split, and gives rows, one after the other.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import KEY

# GMSA, Appendix E: 20 documents for each question of NaturalQuestions, one of which has the answer.
_NQ_DOCUMENTS = 20
_LONG_ALPACA = re.compile(
    r"^(?:Below|There).*?\n(?:\s*The (?:first )?paper begins\.)?(.*)"
    r"Now the (?:second )?(?:paper|material|review guideline) ends\.(.*)$",
    re.DOTALL,
)

Record = Mapping[str, Any]


def mrqa_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """A line of MRQA's files has a context with its questions; the first line names the subset."""
    subset = None
    for record in records:
        if "header" in record:
            subset = record["header"]["dataset"]
            continue
        for question in record["qas"]:
            yield {
                "subset": subset,
                "qid": question["qid"],
                "context": record["context"].strip(),
                "question": question["question"].strip(),
                "answers": question["answers"],
            }


def paragraph_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """Sections with paragraphs, these with questions: SQuAD's JSON, and QuAC's."""
    for record in records:
        for paragraph in record["paragraphs"]:
            for question in paragraph["qas"]:
                yield {
                    "id": question["id"],
                    "context": paragraph["context"].strip(),
                    "question": question["question"],
                    "answers": list(dict.fromkeys(answer["text"].strip() for answer in question["answers"])),
                }


def dialogue_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """QuAC on the Hub: a row is a dialogue, of which each turn is a question here."""
    for record in records:
        answers = _items(record["answers"])
        for turn, question, answer in zip(record["turn_ids"], record["questions"], answers, strict=True):
            texts = list(dict.fromkeys(answer["texts"]))
            yield {"id": turn, "context": record["context"], "question": question, "answers": texts}


def passage_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """Pairs of title and sentences, as HotpotQA and 2WikiMultihopQA are published, in the Hub's columns.

    In some Parquet files of 2WikiMultihopQA the lists are texts in JSON.
    """
    for record in records:
        context, facts = (_parsed(record.get(name)) for name in ("context", "supporting_facts"))
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
    """NaturalQuestions with retrieved documents: of "Lost in the middle" as they lie, or 20 of DPR's for a question.

    DPR's training file has documents with the answer apart from those without. The first one of the former stands
    among 19 of the latter, the hard ones first, at a place that the question draws: the same in every run.
    """
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


def summary_question_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """NarrativeQA's qaps.csv, with the summaries that lie in third_party/wikipedia below the same folder."""
    wanted = {"validation": "valid"}.get(split, split)
    path = Path(folder or ".") / "third_party" / "wikipedia" / "summaries.csv"
    if not path.is_file():
        raise ValueError(f"there is no file {path}, which has the summaries of NarrativeQA's stories")
    with open(path, encoding="utf-8-sig") as file:
        summaries = {row["document_id"]: row["summary"].strip() for row in csv.DictReader(file)}
    for record in records:
        if record["set"] == wanted:
            yield {
                "context": summaries.get(record["document_id"]),
                "question": record["question"],
                "answers": [record["answer1"], record["answer2"]],
            }


def abstract_question_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """PubMedQA's JSON, a mapping from an abstract's id to its parts."""
    for record in records:
        yield {
            "pubid": record[KEY],
            "question": record["QUESTION"],
            "context": {"contexts": record["CONTEXTS"]},
            "long_answer": record["LONG_ANSWER"],
        }


def paper_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """arXiv and PubMed as lists of sentences, those of the abstract between `<S>` and `</S>`."""
    for record in records:
        abstract = [re.sub(r"</?S>", "", sentence).strip() for sentence in record["abstract_text"]]
        article, summary = "\n".join(record["article_text"]), "\n".join(abstract)
        yield {"id": record["article_id"], "article": article, "abstract": summary}


def interview_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """MediaSum's news_dialogue.json: a line for each turn, speaker in front. Its other file tells the splits."""
    path = Path(folder or ".") / "train_val_test_split.json"
    if not path.is_file():
        raise ValueError(f"there is no file {path}, which has the splits of MediaSum")
    with open(path, encoding="utf-8-sig") as file:
        kept = set(json.load(file)[{"validation": "val"}.get(split, split)])
    for record in records:
        if record["id"] in kept:
            turns = zip(record["speaker"], record["utt"], strict=True)
            document = "\n".join(f"{speaker}: {words}" for speaker, words in turns)
            yield {"id": record["id"], "document": document, "summary": record["summary"]}


def paper_question_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """QASPER's papers, from its JSON or in the Hub's columns; what cannot be answered is "unanswerable"."""
    for record in records:
        parts = _items(record["full_text"])
        sections = ["\n".join([part["section_name"] or "", *part["paragraphs"]]).strip() for part in parts]
        text = "\n\n".join(filter(None, [record["title"], record["abstract"], *sections]))
        for question in _items(record["qas"]):
            answers = [_qasper_answer(given["answer"]) for given in _items(question["answers"])]
            yield {
                "id": question["question_id"],
                "context": text,
                "question": question["question"],
                "answers": list(dict.fromkeys(filter(None, answers))),
            }


def option_rows(records: Iterable[Record], folder: Path | None, split: str) -> Iterator[Record]:
    """QuALITY's files: an article a line, whose right options are counted from 1; the right one is the answer."""
    for record in records:
        for question in record["questions"]:
            label = question.get("gold_label")
            yield {
                "id": question["question_unique_id"],
                "context": record["article"],
                "question": question["question"],
                "answers": [] if label is None else [question["options"][label - 1]],
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


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _items(value: Mapping[str, Sequence[Any]] | Sequence[Record]) -> list[Record]:
    """A list of mappings, also of what the Hub has as a mapping of lists."""
    if not isinstance(value, Mapping):
        return list(value)
    return [dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)]
