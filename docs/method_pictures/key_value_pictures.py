# SPDX-License-Identifier: Apache-2.0
"""Pictures of the methods whose memory is keys and values of every layer."""

from collections.abc import Sequence

from drawing import BASE, BEHIND, QUESTION, READER_Y, ROW, SAME_BASE, TOKENS_Y, Columns, Picture, Words, named

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
        picture.row(PAST, column, TOKENS_Y, [name], "token")
    for column, name in zip(places, learned, strict=False):
        picture.row(PAST, column, TOKENS_Y, [name], "trains")
    picture.model(24, READER_Y, (404, 138), "frozen", *labels)
    picture.model(490, READER_Y, (206, 138), "frozen", *decoder)
    picture.row(after, count, TOKENS_Y, text, "token")
    picture.text(after.middle(size - 2), 55, "question", "muted")
    picture.arrows(PAST, range(12), TOKENS_Y + ROW + 1, READER_Y - 1)
    picture.arrows(after, range(count, size), TOKENS_Y + ROW + 1, READER_Y - 1)
    for (y, name), columns in zip(LAYERS.items(), kept, strict=True):
        picture.text(34, y + 12, name)
        for column in range(12):
            picture.row(PAST, column, y, [""], "slot" if column in columns else "dropped", 16)
        picture.arrow((430, y + 8), (488, y + 8), style="flow")
        picture.text(457, y + 2, "k, v", "teal small")
        picture.row(after, count - len(columns), y, [""] * len(columns), "slot", 16)
        picture.row(after, count, y, [""] * len(text), "dropped", 16)
    for x in (50, after.middle((size - 1) / 2)):
        picture.text(x, 202, "⋮", "muted")
    picture.arrows(after, range(size - 3, size), 239, 258)
    picture.row(after, size - 3, 260, named("a", 3), "token")
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
    layers(picture, [BEHIND] * 3, ["[LM]", *named("q", 3)], notes, BASE, "LoRA on q, v", learned=named("m", 3))
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
    picture = Picture("SnapKV", "Keys and values that the last tokens attend to most stay.", ["frozen"], "memory")
    notes = ["Bars: attention from the window, averaged over neighbours.", "The highest stay in each layer and head."]
    layers(picture, kept, QUESTION[:3], notes, "the base, as it is")
    mark(picture, 9, 11, "window: stays")
    for y, vote in zip(LAYERS, votes, strict=True):
        picture.bars(PAST, y - 2, dict(enumerate(vote)), "bar")
    return picture


def streaming_llm() -> Picture:
    picture = Picture("StreamingLLM", "Keys and values of the first and the latest tokens stay.", ["frozen"], "memory")
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
    picture = Picture(title, description, ["trains", "frozen"] if labels[1:] else ["frozen"], "memory")
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
    picture.box(649, READER_Y + 5, 40, 19, "trains", "LoRA")
    return picture
