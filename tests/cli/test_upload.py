# SPDX-License-Identifier: Apache-2.0
"""The `upload` command: what it builds, and what it sends; no connection is ever opened."""

import json
import logging
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from context_compressors import cli
from context_compressors.hub_cards.repository import build_repository

pytest.importorskip("detect_secrets")
ROOT = Path(__file__).resolve().parents[2]
# What an upload adds, for Inference Endpoints.
ADDED = ("handler.py", "requirements.txt")
pytestmark = pytest.mark.usefixtures("no_connection")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def upload(*arguments):
    return cli.main(["publish", "upload", *map(str, arguments)])


@pytest.fixture
def hub(monkeypatch):
    """A Hub in memory: its calls in order, and the state that a test gives it."""
    hub = SimpleNamespace(calls=[], files={}, is_private=True, tags=[], fails=False)

    def record(name, result=lambda **kwargs: None):
        def method(self, *args, **kwargs):
            hub.calls.append((name, args, kwargs))
            return result(**kwargs)

        monkeypatch.setattr(huggingface_hub.HfApi, name, method)

    def receive(folder_path, **kwargs):
        if hub.fails:
            raise ConnectionError("the line broke")
        hub.files = contents(Path(folder_path))
        return SimpleNamespace(oid="c" * 40, commit_url="https://huggingface.co/me/x/commit/1")

    record("create_repo", lambda **kwargs: SimpleNamespace(repo_id="me/x"))
    record("repo_info", lambda **kwargs: SimpleNamespace(private=hub.is_private))
    record("list_repo_refs", lambda **kwargs: SimpleNamespace(tags=[SimpleNamespace(name=tag) for tag in hub.tags]))
    record("upload_folder", receive)
    record("create_tag")
    return hub


def names(hub):
    return [name for name, _, _ in hub.calls]


# --- what is built ---


@pytest.mark.slow
@pytest.mark.parametrize(("form", "weights"), [("checkpoint", "light"), ("light", "full")])
def test_weights_are_converted_and_two_runs_give_the_same_bytes(request, base, tmp_path, form, weights):
    source = request.getfixturevalue(form)
    before = contents(source)
    options = {"weights": weights, "base_model": str(base), "license": "mit"}
    first = build_repository(source, tmp_path / "first", **options)
    second = build_repository(source, tmp_path / "second", **options)
    assert contents(first) == contents(second)
    assert contents(source) == before
    stored = load_file(first / "model.safetensors")
    assert ("model.language_model.norm.weight" in stored) == (weights == "full")
    assert (json.loads((first / "config.json").read_text())["external_weights"] is None) == (weights == "full")
    where = {"base_model": base} if weights == "light" else {}
    ids = torch.arange(5, 15)[None]
    found = AutoModelForCausalLM.from_pretrained(first, **where)(ids, context_input_ids=ids).logits
    where = {"base_model": base} if form == "light" else {}
    assert found.equal(AutoModelForCausalLM.from_pretrained(source, **where)(ids, context_input_ids=ids).logits)
    assert (first / "LICENSE").read_text() == "The base's license.\n"


@pytest.mark.slow
def test_missing_code_and_card_are_written(checkpoint, tmp_path):
    expected = contents(checkpoint)
    for path in [*checkpoint.glob("*.py"), checkpoint / "README.md"]:
        path.unlink()
    built = contents(build_repository(checkpoint, tmp_path / "built", license="mit"))
    assert set(built) == {*expected, *ADDED}
    assert all(built[name] == data for name, data in expected.items() if name.endswith(".py"))
    assert b"license: mit" in built["README.md"]


# --- licenses ---


@pytest.mark.slow
def test_another_license_than_the_bases_is_refused_until_it_is_named(checkpoint, base, tmp_path):
    card = (checkpoint / "README.md").read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1)
    (checkpoint / "README.md").write_text(card)
    with pytest.raises(ValueError, match=r"the card says 'apache-2\.0', and the base base is under 'mit'"):
        build_repository(checkpoint, tmp_path / "built", base_model=str(base))
    built = build_repository(checkpoint, tmp_path / "other", base_model=str(base), license="mit")
    assert huggingface_hub.ModelCard.load(built / "README.md").data.license == "mit"


# --- what stays, and what is refused whole ---


@pytest.mark.slow
def test_states_of_a_training_run_are_left_out_and_named(checkpoint, tmp_path, caplog, monkeypatch):
    expected = contents(build_repository(checkpoint, tmp_path / "before", license="mit"))
    for name in ("checkpoint-20/config.json", "runs/a/events.out.tfevents.1", "trainer_state.json", "optimizer.pt"):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text("/home/nora")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert contents(build_repository(checkpoint, tmp_path / "built", license="mit")) == expected
    assert "(--include): checkpoint-20/, optimizer.pt, runs/, trainer_state.json" in caplog.text


def test_other_folders_are_refused(base, tmp_path, checkpoint):
    with pytest.raises(ValueError, match=r"no config\.json"):
        build_repository(tmp_path, tmp_path / "built")
    with pytest.raises(ValueError, match="'llama', not a context compressor"):
        build_repository(base, tmp_path / "built")
    with pytest.raises(ValueError, match="is not empty"):
        build_repository(checkpoint, checkpoint)


# --- the command ---


@pytest.mark.slow
def test_a_dry_run_of_the_script_shows_every_file_and_calls_nobody(checkpoint, hub, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["upload.py", str(checkpoint), "me/x", "--license", "mit", "--dry-run"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "upload.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert hub.calls == []
    assert "me/x, private, v0.1.0" in shown
    for name, data in contents(checkpoint).items():
        if name != "README.md":
            assert f"{len(data):,}  {name}" in shown
    assert f"bytes in {len(contents(checkpoint)) + len(ADDED)} files" in shown


@pytest.mark.slow
def test_one_commit_and_its_tag_private_by_default(checkpoint, hub, capsys, tmp_path):
    assert upload(checkpoint, "me/x", "--license", "mit", "--tag", "v7") == 0
    assert names(hub) == ["create_repo", "repo_info", "list_repo_refs", "upload_folder", "create_tag"]
    assert hub.calls[0][2] == {"private": True, "exist_ok": True}
    assert hub.calls[4][2] == {"tag": "v7", "revision": "c" * 40}
    assert hub.files == contents(build_repository(checkpoint, tmp_path / "built", license="mit"))
    assert "commit/1" in capsys.readouterr().out


@pytest.mark.slow
def test_public_repositories_and_known_tags_are_refused(checkpoint, hub, capsys):
    hub.is_private, hub.tags = False, ["v1"]
    assert upload(checkpoint, "me/x", "--license", "mit") == 1
    assert "me/x is public already: pass --public" in capsys.readouterr().err
    assert upload(checkpoint, "me/x", "--license", "mit", "--public", "--tag", "v1") == 1
    assert "has a version 'v1' already" in capsys.readouterr().err
    assert "upload_folder" not in names(hub)
    assert upload(checkpoint, "me/x", "--license", "mit", "--public", "--tag", "v2") == 0
    assert [call[2]["private"] for call in hub.calls if call[0] == "create_repo"] == [True, False, False]
