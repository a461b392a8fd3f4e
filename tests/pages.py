# SPDX-License-Identifier: Apache-2.0
"""Run the code of README.md and docs/, and write its output and the tables of scores into the pages.

    python tests/pages.py [--scores | --methods]

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The first one is README's.
CHECKPOINTS = (
    "smollm2-135m-instruct-ranked-key-values",
    "smollm2-135m-instruct-mean-pooling",
    "smollm2-135m-instruct-icae",
)
SCORES = ROOT / "benchmarks" / "smollm2"
# The first checkpoint's answers to the questions of the second.
IN_COMMON = "questions_in_common"
# Pages whose output is the checkpoint's, and the languages that run.
OF_THE_CHECKPOINT = {README: ("python",), DOCS / "use.md": ("python", "bash")}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SCORES = re.compile(r"(<!-- (scores|sets|needles) ?([^>]*?) -->\n).*?(?=\n<!-- /\2 -->)", re.DOTALL)
_RATIOS = (2, 4, 8, 16)
# Task -> its metric and the title of the metric.
_METRICS = {
    "question_answering": ("f1", "F1"),
    "summarization": ("rougeL", "ROUGE-L"),
    "reconstruction": ("token_accuracy", "tokens restored, %"),
    "continuation": ("perplexity", "perplexity of what follows"),
}
_BASELINES = {"cut": "truncated text", "bm25": "BM25 sentences"}
_READ = {"ratio": "{name}", "cut": "Truncated text, same budget", "bm25": "BM25 sentences, same budget"}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Args:
        language: such as "python".
        content: the code.
        start: where the content starts in the page.
        is_output: whether it is a text block directly behind code.
    """

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
    """Run the blocks of a page in order, in the current directory; `yaml` and `jsonl` blocks are written as files.

    Args:
        path: the page.
        languages: blocks of other languages are only shown.

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
    """Copy small trained models into a folder, under the names of a base and of checkpoints on the pages.

    Args:
        small: folder with the models `base` and `mean_pooling`, which get a chat template.
        folder: where a page will run.
    """
    from transformers import AutoTokenizer

    from context_compressors.modeling.parts.prompting import opening_ids

    names = {f"checkpoints/{name}": "mean_pooling" for name in CHECKPOINTS}
    for name, model in {BASE: "base", **names}.items():
        place = folder / name
        shutil.copytree(small / model, place)
        tokenizer = AutoTokenizer.from_pretrained(place)
        tokenizer.chat_template = _CHAT_TEMPLATE
        tokenizer.save_pretrained(place)
        if name != BASE:
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
            config |= {"prompt_format": "chat", "prompts": None, "slots_after_ids": opening_ids(tokenizer)}
            (place / "config.json").write_text(json.dumps(config), encoding="utf-8")


def letters_tokenizer(name: str, is_reversed: bool = False) -> Any:
    """Save a tokenizer whose tokens are letters to a folder."""
    from byte_tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer(backwards=is_reversed, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(name)
    return tokenizer


def base_of_letters(name: str, width: int, is_reversed: bool = False) -> None:
    """Save a random language model with such a tokenizer under the name of a base on the pages."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = letters_tokenizer(name, is_reversed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
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


def scores_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a checkpoint's result file about questions on SQuAD, by condition."""
    return rows_of(json.loads((SCORES / f"{name}.json").read_text(encoding="utf-8")))


def rows_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows about questions on SQuAD of a result file of `context-compressors evaluate`, by condition."""
    rows = [row for row in content["rows"] if (row["dataset"], row["task"]) == ("squad", "question_answering")]
    return {row["condition"]: row for row in rows}


def score_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Return README's table: F1 on SQuAD of each checkpoint and its baselines, what is stored and what is read.

    Args:
        scores: `scores_of` each checkpoint.
    """
    from context_compressors.reporting.tables import markdown_table

    body = []
    for name, rows in scores.items():
        link = f"[{name}](checkpoints/{name}/README.md), {rows['no_context']['num_samples']:,} questions"
        for kind, title in _READ.items():
            bounds = ["no_context", "full_context"] if kind == "ratio" else ["", ""]
            body.append(_line(title.format(name=link), rows, [*bounds, *(f"{kind}={n}" for n in _RATIOS)]))
        if name == CHECKPOINTS[1]:
            title = f"{CHECKPOINTS[0]}, the same questions"
            body.append(_line(title, scores_of(IN_COMMON), ["", "", *(f"ratio={ratio}" for ratio in _RATIOS)]))
        body += _sizes(name, rows)
    return markdown_table(["F1", "no context", "full text", *(f"{ratio}x" for ratio in _RATIOS)], body)


def _line(title: str, rows: Mapping[str, Mapping[str, Any]], conditions: Sequence[str]) -> list[str]:
    return [title, *(f"{rows[name]['metrics']['f1']:.1f}" if name in rows else "" for name in conditions)]


