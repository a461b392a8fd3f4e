# SPDX-License-Identifier: Apache-2.0
"""The `upload` command: what it builds, what it refuses, and what it sends; no connection is ever opened."""

import json
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from context_compressors import MeanPoolingForCausalLM, cli
from context_compressors.hub_cards.public_files import check_files
from context_compressors.hub_cards.repository import build_repository

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_connection(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base, and a whole and a light checkpoint on it, of which each test has copies."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    (folder / "base" / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    (folder / "base" / "LICENSE").write_text("The base's licence.\n")
    for name, fields in (("checkpoint", {}), ("light", {"hub_id": "me/base"})):
        torch.manual_seed(0)
        model = MeanPoolingForCausalLM.from_base(folder / "base", compression_ratios=[2, 4], **fields)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture
def base(saved, tmp_path):
    return shutil.copytree(saved / "base", tmp_path / "base")


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")


@pytest.fixture
def without_code(checkpoint):
    """A checkpoint whose own files are soon read, for tests of one more file beside them."""
    for path in checkpoint.glob("*.py"):
        path.unlink()
    return checkpoint


@pytest.fixture
def light(saved, tmp_path):
    return shutil.copytree(saved / "light", tmp_path / "light")


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_bases_licence_is_taken_where_the_card_has_none(checkpoint, base, tmp_path):
    built = build_repository(checkpoint, tmp_path / "built", base_model=str(base))
    assert huggingface_hub.ModelCard.load(built / "README.md").data.license == "mit"


@pytest.mark.slow
def test_another_licence_than_the_bases_is_refused_until_it_is_named(checkpoint, base, tmp_path):
    card = (checkpoint / "README.md").read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1)
    (checkpoint / "README.md").write_text(card)
    with pytest.raises(ValueError, match=r"the card says 'apache-2\.0', and the base base is under 'mit'"):
        build_repository(checkpoint, tmp_path / "built", base_model=str(base))
    built = build_repository(checkpoint, tmp_path / "other", base_model=str(base), license="mit")
    assert huggingface_hub.ModelCard.load(built / "README.md").data.license == "mit"


@pytest.mark.slow
def test_no_licence_at_all_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="names a licence: pass --license"):
        build_repository(checkpoint, tmp_path / "built")
    built = build_repository(checkpoint, tmp_path / "built", license="mit")
    assert set(contents(built)) == set(contents(checkpoint))


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("old.pt", "pickle"),
        ("sub/memory.pkl", "pickle"),
        ("__pycache__/modeling.pyc", "cache"),
        (".cache/huggingface/x.json", "cache"),
        (".DS_Store", "cache"),
        ("video.mp4", "not a part of a checkpoint"),
        ("rows.csv", "not a part of a checkpoint"),
        ("config.yaml", "not a part of a checkpoint"),
        ("LICENSE.exe", "not a part of a checkpoint"),
        ("NOTICE.zip", "not a part of a checkpoint"),
    ],
)
def test_files_that_do_not_belong_are_named(without_code, tmp_path, name, kind):
    (without_code / name).parent.mkdir(parents=True, exist_ok=True)
    (without_code / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"^{name.replace('.', '[.]')} is .*{kind}"):
        build_repository(without_code, tmp_path / "built", license="mit")
    assert not (tmp_path / "built").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("token = 'hf_" + "a1B2" * 9 + "'", r"access token, hf_a1B"),
        ("ghp_" + "x" * 36, "access token"),
        ("hf_" + "oauth_" + "a1-B_" * 9, "access token, hf_oau"),
        ("api_" + "org_" + "a1B2" * 9, "access token, api_or"),
        ("Bearer " + ".".join(("eyJ" + "hbGciOiJIUzI1", "eyJ" + "zdWIiOiIxMjM0", "abc")), "access token, eyJhbG"),
        ('{"data": "/home/nora/corpus"}', "/home/nora"),
        ("output_dir: /mnt/disk1/run", "/mnt/disk1"),
        ("C:\\Users\\Nora\\model", "C:.*Users"),
        ("D:\\corpora\\x", "D:.*corpora"),
        ("D:/corpora/x", "D:/corpora"),
        ("E:\\temp\\x", "E:.*temp"),
        ("see ~/corpora/x", "~/corpora"),
        ("file:///etc/x", "file:///etc/x"),
        *(
            (f"in {place}/team/run", place)
            for place in ("/nfs", "/nfs01", "/gpfs", "/lustre", "/dbfs", "/scratch2", "/projects", "/storage1")
        ),
        (f"id {'AKIA' + 'IOSFODNN7EXAMPLE'}", "access token, AKIAIO"),
        ("aws_secret_access_key = " + "wJalr/XUtn" * 4, "access token, aws_se"),
        ("AIza" + "Sy_1-" * 7, "access token, AIzaSy"),
        ("xoxb" + "-12345-abcdefghij", "access token, xoxb"),
        ("https://hooks.slack.com/" + "services/T00/B00/x1", "access token, hooks"),
        ("WANDB_API_KEY=" + "0123456789abcdef" * 2 + "01234567", "access token, WANDB"),
        ("machine api.wandb.ai\n  login user\n  password " + "0a" * 20, "access token, wandb"),
        ("-----BEGIN " + "OPENSSH PRIVATE KEY-----", "access token, -----"),
        ("git clone https://nora:" + "secret@example.com/x", "access token, https:"),
        ("git clone https://" + "a1B2" * 9 + "@example.com/x", "access token, https:"),
        *((prefix + "a1B2" * 9, "access token") for prefix in ("npm_", "pypi-AgE", "sk_live_")),
        ("AccountKey=" + "a1B2" * 21 + "==", "access token, Accoun"),
        ("rsync -a nora@gpu7:/home/nora/run .", "/home/nora"),
        ("-v /ckpt:/data/run", "/data/run"),
        ("PYTHONPATH=/usr/lib:/home/nora/code", "/home/nora"),
        ("in /export/home/nora/run", "/export/home"),
        ("path={here}/model.safetensors", "place on one machine"),
    ],
)
def test_tokens_and_paths_are_named(without_code, tmp_path, text, kind):
    text = text.replace("{here}", str(without_code.resolve()))
    for name, data in (
        ("notes.txt", text.encode()),
        ("notes.txt", text.encode("utf-16")),
        ("notes.md", text.encode("utf-16-be")),
        ("notes.json", json.dumps({text: 1}).encode()),
        ("notes.json", ('["' + "".join(f"\\u{ord(letter):04x}" for letter in text) + '"]').encode()),
    ):
        (without_code / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"^{name} .*{kind}"):
            build_repository(without_code, tmp_path / "built", license="mit")
        (without_code / name).unlink()


