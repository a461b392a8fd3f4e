# SPDX-License-Identifier: Apache-2.0
"""Generated documents: plain-English records with questions whose answers stand in the text.

Real text needs hours of training before two compressors can be told apart; these documents need minutes. Each one
is a biography register, an inventory, a timetable or a ledger, made from a seed alone. Every value is unique inside
its document, so that a question has one answer, and names and values of the test split never occur in training.
They are a benchmark of their own, beside real text, never in its place.
"""

# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

KINDS = ("biography", "inventory", "timetable", "ledger")
SPLITS = ("train", "test")
MIN_TOKENS, MAX_TOKENS = 32, 4096
_TEST_SHARE = 5  # one name or value in five belongs to the test split

_ONSETS = "b br d dr f g gr h k kl l m n p pr r s st t tr v z".split()
_VOWELS = "a e i o u ai ei ou".split()
_CODAS = "l m n r s t k nd rn lt sk".split()
_TOWN_ENDINGS = "by dal ford haven holm mark stad stead ton vik".split()
_JOBS = (
    "actor archer artist astronomer auctioneer baker banker barber beekeeper blacksmith bookbinder botanist "
    "brewer broker builder butcher candle-maker carpenter carter cashier cheese-maker chemist clerk clock-maker "
    "coachman cobbler composer conductor cook cooper courier critic curator dairyman dancer dealer decorator "
    "dentist designer detective diver doctor draper driver dyer editor engineer engraver falconer farmer ferryman "
    "fiddler fisher forester gardener gilder glazier glover goldsmith grocer groom guard guide hatter herald "
    "herbalist historian hunter innkeeper inspector interpreter ironmonger jeweller jockey joiner journalist "
    "judge juggler knitter labourer lamplighter landlord lawyer librarian linguist locksmith mason merchant "
    "messenger midwife miller miner minister musician navigator notary nurse organist painter perfumer pharmacist "
    "philosopher physician pilot piper plumber poet porter postman potter priest printer professor publisher "
    "ranger reporter roofer rope-maker saddler sailmaker sailor scholar scribe sculptor secretary servant "
    "shepherd sheriff singer smith soldier stonecutter surgeon surveyor swordsmith tailor tanner tax-collector "
    "teacher thatcher tiler tinker trader translator treasurer trumpeter tutor typist upholsterer vet vintner "
    "waiter warden watchman weaver welder whaler winemaker woodcutter writer"
).split()
_THINGS = (
    "anchors apples apricots arrows axes bags balls banners baskets batteries beads beans bells belts benches "
    "berries bibles bikes blankets bolts bonnets books boots bottles bowls bowties bracelets branches bricks "
    "brooches brooms brushes buckets bulbs bundles buttons cables cakes cameras candles cannons canoes cards "
    "carpets carrots carts chains chairs cherries chisels cigars clips clocks cloths coats coins collars combs "
    "compasses cookies corks cots cradles crayons crowns crutches cubes cups curtains cushions daggers desks dice "
    "dishes dolls doors drills drums earrings easels eggs engines envelopes erasers fans feathers fences fiddles "
    "figs files flags flasks flowers flutes forks frames funnels garlands gates gems globes gloves goblets grapes "
    "grinders guitars hammers handles harps hatchets hats helmets herbs hinges hoes hooks hoops horns hoses inks "
    "jackets jars jewels jugs kettles keys kites knives knobs laces ladders ladles lamps lanterns leaves lemons "
    "lenses letters levers lids lockets locks logs looms magnets mallets maps marbles masks matches mats medals "
    "melons mirrors mittens mops mortars mugs muskets nails napkins necklaces needles nets nuts oars onions "
    "oranges organs ovens paddles paints pans papers parcels peaches pearls pebbles pencils pens peppers pianos "
    "pillows pins pipes pistons pitchers planks plates plums posters pots pouches pumps puppets purses puzzles "
    "quilts racks radios rakes razors ribbons ribs rifles rings robes rods rollers ropes rugs rulers sacks "
    "saddles sails saws scales scarves screws scrolls seeds shawls shells shelves shields shirts shoes shovels "
    "signs skates skirts sledges slippers soaps socks sofas spades spears sponges spoons springs stamps statues "
    "sticks stools stoves straps strings swords tables tanks tapes tassels teapots tents thimbles threads tiles "
    "timers tongs torches towels toys traps trays trumpets tubes turnips umbrellas vases veils violins wagons "
    "walnuts wands washers watches wheels whips whistles wicks wigs wires yarns zippers"
).split()
_ANIMALS = (
    "ant antelope ape badger bat bear beaver bee beetle bison boar bull butterfly camel canary cat cheetah "
    "chicken cobra cod cow crab cricket crow cuckoo deer dog dolphin donkey dove dragonfly duck eagle eel "
    "elephant elk falcon ferret finch flamingo fly fox frog gazelle gecko giraffe goat goose gull hamster hare "
    "hawk hedgehog hen heron hornet horse hyena ibex iguana jackal jay kitten koala lamb lark leopard lion lizard "
    "llama lobster lynx magpie marten mole monkey moose moth mouse mule newt nightingale octopus oriole ostrich "
    "otter owl ox panda panther parrot partridge peacock pelican penguin pheasant pig pigeon plover pony puma "
    "puppy quail rabbit ram rat raven robin rooster salmon seal shark sheep shrew skunk sloth snail snake sparrow "
    "spider squid squirrel stork swallow swan swift tiger toad trout turkey turtle viper vulture walrus wasp "
    "weasel whale wolf wombat wren yak zebra"
).split()
_MATERIALS = "brass bronze clay copper glass iron leather oak paper pine silver steel stone tin wicker wooden".split()
_COLOURS = "black blue brown cream green grey pink purple red silver tan violet white yellow".split()
_CONTAINERS = "barrel basket box bin cabinet case chest crate drawer trunk".split()
_MONTHS = "January February March April May June July August September October November December".split()


