# SPDX-License-Identifier: Apache-2.0
"""The `upload` command: what it builds, what it refuses, and what it sends; no connection is ever opened."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from context_compressors import MeanPoolingForCausalLM, cli
from context_compressors.repository import check_files
from context_compressors.upload import build_repository

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_connection(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    (tmp_path / "base" / "LICENSE").write_text("The base's licence.\n")
    return tmp_path / "base"


@pytest.fixture
def checkpoint(base, tmp_path):
    torch.manual_seed(0)
    model = MeanPoolingForCausalLM.from_base(base, compression_ratios=[2, 4])
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def light(base, tmp_path):
    torch.manual_seed(0)
    model = MeanPoolingForCausalLM.from_base(base, hub_id="me/base", compression_ratios=[2, 4])
    model.save_pretrained(tmp_path / "light")
    return tmp_path / "light"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def upload(*arguments):
    return cli.main(["upload", *map(str, arguments)])


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


@pytest.mark.parametrize("name", ["not a name", "me/my/compressor", "me/-compressor"])
def test_a_name_that_the_hub_does_not_allow_is_refused_without_a_connection(checkpoint, tmp_path, capsys, name):
    assert upload(checkpoint, name, "--dry-run", "--output", tmp_path / "repository") == 1
    assert f"'{name}'" in capsys.readouterr().err
    assert not (tmp_path / "repository").exists()


def test_a_folder_loads_and_two_runs_give_the_same_bytes(checkpoint, tmp_path):
    before = contents(checkpoint)
    first = build_repository(checkpoint, tmp_path / "first", license="mit")
    second = build_repository(checkpoint, tmp_path / "second", license="mit")
    assert contents(first) == contents(second)
    assert contents(checkpoint) == before
    assert set(contents(first)) == set(before)
    ids = torch.arange(5, 15)[None]
    found, expected = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (first, checkpoint))
    assert found.equal(expected)


@pytest.mark.parametrize("weights", ["light", "full"])
@pytest.mark.parametrize("form", ["checkpoint", "light"])
def test_weights_are_converted_and_two_runs_give_the_same_bytes(request, base, tmp_path, form, weights):
    source = request.getfixturevalue(form)
    options = {"weights": weights, "base_model": str(base), "license": "mit"}
    first = build_repository(source, tmp_path / "first", **options)
    second = build_repository(source, tmp_path / "second", **options)
    assert contents(first) == contents(second)
    stored = load_file(first / "model.safetensors")
    assert ("model.language_model.norm.weight" in stored) == (weights == "full")
    assert (json.loads((first / "config.json").read_text())["external_weights"] is None) == (weights == "full")
    where = {"base_model": base} if weights == "light" else {}
    ids = torch.arange(5, 15)[None]
    found = AutoModelForCausalLM.from_pretrained(first, **where)(ids, context_input_ids=ids).logits
    where = {"base_model": base} if form == "light" else {}
    assert found.equal(AutoModelForCausalLM.from_pretrained(source, **where)(ids, context_input_ids=ids).logits)
    assert (first / "LICENSE").read_text() == "The base's licence.\n"


def test_missing_code_and_card_are_written(checkpoint, tmp_path):
    expected = contents(checkpoint)
    for path in [*checkpoint.glob("*.py"), checkpoint / "README.md"]:
        path.unlink()
    built = contents(build_repository(checkpoint, tmp_path / "built", license="mit"))
    assert set(built) == set(expected)
    assert all(built[name] == data for name, data in expected.items() if name.endswith(".py"))
    assert b"license: mit" in built["README.md"]


# --- licences ---


def test_the_bases_licence_is_taken_where_the_card_has_none(checkpoint, base, tmp_path):
    built = build_repository(checkpoint, tmp_path / "built", base_model=str(base))
    assert huggingface_hub.ModelCard.load(built / "README.md").data.license == "mit"


def test_another_licence_than_the_bases_is_refused_until_it_is_named(checkpoint, base, tmp_path):
    card = (checkpoint / "README.md").read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1)
    (checkpoint / "README.md").write_text(card)
    with pytest.raises(ValueError, match=r"the card says 'apache-2\.0', and the base base is under 'mit'"):
        build_repository(checkpoint, tmp_path / "built", base_model=str(base))
    built = build_repository(checkpoint, tmp_path / "other", base_model=str(base), license="mit")
    assert huggingface_hub.ModelCard.load(built / "README.md").data.license == "mit"


def test_no_licence_at_all_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="names a licence: pass --license"):
        build_repository(checkpoint, tmp_path / "built")


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("training_args.bin", "pickle"),
        ("old.pt", "pickle"),
        ("sub/memory.pkl", "pickle"),
        ("optimizer.pt", "state of a training run"),
        ("rng_state_0.pth", "state of a training run"),
        ("trainer_state.json", "state of a training run"),
        ("checkpoint-20/config.json", "state of a training run"),
        ("global_step10/weights.safetensors", "state of a training run"),
        ("__pycache__/modeling.pyc", "cache"),
        (".cache/huggingface/x.json", "cache"),
        (".DS_Store", "cache"),
        ("video.mp4", "not a part of a checkpoint"),
    ],
)
def test_files_that_do_not_belong_are_named(checkpoint, tmp_path, name, kind):
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    (checkpoint / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"^{name.replace('.', '[.]')} is .*{kind}"):
        build_repository(checkpoint, tmp_path / "built", license="mit")
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("token = 'hf_" + "a1B2" * 9 + "'", r"access token, hf_a1B"),
        ("ghp_" + "x" * 36, "access token"),
        ('{"data": "/home/nora/corpus"}', "/home/nora"),
        ("output_dir: /mnt/disk1/run", "/mnt/disk1"),
        ("C:\\Users\\Nora\\model", "Nora"),
        ("path={here}/model.safetensors", "place on one machine"),
    ],
)
def test_tokens_and_paths_are_named(checkpoint, tmp_path, text, kind):
    (checkpoint / "notes.txt").write_text(text.replace("{here}", str(checkpoint.resolve())))
    with pytest.raises(ValueError, match=rf"^notes[.]txt .*{kind}"):
        build_repository(checkpoint, tmp_path / "built", license="mit")


def test_ordinary_text_passes(checkpoint):
    (checkpoint / "notes.txt").write_text(
        "See https://huggingface.co/data/x and ./data/y, ~/z, and/or work/main; hf_hub_download; a/home/b."
    )
    assert Path("notes.txt") in check_files(checkpoint)


def test_a_token_in_the_names_of_weights_is_found(checkpoint):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, checkpoint / "extra.safetensors", metadata={"from": "/home/nora/x"})
    with pytest.raises(ValueError, match=r"^extra[.]safetensors .*/home/nora"):
        check_files(checkpoint)


def test_other_folders_are_refused(base, tmp_path, checkpoint):
    with pytest.raises(ValueError, match=r"no config\.json"):
        build_repository(tmp_path, tmp_path / "built")
    with pytest.raises(ValueError, match="'llama', not a context compressor"):
        build_repository(base, tmp_path / "built")
    with pytest.raises(ValueError, match="is not empty"):
        build_repository(checkpoint, checkpoint)
    with pytest.raises(ValueError, match="weights must be one of"):
        build_repository(checkpoint, tmp_path / "other", weights="half")


# --- the command ---


def test_a_dry_run_shows_every_file_and_calls_nobody(checkpoint, hub, capsys):
    assert upload(checkpoint, "me/x", "--license", "mit", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert hub.calls == []
    assert "me/x, private, v0.1.0" in shown
    for name, data in contents(checkpoint).items():
        if name != "README.md":
            assert f"{len(data):,}  {name}" in shown
    assert f"bytes in {len(contents(checkpoint))} files" in shown


def test_one_commit_and_its_tag_private_by_default(checkpoint, hub, capsys, tmp_path):
    assert upload(checkpoint, "me/x", "--license", "mit", "--tag", "v7", "--output", tmp_path / "kept") == 0
    assert names(hub) == ["create_repo", "repo_info", "list_repo_refs", "upload_folder", "create_tag"]
    assert hub.calls[0][2] == {"private": True, "exist_ok": True}
    assert hub.calls[4][2] == {"tag": "v7", "revision": "c" * 40}
    assert hub.files == contents(tmp_path / "kept")
    assert "commit/1" in capsys.readouterr().out


def test_an_interrupted_upload_goes_through_when_it_is_run_again(checkpoint, hub):
    hub.fails = True
    assert upload(checkpoint, "me/x", "--license", "mit") == 1
    assert "create_tag" not in names(hub)
    hub.fails = False
    assert upload(checkpoint, "me/x", "--license", "mit") == 0
    assert names(hub)[-2:] == ["upload_folder", "create_tag"]


def test_public_repositories_and_known_tags_are_refused(checkpoint, hub, capsys):
    hub.is_private, hub.tags = False, ["v1"]
    assert upload(checkpoint, "me/x", "--license", "mit") == 1
    assert "me/x is public already: pass --public" in capsys.readouterr().err
    assert upload(checkpoint, "me/x", "--license", "mit", "--public", "--tag", "v1") == 1
    assert "has a version 'v1' already" in capsys.readouterr().err
    assert "upload_folder" not in names(hub)
    assert upload(checkpoint, "me/x", "--license", "mit", "--public", "--tag", "v2") == 0
    assert [call[2]["private"] for call in hub.calls if call[0] == "create_repo"] == [True, False, False]


def test_a_refusal_names_the_file(checkpoint, hub, capsys):
    (checkpoint / "optimizer.pt").write_bytes(b"")
    assert upload(checkpoint, "me/x", "--license", "mit") == 1
    assert "optimizer.pt is the state of a training run" in capsys.readouterr().err
    assert hub.calls == []


@pytest.mark.slow
def test_the_script_in_the_checkout_is_the_command(checkpoint, tmp_path):
    copy = tmp_path / "upload.py"
    shutil.copy(ROOT / "upload.py", copy)
    command = [sys.executable, copy, checkpoint, "me/x", "--license", "mit", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout
