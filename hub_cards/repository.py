# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folder becomes a Hub repository: files that this package writes, without traces of the machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
_LICENSE_FILES = ("LICEN[CS]E*", "NOTICE*", "USE_POLICY*")
# Labels of a text compressor, which needs no code.
_KEEP_DROP = {"0": "drop", "1": "keep"}


def build_repository(
    checkpoint: str | Path,
    target: str | Path,
    *,
    weights: str = "saved",
    base_model: str | None = None,
    license: str | None = None,
    local_files_only: bool = False,
    include: Sequence[str] = (),
) -> Path:
    """Build the folder of a Hub repository: weights, configuration, flat code, tokenizer and card with a license.

    The same checkpoint gives the same bytes. `ValueError` for a file that must not be public, or without a license.

    Args:
        checkpoint: a saved checkpoint, or the folder of a training run.
        target: a folder that does not exist, or is empty.
        weights: "saved" as in the checkpoint, "light" without the base's weights, or "full" with them.
        base_model: Hub repository or folder of the base, if not where the checkpoint says.
        license: license of the weights, as the Hub writes it; that of the card or of the base when `None`.
        local_files_only: open no connection; a base then comes from a folder or the cache.
        include: further files by their paths in the checkpoint, which are taken unseen.
    """
    from transformers.utils import logging

    from ..configuration.configuration_compressor import CompressorConfig
    from ..modeling.checkpoint.checkpoint_card import write_first_card
    from ..modeling.checkpoint.pretrained_bases import base_place

    logger = logging.get_logger(__name__)
    checkpoint, target = Path(checkpoint), Path(target)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty")
    if not local_files_only:
        base_model = base_place(base_model)
    files, left_out = select_files(checkpoint, include)
    _config(checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    # What fails leaves the target empty.
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        folder = Path(scratch)
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / path, folder / path)
        if weights != "saved":
            _convert(checkpoint, folder, weights, base_model, local_files_only)
        config, base = _config(folder), None
        if isinstance(config, CompressorConfig):
            _complete_code(config, folder)
            write_first_card(config, folder)
            base = _base_folder(config, base_model, local_files_only)
        _complete_card(config, folder, license, base)
        select_files(folder, include)
        for path in list(folder.iterdir()):
            path.rename(target / path.name)
    if left_out:
        logger.warning(f"left out, since this package does not write them (--include): {', '.join(left_out)}")
    return target


def _config(folder: Path) -> PreTrainedConfig:
    """Return a checkpoint's configuration; `ValueError` for another model's."""
    from transformers import AutoConfig

    from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)

    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "compression_ratios" not in fields and fields.get("id2label") != _KEEP_DROP:
        raise ValueError(f"{folder} holds a model of type {fields.get('model_type')!r}, not a context compressor")
    return AutoConfig.from_pretrained(folder)


def _auto_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class that loads a checkpoint with its head."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForTextEncoding

    classes = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForTextEncoding)
    return next(auto_class for auto_class in classes if auto_class.__name__ == config.auto_class)


def _convert(checkpoint: Path, target: Path, weights: str, base_model: str | None, local_files_only: bool) -> None:
    from ..modeling.checkpoint.base_weights import stored_weights

    options = {"local_files_only": local_files_only}
    config = _config(checkpoint)
    was_light = config.external_weights is not None
    place = {"base_model": base_model} if was_light and base_model else {}
    model = _auto_class(config).from_pretrained(checkpoint, dtype="auto", **options, **place)
    state = None
    if weights == "light" and not was_light:
        base = base_model or model.config.base_model_name_or_path
        if base is None:
            raise ValueError(f"{checkpoint} does not name its base: pass --base-model")
        model.link_base(base, **options)
        # In the types that they are stored in, which may be smaller than those that the model computes in.
        state = stored_weights(checkpoint)
    for path in target.glob("model*.safetensors*"):
        path.unlink()
    model.save_pretrained(target, include_base=weights == "full", state_dict=state)


def _complete_code(config: PreTrainedConfig, folder: Path) -> None:
    """Write the model's code, unless the checkpoint has its own, and the handler of an endpoint into a folder."""
    from ..modeling.checkpoint.remote_code import write_code

    files = [folder / f"{entry.partition('.')[0]}.py" for entry in config.auto_map.values()]
    if not all(file.is_file() for file in files):
        write_code(_auto_class(config)._model_mapping[type(config)], type(config), folder)
    if config.auto_class == "AutoModelForCausalLM" and not (folder / "handler.py").exists():
        shutil.copyfile(Path(__file__).with_name("handler.py"), folder / "handler.py")
        (folder / "requirements.txt").write_text("peft>=0.19\ntransformers>=5.17\n", encoding="utf-8")


def _base_folder(config: PreTrainedConfig, base_model: str | None, local_files_only: bool) -> Path | None:
    """Return the folder of the base's files on this machine, its card among them if it has one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    from ..modeling.checkpoint.checkpoint_card import is_hub_id
    from ..modeling.checkpoint.pretrained_bases import cached_base

    name = base_model or config.base_model_name_or_path
    if name is not None and Path(name).is_dir():
        return Path(name)
    if (kept := cached_base(name)) is not None or not is_hub_id(name):
        return kept
    options = {"revision": config.base_model_revision, "local_files_only": local_files_only}
    try:
        return Path(hf_hub_download(name, "README.md", **options)).parent
    except (OSError, HfHubHTTPError):
        return None


def _complete_card(config: PreTrainedConfig, folder: Path, license: str | None, base: Path | None) -> None:
    from huggingface_hub import ModelCard

    if not (folder / "README.md").is_file():
        raise ValueError(f"a text compressor's card is written by hand: {folder.name} has no README.md")
    card = ModelCard.load(folder / "README.md")
    base_card = base / "README.md" if base is not None else None
    of_the_base = ModelCard.load(base_card).data.license if base_card is not None and base_card.is_file() else None
    stated = card.data.license
    if license is None and stated and of_the_base and stated != of_the_base:
        what = f"the card says {stated!r}, and the base {config.base_model_name_or_path} is under {of_the_base!r}"
        raise ValueError(f"{what}: pass --license with the one that its terms allow")
    chosen = license or stated or of_the_base
    if chosen is None:
        raise ValueError("neither the card nor the base's names a license: pass --license, such as apache-2.0")
    if chosen != stated:
        card.data.license = chosen
        card.save(folder / "README.md")
    for pattern in _LICENSE_FILES:
        for file in [] if base is None else sorted(base.glob(pattern)):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def push_repository(folder: str | Path, repo_id: str, *, tag: str, private: bool = True) -> str:
    """Upload a built folder in one commit, tag it, and return the commit's address; `ValueError` for a known tag."""
    from huggingface_hub import HfApi

    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private != (api.repo_info(repo_id).private is True):
        what = "public already: pass --public" if private else "private: leave out --public, or make it public"
        raise ValueError(f"{repo_id} is {what}")
    if tag in {reference.name for reference in api.list_repo_refs(repo_id).tags}:
        raise ValueError(f"{repo_id} has a version {tag!r} already: name another one with --tag")
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=f"Upload {tag}",
        # Code and weights of an earlier version would be loaded with these.
        delete_patterns=["*.py", "*.safetensors", "*.safetensors.index.json"],
    )
    api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return str(commit.commit_url)


# --- what an upload may hold ---


def select_files(folder: Path, include: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
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
            match = _LOCAL_PATH.search(text)
            known = known or (match and match[0])
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