@dataclass(frozen=True)
class GeneratedQuestion:
    """A question, its one answer (which stands in the document word for word), and the number of facts it joins."""

    question: str
    answer: str
    hops: int


@dataclass(frozen=True)
class GeneratedDocument:
    """A document and every question that it answers."""

    text: str
    questions: tuple[GeneratedQuestion, ...]
    kind: str
    split: str
    seed: int


@dataclass
class _Record:
    """Sentences that belong together, and questions with the sentences each one needs."""

    sentences: dict[str, str]
    questions: list[tuple[tuple[str, ...], GeneratedQuestion]] = field(default_factory=list)

    def ask(self, needs: tuple[str, ...], question: str, answer: str) -> None:
        self.questions.append((needs, GeneratedQuestion(question, answer, len(needs))))


class _Vocabulary:
    """Draws names and values of one split, each at most once in a document."""

    def __init__(self, rng: random.Random, split: str):
        self.rng = rng
        self.split = split
        self.used: set[str] = set()

    def value(self, draw: Callable[[], str]) -> str:
        """A value of this split; it may come twice in a document, so it can only be an answer."""
        while split_of(value := draw()) != self.split:
            pass
        return value

    def unique(self, draw: Callable[[], str]) -> str:
        """A value of this split that the document has not used: a question can point at it."""
        for _ in range(1000):
            value = self.value(draw)
            if value not in self.used:
                self.used.add(value)
                return value
        raise ValueError("a document of this length needs more distinct values than the generator has")

    def _syllables(self, *counts: int) -> str:
        choose = self.rng.choice
        return "".join(choose(_ONSETS) + choose(_VOWELS) for _ in range(choose(counts)))

    def person(self) -> str:
        """First and last name, each of this split, so that not even a part of a test name is seen in training."""
        choose = self.rng.choice
        first = self.value(lambda: (self._syllables(1, 2) + choose(_CODAS)).capitalize())
        last = self.value(lambda: (self._syllables(1) + choose(_CODAS) + choose(("", "er", "en", "i"))).capitalize())
        return f"{first} {last}"

    def unique_person(self) -> str:
        for _ in range(1000):
            if (person := self.person()) not in self.used:
                self.used.add(person)
                return person
        raise ValueError("a document of this length needs more distinct names than the generator has")

    def town(self) -> str:
        return self.unique(lambda: (self._syllables(1, 2) + self.rng.choice(_TOWN_ENDINGS)).capitalize())

    def pet(self) -> str:
        return self.unique(lambda: (self._syllables(1) + self.rng.choice(_CODAS)).capitalize())

    def number(self, low: int, high: int) -> str:
        return self.unique(lambda: str(self.rng.randint(low, high)))

    def amount(self, low: int, high: int) -> str:
        return self.value(lambda: str(self.rng.randint(low, high)))

    def time(self) -> str:
        return self.value(lambda: f"{self.rng.randint(0, 23):02d}:{self.rng.randint(0, 59):02d}")

    def date(self) -> str:
        return self.value(lambda: f"{self.rng.randint(1, 28)} {self.rng.choice(_MONTHS)}")

    def word(self, words: list[str]) -> str:
        return self.value(lambda: self.rng.choice(words))

    def either(self, *templates: str) -> str:
        return self.rng.choice(templates)


