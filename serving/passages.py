# SPDX-License-Identifier: Apache-2.0
"""Passages of the texts that memories are of, for an agent that needs a document's own words."""

from __future__ import annotations

from typing import Any

_MOST_CHARACTERS = 20_000


def passage_of(name: str, text: str, containing: str = "", start: int = 0, length: int = 2000) -> dict[str, Any]:
    """Return a passage of a text, its place and the text's length.

    Args:
        name: what the text is called.
        text: the whole text.
        containing: words, case ignored, around whose first place behind `start` the passage is; from `start` if empty.
        start: character.
        length: characters, at most 20,000.

    Raises:
        ValueError: the words are not in the text.
    """
    if containing:
        place = text.lower().find(containing.lower(), start)
        if place < 0:
            raise ValueError(f"{name} does not contain {containing!r} behind character {start}")
        start = max(0, place - length // 2)
    passage = text[start : start + min(length, _MOST_CHARACTERS)]
    return {"start": start, "of_characters": len(text), "text": passage}
