# SPDX-License-Identifier: Apache-2.0
"""Pages and result files of all benchmarks: commands parse, links lead somewhere, files are small and rounded."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from context_compressors.reporting.result_files import rounded, write_results

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [*sorted(BENCHMARKS.rglob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
SCRIPTS = sorted(path for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
RESULTS = [path for path in BENCHMARKS.rglob("*.json") if not path.stem.endswith("jobs")]
RESULTS += (ROOT / "checkpoints").glob("*/training_summary.json")


def commands() -> set[str]:
    """What starts a benchmark on the pages and in the scripts' own texts."""
    found = set()
    for path in (*PAGES, *SCRIPTS):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        found |= {" ".join(command.split()) for command in re.findall(r"`(python -m benchmarks\.[^`]+)`", text)}
        found |= set(re.findall(r"^ *(python -m benchmarks\.[^`#\n]+)", text, re.MULTILINE))
    return found


def test_every_script_has_a_page_and_commands_that_it_takes(script):
    named = set()
    for command in commands():
        _, _, module, *arguments = shlex.split(command)
        named.add(module)
        if "--help" not in arguments:
            script(module.removeprefix("benchmarks.")).build_parser().parse_args(arguments)
    assert named == {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SCRIPTS}
    assert [path.parent.name for path in SCRIPTS if not (path.parent / "README.md").is_file()] == []


@pytest.mark.slow
def test_a_benchmark_runs_as_its_page_says(tmp_path: Path):
    sizes = ["--hidden-size", "32", "--head-dim", "16", "--layers", "1", "--vocab-size", "64", "--device", "cpu"]
    command = [sys.executable, "-m", "benchmarks.compression_overhead.measure", *sizes, "--methods", "comprexit"]
    command += ["--lengths", "16", "--repeats", "1", "--output", str(tmp_path / "result.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["benchmark"] == "compression_overhead"


def test_links_on_the_pages_lead_to_files():
    for page in BENCHMARKS.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_result_files_are_small_rounded_and_not_indented(tmp_path: Path):
    assert len(RESULTS) > 20
    for path in RESULTS:
        assert path.stat().st_size <= 300_000, path
        text = path.read_text(encoding="utf-8")
        again = write_results(json.loads(text), tmp_path / "again.json").read_text(encoding="utf-8")
        assert text.rstrip() == again.rstrip(), f"{path}: write it with write_results"


def test_results_are_rounded_to_four_digits_and_written_whole(tmp_path: Path):
    assert rounded({"a": [123456, 0.123456, True, None, ("x", 98765.4321)]}) == {
        "a": [123456, 0.1235, True, None, ["x", 98770.0]]
    }
    path = write_results({"score": 2 / 3}, tmp_path / "new" / "result.json")
    assert path.read_text(encoding="utf-8") == '{"score":0.6667}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results({"score": float("nan")}, path)
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]
    assert json.loads(path.read_text(encoding="utf-8")) == {"score": 0.6667}


def test_the_scripts_print_tables_of_their_result_files(script):
    further = {"answer_latency": ["new_tokens"], "encoder_cost": ["length"]}
    for name in ("answer_latency", "compression_overhead", "encoder_cost", "forgetting", "sinkhorn"):
        for path in (BENCHMARKS / name).glob("*.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            settings = [content["settings"][setting] for setting in further.get(name, [])]
            assert script(f"{name}.measure").table(content["rows"], *settings).count("\n") > len(content["rows"]), path


def test_the_page_on_overhead_has_the_times_of_its_result_files(script):
    overhead, folder = script("compression_overhead.measure"), BENCHMARKS / "compression_overhead"

    def ratios(*names: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in names:
            for row in json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["rows"]:
                found.setdefault(row["method"].replace("_", ""), []).append(f"{overhead.time_ratio(row):.2f}")
        return found

    small, wide = ratios("cpu", "cpu_memory_tokens"), ratios("cpu_1024")
    page = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([\d., ]+) \| ([\d., ]+|not measured) \|", page, re.MULTILINE)
    names = {"500xCompressor": "fivehundredx", "TCP-AE": "tcpautoencoder"}
    found = {names.get(title, title.lower().replace(" ", "")): cells for title, *cells in rows}
    assert found == {
        method: [", ".join(times), ", ".join(wide[method]) if method in wide else "not measured"]
        for method, times in small.items()
    }