def split_of(value: str) -> str:
    """The split ("train" or "test") that a name or value belongs to, by its checksum."""
    return "test" if zlib.crc32(value.encode()) % _TEST_SHARE == 0 else "train"


def _biographies(draw: _Vocabulary) -> Iterator[_Record]:
    teacher: tuple[str, str, str] | None = None
    while True:
        person, town, home, year = draw.unique_person(), draw.town(), draw.town(), draw.amount(1700, 1999)
        job, animal, pet = draw.word(_JOBS), draw.word(_ANIMALS), draw.pet()
        key = person
        record = _Record(
            {
                f"{key}/born": draw.either("{p} was born in {v}.", "{v} is where {p} was born.").format(
                    p=person, v=town
                ),
                f"{key}/year": f"{person} came into the world in {year}.",
                f"{key}/job": draw.either("{p} works as a {v}.", "By trade {p} is a {v}.").format(p=person, v=job),
                f"{key}/home": draw.either("{p} lives in {v}.", "The home of {p} is in {v}.").format(p=person, v=home),
                f"{key}/pet": f"{person} keeps a {animal} named {pet}.",
            }
        )
        record.ask(
            (f"{key}/born",), draw.either("Where was {p} born?", "In which town was {p} born?").format(p=person), town
        )
        record.ask((f"{key}/year",), f"In which year did {person} come into the world?", year)
        record.ask(
            (f"{key}/job",), draw.either("What does {p} work as?", "What is the trade of {p}?").format(p=person), job
        )
        record.ask(
            (f"{key}/home",), draw.either("Where does {p} live?", "Where is the home of {p}?").format(p=person), home
        )
        record.ask((f"{key}/pet",), f"What is the name of the animal that {person} keeps?", pet)
        record.ask((f"{key}/pet",), f"Who keeps the {animal} named {pet}?", person)
        record.ask((f"{key}/born", f"{key}/home"), f"Where does the person who was born in {town} live?", home)
        record.ask(
            (f"{key}/pet", f"{key}/job"), f"What is the trade of the person whose {animal} is named {pet}?", job
        )
        if teacher is not None:
            mentor, mentor_town, mentor_key = teacher
            record.sentences[f"{key}/mentor"] = f"{person} learned the trade from {mentor}."
            record.ask((f"{key}/mentor",), f"From whom did {person} learn the trade?", mentor)
            record.ask(
                (f"{key}/mentor", f"{mentor_key}/born"),
                f"Where was the person born from whom {person} learned the trade?",
                mentor_town,
            )
        teacher = (person, town, key)
        yield record


