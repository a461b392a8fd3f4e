# SPDX-License-Identifier: Apache-2.0
"""What may stand in a Hub repository: a checkpoint's own files, and nothing of the machine that it was made on."""

from __future__ import annotations

import json
import os
import pickletools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data.yaml_text import read_yaml

_SUFFIXES = {".safetensors", ".json", ".py", ".md", ".txt", ".jinja", ".model", ".png", ".jpg", ".svg"}
_NAMES = {"LICENSE", "LICENCE", "NOTICE", "USE_POLICY", ".gitattributes", "recipe.yaml"}
# Further ones that a licence may have.
_DOCUMENTS = {".rst", ".html", ".pdf"}
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"}
_CACHES = {"__pycache__", ".cache", ".git", ".huggingface", ".ipynb_checkpoints", ".DS_Store"}
# What a training run keeps in its folder beside the model, by the beginning of a file's or folder's name.
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|rng_state|scaler|global_step|trainer_state|training_args\.bin|zero_to_fp32|latest$"
    r"|pytorch_model_fsdp|checkpoint-\d+$|events\.out\.tfevents|(runs|wandb|mlruns|logs|completions)$)"
)
_OPTIMIZER_TENSOR = re.compile(r"(^|[./_])(exp_avg|max_exp_avg|exp_inf|momentum_buffer|optimizer|master_param)")
_MAX_HEADER_BYTES = 100_000_000
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_PACKED = (*_ZIP, b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
_TAR, _TAR_PLACE = b"ustar", 257
# Opcodes that call what a pickle names.
_CALLS = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD"}
# A vocabulary is made of pieces of text, and some of these look like paths.
_VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"}
# Fields of a recipe that name a folder or file.
_RECIPE_PLACES = (
    *("base", "encoder", "adapter", "checkpoint", "checkpoint_base", "tokenizer", "teacher", "prompts", "memories"),
    *("path", "name", "data_dir", "output_dir", "logging_dir", "resume_from_checkpoint"),
)
_TOKEN = re.compile(
    "|".join(
        (
            r"\bhf_[A-Za-z0-9]{20,}\b|\bhf_oauth_(?=[\w.-]*\d)[\w.-]{20,}|\bapi_org_[A-Za-z0-9]{20,}\b",
            # A JSON Web Token
            r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.",
            r"\bgh[oprsu]_[A-Za-z0-9]{30,}\b",
            r"\bgithub_pat_\w{30,}\b",
            r"\bglpat-[\w-]{20,}",
            r"\bsk-[A-Za-z0-9_-]{30,}\b",
            r"\b[rs]k_live_[A-Za-z0-9]{20,}\b",
            r"\bnpm_[A-Za-z0-9]{36}\b|\bpypi-AgE[\w-]{20,}",
            r"AccountKey=[A-Za-z0-9/+]{40,}",
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
            r"(?i:aws_?secret\w*)\W{1,8}[A-Za-z0-9/+]{40}(?![\w/+])",
            r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}",
            r"\bxox[abeoprs]-[0-9A-Za-z-]{10,}|\bhooks\.slack\.com/services/\w+/\w+/\w+",
            r"\bwandb_v\d_\w{20,}|(?i:wandb)[\s\S]{0,80}?(?<!\w)[0-9a-f]{40}(?!\w)",
            r"-----BEGIN [A-Z ]*PRIVATE KEY",
            # user:password@, or a token alone
            r"\b[A-Za-z][\w+.-]*://(?:[^\s/:@\"'<>]+:[^\s/@\"'<>]+|[\w-]{20,})@",
        )
    )
)
_FOLDERS = (
    "home|export|afs|cephfs|hpc|Users|root|tmp|mnt|scratch|workspace|work|data|opt|srv|media|var|private|content|kaggle"
    "|nfs|gpfs|lustre|dbfs|fsx|efs|beegfs|cluster|Volumes|users|projects?|storage|raid|shared|gscratch|ssd|hdd|disks?"
)
_LOCAL_PATH = re.compile(
    rf"(?<![\w./~-])/(?:{_FOLDERS})\d*/[\w.-]+"
    r"|(?<![\w~/.])~/(?!\.cache\b)[\w.-]+"
    r"|\bfile://[^\s\"'<>]+"
    # After a single backslash a letter may be a line break's.
    r"|(?<!\w)[A-Za-z]:(?:\\\\(?=\w)|\\(?![nrtbfuvx0])|/)[\w.-]+"
    rf"|(?<!\w)[A-Za-z]:\\+(?:{_FOLDERS}|Documents|Temp|temp|repos)\b"
)


