# SPDX-License-Identifier: Apache-2.0
"""Where base models are kept on this machine, so that a checkpoint that leaves out its base finds it there."""

from __future__ import annotations

import json
import os
from pathlib import Path

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def cache_folder() -> Path:
    """`$CONTEXT_COMPRESSORS_CACHE`, else `context_compressors` in `$XDG_CACHE_HOME` or else in `~/.cache`."""
    named = os.environ.get("CONTEXT_COMPRESSORS_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "context_compressors"


def cache_place(name: str) -> Path:
    """Where in the cache the base of a Hub id is, or would be."""
    return cache_folder() / "bases" / name.replace("/", "--")


def cached_base(name: str | os.PathLike | None) -> Path | None:
    """Folder in the cache with the base of a Hub id; `None` if there is none, or `name` is itself a folder."""
    if name is None or os.path.isdir(name):
        return None
    place = cache_place(os.fspath(name))
    return place if is_whole(place) else None


def is_whole(folder: Path) -> bool:
    """Whether a base's folder has weights and tokenizer: whatever loads a model fetches only what it needs itself."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    names |= {"config.json", "tokenizer_config.json"}
    return all((folder / name).is_file() for name in names) and any(
        (folder / name).is_file() for name in _VOCABULARIES
    )


def hub_name(folder: str | os.PathLike) -> tuple[str | None, str | None]:
    """Hub id and commit of a folder in this cache, where the commit is `None`, or in the Hub's; else both `None`."""
    # Not resolved: a cache may be a link to another disk, and so may be what is in it.
    path = Path(os.path.abspath(folder))
    if path.parent == Path(os.path.abspath(cache_folder())) / "bases":
        return path.name.replace("--", "/", 1), None
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1), path.name
    return None, None


def find_base(name: str | os.PathLike) -> tuple[str | os.PathLike, str | None, str | None]:
    """Where to load a base from, and the Hub id and commit of that if it is a folder in a cache."""
    place = cached_base(name) or name
    hub_id, commit = hub_name(place) if os.path.isdir(place) else (None, None)
    return place, hub_id, commit
