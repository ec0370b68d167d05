"""What the loop and the manager tell one another about kept states: every state that is granted is kept or forgotten, once."""

from __future__ import annotations

from latentpool.errors import EpochError
from latentpool.geometry import BLOCK
from latentpool.v1 import pool_manager_pb2 as pb
from services.router.compose import Draft
from services.router.conversations import Conversation
from services.router.counters import Counters
from services.router.kept import Ask, Place, fill_places, places
from services.router.manager import Session
from services.router.workers import Workers


class Keeper:
    """Keeps states of `keep_from` tokens and more; 0: none."""

    def __init__(self, session: Session, workers: Workers, page_rows: int, keep_from: int) -> None:
        self.keep_from = keep_from
        self.forget: list[int] = []
        """States that the next round ends."""
        self._session = session
        self._workers = workers
        self._counters: Counters = workers.counters
        self._page_rows = page_rows
        self._asked: dict[int, tuple[Conversation, Ask]] = {}

    def admitted(self, c: Conversation, admitted: pb.Admitted) -> None:
        """A conversation has pages: perhaps a kept state's, and where it will be kept itself is decided here. Raises EpochError
        where the answer makes no sense."""
        keeping = c.keeping
        if admitted.HasField("resume"):
            cached = admitted.resume.at
            most = c.prompt_rows - (not c.idle)
            if not 0 < cached <= most or cached % BLOCK or cached > len(c.pages) * self._page_rows or c.borrowed:
                raise EpochError(
                    f"the pool manager resumes conversation {c.id} of {c.prompt_rows} prompt tokens at {cached} with "
                    f"{len(c.pages)} pages of its own and {len(c.borrowed)} borrowed ones"
                )
            c.resume_from(admitted.resume, self._page_rows)
        if keeping.blocks is not None and self.keep_from:
            reply = [Place(c.prompt_rows, pb.MARK_REPLY)]
            keeping.wanted = reply if c.idle else fill_places(c.prompt_rows, keeping.rewind, admitted.shared_prefix)
            self._plan(c)

    def sent(self, draft: Draft, seq: int) -> None:
        """What a round does with kept states; it is sent as `seq`."""
        for c in draft.resumed:
            self._session.resumed(c.id, seq)
        for c in draft.asking:
            ask = c.keeping.ask
            assert ask is not None
            self._asked[self._session.ask_keep(c.id, ask.place)] = c, ask
        for _, state in draft.kept:
            self._session.kept(state)
        self._counters.keeps += len(draft.kept)
        if draft.forgotten:
            self._session.forgotten(draft.forgotten, seq)
            self._counters.forgets += len(draft.forgotten)
            self.forget = self.forget[len(draft.forgotten) :]

    def answered(self, key: int, answer: pb.KeepAnswer) -> Conversation | None:
        """Returns the conversation if it still wanted to know. A state for one that left meanwhile is given back."""
        c, ask = self._asked.pop(key)
        if c.keeping.ask is not ask:
            self._give_back(answer.state)
            return None
        if answer.state:
            ask.state, ask.pages = answer.state, list(answer.pages)
        else:
            c.keeping.ask = None
            c.keeping.wanted.remove(ask.place)
            self._plan(c)
        return c

    def left(self, c: Conversation) -> None:
        """A conversation leaves its lane. What it was granted and no round keeps is given back."""
        ask, c.keeping.ask = c.keeping.ask, None
        if ask is not None:
            self._give_back(ask.state)

    def _plan(self, c: Conversation) -> None:
        """Where it is kept from here on: what was too near to a place that is refused may be kept now."""
        keeping = c.keeping
        ahead = [place for place in keeping.wanted if place.at > c.sent]
        keeping.places = places(ahead, self.keep_from, keeping.at)

    def _give_back(self, state: int) -> None:
        if state:
            self._session.forgotten([state], self._workers.seq)
