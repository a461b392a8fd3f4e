# SPDX-License-Identifier: Apache-2.0
import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_compressors.data.synthetic_documents import KINDS, count_words, generate_document


def test_documents_are_the_same_on_every_machine():
    # Pinned: a change of the generator changes every benchmark number, so it has to be seen.
    text = generate_document(0, num_tokens=40, kind="ledger").text
    assert text == (
        "Pres Fati bought thimbles from Bribeilt Kleten. Pres Fati paid 4075 crowns for thimbles. "
        "On 21 July, Pres Fati signed receipt 2510. On 5 September, Drailt Stuker signed receipt 6148."
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    length=st.integers(64, 900),
    kind=st.sampled_from(KINDS),
    split=st.sampled_from(["train", "test"]),
)
def test_length_is_kept_and_almost_reached(seed, length, kind, split):
    document = generate_document(seed, num_tokens=length, kind=kind, split=split)
    assert length - 40 <= count_words(document.text) <= length
    assert document.questions


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_has_one_answer_which_stands_in_the_text(kind):
    for split, seed in itertools.product(["train", "test"], range(20)):
        document = generate_document(seed, num_tokens=300, kind=kind, split=split)
        assert max(Counter(question.question for question in document.questions).values()) == 1
        for question in document.questions:
            assert re.search(rf"(?<!\w){re.escape(question.answer)}(?!\w)", document.text), question


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_test_share_no_name_and_no_answer(kind):
    values = {}
    for split in ("train", "test"):
        documents = [generate_document(seed, num_tokens=400, kind=kind, split=split) for seed in range(25)]
        answers = {question.answer for document in documents for question in document.questions}
        names = {name for document in documents for name in re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", document.text)}
        values[split] = (answers, names - {"Train", "Ferry"} - set(MONTHS))
    assert not values["train"][0] & values["test"][0]
    assert not values["train"][1] & values["test"][1]
    assert len(values["test"][0]) > 30


MONTHS = "January February March April May June July August September October November December".split()  # noqa: SIM905
