"""Facts, questions about them and distracting lines, as templates; `World` draws those of one document.

A fact's value stands after its key in the line, so that the value's position can know the key (attention is causal). Values
and keys are never a line's first word, so that a word has the same tokens wherever it stands. A template's slots: c colour, o
object, os objects, p place, f and l a person's names, n a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from tools.train_demo import words

Slots = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fact: which slots are its key and which its value; how lines say it; questions with their answers."""

    name: str
    key: tuple[str, ...]
    value: tuple[str, ...]
    share: float
    lines: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


HOLDER = Kind(
    "holder",
    ("c", "o", "p"),
    ("f", "l"),
    0.5,
    (
        "the {c} {o} at the {p} is held by {f} {l}.",
        "at the {p} the {c} {o} is kept by {f} {l}.",
        "the {c} {o} of the {p} was given to {f} {l}.",
        "from the {p} the {c} {o} went to {f} {l}.",
        "note: {c} {o} at the {p}, holder {f} {l}.",
    ),
    (
        ("Who holds the {c} {o} at the {p}?", "It is held by {f} {l}."),
        ("Who has the {c} {o} at the {p}?", "That is {f} {l}."),
        ("Who keeps the {c} {o} of the {p}?", "It is kept by {f} {l}."),
        ("Who was given the {c} {o} from the {p}?", "It was given to {f} {l}."),
        ("At the {p}, who has the {c} {o} now?", "It is with {f} {l}."),
        ("Please tell me who holds the {c} {o} at the {p}.", "The {c} {o} is held by {f} {l}."),
        ("Can you find out who has the {c} {o} at the {p}?", "Yes, it is with {f} {l}."),
        ("I am looking for the {c} {o} at the {p}. Who has it?", "You can ask {f} {l}."),
    ),
)
NUMBER = Kind(
    "number",
    ("c", "o", "p"),
    ("n",),
    0.2,
    (
        "the {c} {o} at the {p} carries the number {n}.",
        "at the {p} the {c} {o} is marked {n}.",
        "label for the {c} {o} of the {p}: {n}.",
    ),
    (
        ("What number does the {c} {o} at the {p} carry?", "It carries the number {n}."),
        ("Which number is on the {c} {o} at the {p}?", "The number is {n}."),
        ("How is the {c} {o} of the {p} marked?", "It is marked {n}."),
    ),
)
DUTY = Kind(
    "duty",
    ("f", "l"),
    ("p",),
    0.18,
    (
        "today {f} {l} is on duty at the {p}.",
        "watch: {f} {l} works at the {p}.",
        "this week {f} {l} is posted to the {p}.",
    ),
    (
        ("Where is {f} {l} on duty?", "On duty at the {p}."),
        ("Where can I find {f} {l}?", "You can look at the {p}."),
        ("Where does {f} {l} work?", "The place is the {p}."),
    ),
)
STOCK = Kind(
    "stock",
    ("os", "p"),
    ("n",),
    0.12,
    (
        "stock of {os} in the {p}: {n}.",
        "we counted the {os} in the {p} and found {n}.",
        "for {os} the {p} reports {n}.",
    ),
    (
        ("How many {os} are in the {p}?", "There are {n}."),
        ("What is the stock of {os} in the {p}?", "The stock is {n}."),
        ("How many {os} does the {p} have?", "It has {n} {os}."),
    ),
)
KINDS = (HOLDER, NUMBER, DUTY, STOCK)

DISTRACTORS = (
    "{m} {d} reports {d2} degrees.",
    "all is quiet at the {p}.",
    "the {c} {o} at the {p} was cleaned.",
    "somebody moved the {c} {o} near the {p}.",
    "a new {o} has arrived.",
    "{f} {l} walked past the {p}.",
    "{f} {l} asked about the {c} {o}.",
    "{w} over the {p}.",
    "the {p} was closed for {d} minutes.",
    "no news about the {os}.",
    "heartbeat {d} {d2} {d3}.",
    "{m} {d} at the {p} was switched off.",
    "the {c} paint for the {o} is dry.",
    "{f} wrote to {l} about the {p}.",
)

INTROS = (
    "Here is the log.",
    "This is the log of the day.",
    "Read this log, please.",
    "Here are some notes.",
    "Please read these notes and answer my question.",
    "The report follows.",
)
MORE = ("Here is more of the log.", "The log goes on.", "There are new lines.", "More notes follow.")


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a document: its kind and what fills its slots."""

    kind: Kind
    slots: Slots


INVENTED = 0.1
"""The part of a document's words that no list holds, so that any word may be a name or a thing."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def invented(rng: Random) -> str:
    """A word of two or three syllables, in lower case."""
    word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randrange(2, 4)))
    return word + rng.choice(_CONSONANTS)


def number(rng: Random, digits: int) -> str:
    """A decimal number of an even count of digits, without a leading zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


@dataclass(slots=True)
class World:
    """The words one document draws from. Few colours, and about sqrt(lines) objects, places and names each: many facts
    differ in one word only, and no two facts of a kind have equal keys."""

    rng: Random
    colours: list[str]
    objects: list[str]
    places: list[str]
    firsts: list[str]
    lasts: list[str]
    taken: set[tuple[str, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, rng: Random, lines: int, unknown: float = INVENTED) -> World:
        """A world for a document of about that many lines. `unknown`: the part of its words that are invented."""
        many = max(5, round(lines**0.5))
        places = [f"{kind} {noun}" for kind in words.PLACE_KINDS for noun in words.PLACE_NOUNS]

        def draw(known: list[str], form: str) -> list[str]:
            drawn = rng.sample(known, min(many, len(known)))
            return [form.format(invented(rng)) if rng.random() < unknown else word for word in drawn]

        return cls(
            rng,
            rng.sample(words.COLOURS, 8),
            draw(words.OBJECTS, "{}"),
            draw(places, rng.choice(words.PLACE_KINDS) + " {}"),
            [name.capitalize() for name in draw(words.FIRST_NAMES, "{}")],
            [name.capitalize() for name in draw(words.LAST_NAMES, "{}")],
        )

    def draw(self) -> dict[str, str]:
        """Words for every slot."""
        pick = self.rng.choice
        thing = pick(self.objects)
        return {
            "c": pick(self.colours),
            "o": thing,
            "os": thing + ("es" if thing.endswith(("s", "sh", "ch", "x")) else "s"),
            "p": pick(self.places),
            "f": pick(self.firsts),
            "l": pick(self.lasts),
        }

    def fact(self) -> Fact:
        """A fact whose key no fact of this document has."""
        kind = self.rng.choices(KINDS, [kind.share for kind in KINDS])[0]
        while True:
            slots = self.draw()
            key = (kind.name, *(slots[name] for name in kind.key))
            if key not in self.taken:
                self.taken.add(key)
                return Fact(kind, slots | {"n": number(self.rng, 2 if kind is STOCK else 4)})
            self._widen()

    def _widen(self) -> None:
        """One more name, so that a world that has run out of keys finds another."""
        self.lasts.append(self.rng.choice(words.LAST_NAMES))
        self.places.append(f"{self.rng.choice(words.PLACE_KINDS)} {self.rng.choice(words.PLACE_NOUNS)}")

    def distractor(self) -> tuple[str, Slots]:
        """A line that answers no question: its template and slots."""
        slots = self.draw()
        slots["m"] = self.rng.choice(words.MACHINES)
        slots["w"] = self.rng.choice(words.WEATHER)
        for name in ("d", "d2", "d3"):
            slots[name] = str(self.rng.randrange(10, 100))
        return self.rng.choice(DISTRACTORS), slots