def _inventories(draw: _Vocabulary) -> Iterator[_Record]:
    while True:
        # The number makes the container unique, colour and material make it a phrase worth compressing.
        container = (
            f"{draw.word(_COLOURS)} {draw.word(_MATERIALS)} {draw.rng.choice(_CONTAINERS)} {draw.number(10, 999)}"
        )
        thing, count, owner, room = (
            draw.word(_THINGS),
            draw.amount(2, 9999),
            draw.unique_person(),
            draw.number(100, 9999),
        )
        key = container
        record = _Record(
            {
                f"{key}/content": draw.either("The {c} holds {n} {v}.", "There are {n} {v} in the {c}.").format(
                    c=container, n=count, v=thing
                ),
                f"{key}/owner": draw.either("The {c} belongs to {v}.", "{v} owns the {c}.").format(
                    c=container, v=owner
                ),
                f"{key}/room": f"The {container} stands in room {room}.",
            }
        )
        record.ask((f"{key}/content",), f"How many {thing} are in the {container}?", count)
        record.ask((f"{key}/content",), f"What does the {container} hold?", thing)
        record.ask(
            (f"{key}/owner",),
            draw.either("Who owns the {c}?", "To whom does the {c} belong?").format(c=container),
            owner,
        )
        record.ask((f"{key}/room",), f"In which room does the {container} stand?", room)
        record.ask((f"{key}/room", f"{key}/content"), f"How many {thing} are kept in room {room}?", count)
        record.ask((f"{key}/owner", f"{key}/room"), f"In which room does the property of {owner} stand?", room)
        yield record


def _timetables(draw: _Vocabulary) -> Iterator[_Record]:
    while True:
        kind = draw.rng.choice(("Train", "Ferry", "Bus"))
        vehicle = f"{kind} {draw.number(100, 9999)}"
        start, end, leaves, arrives = draw.town(), draw.town(), draw.time(), draw.time()
        platform, driver = draw.number(1, 999), draw.unique_person()
        key, noun = vehicle, kind.lower()
        record = _Record(
            {
                f"{key}/start": draw.either("{t} leaves {a} at {v}.", "At {v}, {t} leaves {a}.").format(
                    t=vehicle, a=start, v=leaves
                ),
                f"{key}/end": draw.either("{t} reaches {b} at {v}.", "At {v}, {t} reaches {b}.").format(
                    t=vehicle, b=end, v=arrives
                ),
                f"{key}/platform": f"{vehicle} departs from platform {platform}.",
                f"{key}/driver": draw.either("The driver of {t} is {v}.", "{v} drives {t}.").format(
                    t=vehicle, v=driver
                ),
            }
        )
        record.ask((f"{key}/start",), f"When does {vehicle} leave?", leaves)
        record.ask((f"{key}/start",), f"Which town does {vehicle} leave?", start)
        record.ask((f"{key}/end",), f"Which town does {vehicle} reach?", end)
        record.ask((f"{key}/end",), f"When does {vehicle} arrive?", arrives)
        record.ask((f"{key}/platform",), f"From which platform does {vehicle} depart?", platform)
        record.ask(
            (f"{key}/driver",), draw.either("Who drives {t}?", "Who is the driver of {t}?").format(t=vehicle), driver
        )
        record.ask(
            (f"{key}/platform", f"{key}/start"), f"When does the {noun} from platform {platform} leave?", leaves
        )
        record.ask((f"{key}/driver", f"{key}/end"), f"Which town does the {noun} driven by {driver} reach?", end)
        yield record


