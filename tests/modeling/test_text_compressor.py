# SPDX-License-Identifier: Apache-2.0
"""Texts that are compressed to texts: whole words in their order, scored in windows."""

import re

import pytest
import torch
from tiny_encoder import save_encoder, word_piece_tokenizer
from transformers import AutoModelForTokenClassification, pipeline

from context_compressors import TextCompressor
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.modeling.text_compressor import best_runs, extended_runs, forced_words

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
def test_scores_are_means_over_windows_and_over_a_words_tokens(compressor, folder):
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), compressor.tokenizer
    words = (TEXT.split() * 2)[:150]
    pieces = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    ids = [token for piece in pieces for token in piece]
    size = tokenizer.model_max_length - 2
    assert len(ids) > 2 * size
    found = [[] for _ in ids]
    starts = [*range(0, len(ids) - size, size - 64), len(ids) - size]
    for start in starts:
        row = [tokenizer.cls_token_id, *ids[start : start + size], tokenizer.sep_token_id]
        logits = model(torch.tensor([row])).logits[0, 1:-1]
        for place, (drop, keep) in enumerate(logits.tolist(), start):
            found[place].append(keep - drop)
    odds = iter([sum(of_token) / len(of_token) for of_token in found])
    wanted = [sum(next(odds) for _ in piece) / len(piece) for piece in pieces]
    mean, deviation = sum(wanted) / len(wanted), torch.tensor(wanted).std(correction=0).item()
    standardized = [(score - mean) / deviation for score in wanted]
    torch.testing.assert_close(compressor.word_scores(" ".join(words)), standardized, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ratio", [1, 2, 3.5, 8])
def test_words_stay_whole_and_in_order_within_the_budget(ratio):
    tokenizer = word_piece_tokenizer()
    compressor = TextCompressor(by_id, tokenizer)
    kept = compressor.compress_text(TEXT, ratio).split()
    words = iter(TEXT.split())
    assert all(word in words for word in kept if word != "...")
    tokens = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (" ".join(kept), TEXT)]
    assert 0.9 * tokens[1] / ratio < tokens[0] <= -(-tokens[1] // ratio)


@pytest.mark.parametrize(("gap_cost", "gap_tokens"), [(0, 0), (0.7, 0), (0.7, 1), (3, 2)])
def test_runs_are_worth_most_of_all_that_keep_to_the_budget(gap_cost, gap_tokens):
    """Against all subsets."""
    torch.manual_seed(0)
    for _ in range(20):
        scores, costs = torch.randn(9).tolist(), torch.randint(1, 4, (9,)).tolist()
        budget, forced = sum(costs) // 2, [4]

        def gaps(places):
            return sum(place > 0 and place - 1 not in places for place in places)

        def tokens(places, costs=costs):
            return sum(costs[place] for place in places) + gap_tokens * gaps(places)

        def worth(places, scores=scores):
            return sum(scores[place] for place in places) - gap_cost * gaps(places)

        kept = best_runs(scores, costs, budget, gap_cost, gap_tokens, forced)
        spent = tokens(kept)
        subsets = [[place for place in range(9) if number >> place & 1] for number in range(2**9)]
        # A price of tokens finds the best of all that spend as many.
        wanted = max(worth(places) for places in subsets if 4 in places and tokens(places) == spent)
        assert spent <= budget
        assert worth(kept) == pytest.approx(wanted, abs=0.02)


def test_what_is_left_of_the_budget_goes_to_the_best_neighbours_of_kept_words():
    scores, costs = [0.0, 3.0, 9.0, 1.0, 2.0, 8.0], [1, 2, 1, 1, 1, 5]
    assert extended_runs([2], scores, costs, 4) == [1, 2, 3, 4]
    assert extended_runs([], scores, costs, 3) == [0, 1]
    assert extended_runs([4], scores, costs, -1) == [4]


def test_the_readers_tokens_are_counted_and_may_be_given_as_a_number(compressor):
    class Letters:
        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [list(text.strip()) for text in texts]}

    kept = compressor.compress_text(TEXT, max_tokens=100, gap_mark="", tokenizer=Letters()).split()
    assert 60 < len("".join(kept)) <= 100
    assert compressor.compress_text(" \n ") == ""


def test_numbers_and_names_stay_whatever_their_scores(compressor):
    text = "In 1974 the engineer Clara Holm, who was 43, gave the old museum forty model ships."
    kept = compressor.compress_text(text, 8, keep=("numbers", "names"))
    assert kept == "... 1974 ... Clara Holm, ... 43,"
    assert {"1974", "43,"} <= set(compressor.compress_text(text, 3, keep=["numbers"]).split())
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        compressor.compress_text(text, 0.5)


def test_names_are_capitalized_inside_a_sentence():
    words = re.split(" ", 'He met Ann. "Then (Bob) left." So I said: "Yes, Mr. Holm!" Ok')
    assert [words[place] for place in forced_words(words, ["names"])] == ["Ann.", "(Bob)", '"Yes,', "Mr."]


def test_the_stock_pipeline_has_the_same_scores(compressor, folder):
    text = " ".join(TEXT.split()[:20])
    found = pipeline("token-classification", model=str(folder), ignore_labels=[])(text)
    odds = torch.tensor([entry["score"] for entry in found]).logit()
    odds = [odd if entry["entity"] == "keep" else -odd for odd, entry in zip(odds.tolist(), found, strict=True)]
    ids = compressor.tokenizer(text, add_special_tokens=False)["input_ids"]
    torch.testing.assert_close(compressor._token_scores(ids).tolist(), odds, atol=1e-4, rtol=1e-4)
