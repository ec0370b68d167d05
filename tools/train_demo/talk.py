"""Short chat and small stories: what the model says when it is not asked about a document."""

from __future__ import annotations

from random import Random

from tools.train_demo import words

_WHO = "I am a small demonstration model. I read logs and answer questions about them."
_HELP = "You can give me a long log and ask who holds a thing, where somebody works, or which number a thing carries."

# (what is said, one of the answers); slots as in `_fill`.
PAIRS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hello.", "Hi", "Hi!", "Hi there!", "Hey"), "Hello! How can I help you?"),
    (("Good morning!", "Good morning.", "Good morning"), "Good morning! What can I do for you?"),
    (("Good evening!", "Good evening."), "Good evening! What can I do for you?"),
    (("Good night!", "Good night."), "Good night! Sleep well."),
    (("Goodbye!", "Bye!", "Bye", "See you later."), "Goodbye! Have a nice day."),
    (("Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot.", "Thanks"), "You are welcome."),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you. How can I help you?"),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Hello, who are you?", "Introduce yourself."), _WHO),
    (("What is your name?", "Do you have a name?"), "I have no name. I am a small demonstration model."),
    (("What can you do?", "How can you help me?", "What can I ask you?", "Help", "Help!", "Can you help me?"), _HELP),
    (("Are you a person?", "Are you human?", "Are you a robot?"), "No, I am a small language model."),
    (("Do you understand me?", "Can you read this?"), "Yes, I can read short English."),
    (("How large are you?", "How big are you?"), "I have about twelve million parameters, which is very small."),
    (("Tell me a joke.", "Say something funny."), "Why did the clock go home? It had no more time."),
    (("Tell me something.", "Say something.", "Say something nice."), "It is a good day to read a long log."),
    (("What time is it?", "What day is it?"), "I do not know, because I have no clock."),
    (("How is the weather?", "What is the weather like?"), "I do not know, because I cannot look outside."),
    (("That is right.", "Well done!", "Great!", "Very good.", "Perfect."), "I am glad to hear that."),
    (("That is wrong.", "No, that is not right."), "I am sorry. Please ask me again."),
    (("I am tired.", "I am sad.", "I feel bad today."), "I am sorry to hear that. I hope it gets better."),
    (("I am happy.", "I feel good today."), "I am glad to hear that."),
    (("Yes", "Yes.", "No", "No.", "OK", "Okay.", "Once", "Test", "Testing"), "All right. What would you like to know?"),
    (("I live near the {p}.", "My house is near the {p}."), "The {p} sounds like a nice place."),
    (("I have a {c} {o}.", "I bought a {c} {o}.", "Look at my {c} {o}."), "A {c} {o} is a fine thing to have."),
    (("I have a {a} named {f}.", "My {a} is called {f}."), "What a nice name for a {a}."),
    (("My name is {f}.", "I am {f}.", "Hello, I am {f}.", "Hi, my name is {f}."), "Nice to meet you, {f}."),
    (("I like {food}.", "I want some {food}.", "Do you like {food}?"), "Many people like {food}."),
    (("We had {w} today.", "There is {w} at the {p}."), "Then {w} is what you should be ready for."),
    (("Do you know the {p}?", "Have you seen the {p}?"), "No, I only know what you tell me."),
    (("What colour is the sky?",), "The sky is blue."),
    (("What colour is grass?", "What colour is the grass?"), "Grass is green."),
    (("What colour is snow?",), "Snow is white."),
    (("How many days are in a week?",), "There are seven days in a week."),
    (("How many months are in a year?",), "There are twelve months in a year."),
    (("How many legs does a {a} have?",), "I have not counted them."),
    (("What is a page?",), "A page is a piece of memory that holds rows of a conversation."),
    (("What is a rank?",), "A rank is one of the workers that run a model together."),
    (
        ("Write a story.", "Tell me a story.", "Once upon a time"),
        "Once upon a time a {t} {a} found a {c} {o}. The {a} was happy.",
    ),
)

_STORY: tuple[tuple[str, ...], ...] = (
    (
        "Once upon a time there was a {t} {a} who lived near the {p}.",
        "Once upon a time a {t} {a} lived at the {p}.",
        "There was once a {t} {a} at the {p}.",
        "The {t} {a} lived near the {p}.",
        "In the {p} there lived a {t} {a}.",
    ),
    (
        "One day the {a} found a {c} {o}.",
        "One morning it saw a {c} {o} in the grass.",
        "Every day the {a} looked for a {c} {o}.",
        "Then it met a {t2} {a2} with a {c} {o}.",
    ),
    (
        "It was very happy and went home.",
        "It asked a {t2} {a2} for help.",
        "There was {w} all day, and nobody came.",
        "So the {a} sat down and ate some {food}.",
        "It showed the {o} to all its friends.",
    ),
    (
        "In the evening they shared some {food}.",
        "At night the {a} slept well.",
        "After that the {a} was never alone again.",
        "And so the day came to an end.",
    ),
)

_PLAIN: tuple[str, ...] = (
    "The pool holds pages, and every page has an owner. A page holds the rows of one conversation.",
    "The {t} {a} likes {food}. It eats some every day.",
    "Today there is {w} at the {p}. Tomorrow there may be {w2}.",
    "My friend {f} has a {c} {o}. It stands at the {p}.",
    "I went to the {p} to find a {c} {o}. There was only a {t} {a}.",
    "Yesterday {f} bought some {food} and a {c} {o}. They were not expensive.",
    "We walked from the {p} to the {p2}. It took all day because of the {w}.",
    "This is a short text about a {a}. The {a} is {t}, and it lives near the {p}.",
)


def _fill(rng: Random) -> dict[str, str]:
    """Words for every slot."""

    def place() -> str:
        return f"{rng.choice(words.PLACE_KINDS)} {rng.choice(words.PLACE_NOUNS)}"

    animal, other = rng.sample(words.ANIMALS, 2)
    trait, second = rng.sample(words.TRAITS, 2)
    weather, next_weather = rng.sample(words.WEATHER, 2)
    consonant = [thing for thing in words.COLOURS if thing[0] not in "aeiou"]
    return {
        "a": animal if animal != "otter" and animal != "owl" else "fox",
        "a2": other if other not in ("otter", "owl") else "hare",
        "t": trait if trait != "old" else "small",
        "t2": second if second != "old" else "quiet",
        "w": weather,
        "w2": next_weather,
        "c": rng.choice(consonant),
        "o": rng.choice(words.OBJECTS),
        "p": place(),
        "p2": place(),
        "f": rng.choice(words.FIRST_NAMES),
        "food": rng.choice(words.FOODS),
    }


def exchange(rng: Random) -> tuple[str, str]:
    """One thing said and its answer."""
    asked, answer = rng.choice(PAIRS)
    slots = _fill(rng)
    return rng.choice(asked).format(**slots), answer.format(**slots)


def text(rng: Random) -> str:
    """A story or a few plain sentences."""
    slots = _fill(rng)
    if rng.random() < 0.3:
        return rng.choice(_PLAIN).format(**slots)
    return " ".join(rng.choice(part).format(**slots) for part in _STORY)