def _ledgers(draw: _Vocabulary) -> Iterator[_Record]:
    while True:
        buyer, seller, thing = draw.unique_person(), draw.unique_person(), draw.word(_THINGS)
        amount, day, receipt = draw.amount(11, 9999), draw.date(), draw.number(1000, 9999)
        key = f"{buyer}/{thing}"
        record = _Record(
            {
                f"{key}/amount": draw.either("{b} paid {v} crowns for {t}.", "For {t}, {b} paid {v} crowns.").format(
                    b=buyer, t=thing, v=amount
                ),
                f"{key}/seller": draw.either("{b} bought {t} from {v}.", "{v} sold {t} to {b}.").format(
                    b=buyer, t=thing, v=seller
                ),
                f"{key}/date": f"On {day}, {buyer} signed receipt {receipt}.",
            }
        )
        record.ask((f"{key}/amount",), f"How many crowns did {buyer} pay for {thing}?", amount)
        record.ask((f"{key}/amount",), f"What did {buyer} pay {amount} crowns for?", thing)
        record.ask((f"{key}/seller",), f"From whom did {buyer} buy {thing}?", seller)
        record.ask((f"{key}/date",), f"When did {buyer} sign a receipt?", day)
        record.ask((f"{key}/date",), f"Who signed receipt {receipt}?", buyer)
        record.ask(
            (f"{key}/date", f"{key}/amount"), f"How many crowns did the signer of receipt {receipt} pay?", amount
        )
        record.ask(
            (f"{key}/seller", f"{key}/date"), f"When did the person who bought from {seller} sign a receipt?", day
        )
        yield record


_RECORDS = {"biography": _biographies, "inventory": _inventories, "timetable": _timetables, "ledger": _ledgers}


def _fact(key: str) -> str:
    """The kind of fact that a sentence states: the last part of its key."""
    return key.rpartition("/")[2]


def count_words(text: str) -> int:
    """Words and punctuation marks: the length measure where no tokenizer is given."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def generate_document(
    seed: int,
    *,
    num_tokens: int = 128,
    kind: str | None = None,
    split: str = "train",
    count_tokens: Callable[[str], int] = count_words,
    facts_per_record: int | None = None,
) -> GeneratedDocument:
    """Make one document of at most `num_tokens` tokens, filled as far as whole sentences go.

    Args:
        seed: the same seed and arguments give the same document, on every machine.
        num_tokens: length limit in tokens, 32 to 4,096.
        kind: "biography", "inventory", "timetable" or "ledger"; drawn from the seed when `None`.
        split: "train" or "test"; names and values of the two never meet.
        count_tokens: number of tokens of a text, e.g. `lambda text: len(tokenizer(text).input_ids)`.
        facts_per_record: say only so many things about each person, container, vehicle or purchase, the same ones
            about all of them; everything when `None`. A short document then names many, and a question cannot be
            answered without finding the right one.

    Returns:
        The document, with all one-hop and two-hop questions that its sentences answer.

    Raises:
        TypeError: a seed or number that is no int.
        ValueError: a length, kind or split that is not allowed, or a length in which no sentence fits.
    """
    numbers = {"seed": seed, "num_tokens": num_tokens, "facts_per_record": facts_per_record}
    for name, value in numbers.items():
        if name == "facts_per_record" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if not MIN_TOKENS <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"num_tokens must be {MIN_TOKENS} to {MAX_TOKENS}, got {num_tokens}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS} or None, got {kind!r}")
    if facts_per_record is not None and facts_per_record < 1:
        raise ValueError(f"facts_per_record must be at least 1 or None, got {facts_per_record}")
    rng = random.Random(f"{seed}/{split}/{num_tokens}")
    drawn_kind = rng.choice(KINDS)
    kind = kind or drawn_kind

    kept: dict[str, str] = {}
    questions: list[GeneratedQuestion] = []
    total = 0
    facts: set[str] | None = None
    for record in _RECORDS[kind](_Vocabulary(rng, split)):
        order = list(record.sentences)
        rng.shuffle(order)
        if facts_per_record is not None:
            facts = facts or {_fact(key) for key in order[:facts_per_record]}
            order = [key for key in order if _fact(key) in facts]
        full = False
        for key in order:
            length = count_tokens(" " + record.sentences[key])
            full = total + length > num_tokens
            if full:
                break
            kept[key] = record.sentences[key]
            total += length
        questions += [question for needs, question in record.questions if all(need in kept for need in needs)]
        if full:
            break
    if not kept:
        raise ValueError(
            f"no sentence of kind {kind!r} fits into {num_tokens} tokens; try another seed or more tokens"
        )
    rng.shuffle(questions)
    return GeneratedDocument(" ".join(kept.values()), tuple(questions), kind, split, seed)