def test_ordinary_text_passes(without_code):
    (without_code / "notes.txt").write_text(
        "See https://huggingface.co/data/x and ./data/y, a ~ b, and/or work/main; hf_hub_download; a/home/b. Q:\\nWho?"
        " ssh://git@example.com, https://example.com/@nora, pypi-packages-of-the-year, http://localhost:/x, npm_config"
        f" ~/.cache, me@example.com, https://x.org/a:b@c, s3://bucket/key, commit {'0a' * 20}, mailto:me@x.org, 5:/"
        " hf_oauth_callback_of_a_space"
    )
    (without_code / "notes.json").write_text(json.dumps({"prompt": "Q:\nWho?\nA:"}))
    assert {Path("notes.txt"), Path("notes.json")} <= set(check_files(without_code)[0])


@pytest.mark.slow
def test_what_a_checkpoint_holds_passes_whatever_the_base_and_the_method(checkpoint, light):
    for folder in (checkpoint, light):
        assert set(map(str, check_files(folder)[0])) == set(contents(folder))


def test_a_token_in_the_names_of_weights_is_found(without_code):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, without_code / "extra.safetensors", metadata={"from": "/home/nora/x"})
    with pytest.raises(ValueError, match=r"^extra[.]safetensors .*/home/nora"):
        check_files(without_code)


@pytest.mark.parametrize("name", ["state.0.exp_avg", "optimizer.x", "layers.0.weight.momentum_buffer", "exp_avg_sq"])
def test_an_optimizers_state_among_weights_is_found(without_code, name):
    from safetensors.torch import save_file

    save_file({name: torch.ones(1)}, without_code / "extra.safetensors")
    with pytest.raises(ValueError, match=rf"^extra[.]safetensors holds an optimizer's state, {name}"):
        check_files(without_code)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["notes.txt", "vocab.json", "logo.png", "spiece.model", "extra.safetensors"])
def test_a_pickle_is_one_under_any_name(without_code, name):
    for protocol in range(6):
        (without_code / name).write_bytes(pickle.dumps(Path("x"), protocol))
        with pytest.raises(ValueError, match=rf"^{name} is (a pickle|no safetensors file), whatever its name says"):
            check_files(without_code)
    torch.save({"x": torch.ones(1)}, without_code / name)
    with pytest.raises(ValueError, match=rf"^{name} is (an archive|no safetensors file)"):
        check_files(without_code)


