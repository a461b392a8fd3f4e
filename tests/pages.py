# SPDX-License-Identifier: Apache-2.0
"""Run the code of README.md and docs/, and write its output and the tables of scores into the pages.

    python tests/pages.py [--scores]

A `text` block directly behind a `python` or `bash` block is the output of that block. Tables of scores stand between
markers in README.md and benchmarks/smollm2/README.md and come from the result files in benchmarks/smollm2/. `--scores`
writes the tables alone and runs nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from byte_tokenizers import CHAT_TEMPLATE, byte_tokenizer, tiny_llama

from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.rows import EvaluationRow, ordered_conditions
from context_compressors.reporting.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The first one is README's.
CHECKPOINTS = (
    "smollm2-135m-instruct-ranked-key-values",
    "smollm2-135m-instruct-mean-pooling",
    "smollm2-135m-instruct-icae",
    "smollm2-135m-instruct-compression-tokens",
    "smollm2-135m-instruct-five-hundred-x",
    "smollm2-135m-instruct-comprexit",
    "smollm2-135m-instruct-gmsa",
)
SCORES = ROOT / "benchmarks" / "smollm2"
# The first checkpoint's answers to the questions of the second.
IN_COMMON = "questions_in_common"
# Pages whose output is the checkpoint's, and the languages that run.
OF_THE_CHECKPOINT = {README: ("python",), DOCS / "use.md": ("python", "bash")}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SCORES = re.compile(r"(<!-- (scores|family|sets|needles) ?([^>]*?) -->\n).*?(?=<!-- /\2 -->)", re.DOTALL)
_RATIOS = (2, 4, 8, 16)
_TITLES = {
    "question_answering": "F1",
    "summarization": "ROUGE-L",
    "reconstruction": "tokens restored, %",
    "continuation": "perplexity of what follows",
}
_BASELINES = {"cut": "truncated text", "bm25": "BM25 sentences"}
# Cells of a table's rows by title.
Cells = dict[str, list[str]]
_STORED, _READ = "stored: kB", "read: positions, kB of KV cache"


@dataclass(frozen=True)
class Block:
    """A block on a page: where its content starts, and whether it is the output of code directly in front of it."""

    language: str
    content: str
    start: int
    is_output: bool


def blocks_of(text: str) -> list[Block]:
    """Return the code blocks of a page, in order."""
    blocks, end, runs = [], None, False
    for match in _BLOCK.finditer(text):
        is_output = runs and match[1] == "text" and not text[end : match.start()].strip()
        blocks.append(Block(match[1], match[2], match.start(2), is_output))
        end, runs = match.end(), match[1] in ("python", "bash")
    return blocks


def run_command(line: str) -> None:
    """Run a line of a `bash` block: `context-compressors`, or a script of examples/."""
    from context_compressors import cli

    # A comment stands behind a space; `shlex` would take the # in FILE#N for one.
    program, *arguments = shlex.split(line.partition(" #")[0])
    if program == "context-compressors":
        assert cli.main(arguments) == 0, line
        return
    assert (program, arguments[0].partition("/")[0]) == ("python", "examples"), f"cannot run {line!r}"
    with patch.object(sys, "argv", arguments):
        runpy.run_path(arguments[0], run_name="__main__")


def run_page(
    path: Path, languages: tuple[str, ...] = ("python", "bash", "yaml", "jsonl")
) -> tuple[dict[str, Any], list[tuple[Block, str]]]:
    """Run a page's blocks of these languages in the current directory; `yaml` and `jsonl` are written as files.

    Returns:
        The names that the page's Python defines, and its output blocks, each with what was printed.
    """
    names: dict[str, Any] = {"__name__": f"page_{path.stem}"}
    printed, outputs = "", []
    for block in blocks_of(path.read_text(encoding="utf-8")):
        if block.is_output:
            outputs.append((block, printed))
        if block.language not in languages:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            if block.language == "python":
                exec(compile(block.content, path.name, "exec"), names)
            elif block.language == "bash":
                for line in block.content.replace("\\\n", " ").splitlines():
                    if line.strip() and not line.startswith("#"):
                        run_command(line)
            else:
                write_file(path, block)
        printed = "".join(f"{line.rstrip()}\n" for line in stream.getvalue().strip("\n").splitlines())
        print(printed, end="")
    return names, outputs


def write_file(path: Path, block: Block) -> None:
    """Write a block to the file that its first line names."""
    name = re.match(r"# (\S+)\n", block.content)
    assert name, f"a {block.language} block of {path.name} starts with the name of its file: {block.content[:40]!r}"
    content = block.content if block.language == "yaml" else block.content[name.end() :]
    Path(name[1]).write_text(content, encoding="utf-8")


def stand_in_checkpoints(small: Path, folder: Path) -> None:
    """Copy the small trained models, with a chat template, under the names of a base and checkpoints on the pages."""
    from transformers import AutoTokenizer

    from context_compressors.modeling.parts.text_ids import opening_ids

    names = {f"checkpoints/{name}": "mean_pooling" for name in CHECKPOINTS}
    for name, model in {BASE: "base", **names}.items():
        place = folder / name
        shutil.copytree(small / model, place)
        tokenizer = AutoTokenizer.from_pretrained(place)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(place)
        if name != BASE:
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
            config |= {"prompt_format": "chat", "prompts": None, "slots_after_ids": opening_ids(tokenizer)}
            (place / "config.json").write_text(json.dumps(config), encoding="utf-8")


def letters_tokenizer(name: str, is_reversed: bool = False) -> Any:
    """Save a tokenizer whose tokens are letters to a folder."""
    tokenizer = byte_tokenizer(backwards=is_reversed, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(name)
    return tokenizer


def base_of_letters(name: str, width: int, is_reversed: bool = False) -> None:
    """Save a random language model with such a tokenizer under the name of a base on the pages."""
    from transformers import LlamaForCausalLM

    config = tiny_llama(letters_tokenizer(name, is_reversed), hidden_size=width, num_hidden_layers=8)
    LlamaForCausalLM(config).save_pretrained(name)


def run_on_the_checkpoint(path: Path, folder: Path) -> list[tuple[Block, str]]:
    """Run a page beside this repository's checkpoints; return its output blocks with what was printed."""
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    with contextlib.chdir(folder):
        return run_page(path, OF_THE_CHECKPOINT.get(path, ("python",)))[1]


