# SPDX-License-Identifier: Apache-2.0
"""Texts that are compressed to texts: whole words in their order, scored in windows, with a question or without."""

import math
import re

import pytest
import torch
from tiny_encoder import save_encoder, word_piece_tokenizer
from transformers import AutoModelForTokenClassification, pipeline

from context_compressors import TextCompressor
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.modeling.text_compressor import (
    best_run,
    best_sentences,
    forced_words,
    sentence_values,
    word_sentences,
)

TEXT = generate_document(3, num_tokens=300).text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("classifier"), is_classifier=True)


@pytest.fixture(scope="module")
def compressor(folder):
    return TextCompressor.from_pretrained(folder)


def by_id(input_ids, attention_mask):
    """Logits whose log odds are a token's id."""
    return torch.stack([torch.zeros(input_ids.shape), input_ids.float()], dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("question", [None, "Which harbour was built first?"])
def test_scores_are_means_over_windows_and_over_a_words_tokens(compressor, folder, question):
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), compressor.tokenizer
    words = (TEXT.split() * 2)[:150]
    pieces = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    ids = [token for piece in pieces for token in piece]
    longest = tokenizer.model_max_length
    start = [tokenizer.cls_token_id]
    if question:
        asked = tokenizer(question, add_special_tokens=False)["input_ids"][: longest // 4]
        start += [*asked, tokenizer.sep_token_id]
    size = longest - len(start) - 1
    assert len(ids) > 2 * size
    found = [[] for _ in ids]
    for first in [*range(0, len(ids) - size, max(1, size - 64)), len(ids) - size]:
        row = [*start, *ids[first : first + size], tokenizer.sep_token_id]
        logits = model(torch.tensor([row])).logits[0, len(start) : -1]
        for place, (drop, keep) in enumerate(logits.tolist(), first):
            found[place].append(keep - drop)
    odds = iter([sum(of_token) / len(of_token) for of_token in found])
    wanted = [sum(next(odds) for _ in piece) / len(piece) for piece in pieces]
    scores = compressor.word_scores(" ".join(words), question)
    torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ratio", [1, 2, 3.5, 8])
def test_words_stay_whole_and_in_order_within_the_budget(ratio):
    tokenizer = word_piece_tokenizer()
    compressor = TextCompressor(by_id, tokenizer)
    kept = compressor.compress_text(TEXT, ratio).split()
    words = iter(TEXT.split())
    assert all(word in words for word in kept)
    tokens = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (" ".join(kept), TEXT)]
    assert 0.9 * tokens[1] / ratio < tokens[0] <= -(-tokens[1] // ratio)


def test_the_sentences_with_the_highest_values_stay_and_a_run_of_the_next_one():
    scores, sentences = [5, 0, 3, 3, 1, 2, 2, 0, 9, 9], [0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    values, costs = {0: 2.5, 1: 3, 2: 1.25, 3: 9}, [1, 1, 2, 1, 1, 1, 1, 1, 1, 1]

    def kept(budget, forced=()):
        return best_sentences(values, scores, sentences, costs, budget, forced)

    assert kept(2) == [8, 9]
    assert kept(1) == [8]
    # Of a cut sentence a word or two are left out.
    assert kept(4) == [8, 9]
    assert kept(10) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert kept(4, [1, 7]) == [1, 7, 8, 9]
    assert kept(1, [1, 7]) == [1, 7]
    assert kept(11) == list(range(10))


def test_a_sentences_value_is_its_mean_score_and_what_it_has_of_the_question_or_how_early_it_is():
    words, sentences = ["The", "bee.", "The", "ant.", "A", "cat."], [0, 0, 1, 1, 2, 2]
    scores = [1, 2, 3, 4, 5, 6]
    wanted = {0: 1.5, 1: 3.5 - 2 * 2 / 6, 2: 5.5 - 2 * 4 / 6}
    assert sentence_values(scores, words, sentences, "") == pytest.approx(wanted)
    common, rare = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    wanted = {0: 1.5 + (common + rare) / 2, 1: 3.5 + common / 2, 2: 5.5}
    assert sentence_values(scores, words, sentences, "Is the bee, the BEE here?") == pytest.approx(wanted)


def test_a_run_has_the_most_of_all_that_keep_to_the_budget():
    """Against all runs."""
    torch.manual_seed(0)
    for _ in range(20):
        scores, costs = torch.randn(9).tolist(), torch.randint(1, 4, (9,)).tolist()
        budget, lowest = sum(costs) // 2, min(scores)
        runs = [range(first, end) for first in range(9) for end in range(first + 1, 10)]
        fitting = [run for run in runs if sum(costs[place] for place in run) <= budget]
        wanted = max(sum(scores[place] - lowest for place in run) for run in fitting)
        kept = best_run(range(9), scores, costs, budget)
        assert kept in fitting
        assert sum(scores[place] - lowest for place in kept) == pytest.approx(wanted)


def test_words_belong_to_the_sentences_that_they_begin_in():
    assert word_sentences('He met Mr. Holm. "Why?" she\nasked. ') == [0, 0, 0, 0, 1, 2, 3]


def test_a_question_is_read_in_front_of_each_window():
    tokenizer, rows = word_piece_tokenizer(), []

    def noting(input_ids, attention_mask):
        rows.extend(input_ids.tolist())
        return by_id(input_ids, attention_mask)

    TextCompressor(noting, tokenizer).compress_text(TEXT, 4, question="the harbour")
    start = tokenizer("the harbour")["input_ids"]
    assert len(rows) > 1
    assert all(row[: len(start)] == start for row in rows)


def test_the_readers_tokens_are_counted_and_may_be_given_as_a_number(compressor):
    class Letters:
        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [list(text.strip()) for text in texts]}

    kept = compressor.compress_text(TEXT, max_tokens=100, tokenizer=Letters()).split()
    assert 60 < len("".join(kept)) <= 100
    assert compressor.compress_text(" \n ") == ""


def test_numbers_and_names_stay_whatever_their_scores(compressor):
    text = "In 1974 the engineer Clara Holm, who was 43, gave the old museum forty model ships."
    kept = compressor.compress_text(text, 8, keep=("numbers", "names"))
    assert kept == "1974 Clara Holm, 43,"
    assert {"1974", "43,"} <= set(compressor.compress_text(text, 3, keep=["numbers"]).split())
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        compressor.compress_text(text, 0.5)


def test_names_are_capitalized_inside_a_sentence():
    words = re.split(" ", 'He met Ann. "Then (Bob) left." So I said: "Yes, Mr. Holm!" Ok')
    assert [words[place] for place in forced_words(words, ["names"])] == ["Ann.", "(Bob)", '"Yes,', "Mr."]


@pytest.mark.parametrize("question", [None, "Which harbour?"])
def test_the_stock_pipeline_has_the_same_scores(compressor, folder, question):
    text = " ".join(TEXT.split()[:20])
    given = text if question is None else f"{question} [SEP] {text}"
    found = pipeline("token-classification", model=str(folder), ignore_labels=[])(given)
    odds = torch.tensor([entry["score"] for entry in found]).logit()
    odds = [odd if entry["entity"] == "keep" else -odd for odd, entry in zip(odds.tolist(), found, strict=True)]
    ids, asked = (compressor.tokenizer(part or "", add_special_tokens=False)["input_ids"] for part in (text, question))
    wanted = compressor._token_scores(ids, asked).tolist()
    torch.testing.assert_close(wanted, odds[-len(ids) :], atol=1e-4, rtol=1e-4)
    pipe = pipeline("text-compression", model=str(folder))
    assert pipe.compress_text(TEXT, 3, question=question) == compressor.compress_text(TEXT, 3, question=question)
