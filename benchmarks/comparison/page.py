# SPDX-License-Identifier: Apache-2.0
"""Write README.md of the comparison from its result file.

python -m benchmarks.comparison.page OUT/page/comparison.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.tools import script_parser, tells_errors
from benchmarks.comparison.plan import BY_QUESTION, PUBLISHED, name_of_row, read_results, read_table
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table

HERE = Path(__file__).parent
Row = Mapping[str, Any]
_KEEPS = {"embeddings": "vectors", "key_values": "KV", "pruned": "KV", "text": "text"}


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Write the page, `comparison.json`, and the scores of each question.

    Args:
        results: content of the result file.
        folder: where the files go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A finished file replaces each one: other processes may read them.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        rows = [_without(row, "by_question") for row in results["rows"]]
        write_results({**_without(results, "question_documents"), "rows": rows}, place / PUBLISHED.name)
        # Most scores are 0 or 100, and half as long as whole numbers.
        scores = {
            name_of_row(row): [[int(value) if value in (0, 100) else value for value in seed] for seed in by_question]
            for row in results["rows"]
            if (by_question := row.get("by_question"))
        }
        documents = results.get("question_documents")
        write_results({**({"documents": documents} if documents else {}), "scores": scores}, place / BY_QUESTION)
        page_text = page(read_results(place / PUBLISHED.name))
        (place / "README.md").write_text(page_text, encoding="utf-8")
        for file in place.iterdir():
            file.replace(folder / file.name)


def _without(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != name}


def page(results: Mapping[str, Any]) -> str:
    """Return the text of `page.txt` with the results in it."""
    table = read_table()
    titles = {name: entry["title"] for group in ("family", "rounded", "peers") for name, entry in table[group].items()}
    ratios = results["settings"]["ratios"]
    means = [row for row in results["rows"] if row["set"] == "mean"]
    parts = [_settings(results, means, titles)]
    if means:
        parts += ["\n## Scores\n", _bounds(means, titles), _scores(results, means, table, titles)]
    if unread := _unread(results, titles):
        parts += [f"\n{unread}"]
    parts += ["\n## Paired differences\n", differences(results["orderings"], titles, ratios)]
    return (HERE / "page.txt").read_text(encoding="utf-8").replace("{results}", "\n".join(parts))


def _settings(results: Mapping[str, Any], means: Sequence[Row], titles: Mapping[str, str]) -> str:
    """Return what was asked and trained."""
    settings, run = results["settings"], results["budget"].get("run")
    low, high = settings["context_tokens"]
    sets = ", ".join(f"{name} {entry['questions']}" for name, entry in settings["sets"].items())
    text = f"Questions: {sets}. Contexts have {low} to {high} tokens."
    if run:
        text += f" Each method was trained on {run['tokens']:,.0f} tokens."
    if "documents_apart" in results:
        text += " `comparison.json` lists the training, validation and test documents; they are disjoint."
    most = max((row["num_questions"] for row in means), default=0)
    fewer = {titles[row["system"]]: row["num_questions"] for row in means if row["num_questions"] < most}
    if fewer:
        text += f" Fewer than {most} questions: {', '.join(f'{title} {number}' for title, number in fewer.items())}."
    return text


def _bounds(means: Sequence[Row], titles: Mapping[str, str]) -> str:
    bounds = [row for row in means if row["system"] in ("no_context", "full_context")]
    return (
        "F1, mean over the sets of questions, with 95 % intervals, sorted by F1 at the middle ratio. The verdict "
        "compares F1 with truncated text of as many tokens, by ratio where the ratios differ. kB, seconds and "
        "restored tokens are at the middle ratio.\n\n"
        + markdown_table(["bound", "F1"], [[titles[row["system"]], score(row)] for row in bounds])
        + "\n"
    )


def score(row: Row | None, metric: str = "f1") -> str:
    """Return a score with its 95 % interval; empty where it was not measured."""
    if row is None or row["scores"].get(metric) is None:
        return ""
    low, high = row["intervals"][metric]
    return f"{row['scores'][metric]:.1f} [{low:.1f}, {high:.1f}]"


def _scores(
    results: Mapping[str, Any], means: Sequence[Row], table: Mapping[str, Any], titles: Mapping[str, str]
) -> str:
    """Return a row for each system, the best at the middle ratio first."""
    ratios = results["settings"]["ratios"]
    middle = ratios[len(ratios) // 2]
    by_ratio = {(row["system"], row["ratio"]): row for row in means}
    restored = {
        (row["system"], row["ratio"]): row["scores"]["token_accuracy"]
        for row in results["rows"]
        if "token_accuracy" in row["scores"]
    }
    against_truncated = {
        (entry["first"], at["ratio"]): at["verdict"]
        for entry in results["orderings"]
        if entry["second"] == "cut"
        for at in entry["ratios"]
        if at["verdict"] != "not run"
    }
    kinds = {
        name: "pruned" if entry.get("environment") == "kvpress" else "text" for name, entry in table["peers"].items()
    }
    kinds |= results["carriers"]
    systems = [name for name in titles if any((name, ratio) in by_ratio for ratio in ratios)]
    systems.sort(key=lambda name: -by_ratio.get((name, middle), {"scores": {"f1": 0}})["scores"]["f1"])
    lines = []
    for name in systems:
        costs = by_ratio.get((name, middle), {"costs": {}})["costs"]
        verdicts = [against_truncated[name, ratio] for ratio in ratios if (name, ratio) in against_truncated]
        keeps = _KEEPS[kinds.get(name, "text")] + (
            ", question seen" if table["peers"].get(name, {}).get("aware") else ""
        )
        lines.append(
            [
                titles[name],
                keeps,
                *(score(by_ratio.get((name, ratio))) for ratio in ratios),
                verdicts[0] if len(set(verdicts)) == 1 else ", ".join(verdicts),
                f"{costs['memory_bytes'] / 1000:,.1f}" if "memory_bytes" in costs else "",
                f"{costs['kept_positions'] * table['position_bytes'] / 1000:,.0f}" if "memory_bytes" in costs else "",
                *(f"{costs[kind]:.2f}" if kind in costs else "" for kind in ("compress_seconds", "answer_seconds")),
                f"{restored[name, middle]:.0f}" if (name, middle) in restored else "",
            ]
        )
    header = ["system", "memory", *(f"{ratio}x" for ratio in ratios), "than truncated text"]
    header += ["stored, kB", "cache, kB"]
    return markdown_table([*header, "compress, s", "answer, s", "restored, %"], lines)


def _unread(results: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """Return the trained methods whose F1 is at no ratio significantly above that without context."""
    against = results.get("against_no_context", {})
    names = [
        titles[name]
        for name in results["family"]
        if name in against and all(at["interval"][0] <= 0 for at in against[name])
    ]
    if not names:
        return ""
    return (
        f"At this budget these methods are not significantly above no context at any ratio: {'; '.join(names)}. "
        "Their rows show that they need more training, not what they reach."
    )


def differences(orderings: Sequence[Row], titles: Mapping[str, str], ratios: Sequence[int]) -> str:
    """Return the paired differences of F1, those at unlike ratios below the others."""
    equal: list[list[str]] = []
    unlike: list[list[str]] = []
    most = max((at.get("num_questions", 0) for entry in orderings for at in entry["ratios"]), default=0)
    for entry in orderings:
        first, second = titles[entry["first"]], titles[entry["second"]]
        measured = [at for at in entry["ratios"] if "difference" in at]
        if entry["second"] == "cut" or not measured:
            continue
        if all(at["ratio"] == at["second_ratio"] for at in measured):
            cells = {at["ratio"]: _difference(at, most) for at in measured}
            equal.append([first, second, *(cells.get(ratio, "") for ratio in ratios)])
            continue
        for at in measured:
            pair = [
                title if ratio in (0, 1) else f"{title}, {ratio if isinstance(ratio, str) else f'{ratio}x'}"
                for title, ratio in ((first, at["ratio"]), (second, at["second_ratio"]))
            ]
            unlike.append([*pair, _difference(at, most)])
    text = (
        f'F1 of the first system minus the second, on the same {most} questions. "Higher" and "lower" mean that the '
        '95 % interval excludes 0. Otherwise the result is "inconclusive".\n\n'
    )
    tables = [markdown_table(["first", "second", *(f"{ratio}x" for ratio in ratios)], equal)] if equal else []
    tables += [markdown_table(["first", "second", "difference"], unlike)] if unlike else []
    return text + "\n\n".join(tables)


def _difference(at: Row, most: int) -> str:
    low, high = at["interval"]
    number = "" if at["num_questions"] == most else f", n {at['num_questions']}"
    return f"{at['verdict']}: {at['difference']:+.1f} [{low:+.1f}, {high:+.1f}]{number}"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    parser.add_argument("results", metavar="FILE", help="comparison.json")
    parser.add_argument("--folder", default=str(HERE), metavar="FOLDER", help="of the page (default: the benchmark's)")
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    results = read_results(Path(arguments.results))
    if not results:
        raise ValueError(f"{arguments.results} is not a result file")
    write(results, Path(arguments.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
