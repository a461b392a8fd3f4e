# SPDX-License-Identifier: Apache-2.0
"""An argument parser that answers a wrong option with the nearest right one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..configuration.nearest_names import nearest


class NearestNameParser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations, which refuses an unknown option with the nearest right one."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the arguments; exits with code 2 and the nearest right name when one is unknown."""
        # Intermixed: options may stand between or after the files.
        namespace, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            name = unknown[0].partition("=")[0]
            self.error(f"unknown option {name!r}{nearest(name, options)}")
        return namespace


def positive_int(text: str) -> int:
    """Read a whole number of at least 1, for `type=` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def check_device(name: str) -> None:
    """Raise `ValueError` naming the allowed ones unless this machine has the device, or it is "auto"."""
    if name == "auto":
        return
    import torch

    allowed = ["auto", "cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        allowed += [kind, *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]
    if name not in allowed:
        raise ValueError(f"device must be one of {', '.join(allowed)} on this machine, got {name!r}")


def device_name(text: str) -> str:
    """Read a device that this machine has, or "auto", for `type=` of an argument."""
    try:
        check_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
