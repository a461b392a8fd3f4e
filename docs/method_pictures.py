# SPDX-License-Identifier: Apache-2.0
"""One picture for each method, in one style: docs/images/methods/<name>.svg.

    python docs/method_pictures.py

writes all of them. They show the defaults: what reads the context and how slots come about (left), and how the decoder
reads them with the question (right). What trains is warm, what is frozen grey, what is kept of the context teal.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "images" / "methods"
WIDTH, HEIGHT = 720, 320
# Kinds of boxes, which are classes of the style.
TRAINS, FROZEN, SLOT, TOKEN, DROPPED = "trains", "frozen", "slot", "token", "dropped"
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
# Heights of the tokens, of the box of what reads them, and of the slots.
TOKENS_Y, READER_Y, SLOTS_Y, ROW = 62, 100, 254, 24


def named(letter: str, count: int) -> list[str]:
    """`letter` with the subscripts from 1 on."""
    return [letter + str(i).translate(SUBSCRIPTS) for i in range(1, count + 1)]


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

    def __init__(self, title: str, description: str, kinds: Words = (TRAINS, FROZEN), kept: str = "slots"):
        self.title, self.description, self.shapes = title, description, []
        self.shapes.append(f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" class="panel"/>')
        self.text(26, 32, title, "title start")
        for i, label in enumerate((*kinds, kept)):
            x = 704 - 76 * (len(kinds) + 1 - i)
            self.box(x, 20, 13, 13, SLOT if label == kept else label)
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
            colour = {SLOT: " white", TRAINS: " warm"}.get(kind, "")
            size = "tiny" if len(label) > 2 and width < 40 else "small"
            self.text(x + width / 2, y + height / 2 + 4, label, size + colour)

    def row(self, at: Columns, first: float, y: float, labels: Words, kind: str, height: float = ROW) -> None:
        """Boxes in neighbouring columns."""
        for i, label in enumerate(labels):
            self.box(at.edge(first + i), y, at.width, height, TRAINS if label == "[LM]" else kind, label)

    def model(self, x: float, y: float, size: tuple[float, float], kind: str, label: str, adapter: str = "") -> None:
        """A model's box with its label on top, and its adapter."""
        self.box(x, y, *size, kind)
        self.text(x + 11, y + 18, label, "start warm" if kind == TRAINS else "start")
        if adapter:
            width = 6 * len(adapter) + 16
            self.box(x + size[0] - width - 7, y + 5, width, 19, TRAINS, adapter)

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


# --- slots in place of token embeddings ---

CONTEXT, TEXT = Columns(36), Columns(474)
READER_X, READER_WIDTH = 26, 398
# The columns of the slots: in the middle of each window of four, or below the learned tokens.
WINDOWS, BEHIND = (1.5, 5.5, 9.5), (9, 10, 11)
QUESTION, LM_QUESTION = named("q", 4), ["[LM]", *named("q", 3)]
BASE, SHALLOW = "encoder: the base, causal attention", "encoder: a model's first 8 layers, causal attention"
COMPRESSOR = "compressor: any model, causal attention"
SAME_BASE = "decoder: the same base"
READS = ["reads slots as if they were", "embeddings of tokens"]
READS_LM = ["reads slots as embeddings, then", "[LM], a learned task token"]
SECOND_STAGE = ["In a second stage its query, key", "and value maps train, nothing else."]


def read(picture: Picture, learned: Words, height: float, views: Sequence[int], both: bool, *labels: str) -> None:
    """The context and learned tokens behind it, and the encoder, with what `views` attend to, both ways or before."""
    known = 12 - len(learned)
    picture.text(CONTEXT.left, 55, "context", "start muted")
    picture.row(CONTEXT, 0, TOKENS_Y, named("x", known), TOKEN)
    picture.row(CONTEXT, known, TOKENS_Y, learned, TRAINS)
    picture.arrows(CONTEXT, range(12), TOKENS_Y + ROW + 1, READER_Y - 1)
    picture.model(READER_X, READER_Y, (READER_WIDTH, height), FROZEN, *labels)
    pairs = [(i, j) for j in views for i in range(12) if i <= j or both]
    picture.lines(CONTEXT, pairs, 130, READER_Y + height - 5, "seen")


