# SPDX-License-Identifier: Apache-2.0
"""Files of an uploaded folder: allowed, left out, or refused by name. No connection is opened."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from context_compressors.hub_cards.repository import build_repository, select_files

pytest.importorskip("detect_secrets")
pytestmark = pytest.mark.usefixtures("no_connection")

# Longer than any rule for a token asks for.
_DRAWN = "k3Jx9QmZ7rTb2VnL8wYc5HsD"


@pytest.mark.parametrize("name", ["old.pt", ".DS_Store", "config.yaml", "notes.txt", "scores.json"])
def test_what_this_package_does_not_write_is_left_out_unless_it_is_named(without_code, name):
    (without_code / name).write_text("in /home/nora/run")
    (without_code / "__pycache__").mkdir()
    paths, left_out = select_files(without_code)
    assert Path(name) not in paths
    assert left_out == sorted([name, "__pycache__/"])
    paths, left_out = select_files(without_code, [name])
    assert Path(name) in paths
    assert left_out == ["__pycache__/"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((f"token = '{prefix}{_DRAWN}'", "an access token") for prefix in ("hf_", "api_org_")),
        (f"hf_oauth_{_DRAWN}", "an access token"),
        (f"ghp_{'x' * 36}", "GitHub"),
        (f"id {'AKIA' + 'IOSFODNN7EXAMPLE'}", "AWS"),
        (f"xoxb-{'1' * 12}-{'2' * 12}-{_DRAWN}", "Slack"),
        (f"WANDB_API_KEY={'0123456789abcdef' * 2}01234567", "Secret Keyword"),
        ("-----BEGIN " + "OPENSSH PRIVATE KEY-----", "Private Key"),
        ("git clone https://nora:" + "secret@example.com/x", "Basic Auth"),
        (f'unheard_of = "{_DRAWN}{_DRAWN[::-1]}"', "High Entropy"),
        *(
            (text, "a place on one machine")
            for text in (
                *("/home/nora/corpus", "see ~/corpora/x", "file:///etc/x", "rsync -a nora@gpu7:/home/nora/run ."),
                *("in /nobackup/team/run", "-v /ckpt/x:/data/run", "PYTHONPATH=/usr/lib:/teamspace/nora/code"),
                *("C:\\Users\\Nora\\model", "D:/corpora/x", "path={here}/model.safetensors"),
            )
        ),
    ],
)
def test_secrets_and_paths_are_named(without_code, text, kind):
    text = text.replace("{here}", str(without_code.resolve()))
    is_ours = "token" in kind or "place" in kind
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in text)
    for name, content in (
        ("README.md", f"# A card\n\n{text}\n"),
        ("helper.py", f"# {text}\n"),
        ("training_summary.json", json.dumps({"x": [text]})),
        ("training_summary.json", f'{{"x": "{escaped}"}}'),
    ):
        if is_ours or name == "README.md":
            (without_code / name).write_text(content)
            with pytest.raises(ValueError, match=rf"^{name} (holds|names) .*{kind}"):
                select_files(without_code)
            (without_code / name).unlink()


def test_ordinary_text_passes(without_code):
    (without_code / "NOTICE.txt").write_text(
        "See https://huggingface.co/data/x and ./data/y, a ~ b, and/or work/main; hf_hub_download; a/home/b. Q:\\nWho?"
        " ssh://git@example.com, https://example.com/@nora, pypi-packages-of-the-year, http://localhost:/x, npm_config"
        f" ~/.cache, me@example.com, https://x.org/a:b@c, s3://bucket/key, commit '{'0a' * 20}', mailto:me@x.org, 5:/"
        ' hf_oauth_callback_of_a_space, <b>x</b>/y, POST /v1/memories, #!/usr/bin/env python, "Owner-1/Model-2B"'
    )
    (without_code / "training_summary.json").write_text(json.dumps({"prompt": "Q:\nWho?\nA:"}))
    assert {Path("NOTICE.txt"), Path("training_summary.json")} <= set(select_files(without_code)[0])


def test_the_names_of_weights_and_texts_of_a_picture_are_searched(without_code):
    from PIL import Image, PngImagePlugin

    for text in ("/home/nora/x", "from here"):
        save_file({"x": torch.ones(1)}, without_code / "model-2.safetensors", metadata={"from": text})
        described = PngImagePlugin.PngInfo()
        described.add_text("Source", text)
        Image.new("L", (2, 2)).save(without_code / "scores.png", pnginfo=described)
        if text == "from here":
            assert {Path("model-2.safetensors"), Path("scores.png")} <= set(select_files(without_code)[0])
            return
        for name in ("model-2.safetensors", "scores.png"):
            with pytest.raises(ValueError, match=rf"^{name} names a place on one machine, /home/nora"):
                select_files(without_code, {"model-2.safetensors", "scores.png"} - {name})


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_another_repository_is_refused(without_code, name):
    path = without_code / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "auto_map": {"AutoTokenizer": [None, "someone/else--tokens.Tokenizer"]}}))
    with pytest.raises(ValueError, match=rf"^{name} runs code of another repository, someone/else--tokens.Tokenizer"):
        select_files(without_code)


@pytest.mark.slow
def test_a_link_out_of_the_folder_is_never_followed(checkpoint, tmp_path):
    (tmp_path / "secret.txt").write_text("a secret")
    for target in (tmp_path / "secret.txt", Path("../secret.txt"), tmp_path / "nowhere"):
        (checkpoint / "NOTICE.txt").symlink_to(target)
        with pytest.raises(ValueError, match=r"^NOTICE\.txt is a link out of the folder"):
            build_repository(checkpoint, tmp_path / "built", license="mit")
        (checkpoint / "NOTICE.txt").unlink()
    (checkpoint / "NOTICE").symlink_to("README.md")
    built = build_repository(checkpoint, tmp_path / "built", license="mit")
    assert (built / "NOTICE").read_text() == (checkpoint / "README.md").read_text()
    assert not (built / "NOTICE").is_symlink()
