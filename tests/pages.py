# SPDX-License-Identifier: Apache-2.0
"""The code in README.md and docs/: running it, and writing down what it prints.

    python tests/pages.py [--scores]

runs README.md and docs/use.md on the checkpoints of this repository, and writes into them what their code prints; and
into README.md and benchmarks/smollm2/README.md the scores of the file that lies there for each checkpoint, under its
name, those of files with many sets (several files make one table, and each task has its own), and with needles, and
differences of two checkpoints on the same samples.
A `text` block that stands right behind a `python` or `bash` block is what that block prints. With `--scores` nothing
runs.
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
from collections.abc import Iterator, Mapping, Sequence
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
CHECKPOINTS = ("smollm2-135m-instruct-ranked-key-values", "smollm2-135m-instruct-mean-pooling")
SCORES = ROOT / "benchmarks" / "smollm2"
# Pages whose output is that of the checkpoint, and what of them runs.
OF_THE_CHECKPOINT = {README: ("python",), DOCS / "use.md": ("python", "bash")}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SCORES = re.compile(r"(<!-- (scores|sets|needles|paired) ?([^>]*?) -->\n).*?(?=\n<!-- /\2 -->)", re.DOTALL)
_MISSING = "…"
_RATIOS = (2, 4, 8, 16)
# Of each task the metric, and its title.
_METRICS = {
    "question_answering": ("f1", "F1"),
    "summarisation": ("rougeL", "ROUGE-L"),
    "reconstruction": ("token_accuracy", "tokens restored, %"),
    "continuation": ("perplexity", "perplexity of what follows"),
}
_READ = {"ratio": "{name}", "cut": "cut text, read by it", "bm25": "BM25's sentences, read by it"}
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
        is_output: of a text block, whether it stands right behind code.
    """

    language: str
    content: str
    start: int
    is_output: bool


def blocks_of(text: str) -> list[Block]:
    """The code blocks of a page, in order."""
    found, end, runs = [], None, False
    for match in _BLOCK.finditer(text):
        is_output = runs and match[1] == "text" and not text[end : match.start()].strip()
        found.append(Block(match[1], match[2], match.start(2), is_output))
        end, runs = match.end(), match[1] in ("python", "bash")
    return found


def run_command(line: str) -> None:
    """Run a line of a `bash` block: `context-compressors`, or a script of examples/."""
    from context_compressors import cli

    program, *arguments = shlex.split(line, comments=True)
    if program == "context-compressors":
        assert cli.main(arguments) == 0, line
        return
    assert (program, arguments[0].partition("/")[0]) == ("python", "examples"), f"cannot run {line!r}"
    with patch.object(sys, "argv", arguments):
        runpy.run_path(arguments[0], run_name="__main__")


