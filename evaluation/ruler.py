# SPDX-License-Identifier: Apache-2.0
"""The tasks of RULER, generated from a seed at any length: needles, variables to track, words to count, questions.

Rows are in the schema of kvpress, and are scored as RULER scores them, see `benchmark_metrics`. The words of the
templates are RULER's; the running text that needles are hidden in, and the questions, are those that one gives. A
length is that of the context, its instructions included; RULER counts question and answer, too.

Source: RULER (Hsieh et al., 2024), sections 3 and 4 and appendix B; https://github.com/NVIDIA/RULER (Apache-2.0).
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice
from ..modeling.parts.text_ids import encode
from .alternatives import split_sentences

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_NUM_HOPS = 4
# From this length on each common word stands 30 times and each other one 3 times; 6 times and once below it.
_LONG_LIST = 4096
_NUM_COMMON = 10
_NUM_FREQUENT = 3
_CODED_LETTERS = 6
# Fewer words, and the third and fourth most frequent ones are as frequent.
_FEWEST_CODED = 60
_ZETA_OF_2 = math.pi**2 / 6
_DOCUMENTS = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)


@dataclass(frozen=True)
class _Needles:
    """What is hidden in what: haystack "noise", "essay" or "needle"; kinds "words", "numbers" or "uuids"."""

    haystack: str = "essay"
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


_NEEDLE_TASKS = {
    "niah_single_1": _Needles("noise"),
    "niah_single_2": _Needles(),
    "niah_single_3": _Needles(values="uuids"),
    "niah_single_words": _Needles(values="words"),
    "niah_multikey_1": _Needles(num_keys=4),
    "niah_multikey_2": _Needles("needle"),
    "niah_multikey_3": _Needles("needle", "uuids", "uuids"),
    "niah_multivalue": _Needles(num_values=4),
    "niah_multiquery": _Needles(num_keys=4, num_queries=4),
}
TASKS = (*_NEEDLE_TASKS, "vt", "cwe", "fwe", "qa_1", "qa_2")
ESSAY_TASKS = tuple(task for task, needles in _NEEDLE_TASKS.items() if needles.haystack == "essay")
# Those that need neither running text nor questions.
GENERATED_TASKS = tuple(task for task in TASKS if task not in (*ESSAY_TASKS, "qa_1", "qa_2"))


def ruler_examples(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    num_examples: int = 100,
    seed: int = 0,
    texts: Sequence[str] = (),
    questions: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Questions of one task, each about a context of its own.

    Args:
        task: one of `TASKS`: RULER's thirteen, with its settings, and "niah_single_words", whose needle is a word.
            "qa_1" and "qa_2" are one task, for two sets of questions.
        tokenizer: measures the length.
        num_tokens: of a context; no more, and less by about a sentence, a word or a document at most.
        num_examples: how many.
        seed: draws everything.
        texts: running text to hide needles in, for the tasks that need it.
        questions: of "qa_1" and "qa_2", rows with `context`, `question` and `answers`; other contexts are distractors.

    Returns:
        Rows with `id`, `context`, `question`, `answer_prefix`, `answers` and `task`, and where the context was put
        together from `texts` or `questions`, these as `source_texts`.

    Raises:
        ValueError: an unknown task, texts or questions that are missing or too few, or a length without room.
    """
    check_choice("task of RULER:", task, TASKS)
    make: Callable[[PreTrainedTokenizerBase, int, str], dict[str, Any]]
    if task in _NEEDLE_TASKS:
        needles = _NEEDLE_TASKS[task]
        if needles.haystack == "essay" and not texts:
            raise ValueError(f"{task} hides needles in running text: give it a source, {{path: FILE, kind: {task}}}")
        make = partial(_needles, needles, texts)
    elif task in ("qa_1", "qa_2"):
        if not questions:
            raise ValueError(f"{task} asks questions about documents: give it a source, {{path: FILE, kind: {task}}}")
        make = partial(_documents, questions, list(dict.fromkeys(row["context"] for row in questions)))
    else:
        make = {"vt": _variables, "cwe": _common_words, "fwe": _frequent_words}[task]
    found = []
    for number in range(num_examples):
        made = make(tokenizer, num_tokens, f"{seed}/{task}/{num_tokens}/{number}")
        found.append({"id": f"{task}/{number}", **made, "task": task})
    return found