def filled(text: str, outputs: list[tuple[Block, str]]) -> str:
    """Return the page with what was printed in its output blocks."""
    for block, printed in reversed(outputs):
        text = text[: block.start] + printed + text[block.start + len(block.content) :]
    return text


def report_of(*names: str) -> EvaluationReport:
    """Return result files of `context-compressors evaluate` as one report."""
    reports = [EvaluationReport.load(SCORES / f"{name}.json") for name in names]
    return replace(reports[0], rows=[row for report in reports for row in report.rows])


def rows_of(name: str) -> dict[str, EvaluationRow]:
    """Return the rows of a result file about questions on SQuAD, by condition."""
    rows = report_of(name).rows
    return {row.condition: row for row in rows if (row.dataset, row.task) == ("squad", "question_answering")}


def _with(value: float, interval: Sequence[float], digits: int = 1) -> str:
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def f1_of(rows: Iterable[EvaluationRow]) -> list[str]:
    """Return F1 with intervals."""
    return [_with(row.metrics["f1"], row.intervals["f1"]) for row in rows]


def cost_cells(none: list[EvaluationRow], full: list[EvaluationRow], *slots: list[EvaluationRow]) -> Cells:
    """Return mean kB stored and positions read; a slot is read as one position of a KV cache in bfloat16."""
    config_file = ROOT / "checkpoints" / CHECKPOINTS[0] / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))["decoder_config"]
    position = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 / 1000
    question, text = (fmean(row.costs["decoder_positions"] for row in rows) for rows in (none, full))
    read = [text - question, *(fmean(row.costs["slots"] for row in rows) for rows in slots)]
    stored = [f"{fmean(row.costs['memory_bytes'] for row in rows) / 1000:,.0f}" for rows in slots]
    text_bytes = [row.costs.get("memory_bytes") for row in full]
    return {
        _STORED: ["", f"{fmean(text_bytes) / 1000:.1f}" if all(text_bytes) else "", *stored],
        _READ: ["", *(f"{count:.0f}, {count * position:,.0f}" for count in read)],
    }


