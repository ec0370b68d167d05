"""Stop strings against a naive search in the whole decoded text, with a byte-level tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoint import random_checkpoint
from tokenizers import Tokenizer

from services.router.stops import SpokenText, StopFinder, StopStrings
from services.router.text import Detokenizer, Texts

TOKENIZER = Tokenizer.from_file(str(random_checkpoint() / "tokenizer.json"))
HOLE = "\ufffd"


def tokens(text: str | bytes) -> list[int]:
    data = text.encode() if isinstance(text, str) else text
    ids = TOKENIZER.encode(data.decode("latin-1"), add_special_tokens=False).ids if data.isascii() else []
    assert not ids or ids == list(data)  # one token a byte, and its id is the byte
    return list(data)


def naive(ids: list[int], stops: list[str]) -> tuple[int, str, str]:
    """By definition, from whole texts: how many tokens make the reply, the stop string (or ""), what is told."""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count]).removesuffix(HOLE)  # bytes at the end may still become a character
        found = sorted((text.index(stop), -len(stop), stop) for stop in stops if stop in text)
        if found:
            start, _, stop = found[0]
            return count, stop, text[:start]
    return len(ids), "", TOKENIZER.decode(ids)


def found(ids: list[int], stops: list[str]) -> tuple[int, str]:
    finder = StopFinder(StopStrings(stops), Detokenizer(TOKENIZER.decode))
    for count, token in enumerate(ids, 1):
        stop = finder.push(token)
        if stop is not None:
            return count, stop
    return len(ids), ""


def told(ids: list[int], stops: list[str], cuts: list[int]) -> list[str]:
    """What a client is told: the pieces of text, the last one at the end of the reply."""
    text, pieces, at, turn = SpokenText(StopStrings(stops), Detokenizer(TOKENIZER.decode)), [], 0, 0
    while at < len(ids):
        step = cuts[turn % len(cuts)]
        pieces.append(text.push(ids[at : at + step]))
        at, turn = at + step, turn + 1
    return [*pieces, text.flush()]


few = st.text(alphabet="ab", max_size=8)
letters = st.one_of(few, st.text(alphabet="aé€😀", max_size=5), st.text(alphabet="ab ", max_size=3))
pieces = st.one_of(
    letters.map(lambda text: list(text.encode())), st.binary(max_size=4).map(list), st.just([300]), st.just([507])
)
replies = st.lists(pieces, max_size=25).map(lambda parts: [token for part in parts for token in part])
strings = st.one_of(st.text(alphabet="ab", min_size=1, max_size=6), st.text(alphabet="aé€😀", min_size=1, max_size=3))
stop_lists = st.lists(strings, min_size=1, max_size=16)


@settings(max_examples=200, deadline=None)
@given(replies, stop_lists, st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_reply_ends_and_is_told_as_a_search_in_its_whole_text_says(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    count, stop, text = naive(ids, stops)
    assert found(ids, stops) == (count, stop)
    pieces = told(ids[:count], stops, cuts)
    assert "".join(pieces) == text
    assert pieces[-1] == "" or not stop


@settings(max_examples=200, deadline=None)
@given(replies, stop_lists)
def test_as_much_is_held_back_as_may_be_the_beginning_of_a_stop_string_and_no_more(ids: list[int], stops: list[str]) -> None:
    count, _, _ = naive(ids, stops)
    text = SpokenText(StopStrings(stops), Detokenizer(TOKENIZER.decode))
    out = ""
    for at, token in enumerate(ids[: count - 1], 1):
        out += text.push([token])
        known = TOKENIZER.decode(ids[:at]).removesuffix(HOLE)
        beginnings = [length for stop in stops for length in range(1, len(stop)) if known.endswith(stop[:length])]
        assert out == known[: len(known) - max(beginnings, default=0)]


@settings(max_examples=100, deadline=None)
@given(replies)
def test_without_stop_strings_everything_is_told(ids: list[int]) -> None:
    assert "".join(told(ids, [], [1])) == TOKENIZER.decode(ids)
    assert found(ids, []) == (len(ids), "")


@pytest.mark.parametrize(
    ("reply", "stops", "count", "stop", "text"),
    [
        ("aaab", ["aab"], 4, "aab", "a"),
        ("ababac", ["abac"], 6, "abac", "ab"),
        ("xaabaabaac", ["aabaac"], 10, "aabaac", "xaab"),
        ("say stop!", ["stop", "op"], 8, "stop", "say "),  # both end there: the one that starts earlier
        ("say stop!", ["op", "stop!"], 8, "op", "say st"),  # the one that is complete first
        ("aé€", ["é"], 3, "é", "a"),
        ("a😀b", ["😀"], 5, "😀", "a"),
        ("abc", ["abcd", "x"], 3, "", "abc"),  # held back until the end
        ("aXbXc", ["X", "X"], 2, "X", "a"),
        ("THE", ["the"], 3, "", "THE"),
    ],
)
def test_examples(reply: str, stops: list[str], count: int, stop: str, text: str) -> None:
    ids = tokens(reply)
    assert naive(ids, stops) == (count, stop, text)
    assert found(ids, stops) == (count, stop)
    for cuts in ([1], [2], [100]):
        assert "".join(told(ids[:count], stops, cuts)) == text


def test_the_earliest_then_the_longest_of_one_token_counts() -> None:
    words = {7: "abcd", 8: "ab"}
    finder = StopFinder(StopStrings(["bc", "abcd", "ab", "abc"]), Detokenizer(lambda ids: "".join(words[i] for i in ids)))
    assert finder.push(7) == "abcd"
    finder = StopFinder(StopStrings(["bab", "abab"]), Detokenizer(lambda ids: "".join(words[i] for i in ids)))
    assert [finder.push(8), finder.push(8)] == [None, "abab"]


def test_nothing_is_told_after_the_stop_string() -> None:
    text = SpokenText(StopStrings(["b"]), Detokenizer(TOKENIZER.decode))
    assert [text.push(tokens("ab")), text.push(tokens("c")), text.flush()] == ["a", "", ""]


def test_a_stop_string_at_the_limit_is_found_across_many_tokens() -> None:
    stop = "é" * 127 + "ab"  # 256 bytes
    ids = list(("é" * 300 + "ab").encode())
    assert found(ids, [stop]) == (602, stop)
    assert "".join(told(ids, [stop], [1])) == "é" * 173


def test_work_a_token_does_not_grow_with_the_reply() -> None:
    """Steps of the automaton and tokens decoded, for the worst of stop strings and for bytes that never become text."""
    steps, longest = 0, 0

    class Counted(StopStrings):
        def step(self, node, char):
            nonlocal steps
            at = node
            while at is not None and char not in at.next:
                steps, at = steps + 1, at.back
            steps += 1
            return super().step(node, char)

    def decode(ids) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return TOKENIZER.decode(list(ids))

    stops = Counted(["a" * n + "b" for n in range(1, 17)] + ["a" * 255 + "c"])
    finder = StopFinder(stops, Detokenizer(decode))
    steps = 0
    reply = [97] * 3000 + [0xC3] * 500 + [0xC3, *[507] * 500] * 2 + [97] * 100
    for token in reply:
        finder.push(token)
    assert steps <= 2 * len(reply)
    assert longest < 64


def test_bytes_that_wait_outlive_tokens_without_text() -> None:
    detokenizer = Detokenizer(TOKENIZER.decode)
    ids = [97, 0xC3, *[507] * 50, 0xA9, 98]
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert text == TOKENIZER.decode(ids) == "aéb"


def test_a_router_with_this_tokenizer_decodes_the_same() -> None:
    texts = Texts(random_checkpoint())
    try:
        assert texts.detokenizer().push(list("é€".encode())) == "é€"
    finally:
        texts.close()
