# SPDX-License-Identifier: Apache-2.0
"""Pictures of the methods whose slots stand in place of token embeddings, or beside T5's decoder."""

from collections.abc import Sequence

from drawing import BASE, BEHIND, QUESTION, READER_Y, ROW, SAME_BASE, TOKENS_Y, Columns, Picture, Words, named

CONTEXT, TEXT = Columns(36), Columns(474)
READER_X, READER_WIDTH, SLOTS_Y = 26, 398, 254
# The columns of the slots in the middle of each window of four.
WINDOWS = (1.5, 5.5, 9.5)
COMPRESSOR = "compressor: any model, causal attention"
SHALLOW = "encoder: a model's first 8 layers, causal attention"
READS = ["reads slots as if they were", "embeddings of tokens"]
SECOND_STAGE = ["In a second stage its query, key", "and value maps train, nothing else."]


def read(picture: Picture, learned: Words, height: float, views: Sequence[int], both: bool, *labels: str) -> None:
    """The context and learned tokens behind it, and the encoder, with what `views` attend to, both ways or before."""
    known = 12 - len(learned)
    picture.text(CONTEXT.left, 55, "context", "start muted")
    picture.row(CONTEXT, 0, TOKENS_Y, named("x", known), "token")
    picture.row(CONTEXT, known, TOKENS_Y, learned, "trains")
    picture.arrows(CONTEXT, range(12), TOKENS_Y + ROW + 1, READER_Y - 1)
    picture.model(READER_X, READER_Y, (READER_WIDTH, height), "frozen", *labels)
    pairs = [(i, j) for j in views for i in range(12) if i <= j or both]
    picture.lines(CONTEXT, pairs, 130, READER_Y + height - 5, "seen")


def read_with_tokens(picture: Picture, name: str, tokens: Words, part: str, notes: Words, *labels: str) -> None:
    """An encoder of learned tokens behind the context, whose last hidden states become the slots."""
    picture.text(CONTEXT.middle(10), 55, name, "warm")
    read(picture, tokens, 84, BEHIND, False, *labels)
    if part:
        picture.arrows(CONTEXT, BEHIND, 186, 205)
        picture.box(CONTEXT.edge(9) - 6, 207, 102, 24, "trains", part)
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
        picture.row(CONTEXT, column, SLOTS_Y, [slot], "slot")
    picture.row(TEXT, 0, SLOTS_Y, text[:first], "token")
    picture.row(TEXT, first, SLOTS_Y, slots, "slot")
    picture.row(TEXT, first + 3, SLOTS_Y, text[first:], "token")
    picture.text(TEXT.middle(1 + first), 296, "slots", "teal")
    picture.text(TEXT.middle(4.5 if text == QUESTION else 5), 296, "question", "muted")
    decode(picture, 7, "frozen", *labels)
    picture.notes(TEXT.left + 3, 184, notes, "small start " + ("warm" if notes == SECOND_STAGE else "muted"))


def decode(picture: Picture, inputs: int, kind: str, *labels: str) -> None:
    """The decoder above its inputs, and its answer on top."""
    picture.arrows(TEXT, range(inputs), SLOTS_Y - 2, 218)
    picture.model(TEXT.left - 8, 138, (234, 78), kind, *labels)
    picture.arrows(TEXT, (4, 5, 6), 136, TOKENS_Y + ROW + 2)
    picture.row(TEXT, 4, TOKENS_Y, named("a", 3), "token")
    picture.text(TEXT.edge(4) - 8, TOKENS_Y + 16, "answer", "end muted")


def mean_pooling() -> Picture:
    picture = Picture("Mean pooling", "The mean of every r hidden states of a bidirectional encoder is a slot.")
    read(picture, [], 64, (1, 5, 9), True, "encoder: the base, bidirectional attention", "LoRA")
    merge(picture, 168, 190)
    picture.box(READER_X, 207, READER_WIDTH, 24, "trains", "linear map W")
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
    reads = ["reads slots as embeddings, then", "[LM], a learned task token"]
    read_with_tokens(picture, "memory tokens", named("m", 3), "", notes, BASE, "LoRA on q, v")
    ask(picture, BEHIND, ["[LM]", *named("q", 3)], reads, SAME_BASE)
    return picture


