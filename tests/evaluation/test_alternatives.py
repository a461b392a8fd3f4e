# SPDX-License-Identifier: Apache-2.0
"""Baselines in place of slots: truncated text, BM25 sentences and the least expected tokens."""

import math
from collections import Counter

import pytest
import torch
from naive_twin import QA, ROWS, encode, naive_answers, run
from tiny_encoder import save_encoder

from context_compressors import TextCompressor
from context_compressors.evaluation.alternatives import (
    bm25_context,
    informative_context,
    self_information,
    split_sentences,
)

TEXT = (
    "Alice was born in Rome. Bob likes cheese. The cat of Carl is red, and sleeps. "
    'Dr. J. Smith asked: "Is it late?" It was not.\nA new line'
)

KINDS = ("cut", "bm25", "self_information")


def words_of(text):
    return [word for word in "".join(c if c.isalnum() else " " for c in text.lower()).split() if len(word) > 1]


def naive_bm25(tokenizer, text, question, budget):
    """Lucene's BM25 with k1 = 1.5 and b = 0.75, spelled out; sentences are taken until it is enough."""
    ignored = {"is", "was", "in", "the", "of", "and", "it", "not", "at"}
    sentences = split_sentences(text)
    bags = [Counter(word for word in words_of(sentence) if word not in ignored) for sentence in sentences]
    mean_length = sum(bag.total() for bag in bags) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for word in words_of(question):
            having = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
            times = bag[word]
            score += idf * times / (times + 1.5 * (0.25 + 0.75 * bag.total() / mean_length))
        scores.append(score)
    best_first = sorted(range(len(sentences)), key=lambda place: (-scores[place], place))
    kept = {}
    for place in best_first:
        room = budget - sum(map(len, kept.values()))
        kept[place] = encode(tokenizer, sentences[place])[:room]
    return [token for place in sorted(kept) for token in kept[place]]


@torch.no_grad()
def naive_informative(model, tokenizer, ids, budget):
    """Each token's surprise from a pass of the base over all before it; the least surprising go one by one."""
    surprise = {}
    for place, token in enumerate(ids):
        with model.base_language_model():
            logits = model(input_ids=torch.tensor([[tokenizer.bos_token_id, *ids[:place]]])).logits[0, -1]
        surprise[place] = -float(logits.double().log_softmax(-1)[token])
    while len(surprise) > budget:
        del surprise[min(surprise, key=lambda place: (surprise[place], -place))]
    return [ids[place] for place in surprise]


def test_bm25_fills_its_budget_with_the_best_sentences_in_the_order_of_the_text(tokenizer):
    ids = encode(tokenizer, TEXT)
    for question in ("Who likes cheese?", "Where does Carl's red cat live?", "Zanzibar?", "Is it?", ""):
        for budget in (1, 10, 17, 40, 77, 10_000):
            found = bm25_context(tokenizer, ids, question, budget)
            assert len(found) == min(budget, len(ids)), (question, budget)
            assert found == naive_bm25(tokenizer, TEXT, question, budget), (question, budget)


@pytest.mark.slow
def test_self_information_keeps_the_tokens_that_the_base_expects_least(model, tokenizer, monkeypatch):
    monkeypatch.setattr("context_compressors.evaluation.alternatives._LOGITS_AT_ONCE", 7)
    ids = encode(tokenizer, TEXT)[:40]
    information = self_information(model, tokenizer.bos_token_id, ids)
    for budget in (1, 10, 27, 39, 40, 10_000):
        found = informative_context(ids, information, budget)
        assert found == naive_informative(model, tokenizer, ids, budget), budget
        assert len(found) == min(budget, len(ids))
    # What the base expects stays out, wherever it stands; of equals, the earlier stays.
    assert informative_context([5, 6, 7, 8, 9], [0.1, 9.0, 0.5, 0.5, 3.0], 3) == [6, 7, 9]


