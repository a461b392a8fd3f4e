# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/ run as they stand: their Python, their commands and the files that they write down."""

import json
import math
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from context_compressors import __version__, cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))
# What a page only shows: it needs a network, a server, several GPUs or a shell of one's own.
SHOWN = ("accelerate", "git", "make", "pip", "pytest", "python", "vllm", "hf", "curl", "context-compressors")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and content of every code block of a page."""
    return FENCE.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))


# What pages name -> the small trained model that stands there under that name, so that their code runs as it is.
STAND_INS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "base",
    "checkpoints/smollm2-135m-instruct-mean-pooling": "mean_pooling",
    "checkpoints/base": "base",
    "checkpoints/mean_pooling": "mean_pooling",
}


@pytest.fixture
def workplace(small_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as a reader of the pages has it: models under the names of the pages, and the clone's examples."""
    for name, model in STAND_INS.items():
        shutil.copytree(small_checkpoints / model, tmp_path / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def run_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(line, comments=True)
    if program == "context-compressors":
        assert cli.main(arguments) == 0, line
        return
    assert (program, arguments[0].partition("/")[0]) == ("python", "examples"), f"cannot run {line!r}"
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(arguments[0], run_name="__main__")


def name_of_file(page: str, language: str, content: str) -> re.Match[str]:
    """The comment in the first line of a block that is written down as a file."""
    name = re.match(r"# (\S+)\n", content)
    assert name, f"a {language} block of {page}.md starts with the name of its file: {content[:40]!r}"
    return name


def run_page(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the blocks of a page in order; what its Python has defined in the end."""
    names: dict[str, Any] = {"__name__": f"docs_{page}"}
    for language, content in blocks(page):
        if language == "python":
            exec(compile(content, f"{page}.md", "exec"), names)
        elif language == "bash":
            for line in content.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    run_command(line, monkeypatch)
        elif language in ("yaml", "jsonl"):
            name = name_of_file(page, language, content)
            Path(name[1]).write_text(content if language == "yaml" else content[name.end() :], encoding="utf-8")
    return names


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_runs_or_is_only_shown(page: str):
    languages = ("python", "bash", "yaml", "jsonl", "console", "text")
    for language, content in blocks(page):
        assert language in languages, f"{page}.md has a block of {language!r}"
        if language in ("yaml", "jsonl"):
            name_of_file(page, language, content)


@pytest.mark.slow
def test_the_page_on_use_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    names = run_page("use", monkeypatch)
    assert len(names["answers"]) == 2
    assert {path.stem for path in (workplace / "library").iterdir()} == set(names["collection"])


@pytest.mark.parametrize("page", PAGES)
def test_what_is_only_shown_cannot_run_here(page: str):
    for language, content in blocks(page):
        if language == "console":
            lines = content.replace("\\\n", " ").splitlines()
            commands = [line[2:] for line in lines if line.startswith("$ ")]
            assert commands, f"a console block of {page}.md has no line that starts with $"
            for command in commands:
                assert command.split()[0].partition("=")[0] in SHOWN or "=" in command.split()[0], command


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (DOCS / target).resolve().exists(), f"{page}.md links to {target}"


@pytest.mark.slow
def test_the_page_on_training_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    names = run_page("train", monkeypatch)
    for folder in ("berths", "restore_first", "distilled", "pretrained", "icae", "sft/final"):
        assert list((workplace / "outputs" / folder).glob("modeling_*.py")), folder
    assert math.isfinite(names["result"].training_loss)


@pytest.mark.slow
def test_the_page_on_serving_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    names = run_page("serve", monkeypatch)
    assert set(json.loads(names["request"])) == {"model", "prompt", "prompt_embeds", "max_tokens", "temperature"}


@pytest.mark.slow
def test_the_page_on_publishing_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run_page("publish", monkeypatch)
    assert "model.safetensors" in capsys.readouterr().out
    assert "Trained for two steps" in (workplace / "outputs/berths/README.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_readme_and_every_page_that_runs_is_run():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page for page in PAGES if f"(docs/{page}.md)" not in readme] == []
    # A page that is added needs a test of its own; docs/add_a_method.md has a file of them.
    assert PAGES == ["add_a_method", "publish", "serve", "train", "use"]


def test_project_files_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for reference in citation["references"]:
        assert reference["title"] in readme, reference["title"]