def _row(
    context: str, question: str, answer_prefix: str, answers: Sequence[str], sources: Sequence[str] = ()
) -> dict[str, Any]:
    row = {"context": context, "question": question, "answer_prefix": answer_prefix, "answers": list(answers)}
    return {**row, "source_texts": list(sources)} if sources else row


@cache
def _words(*kinds: str) -> list[str]:
    """All words of some kinds: "noun", "verb", "adjective"."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        message = "RULER draws its words from wonderwords: pip install -e '.[benchmarks]' in the clone"
        raise ImportError(message) from error
    return sorted(set(RandomWord().filter(include_categories=kinds)))


def _drawn(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(_words('adjective'))}-{rng.choice(_words('noun'))}"


def _different(kind: str, number: int, rng: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < number:
        found[_drawn(kind, rng)] = None
    return list(found)


def _longest(
    make: Callable[[int], str],
    smallest: int,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    largest: int = 10**9,
) -> str:
    """The text of about the largest size that fits; each step makes `make(size)` longer by as many tokens, nearly."""

    def length(size: int) -> int:
        return len(encode(tokenizer, make(size)))

    first = length(smallest)
    if first > num_tokens:
        raise ValueError(f"a context of {num_tokens} tokens is too short: the least that this task takes is {first}")
    further = min(largest, 2 * smallest + 8)
    each = max(1.0, (length(further) - first) / max(1, further - smallest))
    size = min(largest, smallest + int((num_tokens - first) / each))
    while size > smallest and (surplus := length(size) - num_tokens) > 0:
        size = max(smallest, size - max(1, int(surplus / each)))
    while size < largest:
        step = min(max(1, int((num_tokens - length(size)) / each)), largest - size)
        if length(size + step) > num_tokens:
            return make(size)
        size += step
    if length(size) + each <= num_tokens:
        raise ValueError(f"a context of {num_tokens} tokens is too long: this task has {size} words or documents")
    return make(size)


def _needles(
    settings: _Needles, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int, seed: str
) -> dict[str, Any]:
    rng = random.Random(seed)
    keys = _different(settings.keys, settings.num_keys, rng)
    drawn = _different(settings.values, settings.num_keys * settings.num_values, rng)
    values = {key: drawn[place :: settings.num_keys] for place, key in enumerate(keys)}
    queries = rng.sample(keys, settings.num_queries)
    hidden = [
        _NEEDLE.format(kind=settings.values, key=key, value=value) for key, mine in values.items() for value in mine
    ]
    rng.shuffle(hidden)
    is_one = settings.num_queries * settings.num_values == 1
    kind = settings.values.removesuffix("s") if is_one else settings.values
    head = f"A special magic {kind} is" if is_one else f"Some special magic {kind} are"
    head += " hidden within the following text. Make sure to memorize it. "
    head += f"I will quiz you about the {kind} afterwards.\n"

    def around(size: int) -> str:
        lines = random.Random(f"{seed}/lines")
        if settings.haystack == "noise":
            sentences = [_NOISE] * size
        else:
            pairs = [(_drawn(settings.keys, lines), _drawn(settings.values, lines)) for _ in range(size)]
            # Another value of a key that is asked for would be right, too.
            pairs = [(key, value) for key, value in pairs if key not in values]
            sentences = [_NEEDLE.format(kind=settings.values, key=key, value=value) for key, value in pairs]
        for sentence in hidden:
            sentences.insert(lines.randint(0, len(sentences)), sentence)
        return head + "\n".join(sentences) + "\n"

    sources: list[str] = []
    if settings.haystack == "essay":
        context, room = "", num_tokens - len(encode(tokenizer, f"{head}\n"))
        # Joined, the parts may have a token more.
        while not context or (surplus := len(encode(tokenizer, context)) - num_tokens) > 0:
            room -= surplus if context else 0
            places = random.Random(f"{seed}/places")
            text, sources = hidden_in_text(hidden, [*keys, *drawn], texts, tokenizer, room, places)
            context = f"{head}{text}\n"
    else:
        context = _longest(around, 1, tokenizer, num_tokens)
    named = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    about = f"the special magic {kind} for {named} mentioned in the provided text"
    verb = "is" if is_one else "are"
    question = f"What {verb} {'' if is_one else 'all '}{about}?"
    answers = [value for key in queries for value in values[key]]
    return _row(context, question, f"T{about[1:]} {verb}", answers, sources)


def _variables(tokenizer: PreTrainedTokenizerBase, num_tokens: int, seed: str) -> dict[str, Any]:
    """Variables that hold one value by assignment from one another; a solved example stands in front."""
    example = _chain(f"{seed}/example", 3)
    solved = " ".join([example[0](_NUM_HOPS + 1), *example[1:3], *example[3]])
    make, question, prefix, names = _chain(seed, 5)
    context = _longest(lambda size: f"{solved}\n\n{make(size)}", _NUM_HOPS + 1, tokenizer, num_tokens)
    return _row(context, question, prefix, names)


def _chain(seed: str, num_letters: int) -> tuple[Callable[[int], str], str, str, list[str]]:
    """A text of so many lines of noise around a chain of assignments, and what is asked about it."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) <= _NUM_HOPS:
        found["".join(rng.choices(string.ascii_uppercase, k=num_letters))] = None
    names, value = list(found), str(rng.randint(10000, 99999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]

    def make(size: int) -> str:
        lines = [_NOISE] * size
        # Ascending, so that no variable is read before it has its value.
        places = sorted(random.Random(f"{seed}/{size}").sample(range(size), len(chain)))
        for number, (place, assignment) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + number, assignment)
        task = "Memorize and track the chain(s) of variable assignment hidden in the following text."
        return f"{task}\n\n" + "\n".join(lines) + "\n"

    question = f"Question: Find all variables that are assigned the value {value} in the text above."
    prefix = (
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are: "
    )
    return make, question, prefix, names


