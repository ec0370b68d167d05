"""Stop strings: where a reply's text meets one, and what of the text may be told before that is known.

A reply ends at the first token whose text completes a stop string, wherever token and character boundaries lie. Of several
that the same token completes, the one that starts earliest counts, then the longest. The text of a reply is that of
`text.Detokenizer`: a character counts once all its bytes are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.text import Detokenizer


@dataclass(slots=True)
class _Node:
    """A beginning of a stop string. `back` is the longest proper suffix of it that is a beginning too."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    back: _Node | None = None
    ends: str = ""
    """The longest stop string that it ends with, or ""."""


class StopStrings:
    """All stop strings of a request in one automaton (Aho and Corasick, 1975): one step a character, however many there are.
    Immutable; readers keep their own place in it."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.start = _Node(0)
        for stop in stops:
            node = self.start
            for char in stop:
                node = node.next.setdefault(char, _Node(node.depth + 1))
            node.ends = stop
        self._link()

    def __bool__(self) -> bool:
        return bool(self.start.next)

    def step(self, node: _Node, char: str) -> _Node:
        """The longest beginning that the text ends with, after one more character."""
        at: _Node | None = node
        while at is not None:
            if (found := at.next.get(char)) is not None:
                return found
            at = at.back
        return self.start

    def _link(self) -> None:
        """Breadth first: what a node falls back to is shallower, so it is linked before."""
        nodes = deque(self.start.next.values())
        for child in nodes:
            child.back = self.start
        while nodes:
            node = nodes.popleft()
            assert node.back is not None
            node.ends = node.ends or node.back.ends
            for char, child in node.next.items():
                child.back = self.step(node.back, char)
                nodes.append(child)


class SpokenText:
    """A reply's text up to its stop string. What may be the beginning of one is held back until more is known."""

    def __init__(self, stops: StopStrings, detokenizer: Detokenizer) -> None:
        self.found = ""
        """The stop string that ended the text, once it did."""
        self._stops = stops
        self._detokenizer = detokenizer
        self._node = stops.start
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be told after these tokens: nothing of the stop string, and nothing after it. Tokens may come one
        by one or many at once, but none after the one that completed a stop string."""
        piece = self._detokenizer.push(ids)
        if not self._stops:
            return piece
        if self.found:
            return ""
        text = self._held + piece
        node, start = self._node, len(text)
        for end, char in enumerate(piece, len(self._held) + 1):
            node = self._stops.step(node, char)
            if node.ends and end - len(node.ends) <= start:
                start, self.found = end - len(node.ends), node.ends
        if not self.found:
            start -= node.depth
        self._node, self._held = node, text[start:]
        return text[:start]

    def flush(self) -> str:
        """At the end of the reply: what was held back, unless a stop string ended it. Called once."""
        return "" if self.found else self._held + self._detokenizer.flush()


class StopFinder:
    """Tells the round loop with which token a reply ends. Work a token is bounded by its text. A token that ends the reply by
    its id is no text and must not be pushed."""

    def __init__(self, stops: StopStrings, detokenizer: Detokenizer) -> None:
        self._text = SpokenText(stops, detokenizer)

    def push(self, token: int) -> str | None:
        """The stop string that this token completes, or None."""
        self._text.push((token,))
        return self._text.found or None