def test_nothing_stands_behind_the_weights_or_in_place_of_their_header(without_code):
    from safetensors.torch import save_file

    file = without_code / "extra.safetensors"
    save_file({"x": torch.ones(3)}, file)
    check_files(without_code)
    whole = file.read_bytes()
    other = b'{"x": {}}'
    for content in (whole + b"\x80\x04more", whole[:-1], len(other).to_bytes(8, "little") + other):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"^extra[.]safetensors is no safetensors file, whatever its name says"):
            check_files(without_code)


def test_code_is_no_state_of_a_run_whatever_its_name(without_code):
    (without_code / "scheduler_parts.py").write_text("STEPS = 1\n")
    (without_code / "scheduler.pt").write_bytes(b"0")
    paths, states = check_files(without_code)
    assert Path("scheduler_parts.py") in paths
    assert states == ["scheduler.pt"]


@pytest.mark.parametrize("name", ["spiece.model", "notes.txt"])
def test_an_archive_is_one_under_any_name(without_code, tmp_path, name):
    (tmp_path / "x").write_text("x")
    with tarfile.open(without_code / name, "w") as archive:
        archive.add(tmp_path / "x", "x")
    with pytest.raises(ValueError, match=rf"^{name} is an archive"):
        check_files(without_code)
    with zipfile.ZipFile(without_code / name, "w"):
        pass
    with pytest.raises(ValueError, match=rf"^{name} is an archive"):
        check_files(without_code)


def test_pictures_are_searched_but_for_their_pixels(without_code):
    """Compressed pixels may hold any bytes; what is written beside them is read."""
    path = b" ~/_Q \0 /home/me/x"

    def chunk(kind, content):
        body = kind + content
        return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    end = chunk(b"IEND", b"")
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IDAT", path)
    jpg = b"\xff\xd8\xff\xe0\0\2\xff\xda" + path + b"\xff\xd9"
    for name, data in (("scores.png", png + end), ("scores.jpg", jpg)):
        (without_code / name).write_bytes(data)
        check_files(without_code)
        (without_code / name).write_bytes(data + path)
        with pytest.raises(ValueError, match=rf"^{name} names a place on one machine"):
            check_files(without_code)
        (without_code / name).unlink()
    (without_code / "scores.png").write_bytes(png + chunk(b"tEXt", b"Source\0/home/me/x") + end)
    with pytest.raises(ValueError, match=r"^scores\.png names a place on one machine, /home/me"):
        check_files(without_code)


@pytest.mark.slow
def test_a_link_out_of_the_folder_is_never_followed(checkpoint, tmp_path):
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "secrets").mkdir()
    for target in (tmp_path / "secret.txt", Path("../secret.txt"), tmp_path / "secrets", tmp_path / "nowhere"):
        (checkpoint / "notes.txt").symlink_to(target)
        with pytest.raises(ValueError, match=r"^notes\.txt is a link to another folder or out of this one"):
            build_repository(checkpoint, tmp_path / "built", license="mit")
        (checkpoint / "notes.txt").unlink()
    (checkpoint / "NOTICE").symlink_to("README.md")
    built = build_repository(checkpoint, tmp_path / "built", license="mit")
    assert (built / "NOTICE").read_text() == (checkpoint / "README.md").read_text()
    assert not (built / "NOTICE").is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_not_waited_for(checkpoint):
    os.mkfifo(checkpoint / "notes.txt")
    with pytest.raises(ValueError, match=r"^notes\.txt is no file"):
        check_files(checkpoint)


@pytest.mark.slow
def test_states_of_a_training_run_are_left_out_and_named(checkpoint, tmp_path, caplog, monkeypatch):
    expected = contents(build_repository(checkpoint, tmp_path / "before", license="mit"))
    for name in (
        *(
            "checkpoint-20/optimizer.pt",
            "checkpoint-20/config.json",
            "runs/a/events.out.tfevents.1",
            "wandb/run/x.yaml",
        ),
        *("global_step10/weights.safetensors", "training_args.bin", "trainer_state.json", "rng_state_0.pth"),
        *("optimizer.pt", "logs/output.log"),
    ):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text("/home/nora")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert contents(build_repository(checkpoint, tmp_path / "built", license="mit")) == expected
    assert (
        "left out, since they are states of a training run: checkpoint-20/, global_step10/, logs/, optimizer.pt, "
        "rng_state_0.pth, runs/, trainer_state.json, training_args.bin, wandb/"
    ) in caplog.text


