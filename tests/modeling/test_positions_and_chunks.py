# SPDX-License-Identifier: Apache-2.0
"""Positions of slots and text: chunks, layouts, task tokens, BOS, joined documents."""

import pytest
import torch
from decal_models import build
from tiny_bases import AE, BOS, LM, ids_of
from tiny_models import TRAINING_FREE_CASES

from context_compressors import CompressedContext
from context_compressors.modeling import modeling_comprexit
from context_compressors.modeling.compressor import modeling_compressor
from context_compressors.modeling.parts.base_pass import run_backbone
from context_compressors.modeling.parts.position_layout import decoder_position_ids, encoder_position_ids


class Seen:
    """Record the calls of a compressor's language models, encoder and decoder."""

    def __init__(self, model, monkeypatch):
        self.calls = []
        for module in (modeling_compressor, modeling_comprexit):
            monkeypatch.setattr(module, "run_backbone", self._run)

    def _run(self, backbone, **kwargs):
        self.calls.append(kwargs)
        return run_backbone(backbone, **kwargs)

    def positions(self, call=-1):
        """Return the position ids of each row's real places that are not in the cache."""
        kwargs = self.calls[call]
        width = kwargs["position_ids"].shape[1]
        rows = zip(kwargs["position_ids"], kwargs["attention_mask"][:, -width:].bool(), strict=True)
        return [positions[mask].tolist() for positions, mask in rows]


# test_memory_tokens_key_values.py has tests of its own.
# Where chunks do not see each other, and any layout goes.
chunks_apart = pytest.mark.only(lambda case: not case.method.recurrent)
of_embeddings = pytest.mark.only(lambda case: case.method.config_class.carrier == "embeddings")
# Ranked key/values have one layout and no task tokens: test_ranked_key_values.py says where slots and text stand.
any_layout = pytest.mark.only(lambda case: not case.method.ranks)
LAYOUTS = ("default", "uniform", "enhanced")


# --- several ratios ---


def test_many_ratios_cost_one_pass_and_equal_separate_calls(case, random_rows, pad_rows, monkeypatch, slots):
    model = case.model
    ids, mask = pad_rows(random_rows([13, 0, 7, 1]))
    ratios = list(model.config.compression_ratios)
    separate = [model.compress(ids, mask, ratio=ratio) for ratio in ratios]
    calls, kind = [], type(model.model)
    states = kind.encoder_outputs
    monkeypatch.setattr(kind, "encoder_outputs", lambda *a, **k: calls.append(1) or states(*a, **k))
    model.compress(ids, mask, ratio=ratios[0])
    of_one = len(calls)
    together = model.compress(ids, mask, ratio=ratios)
    # A segment is read behind the slots of one ratio.
    assert len(calls) - of_one <= of_one * (len(ratios) if case.method.recurrent or case.method.passages else 1)
    # Memory tokens of other ratios stand in the same row, and sums of floats go by its length.
    atol = 1e-4 if case.method.memory_tokens else 0
    for one, other, ratio in zip(together, separate, ratios, strict=True):
        assert one.ratio == ratio
        torch.testing.assert_close(slots(one), slots(other), atol=atol, rtol=0)
        assert one.attention_mask.equal(other.attention_mask)
        assert one.position_ids.equal(other.position_ids)