def _common_words(tokenizer: PreTrainedTokenizerBase, num_tokens: int, seed: str) -> dict[str, Any]:
    """A numbered list in which ten words stand more often than all others; a solved example stands in front."""
    is_long = num_tokens >= _LONG_LIST
    words = _words("noun", "adjective", "verb")
    question = f"Question: What are the {_NUM_COMMON} most common words in the above list?"
    prefix = f"Answer: The top {_NUM_COMMON} words that appear most often in the list are:"

    def listed(size: int, often: int, seldom: int, name: str) -> tuple[str, list[str]]:
        rng = random.Random(f"{seed}/{name}")
        # `sample` draws otherwise from a certain size on.
        drawn = list(words)
        rng.shuffle(drawn)
        common = drawn[:_NUM_COMMON]
        found = common * often + drawn[_NUM_COMMON:size] * seldom
        rng.shuffle(found)
        task = "Below is a numbered list of words. In these words, some appear more often than others. "
        return f"{task}Memorize the ones that appear most often.\n{_numbered(found)}\n", common

    example, solution = listed(*((40, 10, 3) if is_long else (20, 3, 1)), "example")
    repeats = (30, 3) if is_long else (6, 1)
    solved = f"{example}{question} {prefix} {_numbered(solution)}\n"

    def make(size: int) -> str:
        return solved + listed(size, *repeats, "words")[0]

    context = _longest(make, _NUM_COMMON + 1, tokenizer, num_tokens, len(words))
    # The first words drawn are the same ones for every size.
    return _row(context, question, prefix, listed(_NUM_COMMON + 1, *repeats, "words")[1])


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _frequent_words(tokenizer: PreTrainedTokenizerBase, num_tokens: int, seed: str) -> dict[str, Any]:
    """Coded words whose numbers fall with the square of their rank, the first of them mere dots."""
    rng = random.Random(seed)
    number = max(2 * _NUM_FREQUENT, num_tokens // 50)
    found: dict[str, None] = {"...": None}
    while len(found) < number:
        found["".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))] = None
    ranked = list(found)

    def make(size: int) -> str:
        text = [word for rank, word in enumerate(ranked, start=1) for _ in range(int(size / (_ZETA_OF_2 * rank**2)))]
        random.Random(f"{seed}/{size}").shuffle(text)
        task = "Read the following coded text and track the frequency of each coded word. "
        return f"{task}Find the three most frequently appeared coded words. {' '.join(text)}\n"

    return _row(
        _longest(make, _FEWEST_CODED, tokenizer, num_tokens),
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?",
        "Answer: According to the coded text above, the three most frequently appeared words are:",
        ranked[1 : 1 + _NUM_FREQUENT],
    )


