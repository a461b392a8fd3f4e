# SPDX-License-Identifier: Apache-2.0
"""Define commands: their parser, the arguments that several of them share, and checks of these."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..configuration.nearest_names import check_choice, nearest
from ..data.yaml_text import parse_yaml, read_yaml

Argument = tuple[tuple[str, ...], dict[str, Any]]


class NearestNameParser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations that exits with 2 and the nearest name for an unknown option."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_args(  # type: ignore[override]  # argparse types it by the namespace that it is given
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        # Intermixed: options may stand between or after the files.
        parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            name = unknown[0].partition("=")[0]
            self.error(f"unknown option {name!r}{nearest(name, options)}")
        return parsed


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a command, in the words of `ArgumentParser.add_argument`."""
    return names, options


def command(
    name: str, description: str, *arguments: Argument, examples: str
) -> Callable[[Callable[[argparse.Namespace], None]], Callable[..., int]]:
    """Make a function of `argv` that parses it, exits with 2 for wrong arguments, and else runs the command."""

    def define(run: Callable[[argparse.Namespace], None]) -> Callable[..., int]:
        @functools.wraps(run)
        def main(argv: Sequence[str] | None = None) -> int:
            lines = "\n".join(f"  {line}".rstrip() for line in examples.strip().splitlines())
            parser = NearestNameParser(
                prog=f"context-compressors {name}", description=description, epilog=f"examples:\n{lines}"
            )
            for names, options in arguments:
                parser.add_argument(*names, **options)
            run(parser.parse_args(argv))
            return 0

        return main

    return define


def positive_int(text: str) -> int:
    """Read a whole number of at least 1, for `type=` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def check_outputs(paths: Iterable[str | None], overwrite: bool) -> None:
    """Raise `ValueError` for a file that is a folder, or that is there and may not be replaced."""
    for path in map(Path, filter(None, paths)):
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name a file")
        if path.exists() and not overwrite:
            raise ValueError(f"{path} is there: name another file, or pass --overwrite")


def config_argument(fields: str, example: str) -> Argument:
    """The option that takes rare settings as YAML."""
    return argument("--config", metavar="YAML", help=f"{fields}, as text or a file, such as '{example}'")


def config_fields(config: str | None, allowed: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a `--config`: YAML, `{name: value}`, or a file of YAML."""
    if config is None:
        return {}
    is_text = config.lstrip().startswith("{")
    fields = parse_yaml(config, "--config") if is_text else read_yaml(Path(config))
    for name in fields:
        check_choice("field of --config:", name, allowed)
    return fields


def device_name(text: str) -> str:
    """Read a device that this machine has, or "auto", for `type=` of an argument."""
    if text not in ("auto", "cpu"):
        import torch

        try:
            torch.empty(0, device=text)
        except (RuntimeError, AssertionError) as error:
            what = f"device {text!r} cannot be used here ({str(error).splitlines()[0]}): take cpu"
            raise argparse.ArgumentTypeError(what) from error
    return text


# Arguments that several commands have.
DEVICE = argument("--device", type=device_name, default="auto", help="such as cuda:0 (default: an accelerator)")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE = argument("--dtype", default="auto", choices=_DTYPES, help="(default: as saved)")
BASE_MODEL = argument("--base-model", metavar="MODEL", help="of a light checkpoint (default: as the checkpoint says)")
MODEL = argument("model", help="folder of a compressor, or its Hub id, also ID@REVISION")
# Of what loads a compressor.
LOADING = (BASE_MODEL, DEVICE, DTYPE)
COLUMN = argument("--column", default="context", help="of .jsonl and .parquet files (default: %(default)s)")
OVERWRITE = argument("--overwrite", action="store_true", help="replace what is there")
