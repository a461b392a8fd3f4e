# SPDX-License-Identifier: Apache-2.0
"""README.md and the pages in docs/ run as they stand: their Python, their commands and the files they write down."""

import math
import re
import shutil
from pathlib import Path

import pages
import pytest
import yaml
from pages import DOCS, ROOT

from context_compressors import __version__
from context_compressors.configuration.methods import METHODS

README = pages.README.read_text(encoding="utf-8")
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))
ALL_PAGES = sorted(path.relative_to(DOCS).as_posix().removesuffix(".md") for path in DOCS.rglob("*.md"))
# What a page only shows: it needs a network, a server, several GPUs, large files or a shell of one's own.
SHOWN = ("accelerate", "git", "make", "pip", "pytest", "python", "ray", "vllm", "hf", "curl", "context-compressors")
SHOWN += ("cd", "export", "trackio")


def blocks(page: str) -> list[pages.Block]:
    return pages.blocks_of((DOCS / f"{page}.md").read_text(encoding="utf-8"))


@pytest.fixture
def workplace(small_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as a reader of the pages has it, but small models under the names of the pages."""
    pages.stand_in_checkpoints(small_checkpoints, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def two_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models of two widths, whose tokenizers give a letter different ids, under the names of a page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pages.base_of_letters("Qwen/Qwen3-0.6B", width=16)
    pages.base_of_letters("HuggingFaceTB/SmolLM2-135M", width=24, is_reversed=True)


def test_every_block_runs_or_is_of_a_kind_that_is_only_shown_and_cannot_run_here():
    languages = ("python", "bash", "yaml", "jsonl", "console", "text")
    for page, block in ((name, block) for name in ALL_PAGES for block in blocks(name)):
        assert block.language in languages, f"{page}.md has a block of {block.language!r}"
        if block.language in ("yaml", "jsonl"):
            assert re.match(r"# \S+\n", block.content), f"{page}.md: {block.content[:40]!r} starts with no file's name"
        if block.language == "console":
            lines = block.content.replace("\\\n", " ").splitlines()
            commands = [line[2:] for line in lines if line.startswith("$ ")]
            assert commands, f"a console block of {page}.md has no line that starts with $"
            for command in commands:
                assert command.split()[0].partition("=")[0] in SHOWN or "=" in command.split()[0], f"{page}: {command}"


def test_links_lead_to_files_and_headings():
    for here in (pages.README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")):
        text = here.read_text(encoding="utf-8")
        for target, heading in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", text):
            path = (here.parent / target).resolve() if target else here
            assert path.exists(), f"{here.name} links to {target}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                names = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
                assert heading in names, f"{here.name} links to {target}#{heading}"


@pytest.mark.release
@pytest.mark.slow
def test_the_page_on_use_says_what_the_checkpoint_prints(smollm2_base: Path, tmp_path: Path):
    outputs = pages.run_on_the_checkpoint(DOCS / "use.md", tmp_path)
    assert [printed for _, printed in outputs] == [block.content for block, _ in outputs], "run tests/pages.py"


@pytest.mark.release
@pytest.mark.slow
def test_the_page_on_training_runs(workplace: Path):
    names, _ = pages.run_page(DOCS / "train.md")
    for folder in ("berths", "restore_first", "distilled", "written", "sft/final"):
        assert list((workplace / "outputs" / folder).glob("modeling_*.py")), folder
    assert math.isfinite(names["result"].training_loss)


def test_the_page_on_texts_says_what_the_checkpoint_prints(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    _, outputs = pages.run_page(DOCS / "text.md", ("python",))
    assert [printed for _, printed in outputs] == [block.content for block, _ in outputs]


# Pages that run on small models, and files that they write.
WRITTEN = {
    "corpus": ["pages.lance.failed.jsonl"],
    "demo": [],
    "evaluate": ["results.json", "answers.jsonl", "needles.json", "needles.jsonl", "needles/needles.png"],
    "publish": ["outputs/berths/README.md"],
    "serve": ["served-adapter/adapter_model.safetensors"],
}


@pytest.mark.slow
@pytest.mark.parametrize("page", WRITTEN)
def test_a_page_runs_on_small_models(page: str, workplace: Path):
    _, outputs = pages.run_page(DOCS / f"{page}.md")
    assert [name for name in WRITTEN[page] if not (workplace / name).is_file()] == []
    if page == "evaluate":
        assert [printed for _, printed in outputs] == [block.content for block, _ in outputs]


@pytest.mark.slow
def test_the_page_on_methods_runs(two_bases: None):
    names, _ = pages.run_page(DOCS / "methods.md")
    # A letter is a token here.
    assert int(names["slots"].num_slots) == -(-len(names["document"]) // 4)
    assert Path("my-adapter/adapter_config.json").is_file()


def test_every_page_is_in_the_readme_and_every_page_that_runs_is_run():
    assert [page for page in PAGES if f"(docs/{page}.md)" not in README] == []
    # A page that is added needs a test of its own; docs/add_a_method.md, docs/papers.md and docs/methods/ have files
    # of them, docs/frameworks.md and docs/server.md have some in tests/integrations.
    pages_that_run = [*WRITTEN, "methods", "text", "train", "use"]
    assert sorted({*pages_that_run, "add_a_method", "data", "frameworks", "papers", "server"}) == PAGES
    assert {block.language for page in ("data", "papers") for block in blocks(page)} <= {"console", "text"}


def test_project_files_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for reference in citation["references"]:
        assert reference["title"] in README, reference["title"]


def test_the_readme_has_at_most_200_lines():
    assert len(README.splitlines()) <= 200


@pytest.mark.slow
def test_the_readmes_code_prints_what_it_says(smollm2_base: Path, tmp_path: Path):
    outputs = pages.run_on_the_checkpoint(pages.README, tmp_path)
    assert [printed for _, printed in outputs] == [block.content for block, _ in outputs], "run tests/pages.py"


@pytest.mark.slow
def test_the_tables_of_scores_are_those_of_the_result_files():
    for path in (pages.README, pages.SCORES / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert pages.with_scores(text) == text, "run tests/pages.py --scores"


def test_every_method_of_the_register_has_its_row():
    assert [classes[2] for classes in METHODS.values() if f"`{classes[2]}`" not in README] == []
