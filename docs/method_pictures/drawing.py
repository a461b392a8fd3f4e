# SPDX-License-Identifier: Apache-2.0
"""Shapes of the methods' pictures: what trains is warm, what is frozen grey, what is kept of the context teal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 320
# Its classes "trains", "frozen", "slot", "token" and "dropped" are the kinds of boxes.
STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#1e293b;text-anchor:middle}
.title{font-size:16px;font-weight:600}.small{font-size:11px}.tiny{font-size:10px}.start{text-anchor:start}
.end{text-anchor:end}.muted{fill:#526072}.warm{fill:#8a2f0d}.teal{fill:#0f766e}.white{fill:#fff}
.panel{fill:#fcfcfd;stroke:#d5dbe3}.trains{fill:#ffe2c2;stroke:#ea7317}.frozen{fill:#e4e9f0;stroke:#94a3b8}
.slot{fill:#0f766e;stroke:#0b5b55}.token{fill:#fff;stroke:#8391a5}.dropped{fill:#f6f8fa;stroke:#c3ccd8}
.frame{fill:none;stroke:#475569;stroke-dasharray:3 2}
path{fill:none;stroke:#475569;stroke-width:1.3}.bar{fill:#64748b;stroke:none}
.gate{fill:#ea7317;stroke:#94a3b8;stroke-width:1}.seen{stroke:#64748b;stroke-width:.7;opacity:.8}
.flow{stroke:#0f766e;stroke-width:2}.plan{stroke:#0f766e}"""
HEAD = (
    '<marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{}" markerHeight="{}" orient="auto" '
    'markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z" style="fill:{};stroke:none"/></marker>'
)
Words = Sequence[str]
Pairs = Iterable[tuple[float, float]]
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
# Heights of the tokens, of the box of what reads them, and of a row of boxes.
TOKENS_Y, READER_Y, ROW = 62, 100, 24


def named(letter: str, count: int) -> list[str]:
    """`letter` with the subscripts from 1 on."""
    return [letter + str(i).translate(SUBSCRIPTS) for i in range(1, count + 1)]


# What is asked, learned tokens' columns behind the context, and what the models are called.
QUESTION, BEHIND = named("q", 4), (9, 10, 11)
BASE, SAME_BASE = "encoder: the base, causal attention", "decoder: the same base"


class Columns(NamedTuple):
    """Where the tokens of a row stand, from left to right: the first one's left edge, the step, and their width."""

    left: float
    step: float = 32
    width: float = 26

    def edge(self, column: float) -> float:
        """Left edge of a column."""
        return self.left + column * self.step

    def middle(self, column: float) -> float:
        """Centre of a column."""
        return self.edge(column) + self.width / 2


class Picture:
    """Shapes in the order in which they are drawn; the description is for those who cannot see them."""

    def __init__(self, title: str, description: str, kinds: Words = ("trains", "frozen"), kept: str = "slots"):
        self.title, self.description, self.shapes = title, description, []
        self.shapes.append(f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" class="panel"/>')
        self.text(26, 32, title, "title start")
        for i, label in enumerate((*kinds, kept)):
            x = 704 - 76 * (len(kinds) + 1 - i)
            self.box(x, 20, 13, 13, "slot" if label == kept else label)
            self.text(x + 20, 31, label, "muted start")

    def text(self, x: float, y: float, text: str, style: str = "small muted start") -> None:
        """A line of text with its baseline at y."""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>')

    def notes(self, x: float, y: float, lines: Iterable[str], style: str = "small muted start") -> None:
        """Lines of text below one another."""
        for i, line in enumerate(lines):
            self.text(x, y + 16 * i, line, style)

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        """A rounded box with its label in the middle."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {size} rx="4" class="{kind}"/>')
        if label:
            colour = {"slot": " white", "trains": " warm"}.get(kind, "")
            size = "tiny" if len(label) > 2 and width < 40 else "small"
            self.text(x + width / 2, y + height / 2 + 4, label, size + colour)

    def row(self, at: Columns, first: float, y: float, labels: Words, kind: str, height: float = ROW) -> None:
        """Boxes in neighbouring columns."""
        for i, label in enumerate(labels):
            self.box(at.edge(first + i), y, at.width, height, "trains" if label == "[LM]" else kind, label)

    def model(self, x: float, y: float, size: tuple[float, float], kind: str, label: str, adapter: str = "") -> None:
        """A model's box with its label on top, and its adapter."""
        self.box(x, y, *size, kind)
        self.text(x + 11, y + 18, label, "start warm" if kind == "trains" else "start")
        if adapter:
            width = 6 * len(adapter) + 16
            self.box(x + size[0] - width - 7, y + 5, width, 19, "trains", adapter)

    def path(self, path: str, style: str, more: str = "") -> None:
        """Lines, or an area."""
        self.shapes.append(f'<path d="{path}" class="{style}"{more}/>')

    def arrow(self, *points: tuple[float, float], style: str = "step") -> None:
        """A line through points, with a head at its end."""
        self.path("M" + "L".join(f"{x:g} {y:g}" for x, y in points), style, f' marker-end="url(#{style}head)"')

    def arrows(self, at: Columns, places: Iterable[float], top: float, bottom: float) -> None:
        """Upright arrows from `top` to `bottom` in some columns."""
        for x in map(at.middle, places):
            self.arrow((x, top), (x, bottom))

    def lines(self, at: Columns, pairs: Pairs, top: float, bottom: float, style: str, more: str = "") -> None:
        """Straight lines, each from a column at `top` to a column at `bottom`."""
        ends = [(at.middle(start), at.middle(end)) for start, end in pairs]
        self.path("".join(f"M{start:g} {top:g}L{end:g} {bottom:g}" for start, end in ends), style, more)

    def bars(self, at: Columns, bottom: float, heights: Mapping[int, int], style: str, more: str = "") -> None:
        """Bars of the width of a column, upwards from `bottom`."""
        path = (f"M{at.edge(i):g} {bottom:g}h{at.width:g}v-{height}h-{at.width:g}z" for i, height in heights.items())
        self.path("".join(path), style, more)

    def svg(self) -> str:
        """The file."""
        size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        heads = HEAD.format("stephead", 6, 6, "#475569") + HEAD.format("flowhead", 9, 9, "#0f766e")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">\n'
            f'<title id="title">{escape(self.title)}</title>\n<desc id="desc">{escape(self.description)}</desc>\n'
            f"<style>{STYLE}</style>\n<defs>{heads}</defs>\n" + "\n".join(self.shapes) + "\n</svg>\n"
        )