def squad_rows(name: str) -> Cells:
    """Return a checkpoint's rows on SQuAD by title; cells are those of no context, the full text and each ratio."""
    rows, ratios = rows_of(name), report_of(name).ratios("question_answering")
    none, full, slots = rows["no_context"], rows["full_context"], [rows[f"ratio={ratio}"] for ratio in ratios]
    cells = {"compressed": f1_of((none, full, *slots))}
    for kind, title in _BASELINES.items():
        cells[title] = ["", "", *f1_of(rows[f"{kind}={ratio}"] for ratio in ratios)]
    for kind, title in _BASELINES.items():
        pairs = [row.differences[f"{kind}={ratio}"] for row, ratio in zip(slots, ratios, strict=True)]
        cells[f"minus {title}"] = ["", "", *(_with(pair["difference"], pair["interval"]) for pair in pairs)]
    cells["retention, %"] = ["", "", *(_with(row.retention, row.intervals["retention"], 0) for row in slots)]
    return cells | cost_cells(*([row] for row in (none, full, *slots)))


def score_table() -> str:
    """Return README's table: F1 on SQuAD of two checkpoints and their baselines, what is stored and what is read."""
    header, body = ["F1", "no context", "full text", *(f"{ratio}x" for ratio in _RATIOS)], []
    for name in CHECKPOINTS[:2]:
        cells, count = squad_rows(name), rows_of(name)["no_context"].num_samples
        shown = {f"[{name}](checkpoints/{name}/README.md), {count:,} questions": cells["compressed"]}
        shown |= {f"{title}, same budget": cells[title] for title in _BASELINES.values()}
        if name == CHECKPOINTS[1]:
            common = [row for condition, row in rows_of(IN_COMMON).items() if condition.startswith("ratio=")]
            shown[f"{CHECKPOINTS[0]}, the same questions"] = ["", "", *f1_of(common)]
        for title, of in (shown | {title: cells[title] for title in (_STORED, _READ)}).items():
            title = title if title.startswith(CHECKPOINTS[0]) else title[0].upper() + title[1:]
            row = [title, *(cell.partition(" [")[0] for cell in of)]
            body.append([*row, *[""] * (len(header) - len(row))])
    return markdown_table(header, body)


def interval_table(name: str) -> str:
    """Return the table of a checkpoint's page: F1 with intervals, differences on the same questions and retention."""
    report, cells, row = report_of(name), squad_rows(name), rows_of(name)["no_context"]
    text = f"{row.num_samples:,} questions about {row.num_documents} paragraphs, seed {report.settings['seed']}."
    header = ["F1", "no context", "full text", *(f"{ratio}x" for ratio in report.ratios("question_answering"))]
    return f"{text}\n\n{markdown_table(header, [[title, *of] for title, of in cells.items()])}"