def autocompressor() -> Picture:
    description = "Each segment is read behind the slots of those before it, which summary tokens behind them make."
    picture, ends = Picture("AutoCompressor", description), (3, 7, 11)
    picture.text(CONTEXT.left, 55, "segments, each with a learned summary token behind it", "start muted")
    tokens, slots = iter(named("x", 6)), named("z", 3)
    for column in range(12):
        segment, place = divmod(column, 4)
        label, kind = (slots[place], "slot") if place < segment else ("m", "trains")
        if segment <= place < 3:
            label, kind = next(tokens), "token"
        picture.row(CONTEXT, column, TOKENS_Y, [label], kind)
    picture.arrows(CONTEXT, range(12), TOKENS_Y + ROW + 1, READER_Y - 1)
    picture.model(READER_X, READER_Y, (READER_WIDTH, 84), "frozen", BASE, "LoRA")
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
    picture.box(READER_X, 194, READER_WIDTH, 22, "trains", alignment)
    picture.box(READER_X, 219, READER_WIDTH, 18, "frozen", "the decoder's final norm")
    picture.arrows(CONTEXT, WINDOWS, 238, SLOTS_Y - 2)
    ask(picture, WINDOWS, QUESTION, SECOND_STAGE, "decoder")
    return picture


def xrag() -> Picture:
    picture = Picture("xRAG", "A retriever's embedding of each passage, through a perceptron, is the passage's slot.")
    picture.text(CONTEXT.left, 55, "context, in passages of r tokens", "start muted")
    for first, column in zip((0, 4, 8), WINDOWS, strict=True):
        edge, width = CONTEXT.edge(first) - 3, CONTEXT.step * 4 - 2
        picture.row(CONTEXT, first, TOKENS_Y, named("x", 12)[first : first + 4], "token")
        picture.arrows(CONTEXT, range(first, first + 4), TOKENS_Y + ROW + 1, READER_Y - 1)
        picture.box(edge, READER_Y, width, 62, "frozen")
        picture.text(edge + 8, READER_Y + 18, "sentence encoder", "small start")
        picture.lines(CONTEXT, [(i, column) for i in range(first, first + 4)], 130, 158, "seen")
        picture.arrows(CONTEXT, [column], 163, 205)
    picture.text(CONTEXT.middle(1.5) + 6, 188, "its embedding")
    picture.box(READER_X, 207, READER_WIDTH, 24, "trains", "perceptron")
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
    picture.box(READER_X, 170, READER_WIDTH, 18, "trains", "layer gate: one anchor for each token")
    # What each token sends: mostly to the slot of its own four, some of it further.
    plan = {(i, WINDOWS[i // 4]): (1, 2.6, 0.6, 1.8, 0.6, 1.8, 2.6, 1)[i * 3 % 8] for i in range(12)}
    plan |= {(0, 5.5): 0.6, (3, 5.5): 1, (4, 1.5): 1, (6, 1.5): 0.6, (7, 9.5): 1.8, (8, 5.5): 0.6, (11, 5.5): 1}
    for width in (0.6, 1, 1.8, 2.6):
        pairs = [pair for pair, sent in plan.items() if sent == width]
        picture.lines(CONTEXT, pairs, 189, 218, "plan", f' style="stroke-width:{width}"')
    picture.box(READER_X, 219, READER_WIDTH, 18, "trains", "optimal transport to the slots of a window, perceptron")
    picture.arrows(CONTEXT, WINDOWS, 238, SLOTS_Y - 2)
    ask(picture, WINDOWS, ["BOS", *named("q", 3)], READS, SAME_BASE)
    return picture


def decal() -> Picture:
    picture = Picture(
        "DeCAL", "A T5 encoder reads latents and tokens and gives the latents' states alone.", ["trains"]
    )
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
        picture.row(CONTEXT, 3, y, named("x", 9), "token")
    picture.row(CONTEXT, 0, second, named("l", 3), "trains")
    picture.arrows(CONTEXT, range(12), second + ROW + 1, 149)
    picture.model(READER_X, 150, (READER_WIDTH, 66), "trains", "T5 encoder, bidirectional attention")
    picture.lines(CONTEXT, [(i, j) for j in range(3) for i in range(12)], 177, 211, "seen")
    picture.arrows(CONTEXT, range(3), 217, SLOTS_Y - 2)
    picture.row(CONTEXT, 0, SLOTS_Y, named("z", 3), "slot")
    picture.text(CONTEXT.middle(1), 296, "slots", "teal")
    picture.text(CONTEXT.edge(3) + 4, 240, "The tokens' own states are not given out.")
    picture.arrow((CONTEXT.edge(3) - 5, 266), (446, 266), (446, 180), (TEXT.left - 10, 180), style="flow")
    picture.row(TEXT, 0, SLOTS_Y, QUESTION, "token")
    picture.text(TEXT.middle(1.5), 296, "question", "muted")
    decode(picture, 4, "trains", "T5 decoder")
    picture.text(TEXT.left + 3, 184, "cross-attention reads the slots", "teal start")
    return picture
