# SPDX-License-Identifier: Apache-2.0
from context_compressors.evaluation.answer_kinds import ANSWER_KINDS, answer_kind

EXAMPLES = {
    "date": "1871|July 11, 1962|2 July 1505|the 1980s|14th century|1421 to 1904|around 1850|AD 14|March|Sundays|5:30",
    "number": "forty|forty pear trees|70%|$1.5 million|about 50 people|Ten|Two hundred|438,000|1,600 mm",
    "name": "Nora Lind|Bern|the Black Sea|Osama bin Laden|Apollo 11|WJRT-TV|Lord of the Rings|One Direction|McManus",
    "phrase": "a lighthouse|yes|No|quick-release door|in the mill behind Bern|Earth's mantle|Queer as Folk|corrosion",
}


def test_an_answer_is_a_number_a_date_a_name_or_a_phrase():
    assert set(EXAMPLES) == set(ANSWER_KINDS)
    expected = {answer: kind for kind, answers in EXAMPLES.items() for answer in answers.split("|")}
    assert {answer: answer_kind(answer) for answer in expected} == expected
