# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folder becomes a Hub repository."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .public_files import check_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
    files, left_out = check_files(checkpoint, include)
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
        check_files(folder, include)
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
    """Write the code beside the weights, unless the checkpoint brought its own, and the handler of an endpoint."""
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