def run_page(
    path: Path, languages: tuple[str, ...] = ("python", "bash", "yaml", "jsonl")
) -> tuple[dict[str, Any], list[tuple[Block, str]]]:
    """Run the blocks of a page in order, in the current directory; `yaml` and `jsonl` are written down as files.

    Args:
        path: the page.
        languages: blocks of other languages are only shown.

    Returns:
        What the page's Python has defined in the end, and its output blocks, each with what was printed.
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
    """Write a block down under the name in its first line, a comment."""
    name = re.match(r"# (\S+)\n", block.content)
    assert name, f"a {block.language} block of {path.name} starts with the name of its file: {block.content[:40]!r}"
    content = block.content if block.language == "yaml" else block.content[name.end() :]
    Path(name[1]).write_text(content, encoding="utf-8")


def stand_in_checkpoints(small: Path, folder: Path) -> None:
    """Put small trained models in a folder, under the names that pages have for a base and a checkpoint on it.

    Args:
        small: folder with the models `base` and `mean_pooling`, which get a chat template.
        folder: where a page will run.
    """
    from transformers import AutoTokenizer

    from context_compressors.modeling.parts.chat_template import opening_ids

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
    """Save a tokenizer whose tokens are letters in a folder of the current directory."""
    from byte_tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer(backwards=is_reversed, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(name)
    return tokenizer


def base_of_letters(name: str, width: int, is_reversed: bool = False) -> None:
    """Save a random language model with such a tokenizer under a name that pages have for a base."""
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
    """Run a page in a folder that has the checkpoints of this repository; its output blocks with what was printed."""
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    with contextlib.chdir(folder):
        return run_page(path, OF_THE_CHECKPOINT.get(path, ("python",)))[1]


def filled(text: str, outputs: list[tuple[Block, str]]) -> str:
    """The page with what was printed in its output blocks."""
    for block, printed in reversed(outputs):
        text = text[: block.start] + printed + text[block.start + len(block.content) :]
    return text


def scores_of(name: str) -> dict[str, dict[str, Any]] | None:
    """The rows of a checkpoint's result file about questions on SQuAD, by condition; `None` where there is no file."""
    path = SCORES / f"{name}.json"
    return rows_of(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def rows_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a result file of `context-compressors evaluate` about questions on SQuAD, by condition."""
    rows = [row for row in content["rows"] if (row["dataset"], row["task"]) == ("squad", "question_answering")]
    return {row["condition"]: row for row in rows}


def score_table(scores: Mapping[str, Mapping[str, Any] | None]) -> str:
    """README's table of checkpoints: F1 on SQuAD beside what stands at the same positions, and what is kept.

    Args:
        scores: of each checkpoint its `scores_of`; where it is `None` its rows hold dots.
    """
    from context_compressors.reporting.tables import markdown_table

    body = []
    for name, rows in scores.items():
        link = f"[{name}](checkpoints/{name}/README.md)"
        for kind, title in _READ.items():
            conditions = ["no_context", "full_context"] if kind == "ratio" else []
            conditions += [f"{kind}={ratio}" for ratio in _RATIOS]
            f1 = [f"{rows[condition]['metrics']['f1']:.1f}" if rows else _MISSING for condition in conditions]
            body.append([title.format(name=link), *[""] * (2 + len(_RATIOS) - len(f1)), *f1])
        body.append(["its context: positions, kB kept", *_kept(name, rows)])
    return markdown_table(["F1", "no context", "full text", *(f"{ratio}x" for ratio in _RATIOS)], body)


def _kept(name: str, rows: Mapping[str, Any] | None) -> list[str]:
    """Positions and kilobytes of a context: none, its keys and values, and a memory of each ratio."""
    if rows is None:
        return ["", *[_MISSING] * (1 + len(_RATIOS))]
    tokens = rows["full_context"]["costs"]["decoder_positions"] - rows["no_context"]["costs"]["decoder_positions"]
    config = json.loads((ROOT / "checkpoints" / name / "config.json").read_text(encoding="utf-8"))["decoder_config"]
    width = config["num_key_value_heads"] * config["head_dim"]
    costs = [rows[f"ratio={ratio}"]["costs"] for ratio in _RATIOS]
    kept = [(cost["slots"], cost["memory_bytes"]) for cost in costs]
    # Keys and values of every layer, in bfloat16.
    both = [(tokens, tokens * config["num_hidden_layers"] * 2 * width * 2), *kept]
    return ["", *(f"{places:.0f}, {size / 1000:,.0f}" for places, size in both)]


def interval_tables(rows: Mapping[str, Any] | None) -> str:
    """Tables of a checkpoint's page: F1 with intervals, differences on the same questions and retention; by kind.

    Args:
        rows: of `scores_of`; dots where it is `None`.
    """
    from context_compressors.reporting.tables import markdown_table

    if rows is None:
        return _MISSING
    ratios = sorted(int(name.partition("=")[2]) for name in rows if name.startswith("ratio="))
    body = []
    for kind, title in (("ratio", "its slots"), ("cut", "cut text"), ("bm25", "BM25's sentences")):
        found = [rows[f"{kind}={ratio}"] for ratio in ratios]
        body.append([title, *(_with(row["metrics"]["f1"], row["intervals"]["f1"]) for row in found)])
    slots = [rows[f"ratio={ratio}"] for ratio in ratios]
    for kind, title in (("cut", "slots less cut text"), ("bm25", "slots less BM25's sentences")):
        found = [row["differences"][f"{kind}={ratio}"] for row, ratio in zip(slots, ratios, strict=True)]
        body.append([title, *(_with(row["difference"], row["interval"]) for row in found)])
    body.append(["retention, %", *(_with(row["retention"], row["intervals"]["retention"], 0) for row in slots)])
    body.append(["positions", *(f"{row['costs']['slots']:.0f}" for row in slots)])
    body.append(["kB kept", *(f"{row['costs']['memory_bytes'] / 1000:,.0f}" for row in slots)])
    bounds = [rows[name] for name in ("no_context", "full_context")]
    none, full = (_with(row["metrics"]["f1"], row["intervals"]["f1"]) for row in bounds)
    by_kind = [
        [f"{kind} ({row['num_samples']})", *(f"{each['by_kind'][kind]['f1']:.0f}" for each in (*bounds, *slots))]
        for kind, row in bounds[0]["by_kind"].items()
    ]
    columns = [f"{ratio}x" for ratio in ratios]
    first = bounds[0]
    drawn = (
        f"{first['num_samples']} questions about {first['num_documents']} paragraphs, drawn by seed {first['seed']}."
    )
    said = f"F1, with 95 % bootstrap intervals over paragraphs; without context {none}, with the full text {full}:"
    tables = markdown_table(["", *columns], body), markdown_table(["F1", "none", "full text", *columns], by_kind)
    return f"{drawn}\n{said}\n\n{tables[0]}\n\nBy kind of answer, with the number of questions:\n\n{tables[1]}"


def _with(value: float, interval: Sequence[float], digits: int = 1) -> str:
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def tables_by_set(*contents: Mapping[str, Any]) -> str:
    """Scores on many sets, what cut text and BM25's sentences lack, and the means over sets; a part for each task.

    Args:
        contents: of result files of `context-compressors evaluate`, as if they were one.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in (row for content in contents for row in content["rows"]):
        found.setdefault(row["task"], {}).setdefault(row["dataset"], {})[row["condition"]] = row
    return "\n\n".join(part for task, sets in found.items() for part in _tables_of_task(task, sets))


def _tables_of_task(task: str, sets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Tables of one task: of its sets the rows by condition."""
    from context_compressors.reporting.tables import markdown_table

    metric, title = _METRICS[task]
    first = next(iter(sets.values()))
    ratios = sorted(int(name.partition("=")[2]) for name in first if name.startswith("ratio="))
    columns = ["no_context", "full_context", *(f"ratio={ratio}" for ratio in ratios)]
    header = [title, "no context", "full text", *(f"{ratio}x" for ratio in ratios)]
    lines = {}
    for name, rows in sets.items():
        one = rows["no_context"]
        domain = ", out of domain" if one["domain"] == "out" else ""
        cells = [(rows[column]["metrics"][metric], rows[column]["intervals"][metric]) for column in columns]
        lines[f"{name}{domain} ({one['num_samples']:,} about {one['num_documents']:,})"] = cells
    yield markdown_table(header, _with_mean(lines, metric != "perplexity"))
    for kind, words in (("cut", "slots less cut text"), ("bm25", "slots less BM25's sentences")):
        if f"{kind}={ratios[0]}" in first:
            less = {
                name: [rows[f"ratio={ratio}"]["differences"][f"{kind}={ratio}"] for ratio in ratios]
                for name, rows in sets.items()
            }
            pairs = {name: [(cell["difference"], cell["interval"]) for cell in cells] for name, cells in less.items()}
            yield markdown_table([words, *header[3:]], _with_mean(pairs))


def _with_mean(
    lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], is_mean_of_all: bool = True
) -> list[list[str]]:
    """Lines of a table and where there are several, if wanted, their mean, its interval that of independent sets."""
    from context_compressors.evaluation.bootstrap import interval_of_mean

    means = []
    for column in zip(*lines.values(), strict=True):
        mean = fmean(value for value, _ in column)
        means.append((mean, interval_of_mean(mean, [ends for _, ends in column])))
    table = {**lines, "mean over sets": means} if is_mean_of_all and len(lines) > 1 else lines
    return [[name, *(_with(value, ends) for value, ends in cells)] for name, cells in table.items()]


def needle_table(path: Path) -> str:
    """The share of needles of all kinds that the outputs contain, of a file of `evaluate-needles`."""
    from context_compressors.evaluation.needles import NeedleGrid

    # Of all tables of a measure the first.
    tables = NeedleGrid.load(path).to_markdown().partition("\n## ")[2]
    return tables.split("\n\n")[1]


def paired_table(content: Mapping[str, Any]) -> str:
    """Two systems on the same samples, a line for each data set and condition.

    Args:
        content: of a file that `context-compressors compare` wrote of two systems.
    """
    from context_compressors.reporting.tables import markdown_table

    found = content["differences"]
    titles = dict(_METRICS.values())
    body = [
        [
            f"{row['dataset']} ({row['num_samples']:,} about {row['num_documents']:,})",
            row["conditions"][0].replace("_", " "),
            *(_with(row[name], row[f"{name}_interval"]) for name in ("first", "second")),
            _with(row["difference"], row["interval"]),
        ]
        for row in found
    ]
    metric, systems = found[0]["metric"], found[0]["systems"]
    return markdown_table([titles.get(metric, metric), "condition", *systems, "difference"], body)


def with_scores(text: str) -> str:
    """A page with the scores of the result files: README's table, or those of the file that the place names."""

    def table(match: re.Match[str]) -> str:
        if match[2] == "needles":
            return match[1] + needle_table(SCORES / f"{match[3]}.json")
        if match[2] == "paired":
            return match[1] + paired_table(json.loads((SCORES / f"{match[3]}.json").read_text(encoding="utf-8")))
        if match[2] == "sets":
            files = [SCORES / f"{name}.json" for name in match[3].split()]
            return match[1] + tables_by_set(*(json.loads(file.read_text(encoding="utf-8")) for file in files))
        if match[3]:
            return match[1] + interval_tables(scores_of(match[3]))
        return match[1] + score_table({name: scores_of(name) for name in CHECKPOINTS})

    return _SCORES.sub(table, text)


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
