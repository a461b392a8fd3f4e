# SPDX-License-Identifier: Apache-2.0
"""What may stand in a folder that is uploaded, and what is refused by its name; no connection is ever opened."""

import json
import os
import pickle
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from context_compressors.hub_cards.public_files import check_files
from context_compressors.hub_cards.repository import build_repository

pytestmark = pytest.mark.usefixtures("no_connection")


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
        written = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        assert set(check_files(folder)[0]) == written


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
