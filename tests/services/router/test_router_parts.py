"""The router's parts by themselves: mailboxes, incremental text, digests, paces, rounds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentpool.errors import DigestMismatchError, EpochError
from latentpool.sampling import Sampling
from latentpool.v1 import rank_worker_pb2 as pb
from latentpool.v1 import router_pb2
from services.router import digests
from services.router.compose import Composer, Pace
from services.router.conversations import Book, Conversation, Phase, Scoring, Times
from services.router.delivery import LIMIT_BYTES, Mailbox, Tokens
from services.router.text import Detokenizer

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
    draft = composer.compose(book, [0])
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


def test_chunks_shrink_to_the_gap_while_others_decode() -> None:
    pace = Pace(2048)
    assert pace.rows(others_decode=True) == 2048
    pace.learn(2048, 2.048)
    assert pace.rows(others_decode=True) == 128  # 150 ms at 1 ms a row, whole blocks
    assert pace.rows(others_decode=False) == 2048
    pace.learn(64, 64.0)
    assert pace.rows(others_decode=True) == 64