def read_with_tokens(picture: Picture, name: str, tokens: Words, part: str, notes: Words, *labels: str) -> None:
    """An encoder of learned tokens behind the context, whose last hidden states become the slots."""
    picture.text(CONTEXT.middle(10), 55, name, "warm")
    read(picture, tokens, 84, BEHIND, False, *labels)
    if part:
        picture.arrows(CONTEXT, BEHIND, 186, 205)
        picture.box(CONTEXT.edge(9) - 6, 207, 102, 24, TRAINS, part)
    picture.arrows(CONTEXT, BEHIND, 233 if part else 186, SLOTS_Y - 2)
    picture.notes(READER_X + 4, 208, notes)


def merge(picture: Picture, top: float, bottom: float) -> None:
    """From the states of each window of four tokens, lines that meet in their mean."""
    for column, label in zip(WINDOWS, ("mean of r = 4", "mean", "mean"), strict=True):
        members = [(column + offset, column) for offset in (-1.5, -0.5, 0.5, 1.5)]
        picture.lines(CONTEXT, members, top, bottom, "step")
        picture.text(CONTEXT.middle(column) + 12, bottom + 7, label)
    picture.arrows(CONTEXT, WINDOWS, bottom, bottom + 15)


def ask(picture: Picture, columns: Sequence[float], text: Words, notes: Words, *labels: str) -> None:
    """Slots in columns of the context, the decoder that reads them with `text`, and its answer."""
    slots, y, first = named("z", 3), SLOTS_Y + ROW / 2, int(text[0] == "BOS")
    picture.arrow((CONTEXT.edge(columns[0]), y), (TEXT.left - 3, y), style="flow")
    for column, slot in zip(columns, slots, strict=True):
        picture.row(CONTEXT, column, SLOTS_Y, [slot], SLOT)
    picture.row(TEXT, 0, SLOTS_Y, text[:first], TOKEN)
    picture.row(TEXT, first, SLOTS_Y, slots, SLOT)
    picture.row(TEXT, first + 3, SLOTS_Y, text[first:], TOKEN)
    picture.text(TEXT.middle(1 + first), 296, "slots", "teal")
    picture.text(TEXT.middle(4.5 if text == QUESTION else 5), 296, "question", "muted")
    decode(picture, 7, FROZEN, *labels)
    picture.notes(TEXT.left + 3, 184, notes, "small start " + ("warm" if notes == SECOND_STAGE else "muted"))


def decode(picture: Picture, inputs: int, kind: str, *labels: str) -> None:
    """The decoder above its inputs, and its answer on top."""
    picture.arrows(TEXT, range(inputs), SLOTS_Y - 2, 218)
    picture.model(TEXT.left - 8, 138, (234, 78), kind, *labels)
    picture.arrows(TEXT, (4, 5, 6), 136, TOKENS_Y + ROW + 2)
    picture.row(TEXT, 4, TOKENS_Y, named("a", 3), TOKEN)
    picture.text(TEXT.edge(4) - 8, TOKENS_Y + 16, "answer", "end muted")


def mean_pooling() -> Picture:
    picture = Picture("Mean pooling", "The mean of every r hidden states of a bidirectional encoder is a slot.")
    read(picture, [], 64, (1, 5, 9), True, "encoder: the base, bidirectional attention", "LoRA")
    merge(picture, 168, 190)
    picture.box(READER_X, 207, READER_WIDTH, 24, TRAINS, "linear map W")
    picture.arrows(CONTEXT, WINDOWS, 233, SLOTS_Y - 2)
    ask(picture, WINDOWS, QUESTION, READS, SAME_BASE, "LoRA")
    return picture


def compression_tokens() -> Picture:
    picture = Picture("Compression tokens", "The last hidden states of copies of one learned token are the slots.")
    notes = ["The copies' last hidden states become slots.", "As a setting, copies see those behind them, too."]
    read_with_tokens(picture, "one token, copied", ["c"] * 3, "linear map W", notes, BASE, "LoRA")
    ask(picture, BEHIND, QUESTION, READS, SAME_BASE, "LoRA")
    return picture


def icae() -> Picture:
    picture = Picture("ICAE", "The last hidden states of memory tokens behind each chunk are the slots.")
    notes = ["The memory tokens' last hidden states are the slots.", "A long context is read in chunks."]
    read_with_tokens(picture, "memory tokens", named("m", 3), "", notes, BASE, "LoRA on q, v")
    ask(picture, BEHIND, LM_QUESTION, READS_LM, SAME_BASE)
    return picture


