# SPDX-License-Identifier: Apache-2.0
"""What may stand in a Hub repository: a checkpoint's own files, and nothing of the machine that it was made on."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_SUFFIXES = {
    *(".safetensors", ".json", ".py", ".md", ".txt", ".jinja", ".yaml", ".yml", ".model"),
    *(".png", ".jpg", ".svg", ".csv"),
}
_NAMES = {"LICENSE", "LICENCE", "NOTICE", "USE_POLICY", ".gitattributes"}
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"}
_CACHES = {"__pycache__", ".cache", ".git", ".huggingface", ".ipynb_checkpoints", ".DS_Store"}
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|rng_state|scaler|global_step|trainer_state|zero_to_fp32|latest$)")
# A vocabulary is made of pieces of text, and some of these look like paths.
_VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"}
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pos]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[A-Za-z0-9_-]{30,})\b")
_FOLDERS = "home|Users|root|tmp|mnt|scratch|workspace|work|data|opt|srv|media|var|private|content|kaggle"
_LOCAL_PATH = re.compile(rf"(?<![\w:./~-])/(?:{_FOLDERS})/[\w.-]+|\b[A-Za-z]:\\+(?:Users|home|work|data)\\+\w+")


def check_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder, by their paths in it, once each is known to be fit for everybody's eyes.

    Args:
        folder: the checkpoint.

    Raises:
        ValueError: the first file that is a pickle, a cache, a training state, something else that no checkpoint
            needs, or that holds an access token or a path of this machine.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no config.json")
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    for path in paths:
        _check_kind(path)
    own = {str(place) for place in (folder.resolve(), Path.cwd(), Path.home()) if len(place.parts) > 1}
    for path in paths:
        _check_text(path, _text_of(folder / path), own)
    return paths


def _check_kind(path: Path) -> None:
    if _CACHES & set(path.parts) or path.suffix == ".pyc":
        raise ValueError(f"{path} is a cache: delete it")
    if any(_TRAINING_STATE.match(part) or re.fullmatch(r"checkpoint-\d+", part) for part in path.parts):
        raise ValueError(f"{path} is the state of a training run, not a part of the model: move it elsewhere")
    if path.suffix in _PICKLES:
        raise ValueError(f"{path} is a pickle, which can run code when it is loaded: delete it")
    if path.suffix not in _SUFFIXES and path.name not in _NAMES and path.stem not in _NAMES:
        raise ValueError(f"{path} is not a part of a checkpoint: move it elsewhere")


def _text_of(file: Path) -> str:
    """What a person could read in a file: all of a text file, the names in a safetensors file."""
    if file.suffix == ".safetensors":
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            return json.dumps(json.loads(stream.read(length)).get("__metadata__", {}))
    return file.read_bytes().decode("utf-8", errors="ignore")


def _check_text(path: Path, text: str, own: set[str]) -> None:
    if found := _TOKEN.search(text):
        raise ValueError(
            f"{path} holds what looks like an access token, {found[0][:6]}...: take it out, and revoke it"
        )
    known = next((place for place in own if f"{place}{os.sep}" in text or f'"{place}"' in text), None)
    if known is None and path.name not in _VOCABULARIES and (found := _LOCAL_PATH.search(text)):
        known = found[0]
    if known is not None:
        raise ValueError(f"{path} names a place on one machine, {known}: take it out")


def tree(folder: Path) -> str:
    """A folder's files with their sizes, one a line, and the sum."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    lines = [f"{size:>15,}  {path.relative_to(folder)}" for path, size in zip(files, sizes, strict=True)]
    return "\n".join([*lines, f"{sum(sizes):>15,}  bytes in {len(files)} files"])
