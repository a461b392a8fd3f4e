# SPDX-License-Identifier: Apache-2.0
"""What the comparison's page says in short: the title's question, the best first, and what has found nothing yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.comparison.page_tables import interval, ratio_title
from context_compressors.reporting.tables import markdown_table

Row = Mapping[str, Any]
_BOUNDS = ("no_context", "full_context")
_NOTHING = {"scores": {"f1": 0.0}}
_THAN_CUT = {"holds": "above", "does not": "below", "cannot be told": "?", "not run": ""}
_IN_WORDS = {"holds": "above cut text", "does not": "below cut text", "cannot be told": "not told from cut text"}


def answer(
    rows: Sequence[Row],
    results: Mapping[str, Any],
    table: Mapping[str, Any],
    kinds: Mapping[str, str],
    titles: Mapping[str, str],
) -> str:
    """The title's question in a few lines: the best at each ratio, and what is above and below text that is cut.

    Args:
        rows: means over sets, of systems that answered all questions.
        results: the result file's content.
        table: `systems.yaml`.
        kinds: system -> what it keeps.
        titles: system -> what it is called.
    """
    ratios, than_cut = results["settings"]["ratios"], _than_cut(results["orderings"])
    aware = {name for name, entry in table["peers"].items() if entry.get("aware")}
    once = {*table["family"], *table["rounded"], *table["peers"]} - {*aware, *_BOUNDS, "cut"}
    vectors = {name for name in once if kinds.get(name) == "embeddings"}
    untrained = {*table["peers"], *(name for name, entry in table["family"].items() if not entry.get("trains", True))}
    untrained |= {name for name, entry in table["rounded"].items() if entry["of"] in untrained}

    def best(names: set[str]) -> str:
        return _best([row for row in rows if row["system"] in names], ratios, than_cut, untrained, titles)

    lines = {
        "Made once for all questions, F1 is highest with": best(once),
        "Of vectors with": best(vectors),
        "Made anew for each question with": best(aware),
    }
    lines |= _beside_cut(than_cut, ratios, vectors, titles)
    low, high = results["settings"]["context_tokens"]
    tokens = results["budget"].get("run", {}).get("tokens")
    budget = f"{tokens:,} tokens of training" if tokens else "its budget of training"
    lines["The verdict is for"] = f"{budget} and contexts of {low} to {high} tokens"
    return "\n".join(f"- {title} {text}." for title, text in lines.items() if text)


def _best(
    rows: Sequence[Row],
    ratios: Sequence[int],
    than_cut: Mapping[tuple[str, int | str], Row],
    untrained: set[str],
    titles: Mapping[str, str],
) -> str:
    """The row with the highest F1 at each ratio, and what is known of its system."""
    found: dict[str, list[str]] = {}
    for of_ratio in ([row for row in rows if row["ratio"] == ratio] for ratio in ratios):
        if of_ratio:
            row = max(of_ratio, key=lambda row: row["scores"]["f1"])
            at = than_cut.get((row["system"], row["ratio"]), {"verdict": "not run"})
            said = ["not trained" if row["system"] in untrained else "trained", _IN_WORDS.get(at["verdict"], "")]
            title = f"{titles[row['system']]} ({', '.join(filter(None, said))}),"
            found.setdefault(title, []).append(f"{row['scores']['f1']:.1f} at {ratio_title(row['ratio'])}")
    return "; ".join(f"{title} {', '.join(f1)}" for title, f1 in found.items())


def _beside_cut(
    than_cut: Mapping[tuple[str, int | str], Row],
    ratios: Sequence[int],
    vectors: set[str],
    titles: Mapping[str, str],
) -> dict[str, str]:
    """What is above cut text, and at which ratios this is above all vectors, or no vectors are above it."""
    above: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in than_cut):
        found = [ratio for ratio in ratios if than_cut.get((name, ratio), {}).get("verdict") == "holds"]
        above.setdefault(_at(found, ratios), []).append(titles[name])
    verdicts = {
        ratio: {at["verdict"] for (name, one), at in than_cut.items() if name in vectors and one == ratio}
        for ratio in ratios
    }
    below = [ratio for ratio, found in verdicts.items() if found == {"does not"}]
    untold = [ratio for ratio, found in verdicts.items() if found and "holds" not in found and ratio not in below]
    return {
        **{f"Above text cut to as many positions {at} are": "; ".join(names) for at, names in above.items() if at},
        "Text cut to as many positions is above every memory of vectors that was paired with it": _at(below, ratios),
        "No memory of vectors is told above text cut to as many positions": _at(untold, ratios),
    }


def _at(found: Sequence[int], ratios: Sequence[int]) -> str:
    """Those of the ratios at which something is so, in words."""
    return "at every ratio" if found == ratios else f"at {', '.join(map(ratio_title, found))}" if found else ""


def _than_cut(orderings: Sequence[Row]) -> dict[tuple[str, int | str], Row]:
    """Of each system at each ratio what the ordering against cut text says."""
    found = [(entry["first"], at) for entry in orderings if entry["second"] == "cut" for at in entry["ratios"]]
    return {(name, at["ratio"]): at for name, at in found if at["verdict"] != "not run"}


def short_table(
    rows: Sequence[Row],
    orderings: Sequence[Row],
    kinds: Mapping[str, str],
    titles: Mapping[str, str],
    aware: set[str],
    common: Sequence[int],
) -> str:
    """A line for each system, the best at the middle ratio first, and whether it is above text that is merely cut."""
    ratios, than_cut = _ratios(rows, common), _than_cut(orderings)
    middle = len(ratios) // 2
    lines = []
    for system, found in _ranked(rows, ratios):
        at = [than_cut[system, ratio] for ratio in ratios if (system, ratio) in than_cut]
        told = [_THAN_CUT[entry["verdict"]] for entry in at]
        lines.append(
            [
                titles[system],
                _keeps(system, kinds, aware),
                "" if found[middle] is None else _kilobytes(found[middle]),
                *("" if row is None else interval(row, "f1") for row in found),
                told[0] if len(set(told)) == 1 else ", ".join(told),
            ]
        )
    text = (
        f"F1, mean over the sets, the best at {ratios[middle]}x first, and kB at that ratio. {_bounds(rows, titles)}"
        f"The last column says, at {', '.join(map(ratio_title, ratios))}, whether it is above or below text that is "
        'cut to as many positions, with an interval that does not hold zero; "?" is what cannot be told, an empty '
        "cell what is not paired"
    )
    header = ["system", "keeps", "kB", *map(ratio_title, ratios), "than cut text"]
    return f"{text}.\n\n{markdown_table(header, lines)}"


def _ratios(rows: Sequence[Row], common: Sequence[int]) -> list[int]:
    return sorted({row["ratio"] for row in rows} & set(common))


def _ranked(rows: Sequence[Row], ratios: Sequence[int]) -> list[tuple[str, list[Row | None]]]:
    """Each system with its rows at the ratios, the best at the middle one first."""
    found = {(row["system"], row["ratio"]): row for row in rows}
    systems = dict.fromkeys(system for system, ratio in found if ratio in ratios)
    at = [(system, [found.get((system, ratio)) for ratio in ratios]) for system in systems]
    return sorted(at, key=lambda entry: -(entry[1][len(ratios) // 2] or _NOTHING)["scores"]["f1"])


def _bounds(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    return "".join(f"{titles[row['system']]}: {interval(row, 'f1')}. " for row in rows if row["system"] in _BOUNDS)


def _keeps(system: str, kinds: Mapping[str, str], aware: set[str]) -> str:
    """What a system keeps of a context, in words."""
    keeps = {"embeddings": "vectors", "text": "text"}
    return keeps.get(kinds[system], "keys, values") + (" (question seen)" if system in aware else "")


def _kilobytes(row: Row) -> str:
    size = row["costs"].get("memory_bytes")
    return "" if size is None else f"{size / 1000:,.1f}"


def not_found(results: Mapping[str, Any], titles: Mapping[str, str]) -> list[str]:
    """Sentences about methods whose slots tell nothing yet: at no ratio is F1 told above that without context."""
    against, parts = results.get("against_no_context", {}), []
    of_trained = {name: against[name] for name in results["family"] if name in against}
    nothing = [name for name, found in of_trained.items() if all(at["interval"][0] <= 0 for at in found)]
    if nothing:
        parts.append(
            f"\nWith this budget the slots of {'; '.join(titles[name] for name in nothing)} tell the decoder nothing "
            "yet: at no ratio does the interval of F1 less that of no context, paired on the same questions, lie "
            "above zero. Such rows say how much training a method takes, and nothing of what it comes to."
        )
    below = {
        titles[name]: ", ".join(ratio_title(at["ratio"]) for at in found if at["interval"][1] < 0)
        for name, found in against.items()
    }
    if named := "; ".join(f"{title} at {ratios}" for title, ratios in below.items() if ratios):
        parts.append(f"\nBelow no context, the whole interval below zero: {named}.")
    return parts
