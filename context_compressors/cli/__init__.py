# SPDX-License-Identifier: Apache-2.0
"""The command `context-compressors`: finds the sub-command and hands its arguments over."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from .. import __version__
from ..configuration.nearest_names import nearest

# Name -> its module, imported when the command is called, and one line of help. What loads torch is imported when its
# arguments are read. The function has the name's last word.
_COMMANDS = {
    "train": ("train", "train a compressor (or a teacher) as a recipe says"),
    "fit": ("fit", "make a compressor of any language model in minutes, without training it"),
    "data": ("data", "write a published data set as Parquet in the columns that training and evaluation read"),
    "evaluate": ("evaluate", "score a checkpoint against no context and full context; needles, RULER, retrieval"),
    "compare": ("compare", "tell whether a condition or system is better than another on the same questions"),
    "compress": ("compress", "read documents once, and keep each as a memory file"),
    "compress-corpus": ("compress_corpus", "compress a collection into a store, with many processes or machines"),
    "ask": ("compress", "answer questions from memory files or documents"),
    "serve": ("serve", "serve memories and the chat that reads them: OpenAI's API, a page, files for agents"),
    "demo": ("serve", "answer questions about five pages in the terminal"),
    "convert": ("publish", "make a checkpoint of this package from a published one of another code base"),
    "publish card": ("publish", "write a checkpoint's card from its training run and its evaluation"),
    "publish upload": ("publish", "build a Hub repository from a checkpoint, and push it"),
    "publish export-decoder": ("publish", "write the decoder as a language model or LoRA adapter, for vLLM"),
}

_OPTIONS = ("--help", "--version", "--traceback")

_HELP = """\
usage: context-compressors [--help] [--version] [--traceback] COMMAND ...

Soft context compressors: read a long context once, answer from a few vectors.

commands:
{commands}

`context-compressors COMMAND --help` tells a command's options. `--traceback` before the command shows where in the
code an error came from, instead of its message alone."""


def _help() -> str:
    lines = [f"  {name:<{max(map(len, _COMMANDS))}}  {text}" for name, (_, text) in _COMMANDS.items()]
    return _HELP.format(commands="\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; return 0 done, 1 refused with a message, 2 wrong arguments, or 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = arguments[:1] == ["--traceback"]
    if show_traceback:
        arguments.pop(0)
    if not arguments:
        print(_help(), file=sys.stderr)
        return 2
    number = 2 if arguments[0] == "publish" else 1
    name, rest = " ".join(arguments[:number]), arguments[number:]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"context-compressors {__version__}")
        return 0
    if name not in _COMMANDS:
        kind, allowed = ("option", _OPTIONS) if name.startswith("-") else ("command", _COMMANDS)
        print(f"context-compressors: error: unknown {kind} {name!r}{nearest(name, allowed)}", file=sys.stderr)
        return 2
    module, function = _COMMANDS[name][0], name.split()[-1].replace("-", "_")
    command = vars(importlib.import_module(f".{module}", __package__))[function]
    try:
        return command(rest)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if show_traceback:
            raise
        print(f"context-compressors {name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