def test_a_ratio_for_each_row_equals_separate_calls(place_case, random_rows, pad_rows, slots):
    model, lengths, ratios = place_case.model, [13, 6, 7, 0], [8, 2, 3, 2]
    rows = random_rows(lengths)
    ids, mask = pad_rows(rows)
    memory = model.compress(ids, mask, ratio=torch.tensor(ratios))
    text = ids_of(4, seed=1)
    logits = model(text.expand(4, -1), memory=memory).logits
    direct = model(
        text.expand(4, -1), context_input_ids=ids, context_attention_mask=mask, ratio=torch.tensor(ratios)
    ).logits
    # Rounding goes with the size of the logits.
    torch.testing.assert_close(direct, logits, atol=1e-5 * max(1.0, logits.abs().max().item()), rtol=0)
    for i, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
        alone = model.compress(row[None], ratio=ratio)
        found = slots(memory)[i, memory.attention_mask[i].bool()]
        torch.testing.assert_close(found, slots(alone)[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(logits[i], model(text, memory=alone).logits[0], atol=1e-4, rtol=0)


# --- chunks ---


@pytest.mark.costly
@chunks_apart
def test_a_chunked_context_is_its_chunks_alone_joined(method_case, random_rows, pad_rows, slots):
    model = method_case.build(chunk_size=5)
    for length in (4, 5, 6, 10, 13):
        rows = random_rows([length, 3])
        ids, mask = pad_rows(rows, "left")
        memory = model.compress(ids, mask, ratio=2)
        chunks = [model.compress(chunk[None], ratio=2) for chunk in rows[0].split(5)]
        expected = torch.cat([slots(chunk)[0] for chunk in chunks])
        if method_case.method.ranks:
            # At the places of the context: documents that are joined get those behind each other.
            chunks = [CompressedContext.concatenate(chunks)]
            expected = slots(chunks[0])[0]
        assert memory.num_slots.tolist() == [len(expected), 2], length
        assert slots(memory)[0, : len(expected)].allclose(expected, atol=1e-4, rtol=0), length
        positions = list(range(len(expected)))
        if memory.carrier == "key_values":  # they keep the encoder's positions
            positions = [position for chunk in chunks for position in chunk.position_ids[0].tolist()]
        assert memory.position_ids[0].tolist() == positions, length


# A segment that has ended has no summary tokens; ranked key/values leave empty chunks out themselves.
@pytest.mark.costly
@pytest.mark.only(lambda case: not (case.method.recurrent or case.method.ranks))
def test_empty_chunks_of_shorter_rows_are_not_read(method_case, random_rows, pad_rows, monkeypatch, slots):
    model, read = method_case.build(chunk_size=5), []
    encode = model.model.encode
    monkeypatch.setattr(model.model, "encode", lambda c, r, **k: read.append(len(c.lengths)) or encode(c, r, **k))
    rows, ratios = random_rows([23, 4, 0, 9, 5]), torch.tensor([2, 3, 8, 8, 2])
    together = model.compress(*pad_rows(rows), ratio=ratios)
    assert read == [5 + 1 + 2 + 1]
    for i, (row, ratio) in enumerate(zip(rows, ratios.tolist(), strict=True)):
        alone, real = model.compress(row[None], ratio=ratio), together.attention_mask[i].bool()
        torch.testing.assert_close(slots(together)[i, real], slots(alone)[0], atol=1e-4, rtol=1e-4)


# --- position layouts ---


# VoCo's places are those of EPL's Figure 8 and not of its tables, see test_voco.py.
@pytest.mark.costly
@pytest.mark.only(lambda case: case.method.name != "voco")
@any_layout
@chunks_apart
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_and_text_stand_where_the_layout_says(method_case, layout, random_rows, pad_rows, monkeypatch):
    model = method_case.build(chunk_size=6, position_layout=layout, task_token_ids={"[AE]": AE, "[LM]": LM})
    ids, mask = pad_rows(random_rows([15, 4]), "left")
    texts, text_mask = pad_rows(random_rows([5, 3], seed=1), "right")
    seen = Seen(model, monkeypatch)
    memory = model.compress(ids, mask, ratio=2)
    for row, length, start in () if method_case.method.passages else ((0, 6, 0), (1, 6, 6), (2, 3, 12), (3, 4, 0)):
        count = -(-length // 2) if method_case.method.memory_tokens else 0
        context, behind = encoder_position_ids(length, count, layout, start)
        assert seen.positions(0)[row] == [*context.tolist(), *behind.tolist()]
    for first, task in ((AE, "reconstruction"), (LM, "continuation"), (7, "continuation")):
        texts[:, 0] = first
        model(input_ids=texts, attention_mask=text_mask, memory=memory)
        chunkings = (([6, 6, 3], [3, 3, 2], 5), ([4], [2], 3))
        for positions, (lengths, counts, text_length) in zip(seen.positions(), chunkings, strict=True):
            slots, text = decoder_position_ids(lengths, counts, text_length, layout, memory.carrier, task)
            assert positions == ([] if memory.carrier == "key_values" else slots.tolist()) + text.tolist()
        for row, (lengths, counts, _) in enumerate(chunkings):
            slots, _ = decoder_position_ids(lengths, counts, 0, layout, memory.carrier, task)
            assert memory.position_ids[row, : len(slots)].tolist() == slots.tolist()


def test_callers_positions_count_within_the_text(form_case, random_rows, pad_rows):
    model = form_case.model
    memory = model.compress(ids_of(9))
    texts, mask = pad_rows(random_rows([5, 3], seed=1), "left")
    implicit = model(texts, attention_mask=mask, memory=memory).logits
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    explicit = model(texts, attention_mask=mask, position_ids=positions, memory=memory).logits
    assert explicit.equal(implicit)
    later = model(texts, attention_mask=mask, position_ids=positions + 7, memory=memory).logits
    assert not later.allclose(implicit, atol=1e-3), "other positions must matter"


# --- what is aligned with what ---


def test_states_and_logits_are_aligned_with_the_text(place_case, random_rows, pad_rows):
    model = place_case.model
    ids, mask = pad_rows(random_rows([15, 0, 3]), "left")
    texts, text_mask = pad_rows(random_rows([5, 3, 7], seed=1), "right")
    inputs = {"input_ids": texts, "attention_mask": text_mask}
    memory = model.compress(ids, mask)
    outputs = model.model(**inputs, memory=memory, output_hidden_states=True)
    assert outputs.last_hidden_state.shape == (3, texts.shape[1], 32)
    assert [states.shape for states in outputs.hidden_states] == [(3, texts.shape[1], 32)] * 3
    logits = model(**inputs, memory=memory).logits
    for keep in (1, 2, texts.shape[1]):
        last = model(**inputs, memory=memory, logits_to_keep=keep).logits
        torch.testing.assert_close(last, logits[:, -keep:], atol=1e-5, rtol=0)
    some = model(**inputs, memory=memory, logits_to_keep=torch.tensor([0, 3])).logits
    torch.testing.assert_close(some, logits[:, [0, 3]], atol=1e-5, rtol=0)


@of_embeddings
def test_a_plain_concatenation_gives_the_same_states(backbone_case):
    """Slots as input embeddings in front of the text's, by hand."""
    model, text = backbone_case.build(decoder_lora=None), ids_of(6, seed=1)
    memory = model.compress(ids_of(9), ratio=2)
    embeddings = torch.cat([memory.embeddings, model.get_input_embeddings()(text)], dim=1)
    by_hand = model.model.language_model(inputs_embeds=embeddings).last_hidden_state[:, 5:]
    torch.testing.assert_close(model.model(text, memory=memory).last_hidden_state, by_hand, atol=1e-5, rtol=0)


# --- BOS in front of the slots ---


@of_embeddings
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bos_moves_in_front_of_the_slots(form_case, layout, monkeypatch):
    text = ids_of(6, seed=1)
    text[0, 0] = BOS
    for chunk_size in (form_case.config().chunk_size, 4):
        fields = {"position_layout": layout, "chunk_size": chunk_size, "decoder_lora": None}
        model = form_case.build(bos_before_slots=True, **fields)
        memory = model.compress(ids_of(9), ratio=2)
        slots = int(memory.num_slots)
        seen = Seen(model, monkeypatch)
        states = model.model(text, memory=memory).last_hidden_state
        table = model.get_input_embeddings()
        embeddings = torch.cat([table(text[:, :1]), memory.embeddings, table(text[:, 1:])], dim=1)
        torch.testing.assert_close(seen.calls[0]["inputs_embeds"], embeddings)
        if layout == "enhanced":
            expected = [0, *memory.position_ids[0].tolist(), *range(10, 15)]
        else:
            expected = list(range(slots + 6))
        assert seen.positions() == [expected], chunk_size
        by_hand = model.model.language_model(
            inputs_embeds=embeddings,
            position_ids=torch.tensor([expected]),
            attention_mask=torch.ones(1, slots + 6).long(),
        ).last_hidden_state
        # The token after BOS is predicted from the state of the last slot, not from that of BOS.
        assert states.allclose(by_hand[:, slots:], atol=1e-5, rtol=0), chunk_size


# --- task tokens ---


@any_layout
def test_task_tokens_are_looked_up_in_the_methods_own_embeddings(method_case, monkeypatch):
    model = method_case.build(task_token_ids={"[AE]": AE, "[LM]": LM})
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 128
    text = torch.tensor([[AE, 9, LM, 12]])
    seen = Seen(model, monkeypatch)
    model(text, context_input_ids=ids_of(9))
    embedded = seen.calls[-1]["inputs_embeds"][0, -4:]
    table = model.get_input_embeddings()
    expected = [*model.model.task_embeddings[:1], *table(text[0, 1:2]), *model.model.task_embeddings[1:]]
    torch.testing.assert_close(embedded, torch.stack([*expected, *table(text[0, 3:])]))


# --- several documents ---


@any_layout
@chunks_apart
def test_documents_joined_are_read_like_one_chunked_context(method_case, random_rows, slots):
    model = method_case.build(chunk_size=6, position_layout="enhanced")
    first, second = random_rows([6, 9])
    joined = CompressedContext.concatenate([model.compress(first[None]), model.compress(second[None])])
    whole = model.compress(torch.cat([first, second])[None])
    assert joined.position_ids.equal(whole.position_ids)
    assert joined.num_context_tokens.equal(whole.num_context_tokens)
    # Rotations are relative, so a chunk's slots do not depend on where it starts.
    torch.testing.assert_close(slots(joined), slots(whole), atol=1e-4, rtol=0)
    text = ids_of(5, seed=1)
    torch.testing.assert_close(model(text, memory=joined).logits, model(text, memory=whole).logits, atol=1e-4, rtol=0)


# --- contexts of passages ---


# Methods whose chunks know nothing of each other.
CUT_APART = ("mean_pooling", "compression_tokens", "icae", "five_hundred_x", "comprexit", "gmsa")
PASSAGES = [[5, 1, 9], [], [7]]
ROWS = [ids_of(15), ids_of(0), ids_of(7, seed=2)]
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture
def batch(pad_rows):
    ids, mask = pad_rows([row[0] for row in ROWS], "left")
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", CUT_APART)
def test_passages_are_compressed_as_if_each_stood_alone(name, method_cases, batch):
    """With positions that start anew, in a batch with pads and a row without any passage, at a ratio for each row."""
    model = method_cases[name].build(chunk_size=6)
    ratios = torch.tensor([2, 2, 3])
    lengths = torch.tensor([[5, 1, 9], [0, 0, 0], [0, 7, 0]])
    found = model.compress(**batch, ratio=ratios, chunk_lengths=lengths)
    assert found.num_context_tokens.tolist() == [15, 0, 7]
    for row, (ids, passages, ratio) in enumerate(zip(ROWS, PASSAGES, ratios.tolist(), strict=True)):
        alone = [model.compress(part, ratio=ratio) for part in ids.split(passages or [0], dim=1)]
        joined = CompressedContext.concatenate(alone)
        count = int(found.num_slots[row])
        assert count == int(joined.num_slots)
        assert count == sum(model.config.num_slots(n, ratio) for n in passages)
        if found.embeddings is not None:
            torch.testing.assert_close(found.embeddings[row, :count], joined.embeddings[0], atol=2e-4, rtol=0)
    text = ids_of(4, seed=3)
    row = CompressedContext.concatenate([model.compress(part, ratio=2) for part in ROWS[0].split([5, 1, 9], dim=1)])
    read = {"context_input_ids": ROWS[0], "context_chunk_lengths": torch.tensor([[5, 1, 9]]), "ratio": 2}
    if name != "five_hundred_x":
        # Its joined keys are rotated to their later places; those of one context were made in theirs.
        torch.testing.assert_close(
            model(input_ids=text, **read).logits, model(input_ids=text, memory=row).logits, atol=2e-3, rtol=0
        )
    assert model.generate(text, **read, **GREEDY).shape == (1, 10)


def test_passages_of_an_encoder_decoder():
    model = build()
    ids, text = ids_of(12), ids_of(3, seed=1)
    memory = model.compress(ids, chunk_lengths=[[5, 7]])
    parts = [model.compress(part) for part in ids.split([5, 7], dim=1)]
    torch.testing.assert_close(memory.embeddings, CompressedContext.concatenate(parts).embeddings, atol=1e-5, rtol=0)
    read = {"context_input_ids": ids, "context_chunk_lengths": torch.tensor([[5, 7]])}
    expected = model(input_ids=text, memory=memory).logits
    torch.testing.assert_close(model(input_ids=text, **read).logits, expected)
    assert model.generate(text, **read, **GREEDY).equal(model.generate(text, memory=memory, **GREEDY))


def test_lengths_that_do_not_fit_are_refused(method_cases):
    model, ids = method_cases["icae"].model, ids_of(6)
    with pytest.raises(ValueError, match=r"`chunk_lengths` must add up to the 6 tokens of row 0, got \[2, 3\]"):
        model.compress(ids, chunk_lengths=[[2, 3]])
    with pytest.raises(ValueError, match=r"reads a context whole, without `chunk_lengths`, got \[\[6\]\]"):
        TRAINING_FREE_CASES[0].model.compress(ids, chunk_lengths=[[6]])


@pytest.mark.parametrize(
    ("name", "base"), [("five_hundred_x", "llama-sdpa"), ("voco", "llama-sdpa"), ("mean_pooling", "gemma2-eager")]
)
def test_rows_of_one_length_and_unlike_passages_are_read_as_their_memory(name, base, case_on):
    """Their slots are unlike in number, so that one row has a padding slot; values and the loss of training."""
    model = case_on(name, base).build()
    context, text = (torch.cat([ids_of(length, seed), ids_of(length, seed + 1)]) for length, seed in ((8, 1), (4, 3)))
    lengths = torch.tensor([[4, 4], [3, 5]])
    read = {"context_input_ids": context, "context_chunk_lengths": lengths, "ratio": 2}
    memory = model.compress(context, ratio=2, chunk_lengths=lengths)
    assert memory.num_slots.tolist() == [4, 5]
    with torch.no_grad():
        expected = model(text, memory=memory).logits
        torch.testing.assert_close(model(text, **read).logits, expected, atol=1e-4, rtol=0)
        model.train()
        memory = model.compress(context, ratio=2, chunk_lengths=lengths)
        expected = model(text, memory=memory, labels=text).loss
        torch.testing.assert_close(model(text, **read, labels=text).loss, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CUT_APART)
def test_passes_of_a_bounded_number_of_tokens_give_the_same_memory(name, method_cases, monkeypatch, pad_rows, slots):
    model = method_cases[name].build(chunk_size=6)
    ids, mask = pad_rows([row[0] for row in (*ROWS, ids_of(3, seed=4))], "left")
    ratios = torch.tensor([2, 3, 3, 2])
    expected, passes = model.compress(ids, mask, ratio=[2, ratios]), []
    encode = model.model.encode
    monkeypatch.setattr(model.model, "encode", lambda chunks, *args: passes.append(chunks) or encode(chunks, *args))
    monkeypatch.setattr(model.model, "tokens_at_once", 12)
    found = model.compress(ids, mask, ratio=[2, ratios])
    # Chunks of 6, 6, 3; 6, 1; 3 tokens.
    assert sorted(length for part in passes for length in part.lengths) == [1, 3, 3, 6, 6, 6]
    assert len(passes) > 1
    assert all(part.input_ids.numel() <= 12 for part in passes)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(slots(one), slots(other), atol=1e-4, rtol=1e-4)
        assert one.attention_mask.equal(other.attention_mask)
        assert one.position_ids.equal(other.position_ids)