def autocompressor() -> Picture:
    description = "Each segment is read behind the slots of those before it, which summary tokens behind them make."
    picture, ends = Picture("AutoCompressor", description), (3, 7, 11)
    picture.text(CONTEXT.left, 55, "segments, each with a learned summary token behind it", "start muted")
    tokens, slots = iter(named("x", 6)), named("z", 3)
    for column in range(12):
        segment, place = divmod(column, 4)
        label, kind = (slots[place], SLOT) if place < segment else ("m", TRAINS)
        if segment <= place < 3:
            label, kind = next(tokens), TOKEN
        picture.row(CONTEXT, column, TOKENS_Y, [label], kind)
    picture.arrows(CONTEXT, range(12), TOKENS_Y + ROW + 1, READER_Y - 1)
    picture.model(READER_X, READER_Y, (READER_WIDTH, 84), FROZEN, BASE, "LoRA")
    picture.lines(CONTEXT, [(i, end) for end in ends for i in range(end - 3, end + 1)], 130, 179, "seen")
    picture.arrows(CONTEXT, ends, 186, SLOTS_Y - 2)
    for end in ends[:2]:
        x = CONTEXT.middle(end + 1)
        picture.arrow((CONTEXT.edge(end) + 13, SLOTS_Y + 5), (x, SLOTS_Y + 5), (x, 187), style="flow")
    picture.notes(READER_X + 4, 208, ["Later segments", "read the slots", "of earlier ones."])
    ask(picture, ends, QUESTION, ["reads slots as embeddings,", "with the encoder's adapter"], SAME_BASE, "LoRA")
    return picture


def tcp_autoencoder() -> Picture:
    picture = Picture("TCP-AE", "A shallow encoder's states of learned tokens, through a perceptron, are the slots.")
    notes = ["A perceptron takes the learned tokens' last", "hidden states to the decoder's input."]
    read_with_tokens(picture, "learned tokens", named("m", 3), "perceptron", notes, SHALLOW, "LoRA")
    ask(picture, BEHIND, QUESTION, SECOND_STAGE, "decoder")
    return picture


def pcc() -> Picture:
    picture = Picture("PCC", "A compressor's states of memory tokens, through a converter, are the slots.")
    notes = [
        "A converter takes the memory tokens' last",
        "hidden states to any decoder's input.",
        "A long context is in segments.",
    ]
    read_with_tokens(picture, "memory tokens", named("m", 3), "norm, perceptron", notes, COMPRESSOR, "LoRA, or whole")
    markers = ["<mem> and </mem>, learned, stand", "around each segment's slots."]
    ask(picture, BEHIND, ["BOS", *named("q", 3)], markers, "decoder: any model")
    return picture


def gmsa() -> Picture:
    picture = Picture("GMSA", "Means of a shallow encoder's states, aligned with the decoder's input, are the slots.")
    read(picture, [], 58, (3, 7, 11), False, SHALLOW, "LoRA")
    merge(picture, 161, 178)
    alignment = "layer semantic alignment: starts as the decoder's first layer"
    picture.box(READER_X, 194, READER_WIDTH, 22, TRAINS, alignment)
    picture.box(READER_X, 219, READER_WIDTH, 18, FROZEN, "the decoder's final norm")
    picture.arrows(CONTEXT, WINDOWS, 238, SLOTS_Y - 2)
    ask(picture, WINDOWS, QUESTION, SECOND_STAGE, "decoder")
    return picture


def xrag() -> Picture:
    picture = Picture("xRAG", "A retriever's embedding of each passage, through a perceptron, is the passage's slot.")
    picture.text(CONTEXT.left, 55, "context, in passages of r tokens", "start muted")
    for first, column in zip((0, 4, 8), WINDOWS, strict=True):
        edge, width = CONTEXT.edge(first) - 3, CONTEXT.step * 4 - 2
        picture.row(CONTEXT, first, TOKENS_Y, named("x", 12)[first : first + 4], TOKEN)
        picture.arrows(CONTEXT, range(first, first + 4), TOKENS_Y + ROW + 1, READER_Y - 1)
        picture.box(edge, READER_Y, width, 62, FROZEN)
        picture.text(edge + 8, READER_Y + 18, "sentence encoder", "small start")
        picture.lines(CONTEXT, [(i, column) for i in range(first, first + 4)], 130, 158, "seen")
        picture.arrows(CONTEXT, [column], 163, 205)
    picture.text(CONTEXT.middle(1.5) + 6, 188, "its embedding")
    picture.box(READER_X, 207, READER_WIDTH, 24, TRAINS, "perceptron")
    picture.arrows(CONTEXT, WINDOWS, 233, SLOTS_Y - 2)
    ask(picture, WINDOWS, QUESTION, READS, "decoder")
    return picture