def _sizes(name: str, rows: Mapping[str, Any]) -> list[list[str]]:
    """Return two lines, what is stored and what is read: of no context, of the full text, and at each ratio."""
    tokens = rows["full_context"]["costs"]["decoder_positions"] - rows["no_context"]["costs"]["decoder_positions"]
    costs = [rows[f"ratio={ratio}"]["costs"] for ratio in _RATIOS if f"ratio={ratio}" in rows]
    stored = [rows["full_context"]["costs"]["memory_bytes"] / 1000, *(cost["memory_bytes"] / 1000 for cost in costs)]
    read = [tokens, *(cost["slots"] for cost in costs)]
    lines = [
        ["Stored: kB", "", *(f"{size:,.0f}" if size > 10 else f"{size:.1f}" for size in stored)],
        ["Read: positions, kB of KV cache", "", *(f"{n:.0f}, {n * _position_kb(name):,.0f}" for n in read)],
    ]
    return [[*line, *[""] * (3 + len(_RATIOS) - len(line))] for line in lines]


def _position_kb(name: str) -> float:
    """Return kB of the keys and values of a position in bfloat16, which a slot takes, too, when it is read."""
    config = json.loads((ROOT / "checkpoints" / name / "config.json").read_text(encoding="utf-8"))["decoder_config"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 / 1000


def interval_table(name: str, rows: Mapping[str, Any]) -> str:
    """Return the table of a checkpoint's page: F1 with intervals, differences on the same questions and retention.

    Args:
        name: of the checkpoint.
        rows: of `scores_of`.
    """
    from context_compressors.reporting.tables import markdown_table

    ratios = sorted(int(name.partition("=")[2]) for name in rows if name.startswith("ratio="))
    body = []
    for kind, title in (("ratio", "compressed"), *_BASELINES.items()):
        of_kind = [rows[f"{kind}={ratio}"] for ratio in ratios]
        body.append([title, *(_with(row["metrics"]["f1"], row["intervals"]["f1"]) for row in of_kind)])
    slots = [rows[f"ratio={ratio}"] for ratio in ratios]
    for kind, title in _BASELINES.items():
        pairs = [row["differences"][f"{kind}={ratio}"] for row, ratio in zip(slots, ratios, strict=True)]
        body.append([f"minus {title}", *(_with(pair["difference"], pair["interval"]) for pair in pairs)])
    body.append(["retention, %", *(_with(row["retention"], row["intervals"]["retention"], 0) for row in slots)])
    body.append(["stored: kB", *(f"{row['costs']['memory_bytes'] / 1000:,.0f}" for row in slots)])
    positions = [row["costs"]["slots"] for row in slots]
    read = [f"{number:.0f}, {number * _position_kb(name):,.0f}" for number in positions]
    body.append(["read: positions, kB of KV cache", *read])
    first = rows["no_context"]
    none, full = (
        _with(rows[name]["metrics"]["f1"], rows[name]["intervals"]["f1"]) for name in ("no_context", "full_context")
    )
    text = f"{first['num_samples']:,} questions about {first['num_documents']} paragraphs, seed {first['seed']}. "
    text += f"No context: {none}. Full text: {full}."
    return f"{text}\n\n{markdown_table(['F1', *(f'{ratio}x' for ratio in ratios)], body)}"


def _with(value: float, interval: Sequence[float], digits: int = 1) -> str:
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def tables_by_set(*contents: Mapping[str, Any]) -> str:
    """Return a table for each task: scores on each set, their mean, and the mean difference to each baseline.

    Args:
        contents: of result files of `context-compressors evaluate`, which are read as one.
    """
    from context_compressors.configuration.nearest_names import as_spelled_now

    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    for row in (row for content in contents for row in content["rows"]):
        tasks.setdefault(as_spelled_now(row["task"]), {}).setdefault(row["dataset"], {})[row["condition"]] = row
    return "\n\n".join(_table_of_task(task, sets) for task, sets in tasks.items())


def _table_of_task(task: str, sets: Mapping[str, Mapping[str, Any]]) -> str:
    from context_compressors.reporting.tables import markdown_table

    metric, title = _METRICS[task]
    conditions = next(iter(sets.values()))
    ratios = sorted(int(name.partition("=")[2]) for name in conditions if name.startswith("ratio="))
    columns = ["no_context", "full_context", *(f"ratio={ratio}" for ratio in ratios)]
    body, cells_of_sets = [], []
    for name, rows in sets.items():
        counts = rows["no_context"]
        domain = ", out of domain" if counts["domain"] == "out" else ""
        cells = [(rows[column]["metrics"][metric], rows[column]["intervals"][metric]) for column in columns]
        cells_of_sets.append(cells)
        label = f"{name}{domain} ({counts['num_samples']:,} about {counts['num_documents']:,})"
        body.append([label, *(_with(*cell) for cell in cells)])
    if metric != "perplexity" and len(sets) > 1:
        body.append(["mean", *_means(cells_of_sets)])
    for kind, baseline in _BASELINES.items():
        if f"{kind}={ratios[0]}" in conditions:
            pairs = [
                [rows[f"ratio={ratio}"]["differences"][f"{kind}={ratio}"] for ratio in ratios]
                for rows in sets.values()
            ]
            differences = [[(pair["difference"], pair["interval"]) for pair in of_set] for of_set in pairs]
            body.append([f"compressed minus {baseline}, mean", "", "", *_means(differences)])
    costs = [[rows[f"ratio={ratio}"]["costs"] for rows in sets.values()] for ratio in ratios]
    for size, name, unit in (("stored: kB, mean", "memory_bytes", 1000), ("read: positions, mean", "slots", 1)):
        body.append([size, "", "", *(f"{fmean(cost[name] for cost in of_all) / unit:,.0f}" for of_all in costs)])
    return markdown_table([title, "no context", "full text", *(f"{ratio}x" for ratio in ratios)], body)


def _means(lines: Sequence[Sequence[tuple[float, Sequence[float]]]]) -> list[str]:
    """Return the means over sets with the intervals of independent sets."""
    from context_compressors.evaluation.bootstrap import interval_of_mean

    means = []
    for column in zip(*lines, strict=True):
        mean = fmean(value for value, _ in column)
        means.append(_with(mean, interval_of_mean(mean, [ends for _, ends in column])))
    return means


def needle_table(path: Path) -> str:
    """The share of needles of all kinds that the outputs contain, by length and condition."""
    from context_compressors.evaluation.rows import ordered_conditions
    from context_compressors.reporting.tables import markdown_table

    cells = {
        (cell["length"], cell["condition"]): _with(cell["accuracy"], cell["interval"], 0)
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if (cell["kind"], cell["metric"]) == ("all", "substring_accuracy")
    }
    conditions = ordered_conditions(name for _, name in cells)
    rows = [
        [f"{length:,}", *(cells[length, name] for name in conditions)] for length in sorted({row for row, _ in cells})
    ]
    return markdown_table(["tokens", *(name.replace("_", " ") for name in conditions)], rows)


def with_scores(text: str) -> str:
    """Return a page with its tables of scores, from the result files that its markers name."""

    def table(match: re.Match[str]) -> str:
        if match[2] == "needles":
            return match[1] + needle_table(SCORES / f"{match[3]}.json")
        if match[2] == "sets":
            files = [SCORES / f"{name}.json" for name in match[3].split()]
            return match[1] + tables_by_set(*(json.loads(file.read_text(encoding="utf-8")) for file in files))
        if match[3]:
            return match[1] + interval_table(match[3], scores_of(match[3]))
        return match[1] + score_table({name: scores_of(name) for name in CHECKPOINTS})

    return _SCORES.sub(table, text)


def method_row(method: str, classes: Sequence[str]) -> str:
    """Return the row of README's table for a method of the register that has none."""
    heads = ", ".join(f"`{name}`" for name in classes[2:])
    return f"| [{method.replace('_', ' ')}](docs/methods/{method}.md) | `{method}` | | {heads} |"


def with_method_rows(text: str) -> str:
    """README with a row for every method of the register."""
    from context_compressors.configuration.methods import METHODS

    table = re.search(r"## Methods\n\n(?:\|.*\n)+", text)[0]
    rows = [method_row(name, classes) for name, classes in METHODS.items() if f"`{classes[2]}`" not in table]
    return text.replace(table, "".join([table, *(f"{row}\n" for row in rows)]))


def main() -> None:
    """Write what the checkpoints print and score into the pages."""
    for path in (README, SCORES / "README.md"):
        path.write_text(with_scores(path.read_text(encoding="utf-8")), encoding="utf-8")
    if "--methods" in sys.argv:
        README.write_text(with_method_rows(README.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if "--scores" in sys.argv:
        return
    for path in OF_THE_CHECKPOINT:
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            outputs = run_on_the_checkpoint(path, Path(folder))
        path.write_text(filled(text, outputs), encoding="utf-8")
        print(f"wrote {os.path.relpath(path, ROOT)}")
    # README leaves the type to the checkpoint: an answer that rounding changes would be another on the next machine.
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.md"
        in_float32 = 'trust_remote_code=True, dtype="float32")'
        page.write_text(README.read_text(encoding="utf-8").replace("trust_remote_code=True)", in_float32, 1), "utf-8")
        changed = [
            block.content for block, printed in run_on_the_checkpoint(page, Path(folder)) if printed != block.content
        ]
    if changed:
        print(f"in float32 README prints something else than {changed}: ask what the checkpoint is surer of")


if __name__ == "__main__":
    main()