def family_table(*names: str) -> str:
    """Return F1 on SQuAD of checkpoints about the same questions, and differences to texts that one reader reads."""
    body: list[list[str]] = []
    stored: dict[tuple[str, ...], str] = {}
    for name in names:
        cells, label = squad_rows(name), name.removeprefix("smollm2-135m-instruct-").replace("-", " ")
        stored.setdefault(tuple(cells[_STORED]), f"{_STORED}, {label}")
        bounds = ["", ""] if body else cells["compressed"][:2]
        body.append([f"[{label}](../../checkpoints/{name}/README.md)", *bounds, *cells["compressed"][2:]])
        body += [[f"minus {baseline}", *cells[f"minus {baseline}"]] for baseline in _BASELINES.values()]
    body += [[title, *cells[title]] for title in _BASELINES.values()]
    body += [*([title, *kilobytes] for kilobytes, title in stored.items()), [_READ, *cells[_READ]]]
    ratios = report_of(names[0]).ratios("question_answering")
    return markdown_table(["F1", "no context", "full text", *(f"{ratio}x" for ratio in ratios)], body)


def task_table(report: EvaluationReport, task: str) -> str:
    """Return the scores on each set of a task, their mean, and the mean difference to each baseline."""
    metric, ratios = report.main_metric(task), report.ratios(task)
    conditions, body = ["no_context", "full_context", *(f"ratio={ratio}" for ratio in ratios)], []
    for name in report.datasets(task):
        rows = [report.row(name, task, condition) for condition in conditions]
        domain = ", out of domain" if rows[0].domain == "out" else ""
        label = f"{name}{domain} ({rows[0].num_samples:,} about {rows[0].num_documents:,})"
        body.append([label, *(_with(row.metrics[metric], row.intervals[metric]) for row in rows)])
    if metric != "perplexity" and len(body) > 1:
        means = report.averages(task, metric)["macro_average"]
        body.append(["mean", *(_with(*means[name]) for name in conditions)])
    differences = report.mean_differences(task, metric)
    for kind, title in _BASELINES.items():
        pairs = [differences.get((f"ratio={ratio}", f"{kind}={ratio}")) for ratio in ratios]
        if all(pairs):
            body.append([f"compressed minus {title}, mean", "", "", *(_with(*pair) for pair in pairs)])
    rows = [[row for row in report.rows if (row.task, row.condition) == (task, name)] for name in conditions]
    body += [[f"{title}, mean", *cells] for title, cells in cost_cells(*rows).items()]
    return markdown_table([_TITLES[task], "no context", "full text", *(f"{ratio}x" for ratio in ratios)], body)


def needle_table(name: str) -> str:
    """Return the share of needles of all kinds that the outputs contain, by length and condition."""
    cells: dict[int, dict[str, str]] = {}
    for cell in json.loads((SCORES / f"{name}.json").read_text(encoding="utf-8"))["cells"]:
        if (cell["kind"], cell["metric"]) == ("all", "substring_accuracy"):
            of_length = cells.setdefault(cell["length"], {})
            of_length[cell["condition"]] = _with(cell["accuracy"], cell["interval"], 0)
    conditions = ordered_conditions(next(iter(cells.values())))
    body = [[f"{length:,}", *(row[name] for name in conditions)] for length, row in sorted(cells.items())]
    return markdown_table(["tokens", *(name.replace("_", " ") for name in conditions)], body)


def with_scores(text: str) -> str:
    """Return a page with its tables of scores, from the result files that its markers name."""

    def table(kind: str, *names: str) -> str:
        if kind == "needles":
            return needle_table(*names)
        if kind == "family":
            return family_table(*names)
        if kind == "sets":
            report = report_of(*names)
            return "\n\n".join(task_table(report, task) for task in report.tasks())
        return interval_table(*names) if names else score_table()

    return _SCORES.sub(lambda match: f"{match[1]}{table(match[2], *match[3].split())}\n", text)


def main() -> None:
    """Write what the checkpoints print and score into the pages."""
    for path in (README, SCORES / "README.md"):
        path.write_text(with_scores(path.read_text(encoding="utf-8")), encoding="utf-8")
    if "--scores" in sys.argv:
        return
    for path in OF_THE_CHECKPOINT:
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            outputs = run_on_the_checkpoint(path, Path(folder))
        path.write_text(filled(text, outputs), encoding="utf-8")
        print(f"wrote {os.path.relpath(path, ROOT)}")


if __name__ == "__main__":
    main()
