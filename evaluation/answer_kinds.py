# SPDX-License-Identifier: Apache-2.0
"""Kinds of answers: numbers, dates, names and phrases are not equally hard to keep in a few slots."""

# ruff: noqa: SIM905 (word lists read better as text)

import re

ANSWER_KINDS = ("number", "date", "name", "phrase")
_NUMBER_WORDS = frozenset(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands "
    "million millions billion billions trillion dozen dozens half twice".split()
)
_PARTICLES = frozenset(
    "a an and at bin d da das de del della der di dos du e el en et for from in la las le les los of on or the to van "
    "von with y zu".split()
)
_NO_NAMES = frozenset(("yes", "no", "true", "false", "none", "unanswerable"))
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_YEAR = r"(1\d|20)\d\d"
_DATE = re.compile(
    rf"\b({_MONTHS}|(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?)\b(?! [A-Z][a-z])"
    rf"|^\W*([a-z]+ ){{0,2}}{_YEAR}s?(\s*(-|–|to|and|until)\s*({_YEAR}|\d\d))?\s*(AD|BC|BCE|CE)?\W*$"
    r"|\b(century|centuries|BCE?|AD|CE)\b|\b\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}\b|\b\d{1,2}:\d\d\b"
)


def answer_kind(answer: str) -> str:
    """What an answer is, by the first rule that fits.

    - "date": a month or a day of the week, a year or a range of years, a century, a date in figures, a time of day;
    - "number": figures that no capital letter stands in front of, or a number in words first of all ("forty pears");
    - "name": every word but small ones ("of", "the", "van") begins with a capital or a figure ("Apollo 11");
    - "phrase": everything else, "yes" and "no" among them.

    Args:
        answer: the first accepted answer of a question.
    """
    words = re.findall(r"[^\s\-–—,;:()\"“”]+", answer.strip())
    if _DATE.search(answer):
        return "date"
    if not words:
        return "phrase"
    capital = next((place for place, word in enumerate(words) if word[0].isupper()), len(words))
    figure = next((place for place, word in enumerate(words) if any(map(str.isdigit, word))), len(words))
    content = [word for word in words if word.lower() not in _PARTICLES]
    lower = [word.strip(".%'’").lower() for word in content]
    if figure < capital or (figure < len(words) and len(content) == 1):
        return "number"
    if lower and lower[0] in _NUMBER_WORDS and (capital > 0 or set(lower) <= _NUMBER_WORDS):
        return "number"
    is_name = content and all(word.strip(".'’‘")[:1].isupper() or word[0].isdigit() for word in content)
    return "name" if is_name and lower[0] not in _NO_NAMES else "phrase"