@pytest.mark.slow
def test_code_that_the_package_does_not_write_is_named(checkpoint, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    build_repository(checkpoint, tmp_path / "own", license="mit")
    assert "not what context-compressors" not in caplog.text
    with open(checkpoint / "pooling.py", "a") as file:
        file.write("# one more line\n")
    (checkpoint / "helper.py").write_text("")
    build_repository(checkpoint, tmp_path / "built", license="mit")
    assert "not what context-compressors 0.1.0 writes: helper.py, pooling.py; whoever trusts" in caplog.text


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


@pytest.mark.slow
def test_a_dry_run_shows_every_file_and_calls_nobody(checkpoint, hub, capsys):
    assert upload(checkpoint, "me/x", "--license", "mit", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert hub.calls == []
    assert "me/x, private, v0.1.0" in shown
    for name, data in contents(checkpoint).items():
        if name != "README.md":
            assert f"{len(data):,}  {name}" in shown
    assert f"bytes in {len(contents(checkpoint))} files" in shown


@pytest.mark.slow
def test_one_commit_and_its_tag_private_by_default(checkpoint, hub, capsys, tmp_path):
    assert upload(checkpoint, "me/x", "--license", "mit", "--tag", "v7", "--output", tmp_path / "kept") == 0
    assert names(hub) == ["create_repo", "repo_info", "list_repo_refs", "upload_folder", "create_tag"]
    assert hub.calls[0][2] == {"private": True, "exist_ok": True}
    assert hub.calls[4][2] == {"tag": "v7", "revision": "c" * 40}
    assert hub.files == contents(tmp_path / "kept")
    assert "commit/1" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_upload_goes_through_when_it_is_run_again(checkpoint, hub):
    hub.fails = True
    assert upload(checkpoint, "me/x", "--license", "mit") == 1
    assert "create_tag" not in names(hub)
    hub.fails = False
    assert upload(checkpoint, "me/x", "--license", "mit") == 0
    assert names(hub)[-2:] == ["upload_folder", "create_tag"]


@pytest.mark.slow
def test_public_repositories_and_known_tags_are_refused(checkpoint, hub, capsys):
    hub.is_private, hub.tags = False, ["v1"]
    assert upload(checkpoint, "me/x", "--license", "mit") == 1
    assert "me/x is public already: pass --public" in capsys.readouterr().err
    hub.is_private = True
    assert upload(checkpoint, "me/x", "--license", "mit", "--public", "--tag", "v2") == 1
    assert "me/x is there and private: upload without --public" in capsys.readouterr().err
    hub.is_private = False
    assert upload(checkpoint, "me/x", "--license", "mit", "--public", "--tag", "v1") == 1
    assert "has a version 'v1' already" in capsys.readouterr().err
    assert "upload_folder" not in names(hub)
    assert upload(checkpoint, "me/x", "--license", "mit", "--public", "--tag", "v2") == 0
    assert [call[2]["private"] for call in hub.calls if call[0] == "create_repo"] == [True, False, False, False]


@pytest.mark.parametrize("place", ["/teamspace/me/base", "/notebooks/base"])
def test_a_model_named_by_its_folder_is_refused_wherever_that_is(without_code, place):
    config = json.loads((without_code / "config.json").read_text())
    config["decoder_config"]["_name_or_path"] = place
    (without_code / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"config.json names a place on one machine, {place}"):
        check_files(without_code)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", '{"name_or_path": "/nobackup/me/base"}'),
        ("adapter_config.json", '[{"base_model_name_or_path": "/nobackup/me/base"}]'),
        ("recipe.yaml", "base: /nobackup/me/base"),
        ("recipe.yaml", "sources: [{name: me/x}, {path: /nobackup/me/base}]"),
    ],
)
def test_a_place_is_refused_in_every_file_that_names_models_or_data(without_code, name, text):
    (without_code / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{name} names a place on one machine, /nobackup/me/base"):
        check_files(without_code)
    (without_code / name).write_text(text.replace("/nobackup/", ""))
    check_files(without_code)
    (without_code / "recipe.yaml").write_text("context_prefix: /nobackup/me/base\nbase: me/base")
    check_files(without_code)


def test_a_refusal_names_the_file(checkpoint, hub, capsys):
    (checkpoint / "old.pt").write_bytes(b"")
    assert upload(checkpoint, "me/x", "--license", "mit") == 1
    assert "old.pt is a pickle" in capsys.readouterr().err
    assert hub.calls == []


@pytest.mark.slow
def test_the_script_in_the_checkout_is_the_command(checkpoint, tmp_path):
    copy = tmp_path / "upload.py"
    shutil.copy(ROOT / "upload.py", copy)
    command = [sys.executable, copy, checkpoint, "me/x", "--license", "mit", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout
