# SPDX-License-Identifier: Apache-2.0
"""The tables of the comparison's page, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from context_compressors.reporting.tables import markdown_table

_COSTS = ("questions", "positions", "bytes", "compress, s", "answer, s")
_SCORES = ("F1", "exact match", "contained", "retention, %")
_TITLES = {
    "f1": "F1",
    "rougeL": "ROUGE-L",
    "token_accuracy": "token accuracy",
}


def interval(row: Mapping[str, Any], metric: str) -> str:
    """A score with its 95 % interval; empty where it was not measured."""
    value, ends = row["scores"].get(metric), row["intervals"].get(metric)
    if value is None:
        return ""
    return f"{value:.1f}" + ("" if ends is None or None in ends else f" [{ends[0]:.1f}, {ends[1]:.1f}]")


def ratio_title(ratio: int | str) -> str:
    """What a ratio is called; empty for the two bounds."""
    return ratio if isinstance(ratio, str) else f"{ratio}x" if ratio > 1 else ""


def _number(row: Mapping[str, Any], name: str, digits: int = 0) -> str:
    value = row["costs"].get(name)
    return "" if value is None else f"{value:,.{digits}f}"


def main_table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Each row with its costs and scores; columns that no row fills are left out."""
    lines = [
        [
            titles[row["system"]],
            ratio_title(row["ratio"]),
            row["num_questions"],
            _number(row, "kept_positions"),
            _number(row, "memory_bytes"),
            _number(row, "compress_seconds", 2),
            _number(row, "answer_seconds", 2),
            *(interval(row, metric) for metric in ("f1", "exact_match", "substring_accuracy", "retention")),
        ]
        for row in rows
    ]
    header = ["system", "ratio", *_COSTS, *_SCORES]
    known = [place for place, column in enumerate(zip(*lines, strict=True)) if any(cell != "" for cell in column)]
    return markdown_table([header[place] for place in known], [[line[place] for place in known] for line in lines])


def by_set(rows: Sequence[Mapping[str, Any]], asked: Mapping[str, int], titles: Mapping[str, str]) -> str:
    """A table with a column for each set, and the number of its questions; a cell has its own if that is another."""

    def cell(row: Mapping[str, Any] | None, number: int) -> str:
        if row is None:
            return ""
        own = "" if row["num_questions"] == number else f", n {row['num_questions']}"
        return interval(row, next(iter(row["scores"]))) + own

    found = {(row["system"], row["ratio"], row["set"]): row for row in rows}
    metrics = {row["set"]: next(iter(row["scores"])) for row in rows}
    names = [name for name in asked if name in metrics]
    lines = [
        [titles[system], ratio_title(ratio)] + [cell(found.get((system, ratio, name)), asked[name]) for name in names]
        for system, ratio in dict.fromkeys((row["system"], row["ratio"]) for row in rows)
    ]
    columns = [f"{name}, {_TITLES[metrics[name]]}, n {asked[name]}" for name in names]
    return markdown_table(["system", "ratio", *columns], lines)


def by_bytes(
    rows: Sequence[Mapping[str, Any]],
    compared: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
    aware: set[str],
) -> str:
    """What is made once for all questions, from few bytes to many, and keys and values less embeddings."""

    def less(entry: Mapping[str, Any] | None) -> str:
        return f"{_difference(entry)} ({titles[entry['system']]}, {ratio_title(entry['ratio'])})" if entry else ""

    found = {(entry["system"], entry["ratio"]): entry for entry in compared}
    rows = [row for row in rows if row["system"] not in aware and "bytes_per_context_token" in row["costs"]]
    lines = []
    for row in sorted(rows, key=lambda row: row["costs"]["bytes_per_context_token"]):
        of_row = found.get((row["system"], row["ratio"]), {})
        cells = [_number(row, "bytes_per_context_token", 1), titles[row["system"]], ratio_title(row["ratio"])]
        cells += [row["num_questions"], interval(row, "f1")]
        lines.append([*cells, *(less(of_row.get(side)) for side in ("fewer", "more", "positions"))])
    text = (
        "Bytes for each token of a context. Of keys and values F1 is put beside that of embeddings, on the same "
        "questions: the best row of embeddings that stores no more, and of those that store no less the nearest, of "
        'several the best. What "holds" against the second is better at equal bytes; what "does not" against the '
        "first is worse; where a cell is empty no embeddings store as much. The last column is at equal positions: "
        "the best embeddings at the same ratio.\n\n"
    )
    less_than = ("less fewer bytes", "less more bytes", "less equal positions")
    return text + markdown_table(["bytes", "system", "ratio", "questions", "F1", *less_than], lines)


