# SPDX-License-Identifier: Apache-2.0
"""The files that an upload may hold: those that this package writes, without traces of the machine."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# A vocabulary is made of pieces of text, and some of these look like paths or keys.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
# What `save_pretrained`, a training run, a card and tokenizers write, and licenses.
_WRITTEN = (
    *("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json"),
    *("*.safetensors.index.json", "model*.safetensors", "adapter_model.safetensors", "*.py", "*.jinja"),
    *(*_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("training_summary.json", "training_documents.json", "recipe.yaml", "requirements.txt"),
    *("README.md", "*.png"),
    *("LICEN[CS]E", "LICEN[CS]E*.txt", "LICEN[CS]E*.md", "NOTICE", "NOTICE*.txt", "NOTICE*.md", "USE_POLICY*"),
)
# Of the Hub itself, which detect-secrets does not know.
_HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b|\bhf_oauth_(?=[\w.-]*\d)[\w.-]{20,}")
_LOCAL_PATH = re.compile(
    # Programs and devices are those of every machine, and `/v1/` starts the paths of a server.
    r"(?<![\w./~<-])/(?!usr/|dev/|v\d/)[\w.-]+/[\w.-]+"
    r"|(?<![\w~/.])~/(?!\.cache\b)[\w.-]+"
    r"|\bfile://[^\s\"'<>]+"
    # After a single backslash a letter may be a line break's.
    r"|(?<!\w)[A-Za-z]:(?:\\\\(?=\w)|\\(?![nrt])|/)\w[\w.-]*"
)
_REMOTE_CODE = re.compile(r'"auto_map": \{[^}]*"([\w./-]+--[\w.]+)"')
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_files(folder: Path, include: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Return the files of a checkpoint's folder, by their paths in it, and the names of those that are left out.

    Files of `include` are taken as they are. `ValueError` names the first other file that is a link out of the folder,
    not what its name says, or that holds a secret, a path of a machine or the address of somebody else's code.
    """
    from ..modeling.checkpoint.encoder_tokenizer import ENCODER_TOKENIZER

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no config.json")
    trusted = [Path(os.path.normpath(name)) for name in include]
    for path in trusted:
        if path.is_absolute() or ".." in path.parts or not (folder / path).is_file():
            raise ValueError(f"{path} cannot be included: {folder} has no such file")
    paths, left_out = set(trusted), []
    for file in (file for place in (folder, folder / ENCODER_TOKENIZER) for file in sorted(place.glob("*"))):
        path = file.relative_to(folder)
        if not file.is_dir() and any(fnmatchcase(path.name, pattern) for pattern in _WRITTEN):
            paths.add(path)
        elif path not in paths and path.name != ENCODER_TOKENIZER:
            left_out.append(f"{path}/" if file.is_dir() else str(path))
    texts = {}
    for path in sorted(paths):
        file, place = folder / path, Path(os.path.realpath(folder / path))
        if file.is_symlink() and not place.is_relative_to(os.path.realpath(folder)):
            raise ValueError(f"{path} is a link out of the folder: put what it points to in its place")
        if not file.is_file():
            raise ValueError(f"{path} is no file: a folder, a pipe, a device or a link that points nowhere")
        if path not in trusted:
            texts[path] = _text_of(file, path)
    _check_texts(folder, texts)
    return sorted(paths), left_out


def _text_of(file: Path, path: Path) -> str:
    """Return the readable text of a file that this package writes; `ValueError` for a file of another kind."""
    from PIL import Image
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(file, "np") as weights:
                return "\n".join([*weights.keys(), json.dumps(weights.metadata() or {})])
        if path.suffix == ".png":
            with Image.open(file, formats=["PNG"]) as image:
                image.verify()
                return "\n".join(map(str, image.info.values()))
        text = file.read_text(encoding="utf-8")
        if "\0" in text:
            raise ValueError("it holds a zero byte")
        if path.suffix == ".json" and path.name not in _VOCABULARIES:
            # Letters may be written as their numbers.
            return json.dumps(json.loads(text), ensure_ascii=False, indent=1)
        return text
    except Exception as error:  # of the libraries that read these kinds
        raise ValueError(f"{path} is not what its name says ({type(error).__name__}: {error}): delete it") from error


def _check_texts(folder: Path, texts: Mapping[Path, str]) -> None:
    own = {str(place) for place in (folder.resolve(), Path.cwd(), Path.home()) if len(place.parts) > 1}
    searched = {}
    for path, text in texts.items():
        known = next((place for place in own if f"{place}{os.sep}" in text or f'"{place}"' in text), None)
        if path.name not in _VOCABULARIES:
            searched[path] = text
            found = _LOCAL_PATH.search(text)
            known = known or (found and found[0])
        if known:
            raise ValueError(f"{path} names a place on one machine, {known}: take it out, or pass --include {path}")
        if path.suffix == ".json" and (code := _REMOTE_CODE.search(text)):
            raise ValueError(f"{path} runs code of another repository, {code[1]}: take its auto_map out")
        if token := _HUB_TOKEN.search(text):
            raise ValueError(f"{path} holds an access token, {token[0][:6]}...: take it out, and revoke it")
    for path, kind, secret in _secrets(searched):
        what = f"{path} holds what looks like a secret ({kind}), {secret[:6]}..."
        raise ValueError(f"{what}: take it out, and revoke it, or pass --include {path}")


def _secrets(texts: Mapping[Path, str]) -> Iterator[tuple[Path, str, str]]:
    """Yield the secrets that detect-secrets finds: file, kind and secret."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        from detect_secrets.core.scan import scan_file
        from detect_secrets.settings import transient_settings
    except ImportError as error:
        raise ImportError("files are searched for secrets before an upload: pip install -e '.[publish]'") from error
    # Commits, checksums and versions are no secrets.
    kinds: Any = get_mapping_from_secret_type_to_class()
    names = {kind.__name__ for kind in kinds.values()}
    plugins = [{"name": name} for name in sorted(names - {"HexHighEntropyString", "IPPublicDetector"})]
    with tempfile.TemporaryDirectory() as scratch, transient_settings({"plugins_used": plugins}):
        for path, text in texts.items():
            file = Path(scratch, f"text{path.suffix if path.suffix in ('.py', '.json', '.yaml', '.md') else '.txt'}")
            file.write_text(text, encoding="utf-8")
            for secret in scan_file(str(file)):
                value = secret.secret_value or ""
                is_drawn = secret.type == "Base64 High Entropy String"
                # config.json has fingerprints of weights.
                if not (is_drawn and (path.name == "config.json" or _HUB_ID.fullmatch(value))):
                    yield path, secret.type, value


def tree(folder: Path) -> str:
    """A folder's files with their sizes, one a line, and the sum."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    lines = [f"{size:>15,}  {path.relative_to(folder)}" for path, size in zip(files, sizes, strict=True)]
    return "\n".join([*lines, f"{sum(sizes):>15,}  bytes in {len(files)} files"])
