"""The router's parts by themselves: mailboxes, incremental text, digests, paces, rounds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentpool.errors import DigestMismatchError, EpochError
from latentpool.sampling import Sampling
from latentpool.v1 import pool_manager_pb2, router_pb2
from latentpool.v1 import rank_worker_pb2 as pb
from services.router import digests
from services.router.compose import Composer
from services.router.conversations import Book, Conversation, Phase, Scoring, Times
from services.router.delivery import LIMIT_BYTES, Mailbox, Tokens
from services.router.loop import RoundLoop
from services.router.pace import Pace
from services.router.score_rows import cut
from services.router.text import Detokenizer
from services.router.workers import Workers

# ---- text ---------------------------------------------------------------------------------------------------------


def decode(ids) -> str:
    """A byte-level tokenizer: one token a byte."""
    return bytes(ids).decode("utf-8", errors="replace")


pieces = st.lists(st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=6)), max_size=30).map(b"".join)


@settings(max_examples=300)
@given(pieces, st.lists(st.integers(1, 5), min_size=1))
def test_pieces_of_text_join_to_the_whole(data: bytes, cuts: list[int]) -> None:
    detokenizer, out, at, i = Detokenizer(decode), "", 0, 0
    while at < len(data):
        step = cuts[i % len(cuts)]
        out += detokenizer.push(list(data[at : at + step]))
        at, i = at + step, i + 1
        assert decode(data).startswith(out)
    assert out + detokenizer.flush() == decode(data)


def test_an_incomplete_character_is_held_back() -> None:
    detokenizer = Detokenizer(decode)
    assert [detokenizer.push([b]) for b in "a€b".encode()] == ["a", "", "", "€", "b"]


def test_bytes_that_never_become_text_do_not_slow_a_reply_down() -> None:
    longest = 0

    def measured(ids) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    detokenizer = Detokenizer(measured)
    text = "".join(detokenizer.push([0xC3]) for _ in range(2000))
    assert longest < 64
    assert text + detokenizer.flush() == "\ufffd" * 2000


# ---- mailboxes ----------------------------------------------------------------------------------------------------


async def test_a_mailbox_joins_tokens_and_replaces_progress() -> None:
    mailbox = Mailbox(asyncio.Event())
    for ahead in (2, 1):
        mailbox.put(router_pb2.Waiting(ahead=ahead))
    for done in (64, 128):
        mailbox.put(router_pb2.Filling(tokens_done=done))
    mailbox.put(Tokens(0, [7], 1))
    mailbox.put(Tokens(1, [8], 1))
    mailbox.put(Tokens(2, [9], 0))
    mailbox.put(router_pb2.Completion())
    mailbox.fail(EpochError("late"))
    got = [await mailbox.get() for _ in range(4)]
    assert got[0].ahead == 1
    assert got[1].tokens_done == 128
    assert got[2] == Tokens(0, [7, 8, 9], 2)
    with pytest.raises(EpochError, match="late"):
        await mailbox.get()


async def test_a_full_mailbox_wakes_the_loop_when_drained() -> None:
    wake = asyncio.Event()
    mailbox = Mailbox(wake)
    for i in range(LIMIT_BYTES // 4):
        assert not mailbox.full
        mailbox.put(Tokens(i, [1], 1))
    assert mailbox.full
    await mailbox.get()
    assert wake.is_set()
    assert not mailbox.full


# ---- digests ------------------------------------------------------------------------------------------------------


def _results(table: list[list[int]]) -> list[pb.RoundResult]:
    return [pb.RoundResult(seq=7, results=[pb.OperationResult(digest=d) for d in row]) for row in table]


def test_digests_name_round_operation_and_ranks() -> None:
    round_ = pb.Round(seq=7, operations=[pb.Operation(free=pb.Free()), pb.Operation(prompt=pb.Prompt())])
    digests.compare(round_, _results([[1, 2**64 - 1]] * 3))
    with pytest.raises(DigestMismatchError) as raised:
        digests.compare(round_, _results([[1, 2], [1, 3], [1, 2]]))
    assert str(raised.value) == "round 7, operation 2 (prompt): rank 1 computed other bits than ranks 0, 2"
    with pytest.raises(DigestMismatchError, match=r"operation 1 \(free\): rank 1 computed other bits than rank 0"):
        digests.compare(round_, _results([[1, 2], [4, 2]]))


# ---- rounds -------------------------------------------------------------------------------------------------------


def conversation(id_: int, tokens: int, lane: int, scoring: Scoring | None = None, pages: int = 1000) -> Conversation:
    c = Conversation(
        id=id_, request_id="", tokens=np.arange(tokens, dtype=np.uint32), sampling=Sampling(), seed=1, stops=frozenset(),
        limit=tokens + 100, mailbox=Mailbox(asyncio.Event()), times=Times(0.0), scoring=scoring, lane=lane,
    )  # fmt: skip
    c.admit(0, list(range(pages)), 0.0)
    return c


def kinds(draft) -> list[str]:
    return [operation.WhichOneof("operation") for operation in draft.operations]


def test_frees_come_first_and_prompts_share_the_rows_of_a_round() -> None:
    book, composer = Book(4), Composer(64, 256, 256)
    for lane, tokens in ((1, 100), (2, 300), (3, 50)):
        book.seated[lane] = conversation(lane, tokens, lane)
    draft = composer.compose(book, [conversation(9, 10, 0)])
    assert kinds(draft) == ["free", "bind", "table", "bind", "table", "bind", "table", "prompt", "prompt"]
    first, second = draft.operations[-2].prompt, draft.operations[-1].prompt
    assert (first.lane, len(first.tokens), first.last) == (1, 100, True)
    assert (second.lane, len(second.tokens), second.last) == (2, 128, False)  # two blocks went to the 100 rows


def test_raw_rows_of_a_round_are_limited_by_bytes() -> None:
    vocab = 154_880
    book, composer = Book(40), Composer(64, vocab, 2048)
    for lane in range(40):
        c = book.seated[lane] = conversation(lane, 500, lane, Scoring(100, True))
        if lane >= 20:
            c.advance(100)
            assert c.phase is Phase.DECODING
    draft = composer.compose(book, [])
    rows = sum(len(o.prompt.tokens) for o in draft.operations if o.HasField("prompt"))
    rows += sum(o.decode.rows for o in draft.operations if o.HasField("decode"))
    assert rows == 64
    assert rows * vocab * 4 < 40 << 20


def test_a_conversation_without_pages_sits_out() -> None:
    book, composer = Book(2), Composer(64, 256, 2048)
    dry, other = conversation(0, 128, 0, pages=2), conversation(1, 128, 1, pages=3)
    for c in (dry, other):
        book.seated[c.lane] = c
        c.advance(128)
    draft = composer.compose(book, [])
    assert [list(o.decode.lanes) for o in draft.operations if o.HasField("decode")] == [[1]]
    dry.pages.append(7)
    draft = composer.compose(book, [])
    assert kinds(draft) == ["table", "decode"]
    assert (draft.operations[0].table.first_slot, list(draft.operations[0].table.pages)) == (2, [7])
    assert list(draft.operations[1].decode.lanes) == [0, 1]


def test_a_reply_is_not_run_past_its_end() -> None:
    book, composer = Book(1), Composer(64, 256, 2048)
    c = book.seated[0] = conversation(0, 100, 0)
    c.limit = 103
    drafts = [composer.compose(book, []) for _ in range(5)]  # none is answered
    assert [kinds(draft) for draft in drafts] == [["bind", "table", "prompt"], ["decode"], ["decode"], [], []]


def test_replay_forces_known_tokens_in_windows_beside_those_who_decode() -> None:
    book, composer = Book(3), Composer(64, 256, 2048)
    replays, scores, decodes = conversation(1, 70, 0), conversation(2, 80, 1, Scoring(70, False)), conversation(3, 70, 2)
    replays.generated = [11, 12, 13, 14, 15, 16, 17]
    replays.lane = 0
    replays.come_back()
    replays.admit(0, list(range(9)), 0.0)
    replays.lane = 0
    for lane, c in enumerate((replays, scores, decodes)):
        book.seated[lane] = c
    composer.compose(book, [])
    rounds = []
    for _ in range(3):
        draft = composer.compose(book, [])
        rounds.append([(list(op.decode.lanes), op.decode.rows, list(op.decode.forced)) for op in draft.operations])
    assert rounds == [
        [([2], 1, []), ([0], 4, [11, 12, 13, 14]), ([1], 4, [70, 71, 72, 73])],
        [([2], 1, []), ([0], 2, [15, 16]), ([1], 4, [74, 75, 76, 77])],
        [([0, 2], 1, []), ([1], 2, [78, 79])],
    ]


def test_windows_alike_are_one_operation_and_log_probs_the_most_that_are_wanted() -> None:
    book, composer = Book(8), Composer(64, 256, 2048)
    for lane in range(4):
        c = book.seated[lane] = conversation(lane, 70, lane)
        c.sampling = Sampling(log_probs=(None, 0, 3, None)[lane])
    for lane in range(4, 8):
        book.seated[lane] = conversation(lane, 80, lane, Scoring(70, False))
    composer.compose(book, [])
    replies, scores = (op.decode for op in composer.compose(book, []).operations)
    assert (list(replies.lanes), replies.log_probs) == ([0, 1, 2, 3], 4)
    assert (list(scores.lanes), list(scores.following), len(scores.forced)) == ([4, 5, 6, 7], [74] * 4, 16)


def test_the_foreground_fills_first() -> None:
    book, composer = Book(3), Composer(64, 256, 128)
    for lane, id_, background in ((0, 1, True), (1, 3, False), (2, 2, False)):
        c = book.seated[lane] = conversation(id_, 64, lane)
        c.background = background
    draft = composer.compose(book, [])
    assert [op.prompt.lane for op in draft.operations if op.HasField("prompt")] == [2, 1]


def test_the_queue_serves_foreground_first_and_returning_ones_at_the_head_of_their_class() -> None:
    book = Book(1)
    for id_, background, parked in ((5, False, 0), (3, True, 0), (2, True, 1), (6, False, 0), (4, False, 1), (1, True, 0)):
        c = conversation(id_, 10, -1)
        c.background, c.parked = background, parked
        book.enqueue(c)
    assert [c.id for c in book.queue] == [4, 5, 6, 2, 1, 3]


def test_chunks_shrink_to_the_gap_while_others_decode() -> None:
    pace = Pace(2048)
    assert pace.rows(others_decode=True) == 2048
    pace.learn(32, False, 2.048)
    assert pace.rows(others_decode=True) == 128  # 150 ms at 1 ms a row, whole blocks
    pace.learn(0, True, 0.05)
    assert pace.rows(others_decode=True) == 64  # decoding takes 50 ms of the gap
    assert pace.rows(others_decode=False) == 2048
    pace.learn(1, True, 64.0)
    assert pace.rows(others_decode=True) == 64
    for _ in range(200):
        pace.learn(2, True, 0.05 + 0.0128)
    assert pace.rows(others_decode=True) == 960  # 100 ms at 0.1 ms a row: the slow round is forgotten little by little


def test_rows_are_cut_out_of_scores() -> None:
    scores = pb.Scores(max=np.arange(6, dtype="<f4").tobytes(), sum=np.arange(6, dtype="<f8").tobytes(), raw=bytes(range(60)))
    part = cut(scores, 2, 3, 6)
    assert np.frombuffer(part.max, "<f4").tolist() == [2, 3, 4]
    assert np.frombuffer(part.sum, "<f8").tolist() == [2, 3, 4]
    assert part.raw == bytes(range(20, 50))
    assert not part.best
    with pytest.raises(EpochError, match=r"60 bytes of scores \(raw\), which are not 7 rows"):
        cut(pb.Scores(raw=bytes(60)), 2, 3, 7)


# ---- the manager's answers --------------------------------------------------------------------------------------------


class Told:
    """A session that keeps what it is told."""

    def __init__(self) -> None:
        self.finished: list[tuple[int, int]] = []
        self.admitted: list[tuple[int, int, bool]] = []

    def finish(self, conversation: int, fence_seq: int) -> None:
        self.finished.append((conversation, fence_seq))

    def admit(self, conversation: int, _lane: int, prompt_tokens: int, *_rest, returning: bool, **_more) -> int:
        self.admitted.append((conversation, prompt_tokens, returning))
        return len(self.admitted)


async def test_answers_from_before_parking_do_not_concern_who_waits_again() -> None:
    told = Told()
    loop = RoundLoop(told, Workers([], 1.0), Composer(64, 256, 64), Book(1), 256, 64, 2048)
    c = conversation(7, 100, -1)
    c.come_back()
    loop.submit(c)
    grant = pool_manager_pb2.Grant(conversation=7, pages=[5], first_slot=3)
    loop.on_answer(pool_manager_pb2.SessionResponse(extended=pool_manager_pb2.Extended(grants=[grant], park=[7])))
    assert (c.phase, c.pages, told.finished) == (Phase.WAITING, [], [])
    admitted = pool_manager_pb2.Admitted(pages=[1, 2, 3])
    loop.on_answer(pool_manager_pb2.SessionResponse(key=1, admitted=admitted))
    assert (c.phase, c.pages) == (Phase.FILLING, [1, 2, 3])


async def test_parking_frees_the_lane_once_and_the_fence_is_the_round_that_frees_it() -> None:
    told = Told()
    loop = RoundLoop(told, Workers([], 1.0), Composer(64, 256, 64), Book(1), 256, 64, 2048)
    c = conversation(7, 100, -1)
    c.phase, c.parked = Phase.WAITING, 1
    loop.submit(c)
    loop.on_answer(pool_manager_pb2.SessionResponse(key=1, admitted=pool_manager_pb2.Admitted(pages=[1, 2, 3])))
    await loop.send(loop.compose())
    parking = pool_manager_pb2.SessionResponse(extended=pool_manager_pb2.Extended(park=[7]))
    loop.on_answer(parking)
    loop.on_answer(parking)
    draft = loop.compose()
    assert kinds(draft) == ["free"]
    assert (told.finished, loop.counters.parked) == ([(7, 2)], 1)
    await loop.send(draft)
    c.generated = [1, 2, 3]  # what was in flight may still come
    loop._vacated(c)
    loop.admit()
    assert told.admitted == [(7, 100, True), (7, 103, True)]
    loop.leave(c)
    loop.leave(c)
    assert told.finished == [(7, 2), (7, 2)]
    assert loop.book.lane_free


async def test_one_that_is_parked_before_its_first_round_is_back_at_once() -> None:
    told = Told()
    loop = RoundLoop(told, Workers([], 1.0), Composer(64, 256, 64), Book(1), 256, 64, 2048)
    c = conversation(7, 100, -1)
    c.phase = Phase.WAITING
    loop.submit(c)
    loop.on_answer(pool_manager_pb2.SessionResponse(key=1, admitted=pool_manager_pb2.Admitted(pages=[1, 2, 3])))
    loop.on_answer(pool_manager_pb2.SessionResponse(extended=pool_manager_pb2.Extended(park=[7])))
    assert (c.phase, loop.book.queue, told.finished) == (Phase.WAITING, [c], [(7, 0)])
    loop.admit()
    assert told.admitted == [(7, 100, False), (7, 100, True)]