def _difference(entry: Mapping[str, Any], number: int | None = None) -> str:
    """A verdict with its difference, and the number of questions if another one is said to be that of most."""
    if "difference" not in entry:
        return entry["verdict"]
    low, high = entry["interval"]
    text = f"{entry['verdict']}: {entry['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
    own = "" if number in (None, entry["num_questions"]) else f", n {entry['num_questions']}"
    return text + own


def orderings_table(orderings: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Each ordering with its verdict at each ratio: the difference of F1 on the same questions."""

    def name(entry: Mapping[str, Any]) -> str:
        return f"{titles[entry['first']]} > {titles[entry['second']]}"

    def is_equal(entry: Mapping[str, Any]) -> bool:
        return all(at["ratio"] == at["second_ratio"] for at in entry["ratios"])

    def name_at(entry: Mapping[str, Any], at: Mapping[str, Any]) -> str:
        sides = (entry["first"], at["ratio"]), (entry["second"], at["second_ratio"])
        return " > ".join(", ".join(filter(None, (titles[system], ratio_title(ratio)))) for system, ratio in sides)

    most = max((at["num_questions"] for entry in orderings for at in entry["ratios"] if "difference" in at), default=0)
    text = (
        f"Differences of F1 on the same questions, {most} where a cell has no number n of its own, with 95 % "
        'intervals. "Holds": the interval is above zero; "does not": below; "cannot be told": it holds zero. Each '
        "interval stands for itself: of many differences that are none, one in twenty is told all the same.\n\n"
    )
    run = [entry for entry in orderings if any("difference" in at for at in entry["ratios"])]
    equal, others = ([entry for entry in run if is_equal(entry) == wanted] for wanted in (True, False))
    # Of a system with one ratio the other cells are empty.
    ratios = sorted({at["ratio"] for entry in equal for at in entry["ratios"]})
    lines = []
    for entry in equal:
        cells = {at["ratio"]: _difference(at, most) for at in entry["ratios"]}
        lines.append([name(entry), *(cells.get(ratio, "") for ratio in ratios)])
    text += markdown_table(["ordering", *map(ratio_title, ratios)], lines) if equal else ""
    lines = [[name_at(entry, at), _difference(at, most)] for entry in others for at in entry["ratios"]]
    text += "\n\n" + markdown_table(["at other ratios", "difference"], lines) if lines else ""
    left = [
        name(entry) if is_equal(entry) else name_at(entry, *entry["ratios"]) for entry in orderings if entry not in run
    ]
    return text + (f"\n\nNot run, or not on the same questions: {'; '.join(left)}." if left else "")


def trainings(results: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """What each method was trained with, and its trials."""
    budget, family = results["budget"].get("run", {}), results["family"]
    marks = dict.fromkeys(mark for entry in family.values() for mark in entry.get("steps_to_loss", {}))
    lines = [
        [
            titles[name],
            f"{entry['trainable_parameters']:,}",
            f"{entry['steps']:,}",
            f"{entry['context_tokens']:,}",
            *(f"{entry['trials'].get(rate, float('nan')):.3f}" for rate in _rates(results)),
            f"{entry['learning_rate']:g}" if entry["learning_rate"] else "",
            *(_steps(entry, mark, results["budget"]) for mark in marks),
            "" if entry["loss"] is None else f"{entry['loss']:.3f}",
            f"{entry['hours']:.2f}",
            entry["seeds"],
        ]
        for name, entry in family.items()
    ]
    header = ["method", "trainable", "steps", "context tokens", *(f"trial at {rate}" for rate in _rates(results))]
    text = (
        "Trials: the loss on the choosing part at their end, summed over ratios. Loss and hours are "
        "those of the first seed."
    )
    if marks:
        text += (
            " Steps to a loss: of the trial that went on, until the mean cross-entropy of a token in twenty steps of "
            "its training is below it. A trial restores short texts, at 2x where a method has that ratio, so that "
            "this is how soon slots are found, and nothing of questions or of longer contexts; a cell is empty where "
            "a run has kept no losses."
        )
    if budget:
        counts = f"{budget['tokens']:,} tokens of contexts and texts, {budget['examples']:,} examples"
        text = f"The budget is {counts}. {text}"
    header += ["rate", *(f"steps to {mark}" for mark in marks), "last loss", "hours", "seeds"]
    return f"{text}\n\n{markdown_table(header, lines)}"


def _steps(entry: Mapping[str, Any], mark: str, budget: Mapping[str, Any]) -> str:
    """Steps to a loss; of a trial that did not come to it more than it has."""
    if mark not in entry.get("steps_to_loss", {}):
        return ""
    steps = entry["steps_to_loss"][mark]
    return f"> {budget['trial_steps']}" if steps is None else str(steps)


def _rates(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(rate for entry in results["family"].values() for rate in entry["trials"]))