def _documents(
    questions: Sequence[Mapping[str, Any]],
    documents: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    seed: str,
) -> dict[str, Any]:
    """A question's own context among others."""
    rng = random.Random(seed)
    asked = rng.choice(questions)
    # Another document that says an answer would do, too.
    others = [document for document in documents if not any(answer in document for answer in asked["answers"])]
    rng.shuffle(others)

    def make(size: int) -> str:
        taken = [asked["context"], *others[: size - 1]]
        random.Random(f"{seed}/order").shuffle(taken)
        listed = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(taken, start=1))
        return f"{_DOCUMENTS}The following are given documents.\n\n{listed}\n\n"

    context = _longest(make, 1, tokenizer, num_tokens, len(others) + 1)
    # Its own document first, by which questions are drawn together in a bootstrap.
    sources = sorted((text for text in documents if text in context), key=lambda text: text != asked["context"])
    return _row(context, f"{_DOCUMENTS}Question: {asked['question']}", "Answer:", asked["answers"], sources)


def hidden_in_text(
    hidden: Sequence[str],
    avoided: Sequence[str],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    rng: random.Random,
) -> tuple[str, list[str]]:
    """Running text with sentences in it, each at a place of its own, drawn uniformly between two others."""
    room = num_tokens - sum(len(encode(tokenizer, " " + sentence)) for sentence in hidden)
    if room < 1:
        raise ValueError(f"a context of {num_tokens} tokens has no room for {hidden[0]!r} and text around it")
    depths, start = [rng.random() for _ in hidden], rng.random()
    while True:
        sentences, ends, taken = _running_text(avoided, texts, tokenizer, room, start)
        parts, last = [], 0
        for depth, sentence in sorted(zip(depths, hidden, strict=True)):
            place = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * room))
            parts += ["".join(sentences[last:place]).strip(), sentence]
            last = place
        context = " ".join(filter(None, [*parts, "".join(sentences[last:]).strip()]))
        # Joined, the parts may have a token more.
        surplus = len(encode(tokenizer, context)) - num_tokens
        if surplus <= 0:
            return context, [texts[index] for index in sorted(taken)]
        room -= surplus


def _running_text(
    avoided: Sequence[str], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int, start: float
) -> tuple[list[str], list[int], set[int]]:
    """Sentences of so many tokens, the last one cut, the tokens before each place where another could stand, and the
    texts that they are from.
    """
    sentences: list[str] = []
    ends, taken = [0], set()
    for index, sentence in _sentences_from(texts, start):
        if any(words in sentence for words in avoided):
            continue
        taken.add(index)
        ids = encode(tokenizer, sentence)
        left = num_tokens - ends[-1]
        if len(ids) >= left:
            return [*sentences, tokenizer.decode(ids[:left])], ends, taken
        sentences.append(sentence)
        ends.append(ends[-1] + len(ids))
    raise ValueError(f"the texts have {ends[-1]} tokens, and a context of running text takes {num_tokens}")


def _sentences_from(texts: Sequence[str], start: float) -> Iterator[tuple[int, str]]:
    """All sentences, each behind its text's number, from one on that `start` (0 to 1) of all letters stand before."""
    place, index = start * sum(map(len, texts)), 0
    while index < len(texts) - 1 and place >= len(texts[index]):
        place -= len(texts[index])
        index += 1
    # Behind the last text comes the first one, and at the very end what stands before the start.
    for turn in range(len(texts) + 1):
        letters, text = 0, (index + turn) % len(texts)
        for number, sentence in enumerate(split_sentences(texts[text])):
            letters += len(sentence)
            if (turn == 0 and letters < place) or (turn == len(texts) and letters >= place):
                continue
            yield text, "\n\n" + sentence.lstrip() if turn and number == 0 else sentence
