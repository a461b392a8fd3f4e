# SPDX-License-Identifier: Apache-2.0
"""Refusals that name the nearest right name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# More than these are no help in a message.
_MOST_NAMES = 60


def nearest_name(name: str, allowed: Iterable[str], similarity: float = 0.5) -> str | None:
    """The allowed name that is most like another one, or `None` when none is near; `similarity` is from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, sorted(map(str, allowed)), n=1, cutoff=similarity)), None)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A clause such as `; did you mean 'context'?` with the nearest allowed name, or the names when none is near."""
    names = sorted(map(str, allowed))
    if (best := nearest_name(name, names)) is not None:
        return f"; did you mean {best!r}?"
    return f"; allowed: {', '.join(names)}" if 0 < len(names) <= _MOST_NAMES else ""


def check_choice(what: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ValueError` naming `what`, the value and the nearest allowed one, unless the value is allowed."""
    names = list(allowed)
    if value not in names:
        raise ValueError(f"unknown {what} {value!r}{nearest(str(value), names)}")