def test_sentences_joined_are_the_text():
    sentences = split_sentences(TEXT)
    assert "".join(sentences) == TEXT
    assert [sentence.strip() for sentence in sentences] == [
        "Alice was born in Rome.",
        "Bob likes cheese.",
        "The cat of Carl is red, and sleeps.",
        'Dr. J. Smith asked: "Is it late?"',
        "It was not.",
        "A new line",
    ]
    assert split_sentences("") == []
    assert split_sentences("No end ") == ["No end "]


@pytest.mark.slow
def test_alternatives_have_the_positions_of_the_slots_and_the_reader_of_the_full_text(model, teacher, tokenizer):
    report = run(model, tokenizer, teacher=teacher, tasks=(QA,), alternatives=KINDS)
    assert report.conditions(QA) == [
        "no_context",
        "full_context",
        *(f"{kind}={ratio}" for kind in ("ratio", *KINDS) for ratio in (2, 4)),
    ]
    costs = {row.condition: row.costs for row in report.rows}
    for ratio in (2, 4):
        slots = [math.ceil(len(row["context"]) / ratio) for row in ROWS]
        positions = costs[f"ratio={ratio}"]["decoder_positions"]
        assert costs[f"ratio={ratio}"]["slots"] == pytest.approx(sum(slots) / 3)
        for kind in KINDS:
            # A byte a token; the next question may pick other sentences.
            kept = sum(len(row["context"]) for row in ROWS) if kind == "bm25" else sum(slots)
            own = {"memory_bytes": pytest.approx(kept / 3), "decoder_positions": positions}
            assert costs[f"{kind}={ratio}"].pop("cache_bytes") > kept / 3
            assert costs[f"{kind}={ratio}"] == own
        kept = {kind: [] for kind in KINDS}
        for row, n in zip(ROWS, slots, strict=True):
            ids = encode(tokenizer, row["context"])
            kept["cut"].append(row["context"][:n])
            kept["bm25"].append(tokenizer.decode(bm25_context(tokenizer, ids, row["question"], n)))
            # A teacher reads what the compressor's own base picks.
            kept["self_information"].append(tokenizer.decode(naive_informative(model, tokenizer, ids, n)))
        for kind, contexts in kept.items():
            shortened = [{**row, "context": context} for row, context in zip(ROWS, contexts, strict=True)]
            expected = naive_answers(teacher, tokenizer, "full_context", shortened, 6)
            assert [sample.answers[f"{kind}={ratio}"] for sample in report.answers] == expected
    # Without a teacher the compressor's own decoder reads.
    own = run(model, tokenizer, tasks=(QA,), alternatives=("cut",))
    shortened = [{**row, "context": context} for row, context in zip(ROWS, kept["cut"], strict=True)]
    expected = naive_answers(model, tokenizer, "full_context", shortened, 6)
    assert [sample.answers["cut=4"] for sample in own.answers] == expected


@pytest.mark.parametrize("name", ["keep_drop", "keep_drop_aware"])
def test_keep_drop_reads_the_words_of_a_text_compressor(model, tokenizer, tmp_path, name):
    folder = save_encoder(tmp_path / "classifier", is_classifier=True)
    report = run(model, tokenizer, tasks=(QA,), alternatives=(name,), text_compressor=str(folder))
    compressor, shortened = TextCompressor.from_pretrained(folder), []
    for row in ROWS:
        budget = math.ceil(len(row["context"]) / 2)
        question = row["question"] if name == "keep_drop_aware" else None
        kept = compressor.compress_text(row["context"], question=question, max_tokens=budget, tokenizer=tokenizer)
        shortened.append({**row, "context": kept})
        assert len(kept) <= budget
    expected = naive_answers(model, tokenizer, "full_context", shortened, 6)
    assert [sample.answers[f"{name}=2"] for sample in report.answers] == expected
    with pytest.raises(ValueError, match="go with text_compressor, a checkpoint"):
        run(model, tokenizer, alternatives=(name,))
