# SPDX-License-Identifier: Apache-2.0
"""Passages of texts, for an agent that needs a document's own words."""

from __future__ import annotations

from typing import Any

_MOST_CHARACTERS = 20_000


def passage_of(name: str, text: str, containing: str = "", start: int = 0, length: int = 2000) -> dict[str, Any]:
    """Return `length` characters of a text from `start`, or around the first place of `containing` behind it.

    Case is ignored. Words that are not in the text raise `ValueError`.
    """
    if containing:
        place = text.lower().find(containing.lower(), start)
        if place < 0:
            raise ValueError(f"{name} does not contain {containing!r} behind character {start}")
        start = max(0, place - length // 2)
    passage = text[start : start + min(length, _MOST_CHARACTERS)]
    return {"start": start, "of_characters": len(text), "text": passage}