def comprexit() -> Picture:
    picture = Picture("ComprExIT", "A gate mixes a token's states of all layers, and transport makes slots of them.")
    read(picture, [], 66, (), False, "the base, as it is: hidden states of all layers")
    picture.text(READER_X + READER_WIDTH - 8, READER_Y + 18, "shade: weight", "small warm end")
    for step, weight in enumerate((0.1, 0.4, 0.95, 0.2, 0.6)):
        for layer in range(4):
            cells = {i: 7 for i in range(12) if (3 * i + 2 * layer + i * layer) % 5 == step}
            picture.bars(CONTEXT, 132 + 9 * layer, cells, "gate", f' fill-opacity="{weight}"')
    picture.box(READER_X, 170, READER_WIDTH, 18, TRAINS, "layer gate: one anchor for each token")
    # What each token sends: mostly to the slot of its own four, some of it further.
    plan = {(i, WINDOWS[i // 4]): (1, 2.6, 0.6, 1.8, 0.6, 1.8, 2.6, 1)[i * 3 % 8] for i in range(12)}
    plan |= {(0, 5.5): 0.6, (3, 5.5): 1, (4, 1.5): 1, (6, 1.5): 0.6, (7, 9.5): 1.8, (8, 5.5): 0.6, (11, 5.5): 1}
    for width in (0.6, 1, 1.8, 2.6):
        pairs = [pair for pair, sent in plan.items() if sent == width]
        picture.lines(CONTEXT, pairs, 189, 218, "plan", f' style="stroke-width:{width}"')
    picture.box(READER_X, 219, READER_WIDTH, 18, TRAINS, "optimal transport to the slots of a window, perceptron")
    picture.arrows(CONTEXT, WINDOWS, 238, SLOTS_Y - 2)
    ask(picture, WINDOWS, ["BOS", *named("q", 3)], READS, SAME_BASE)
    return picture


def decal() -> Picture:
    picture = Picture("DeCAL", "A T5 encoder reads latents and tokens and gives the latents' states alone.", [TRAINS])
    second = 112
    picture.text(CONTEXT.edge(3), 55, "context, embedded", "start muted")
    picture.notes(READER_X, 60, ["l = norm(v +", "mean of C = 3 x)"])
    picture.lines(CONTEXT, [(i, i) for i in range(3, 12)], TOKENS_Y + ROW, second, "seen")
    # A line below three tokens, and the arrow from its middle to their latent.
    for latent in range(3):
        x, y = CONTEXT.middle(3 * latent + 4), TOKENS_Y + ROW + 3
        picture.path(f"M{x - 43:g} {y}h86", "step")
        picture.arrow((x, y), (CONTEXT.middle(latent), second - 1))
    for y in (TOKENS_Y, second):
        picture.row(CONTEXT, 3, y, named("x", 9), TOKEN)
    picture.row(CONTEXT, 0, second, named("l", 3), TRAINS)
    picture.arrows(CONTEXT, range(12), second + ROW + 1, 149)
    picture.model(READER_X, 150, (READER_WIDTH, 66), TRAINS, "T5 encoder, bidirectional attention")
    picture.lines(CONTEXT, [(i, j) for j in range(3) for i in range(12)], 177, 211, "seen")
    picture.arrows(CONTEXT, range(3), 217, SLOTS_Y - 2)
    picture.row(CONTEXT, 0, SLOTS_Y, named("z", 3), SLOT)
    picture.text(CONTEXT.middle(1), 296, "slots", "teal")
    picture.text(CONTEXT.edge(3) + 4, 240, "The tokens' own states are not given out.")
    picture.arrow((CONTEXT.edge(3) - 5, 266), (446, 266), (446, 180), (TEXT.left - 10, 180), style="flow")
    picture.row(TEXT, 0, SLOTS_Y, QUESTION, TOKEN)
    picture.text(TEXT.middle(1.5), 296, "question", "muted")
    decode(picture, 4, TRAINS, "T5 decoder")
    picture.text(TEXT.left + 3, 184, "cross-attention reads the slots", "teal start")
    return picture


# --- keys and values of every layer ---

PAST, LAYERS = Columns(88, 28, 23), {134: "layer 1", 168: "layer 2", 212: "layer L"}


def layers(
    picture: Picture,
    kept: Sequence[Sequence[int]],
    text: Words,
    notes: Words,
    *labels: str,
    learned: Words = (),
    decoder: Words = (SAME_BASE,),
    places: Sequence[int] = (9, 10, 11),
) -> None:
    """Both readers and, for each layer, the columns of the context whose keys and values go from one to the other.

    Learned tokens stand behind the context's, or at other `places` among them.
    """
    count = max(map(len, kept))
    size = count + len(text)
    after = Columns(499, 189 // size, 189 // size - 4)
    picture.text(34, TOKENS_Y + 16, "context", "start muted")
    columns = [column for column in range(12) if not learned or column not in places]
    for column, name in zip(columns, named("x", 12 - len(learned)), strict=True):
        picture.row(PAST, column, TOKENS_Y, [name], TOKEN)
    for column, name in zip(places, learned, strict=False):
        picture.row(PAST, column, TOKENS_Y, [name], TRAINS)
    picture.model(24, READER_Y, (404, 138), FROZEN, *labels)
    picture.model(490, READER_Y, (206, 138), FROZEN, *decoder)
    picture.row(after, count, TOKENS_Y, text, TOKEN)
    picture.text(after.middle(size - 2), 55, "question", "muted")
    picture.arrows(PAST, range(12), TOKENS_Y + ROW + 1, READER_Y - 1)
    picture.arrows(after, range(count, size), TOKENS_Y + ROW + 1, READER_Y - 1)
    for (y, name), columns in zip(LAYERS.items(), kept, strict=True):
        picture.text(34, y + 12, name)
        for column in range(12):
            picture.row(PAST, column, y, [""], SLOT if column in columns else DROPPED, 16)
        picture.arrow((430, y + 8), (488, y + 8), style="flow")
        picture.text(457, y + 2, "k, v", "teal small")
        picture.row(after, count - len(columns), y, [""] * len(columns), SLOT, 16)
        picture.row(after, count, y, [""] * len(text), DROPPED, 16)
    for x in (50, after.middle((size - 1) / 2)):
        picture.text(x, 202, "⋮", "muted")
    picture.arrows(after, range(size - 3, size), 239, 258)
    picture.row(after, size - 3, 260, named("a", 3), TOKEN)
    picture.text(after.edge(size - 3) - 8, 276, "answer", "end muted")
    picture.notes(34, 266, notes)


def mark(picture: Picture, first: int, last: int, label: str) -> None:
    """A frame around some tokens of the context."""
    picture.box(PAST.edge(first) - 3, TOKENS_Y - 3, PAST.edge(last) + 29 - PAST.edge(first), ROW + 6, "frame")
    picture.text(PAST.middle((first + last) / 2), 54, label, "muted")


def five_hundred_x() -> Picture:
    description = "The keys and values of memory tokens behind each chunk, in every layer, are the memory."
    picture = Picture("500xCompressor", description, kept="memory")
    notes = ["The memory tokens' keys and values of every layer stay.", "A long context is read in chunks."]
    layers(picture, [BEHIND] * 3, LM_QUESTION, notes, BASE, "LoRA on q, v", learned=named("m", 3))
    picture.text(PAST.middle(10), 55, "memory tokens", "warm")
    picture.lines(PAST, [(i, 11) for i in range(12)], 150, 168, "seen")
    return picture


def voco() -> Picture:
    description = "The keys and values of copies of one token behind a text or an image are the memory."
    picture = Picture("VoCo", description, kept="memory")
    notes = ["Keys and values of the copies stay; the same LoRA", "reads them. A context may hold image tokens."]
    layers(picture, [BEHIND] * 3, QUESTION, notes, BASE, "LoRA", learned=["v"] * 3, decoder=(SAME_BASE, "LoRA"))
    picture.text(PAST.middle(10), 55, "one token, copied", "warm")
    picture.lines(PAST, [(i, 11) for i in range(12)], 150, 168, "seen")
    return picture


def activation_beacon() -> Picture:
    description = "The keys and values of beacons behind every group of tokens are all that a window leaves behind."
    picture, beacons = Picture("Activation Beacon", description, kept="memory"), (2, 5, 8, 11)
    notes = ["Beacons have query, key and value maps of their own.", "A window is read behind the beacons before it."]
    layers(picture, [beacons] * 3, QUESTION, notes, "the base", "maps of beacons", learned=["b"] * 4, places=beacons)
    mark(picture, 0, 5, "first window")
    mark(picture, 6, 11, "next window")
    return picture


def snap_kv() -> Picture:
    # Votes for the places before the window, in each layer, as they are behind the pool over neighbours.
    votes = [(2, 5, 9, 10, 8, 4, 2, 3, 2), (10, 8, 5, 2, 2, 3, 6, 5, 3), (1, 2, 3, 3, 5, 8, 10, 9, 5)]
    kept = [[*sorted(range(9), key=vote.__getitem__)[-3:], 9, 10, 11] for vote in votes]
    picture = Picture("SnapKV", "Keys and values that the last tokens attend to most stay.", [FROZEN], "memory")
    notes = ["Bars: attention from the window, averaged over neighbours.", "The highest stay in each layer and head."]
    layers(picture, kept, QUESTION[:3], notes, "the base, as it is")
    mark(picture, 9, 11, "window: stays")
    for y, vote in zip(LAYERS, votes, strict=True):
        picture.bars(PAST, y - 2, dict(enumerate(vote)), "bar")
    return picture


def streaming_llm() -> Picture:
    picture = Picture("StreamingLLM", "Keys and values of the first and the latest tokens stay.", [FROZEN], "memory")
    notes = ["The same places stay in every layer and head,", "numbered anew: x₁₁ and x₁₂ stand right behind x₄."]
    layers(picture, [(0, 1, 2, 3, 10, 11)] * 3, QUESTION[:3], notes, "the base, as it is")
    mark(picture, 0, 3, "attention sinks")
    mark(picture, 10, 11, "latest")
    return picture


# What a second reading attends to in the first, in each layer; the highest twelve of all stay.
AGAIN = [
    (10, 2, 6, 1, 2, 7, 1, 2, 6, 3, 1, 2),
    (10, 3, 7, 8, 2, 9, 3, 6, 8, 2, 1, 4),
    (9, 1, 2, 1, 3, 2, 7, 1, 2, 1, 1, 2),
]


def second_reading(title: str, description: str, notes: Words, style: str, *labels: str) -> Picture:
    """Pairs of keys and values that stay by what all layers have of `AGAIN` together."""
    pairs = [(layer, column) for layer, scores in enumerate(AGAIN) for column in range(len(scores))]
    kept = sorted(pairs, key=lambda pair: -AGAIN[pair[0]][pair[1]])[:12]
    picture = Picture(title, description, [TRAINS, FROZEN] if labels[1:] else [FROZEN], "memory")
    layers(picture, [[c for i, c in kept if i == layer] for layer in range(3)], QUESTION[:3], notes, *labels)
    for y, scores in zip(LAYERS, AGAIN, strict=True):
        picture.bars(PAST, y - 2, dict(enumerate(scores)), style)
    return picture


def kv_zip() -> Picture:
    notes = ["Bars: the highest attention of a second reading.", "The highest of all layers and heads together stay."]
    description = "Of the keys and values of all layers together those stay that a second reading attends to most."
    return second_reading("KVzip", description, notes, "bar", "the base reads twice")


def ranked_key_values() -> Picture:
    notes = [
        "Bars: a score from each layer's input, learned from the",
        "attention of a second reading. The highest of all stay.",
    ]
    description = "Of the keys and values of all layers together those stay that learned scores rank first."
    picture = second_reading("Ranked key/values", description, notes, "gate", BASE, "LoRA")
    picture.box(649, READER_Y + 5, 40, 19, TRAINS, "LoRA")
    return picture


def files() -> dict[Path, str]:
    """What stands in each file."""
    methods = [mean_pooling, compression_tokens, icae, autocompressor, five_hundred_x, voco, activation_beacon]
    methods += [comprexit, gmsa, tcp_autoencoder, pcc, xrag, streaming_llm, snap_kv, kv_zip]
    methods += [ranked_key_values, decal]
    return {FOLDER / f"{draw.__name__}.svg": draw().svg() for draw in methods}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
