# SPDX-License-Identifier: Apache-2.0
"""What the page shows, as HTML: two answers, and a document's tokens in the colours of slots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from ..evaluation.metrics import holds_answer
from ..evaluation.slot_origins import ATTENTION, KEPT, PLAN, WINDOWS
from .page_answers import Answer, Inside

_KINDS = {
    WINDOWS: "Each slot is made of the mean of a window of neighbouring tokens; shades tell windows apart.",
    PLAN: "Each slot is a weighted mean of tokens. The weights are the transport plan's: the darker a token, the more "
    "of it is in the slots.",
    ATTENTION: "Each slot is a memory token. Shown is what it attends to in the last layer, as a mean over the heads: "
    "the darker a token, the more it is attended to.",
    KEPT: "Each slot holds keys and values of tokens of the text: the darker a token, the more heads have kept it.",
    None: "This method has no weights that would tell which tokens a slot is made of.",
}
_READING = "reading …"


def message(text: str) -> str:
    """What the user has to change."""
    return f'<div class="cc-message" role="alert">{escape(text)}</div>'


def header(name: str, facts: Sequence[str]) -> str:
    """The top of the page: what it does, and of which checkpoint."""
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        '<header class="cc-header"><h1>Read once, answer from a few slots</h1>'
        "<p>A compressor turns a document into slots, which stand in for its tokens. The same language model "
        "answers your question from the full text and from the slots.</p>"
        f'<ul class="cc-facts" aria-label="Checkpoint"><li><strong>{escape(name)}</strong></li>{items}</ul></header>'
    )


def marks(ratios: Sequence[int], chosen: int) -> str:
    """The ratios below their slider."""
    items = (f"<b>{ratio}x</b>" if ratio == chosen else f"<span>{ratio}x</span>" for ratio in ratios)
    return f'<div class="cc-ticks">{"".join(items)}</div>'


def answers(
    text: Answer | None,
    slots: Answer | None,
    ratio: int,
    accepted: Sequence[str] = (),
    waiting: str | None = None,
) -> str:
    """Both answers as far as they are written."""
    costs = [answer for answer in (text, slots) if answer is not None]
    turn = _READING if slots is not None and slots.is_done else "waiting for the other answer …"
    full = _card("text", "From the full text", text, costs, accepted, waiting or turn)
    title = f'From slots<span class="cc-tag">{ratio}x</span>'
    few = _card("slots", title, slots, costs, accepted, waiting or _READING)
    line = ""
    if text is not None and slots is not None and slots.num_places and slots.num_bytes:
        places, size = text.num_places / slots.num_places, text.num_bytes / slots.num_bytes
        line = (
            f'<p class="cc-summary">The slots take <strong>{places:.1f} times</strong> fewer places in the context, '
            f"and <strong>{size:,.0f} times</strong> fewer bytes are kept of the document.</p>"
        )
    return f'<div class="cc-answers">{full}{few}</div>{line}'


def _card(
    kind: str,
    title: str,
    answer: Answer | None,
    costs: Sequence[Answer],
    accepted: Sequence[str],
    waiting: str,
) -> str:
    head = f'<article class="cc-card cc-{kind}"><h3>{title}</h3>'
    if answer is None:
        return f'{head}<p class="cc-answer cc-waiting">{waiting}</p></article>'
    caret = "" if answer.is_done else '<span class="cc-caret"></span>'
    words = escape(answer.text) or ("<em>an empty answer</em>" if answer.is_done else "")
    done = str(answer.is_done).lower()
    body = f'<p class="cc-answer" aria-live="polite" data-done="{done}">{words}{caret}</p>'
    if accepted and answer.is_done:
        mark, verdict = ("✓", "right") if holds_answer(answer.text, accepted) else ("✗", "not")
        known = f"the document says “{escape(accepted[0])}”"
        body += f'<p class="cc-verdict cc-{verdict}"><span aria-hidden="true">{mark}</span> {known}</p>'
    rows: tuple[tuple[str, list[float], str], ...] = (
        ("slots" if kind == "slots" else "tokens", [cost.num_places for cost in costs], f"{answer.num_places:,}"),
        ("kept", [cost.num_bytes for cost in costs], size_text(answer.num_bytes)),
        ("to read", [cost.read_seconds for cost in costs], f"{answer.read_seconds:.2f} s"),
        ("to answer", [cost.answer_seconds for cost in costs], f"{answer.answer_seconds:.2f} s"),
    )
    own = (answer.num_places, answer.num_bytes, answer.read_seconds, answer.answer_seconds)
    items = "".join(
        f'<div><dt>{name}</dt><dd>{shown}</dd><i style="--share:{value / (max(values) or 1):.3f}"></i></div>'
        for (name, values, shown), value in zip(rows, own, strict=True)
    )
    return f'{head}{body}<dl class="cc-costs">{items}</dl></article>'


def size_text(count: float) -> str:
    """Bytes in the unit that suits them."""
    if count < 2**10:
        return f"{count:,.0f} B"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def inside(found: Inside, ratio: int) -> str:
    """The tokens of a document with their slots."""
    slots = [[[place, round(weight, 3)] for place, weight in slot] for slot in found.slots]
    choice = ""
    if slots:
        choice = (
            f'<label class="cc-choice"><span>Slot</span><input type="range" class="cc-slot" min="1" '
            f'max="{len(slots)}" value="1" aria-label="Slot"></label>'
            '<output class="cc-readout" aria-live="polite">Choose a slot, or a token.</output>'
        )
    tokens = "".join(
        f'<span class="t" style="--w:{shade:.2f}">{escape(piece)}</span>'
        for piece, shade in zip(found.pieces, _shades(found), strict=True)
    )
    title = f"What went into which slot <small>{len(found.pieces):,} tokens, {ratio}x</small>"
    return (
        f'<section class="cc-inside" data-slots="{escape(json.dumps(slots))}">'
        f'<article class="cc-panel" data-panel="slots"><h3>{title}</h3><p>{_KINDS[found.kind]}</p>{choice}'
        f'<div class="cc-tokens" tabindex="0" aria-label="Tokens by slot">{tokens}</div></article></section>'
    )


def _shades(found: Inside) -> list[float]:
    """How dark each token is, 0 to 1: slots that share no token take turns, of others all weights are summed up."""
    totals, owners = [0.0] * len(found.pieces), [0] * len(found.pieces)
    for number, slot in enumerate(found.slots):
        for place, weight in slot:
            totals[place] += weight
            owners[place] = number
    if sum(len(slot) for slot in found.slots) == len(found.pieces):
        return [0.1 + 0.2 * (owner % 2) for owner in owners]
    highest = sorted(totals)[int(0.98 * (len(totals) - 1))] if totals else 0.0
    return [0.5 * min(1.0, total / (highest or 1.0)) for total in totals]