def check_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files of a checkpoint's folder, by their paths in it, once each is known to be fit for everybody's eyes.

    Args:
        folder: the checkpoint, or the folder of the training run that made it.

    Returns:
        the files, and what stays where it is because it is a state of the run: files and folders by name.

    Raises:
        ValueError: the first file that is a link out of the folder, a pickle, a cache, something else that no
            checkpoint needs, or that holds an access token, a path of a machine or an optimizer's state.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no config.json")
    paths, states = [], set()
    for path in sorted(path.relative_to(folder) for path in folder.rglob("*")):
        is_code = path.suffix == ".py"
        parts = enumerate(path.parts[:-1] if is_code else path.parts, 1)
        state = next((number for number, part in parts if _TRAINING_STATE.match(part)), None)
        if state is not None:
            top = Path(*path.parts[:state])
            states.add(f"{top}/" if (folder / top).is_dir() else str(top))
            continue
        _check_link(folder, path)
        if not (folder / path).is_dir():
            _check_kind(folder, path)
            paths.append(path)
    own = {str(place) for place in (folder.resolve(), Path.cwd(), Path.home()) if len(place.parts) > 1}
    for path in paths:
        _check_text(path, _text_of(folder, path), own)
    for path in paths:
        if path.suffix == ".json" and path.name not in _VOCABULARIES:
            _check_names(path, json.loads((folder / path).read_bytes()))
        elif path.name == "recipe.yaml":
            _check_names(path, read_yaml(folder / path), _RECIPE_PLACES)
    return paths, sorted(states)


def _check_names(path: Path, value: Any, names: tuple[str, ...] = ()) -> None:
    """Refuse a file that names a model, or what else these fields do, by a place on one machine, wherever that is."""
    for name, inside in value.items() if isinstance(value, dict) else ():
        is_place = name in names or str(name).endswith("name_or_path")
        if is_place and isinstance(inside, str) and os.path.isabs(inside):
            raise ValueError(f"{path} names a place on one machine, {inside}: take it out")
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_names(path, inside, names)


def _check_link(folder: Path, path: Path) -> None:
    file = folder / path
    if file.is_symlink() and (file.is_dir() or not file.resolve().is_relative_to(folder.resolve())):
        raise ValueError(f"{path} is a link to another folder or out of this one: put what it points to in its place")


def _check_kind(folder: Path, path: Path) -> None:
    if _CACHES & set(path.parts) or path.suffix == ".pyc":
        raise ValueError(f"{path} is a cache: delete it")
    if path.suffix in _PICKLES:
        raise ValueError(f"{path} is a pickle, which can run code when it is loaded: delete it")
    is_licence = path.stem in _NAMES and path.suffix in _DOCUMENTS
    if path.suffix not in _SUFFIXES and path.name not in _NAMES and not is_licence:
        raise ValueError(f"{path} is not a part of a checkpoint: move it elsewhere")
    if not (folder / path).is_file():
        raise ValueError(f"{path} is no file: a pipe, a device or a link that points nowhere")


def _text_of(folder: Path, path: Path) -> str:
    """What a person could read in a file: all of it but pixels; names and metadata of a safetensors file."""
    with open(folder / path, "rb") as stream:
        if path.suffix == ".safetensors":
            return _text_of_weights(path, stream)
        data = stream.read()
    if data.startswith(_PACKED) or data.startswith(_TAR, _TAR_PLACE):
        raise ValueError(f"{path} is an archive, such as `torch.save` writes, whatever its name says: delete it")
    if _is_pickle(data):
        raise ValueError(f"{path} is a pickle, whatever its name says: delete it")
    data = _without_pixels(data)
    text = data.decode("utf-8", errors="ignore")
    if b"\0" in data:
        # Every other byte of UTF-16 is zero in what is searched for.
        text += "\n" + data.replace(b"\0", b"").decode("utf-8", errors="ignore")
    if path.suffix == ".json":
        try:
            # Letters may be written as their numbers.
            text += "\n" + "\n".join(_strings(json.loads(data)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    return text


def _without_pixels(data: bytes) -> bytes:
    """A PNG or JPEG file without its compressed pixels, among whose bytes anything may seem to be written."""
    if data.startswith(b"\xff\xd8"):
        head, _, scan = data.partition(b"\xff\xda")
        return head + scan.rpartition(b"\xff\xd9")[2]
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    kept, place, kind = [], 8, b""
    while place + 12 <= len(data) and kind != b"IEND":
        kind, end = data[place + 4 : place + 8], place + 12 + int.from_bytes(data[place : place + 4], "big")
        if kind != b"IDAT":
            kept.append(data[place:end])
        place = end
    return b"\n".join([*kept, data[place:]])


def _text_of_weights(path: Path, stream: Any) -> str:
    length = int.from_bytes(stream.read(8), "little")
    try:
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(stream.read(length))
        names = [name for name in header if name != "__metadata__"]
        end = 8 + length + max((header[name]["data_offsets"][1] for name in names), default=0)
        if end != stream.seek(0, os.SEEK_END):
            raise ValueError(f"{stream.tell()} bytes where its header ends at {end}")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file, whatever its name says: delete it ({error})") from error
    state = next((name for name in names if _OPTIMIZER_TENSOR.search(name)), None)
    if state is not None:
        raise ValueError(f"{path} holds an optimizer's state, {state}: store the model's weights alone")
    return "\n".join([*names, *_strings(header.get("__metadata__", {}))])


def _strings(value: Any) -> Iterator[str]:
    """All texts inside a value of JSON, the names of fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inside in value.items():
            yield name
            yield from _strings(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _strings(inside)


def _is_pickle(data: bytes) -> bool:
    if data[:1] == b"\x80" and data[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return True
    # The oldest protocols are text. Reading their opcodes runs nothing.
    found = set()
    try:
        for opcode, _, _ in pickletools.genops(data):
            found.add(opcode.name)
    except Exception:  # It fails in as many ways as texts are not pickles.
        return False
    return bool(found & _CALLS)


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
