"""The contract of services/rank_worker/exchange/base.py, over every implementation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exchange_ranks import Group, ProcessRank, ThreadRank

from services.rank_worker.exchange.inproc import Hub

AROUND_THE_THRESHOLDS = [1, 7, 4096, 8192, 65536, 131071, 131072, 131073, 1 << 20]
MIB_64 = 64 << 20


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[int, ProcessRank]]:
    """UCX ranks that live through the module, so that most tests also are rebuilds; who dies is replaced."""
    ranks: dict[int, ProcessRank] = {}
    try:
        yield ranks
    finally:
        for rank in ranks.values():
            rank.kill()


@pytest.fixture(params=["inproc", "ucx"])
def group(request: pytest.FixtureRequest, processes: dict[int, ProcessRank]) -> Iterator[Callable[[int], Group]]:
    """group(world) -> a Group over the transport under test, no exchange made yet."""
    made: list[Group] = []

    def make(world: int) -> Group:
        if request.param == "inproc":
            hub = Hub(world)
            made.append(Group([ThreadRank(rank, hub) for rank in range(world)]))
        else:
            for rank in range(world):
                if rank not in processes or not processes[rank].alive:
                    processes[rank] = ProcessRank(rank)
            made.append(Group([processes[rank] for rank in range(world)]))
        return made[-1]

    yield make
    for one in made:
        for member in one.ranks:
            if isinstance(member, ThreadRank):
                member.kill()
                member.end()
            elif member.alive:
                member.reset()


# ---- what travels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [False, True], ids=["broadcast", "each"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sizes_around_every_threshold_arrive_whole(group: Callable[[int], Group], world: int, each: bool) -> None:
    ranks = group(world)
    ranks.connect()
    for size in AROUND_THE_THRESHOLDS:
        ranks.prepare(f"of {size}", (1, size), "uint8", each)
    for parity in (0, 1):
        for size in AROUND_THE_THRESHOLDS:
            assert ranks.exchange(f"of {size}", parity, parity, 1) == []


def test_nothing_travels_for_no_rows_and_for_rows_of_no_bytes(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    ranks.connect()
    ranks.prepare("full", (4, 8))
    ranks.prepare("hollow", (4, 0))
    assert ranks.exchange("full", 0, 0, 0) == []
    assert ranks.exchange("hollow", 0, 0, 4) == []
    assert ranks.one(0, "enqueue", "full", 1, 1, [0, 0], [0, 0]) is None
    assert ranks.one(0, "wait", "full", 1, 0.0) == []


@pytest.mark.parametrize(
    ("world", "each"),
    [(2, False), pytest.param(2, True, marks=pytest.mark.full), pytest.param(3, True, marks=pytest.mark.full)],
)
def test_64_mib_arrive_whole(group: Callable[[int], Group], world: int, each: bool) -> None:
    ranks = group(world)
    ranks.connect()
    ranks.prepare("large", (64, MIB_64 // 64), "uint8", each)
    assert ranks.exchange("large", 0, 0, 64) == []
    if each:
        assert ranks.exchange("large", 1, 1, 63) == []


@pytest.mark.parametrize("rounds", [12, pytest.param(600, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_uneven_counts_on_many_channels_with_waits_out_of_order(group: Callable[[int], Group], world: int, rounds: int) -> None:
    ranks = group(world)
    addresses = ranks.make()
    ranks.prepare("queries", (5, 3, 700), "float32", each=True)
    ranks.prepare("outputs", (9, 4096), "bfloat16", each=True)
    assert ranks.all("connect", addresses, 1, 10.0) == [None] * world
    ranks.prepare("rows", (64, 513), "uint8")
    ranks.prepare("pieces", (3, 100_000), "uint8")
    for number in range(6):
        ranks.prepare(f"small {number}", (4, 2), "float64")
    assert ranks.all("soak", world, rounds, 11 * world + rounds, seconds=90) == [[]] * world


def test_a_prefix_travels_while_the_other_parity_is_in_flight(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    ranks.connect()
    ranks.prepare("rows", (8, 1000), "float32", each=True)
    for parity, rows in ((0, 3), (1, 5)):
        assert ranks.all("enqueue", "rows", parity, parity, [rows] * 2, [rows] * 2) == [None] * 2
    assert ranks.all("wait", "rows", 1, 10.0) == [[]] * 2
    assert ranks.all("enqueue", "rows", 1, 2, [8] * 2, [8] * 2) == [None] * 2
    assert ranks.all("wait", "rows", 0, 10.0) == [[]] * 2
    assert ranks.all("wait", "rows", 1, 10.0) == [[]] * 2


def test_what_was_enqueued_before_a_close_still_arrives(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    ranks.connect()
    ranks.prepare("large", (1, 3 << 20))
    assert ranks.all("enqueue", "large", 0, 0, [1, 1], [1, 1]) == [None] * 2
    ranks.ranks[0].post("close")
    time.sleep(0.2)
    assert ranks.one(1, "wait", "large", 0, 10.0) == []
    assert ranks.answer(0, 10) is None


# ---- what is refused -------------------------------------------------------------------------------------------


def test_refuses_what_a_caller_must_not_do(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    addresses = ranks.make()
    ranks.prepare("rows", (8, 4))
    for arguments, says in (
        (("attempt", "prepare", "rows", (8, 4), "uint8"), "prepared before"),
        (("attempt", "prepare", "objects", (8, 4), "object"), "references"),
        (("attempt", "prepare", "nothing", (), "uint8"), "max rows"),
        (("attempt", "enqueue", ("rows", 0), [0, 1], [1, 0]), "connect before"),
        (("attempt", "wait", ("rows", 0), 1.0), "not in flight"),
        (("attempt", "connect", addresses[:1], 1, 1.0), "with 2 addresses"),
    ):
        kind, message, _ = ranks.one(0, *arguments)
        assert kind == "ValueError"
        assert says in message
    assert ranks.all("connect", addresses, 1, 10.0) == [None] * 2
    for arguments, says in (
        (("enqueue", "rows", 0, 0, [0, 9], [1, 0]), "send of 9 rows, rank 1: allowed are 0 to 8"),
        (("enqueue", "rows", 0, 0, [0, 0], [0, -1]), "recv of -1 rows"),
        (("enqueue", "rows", 0, 0, [0, 0, 0], [0, 0]), "3 send counts for 2 ranks"),
        (("attempt", "connect", addresses, 1, 1.0), "connect, once"),
    ):
        kind, message, _ = ranks.one(0, *arguments)
        assert kind == "ValueError"
        assert says in message
    assert ranks.exchange("rows", 0, 0, 8) == []  # a refusal costs nothing: both sides still agree on the sequence
    assert ranks.all("enqueue", "rows", 0, 1, [8, 8], [8, 8]) == [None] * 2
    kind, message, _ = ranks.one(0, "attempt", "enqueue", ("rows", 0), [8, 8], [8, 8])
    assert (kind, "in flight" in message) == ("ValueError", True)
    assert ranks.all("wait", "rows", 0, 10.0) == [[]] * 2


def test_refuses_arrays_that_are_not_the_link_buffers(group: Callable[[int], Group]) -> None:
    ranks = group(1)
    ranks.connect()
    for name in ("a", "b", "c"):
        ranks.prepare(name, (8, 4))
    ranks.one(0, "replace", "a", "send")
    ranks.one(0, "replace", "b", "recv")
    ranks.one(0, "freeze_recv", "c")
    for name, says in (("a", "were replaced"), ("b", "were replaced"), ("c", "writeable")):
        kind, message, _ = ranks.one(0, "attempt", "enqueue", (name, 0), [0], [0])
        assert kind == "ValueError"
        assert says in message


def test_a_disagreement_on_counts_is_named(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    ranks.connect()
    ranks.prepare("rows", (8, 64))
    ranks.one(0, "enqueue", "rows", 0, 0, [0, 5], [0, 0])
    told = [ranks.one(1, "enqueue", "rows", 0, 0, [0, 0], [4, 0]), ranks.one(1, "attempt", "wait", ("rows", 0), 5.0)]
    kind, message, _ = next(one for one in told if one is not None)
    assert kind == "LinkError"
    assert "expected" in message


def test_a_wait_that_only_sends_lasts_until_the_receiver_has_enqueued(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    ranks.connect()
    ranks.prepare("rows", (8, 64))
    assert ranks.one(0, "enqueue", "rows", 0, 0, [0, 5], [0, 0]) is None
    ranks.ranks[0].post("wait", "rows", 0, 20.0)
    with pytest.raises(TimeoutError):
        ranks.answer(0, 0.3)
    assert ranks.one(1, "enqueue", "rows", 0, 0, [0, 0], [5, 0]) is None
    assert ranks.answer(0, 10) == []
    assert ranks.one(1, "wait", "rows", 0, 10.0) == []


@pytest.mark.parametrize("garbage", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\xff" * 300, b"LPa1" + bytes(160)])
def test_garbage_for_an_address_connects_to_nothing(group: Callable[[int], Group], garbage: bytes) -> None:
    ranks = group(2)
    mine = ranks.make()[0]
    kind, message, blamed = ranks.one(0, "connect", [mine, garbage], 1, 5.0)
    assert (kind, blamed) == ("LinkError", 1)
    assert "link address of rank 1" in message


def test_addresses_in_the_wrong_order_or_damaged_are_named(group: Callable[[int], Group]) -> None:
    ranks = group(3)
    a, b, c = ranks.make()
    damaged = c[:-1] + bytes([c[-1] ^ 1])
    assert ranks.one(0, "connect", [a, c, b], 1, 5.0)[::2] == ("LinkError", 1)
    assert ranks.one(1, "connect", [a, b, damaged], 1, 5.0)[::2] == ("LinkError", 2)


def test_ranks_of_different_epochs_refuse_each_other_in_words(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    addresses = ranks.make()
    for rank, epoch in ((0, 4), (1, 5)):
        ranks.ranks[rank].post("connect", addresses, epoch, 10.0)
    first, second = ranks.answer(0), ranks.answer(1)
    assert first == ("LinkError", "rank 1 belongs to another group: epoch 5 there, 4 here", 1)
    assert second == ("LinkError", "rank 0 belongs to another group: epoch 4 there, 5 here", 0)


def test_a_rank_that_never_connects_is_named_at_the_deadline(group: Callable[[int], Group]) -> None:
    ranks = group(3)
    addresses = ranks.make()
    for rank in (0, 1):
        ranks.ranks[rank].post("connect", addresses, 1, 0.5)
    for rank in (0, 1):
        kind, message, blamed = ranks.answer(rank, 10)
        assert (kind, blamed) == ("LinkError", 2)
        assert "rank 2 did not answer the greeting within 0.5 s" in message


# ---- what fails ------------------------------------------------------------------------------------------------


def waiting_ranks(group: Callable[[int], Group], deadline: float, large: bool = False) -> Group:
    """Three connected ranks; 0 and 1 wait for a block from 2, which has not enqueued."""
    ranks = group(3)
    ranks.connect()
    ranks.prepare("rows", (8, 1 << 20 if large else 64))
    for rank in (0, 1):
        assert ranks.one(rank, "enqueue", "rows", 0, 0, [8] * 3, [8] * 3) is None
        ranks.ranks[rank].post("wait", "rows", 0, deadline)
    time.sleep(0.2)
    return ranks


@pytest.mark.parametrize("how", ["kill", "vanish"])
@pytest.mark.parametrize("large", [False, True], ids=["512B", "8MiB"])
def test_a_peer_that_dies_is_named_long_before_the_deadline(group: Callable[[int], Group], how: str, large: bool) -> None:
    ranks = waiting_ranks(group, 100.0, large)
    getattr(ranks.ranks[2], how)()
    for rank in (0, 1):
        kind, message, blamed = ranks.answer(rank, 20)
        assert (kind, blamed) == ("LinkError", 2)
        assert message.startswith("rank 2 is gone")
    # The link stays broken, in the same words.
    assert ranks.one(0, "enqueue", "rows", 1, 1, [8] * 3, [8] * 3)[::2] == ("LinkError", 2)


def test_a_peer_that_dies_fails_also_who_waits_for_another(group: Callable[[int], Group]) -> None:
    ranks = group(3)
    ranks.connect()
    ranks.prepare("rows", (8, 64))
    assert ranks.one(0, "enqueue", "rows", 0, 0, [0, 8, 0], [0, 8, 0]) is None
    ranks.ranks[0].post("wait", "rows", 0, 100.0)
    ranks.ranks[2].kill()
    assert ranks.answer(0, 20) == ("LinkError", "rank 2 is gone", 2)


@pytest.mark.parametrize("row", [64, 1 << 20], ids=["512B", "8MiB"])
def test_a_silent_peer_is_named_at_the_deadline(group: Callable[[int], Group], row: int) -> None:
    ranks = group(3)
    ranks.connect()
    ranks.prepare("rows", (8, row))
    ranks.ranks[2].stop()
    begun = time.monotonic()
    for rank in (0, 1):
        assert ranks.one(rank, "enqueue", "rows", 0, 0, [8] * 3, [8] * 3) is None
        ranks.ranks[rank].post("wait", "rows", 0, 1.5)
    for rank in (0, 1):
        kind, message, blamed = ranks.answer(rank, 20)
        assert (kind, blamed) == ("LinkError", 2)
        assert "rank 2 was silent on channel rows for 1.5 s" in message
    assert time.monotonic() - begun >= 1.5
    assert ranks.one(0, "abort", seconds=10) is None  # although the peer still does not move
    ranks.ranks[2].go_on()


def test_an_abort_fails_the_others_waits_and_is_named(group: Callable[[int], Group]) -> None:
    ranks = waiting_ranks(group, 100.0)
    assert ranks.one(2, "abort") is None
    # Whichever of 0 and 1 hears it first, both name the rank that it began with.
    for rank in (0, 1):
        assert ranks.answer(rank, 20) == ("LinkError", "rank 2 dropped its links", 2)
    assert ranks.one(2, "enqueue", "rows", 0, 0, [8] * 3, [8] * 3)[0] == "LinkError"
    assert ranks.all("abort") == [None] * 3


def test_an_abort_tells_the_others_whom_it_blames(group: Callable[[int], Group]) -> None:
    ranks = group(3)
    ranks.connect()
    ranks.prepare("rows", (8, 64))
    ranks.ranks[2].stop()
    # Rank 1 loses patience with rank 2 and aborts; rank 0, with more patience, hears of it.
    for rank, deadline in ((0, 100.0), (1, 0.5)):
        assert ranks.one(rank, "enqueue", "rows", 0, 0, [8] * 3, [8] * 3) is None
        ranks.ranks[rank].post("wait", "rows", 0, deadline)
    assert ranks.answer(1, 10)[::2] == ("LinkError", 2)
    assert ranks.one(1, "abort") is None
    assert ranks.answer(0, 10) == ("LinkError", "rank 1 dropped its links because of rank 2", 2)
    ranks.ranks[2].go_on()


def test_a_peer_that_closes_fails_only_who_needs_it(group: Callable[[int], Group]) -> None:
    ranks = group(3)
    ranks.connect()
    ranks.prepare("rows", (8, 64))
    assert ranks.one(2, "close", seconds=10) is None
    pair = [8, 8, 0]
    for round_ in (0, 1):
        assert ranks.one(0, "enqueue", "rows", round_, round_, pair, pair) is None
        ranks.ranks[0].post("wait", "rows", round_, 10.0)
        time.sleep(0.5)  # long enough for rank 0 to have heard the goodbye and thought about it
        assert ranks.one(1, "enqueue", "rows", round_, round_, pair, pair) is None
        assert ranks.answer(0, 10) == []
        assert ranks.one(1, "wait", "rows", round_, 10.0) == []
    assert ranks.one(0, "enqueue", "rows", 0, 2, [8] * 3, [8] * 3) in (
        None,
        ("LinkError", "rank 2 has closed its links", 2),
    )
    assert ranks.one(0, "attempt", "wait", ("rows", 0), 10.0)[0] in ("LinkError", "ValueError")
    assert ranks.one(2, "enqueue", "rows", 0, 0, [8] * 3, [8] * 3)[0] == "LinkError"


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ends_are_idempotent_from_any_state(group: Callable[[int], Group], end: str) -> None:
    ranks = group(2)
    addresses = ranks.make()
    assert ranks.all(end) == [None] * 2
    assert ranks.one(0, "connect", addresses, 1, 1.0)[0] == "LinkError"
    ranks.connect()
    assert ranks.all(end) == [None] * 2
    assert ranks.all("close") == [None] * 2
    assert ranks.all("abort") == [None] * 2


def test_a_new_epoch_after_an_abort_sees_nothing_of_the_old_one(group: Callable[[int], Group]) -> None:
    ranks = group(2)
    for epoch in (1, 2, 3):
        ranks.connect(epoch)
        ranks.prepare("rows", (8, 1 << 17))
        assert ranks.exchange("rows", 0, 10 * epoch, 8) == []
        # Rank 0's block of parity 1 is under way when both abort.
        assert ranks.one(0, "enqueue", "rows", 1, 10 * epoch + 1, [8, 8], [8, 8]) is None
        assert ranks.all("abort") == [None] * 2


@pytest.mark.parametrize("rebuilds", [20, pytest.param(200, marks=pytest.mark.full)])
def test_rebuilds_leave_no_file_thread_or_segment(group: Callable[[int], Group], rebuilds: int) -> None:
    ranks = group(2)
    before: list[list[int]] = []
    # Threads share the files of the test's own process.
    counted = ["threads"] if isinstance(ranks.ranks[0], ThreadRank) else ["open_files", "threads"]
    segments = set(os.listdir("/dev/shm"))
    for epoch in range(rebuilds + 2):
        if epoch == 2:
            before = [ranks.all(what) for what in counted]
        ranks.connect(epoch + 1)
        ranks.prepare("rows", (8, 1 << 17))
        assert ranks.exchange("rows", 0, epoch, 8) == []
        assert ranks.one(epoch % 2, "enqueue", "rows", 1, epoch, [8, 8], [8, 8]) is None
        if epoch % 2:
            assert ranks.one(1 - epoch % 2, "enqueue", "rows", 1, epoch, [8, 8], [8, 8]) is None
            assert ranks.all("close") == [None] * 2
        else:
            assert ranks.all("abort") == [None] * 2
    assert [ranks.all(what) for what in counted] == before
    assert set(os.listdir("/dev/shm")) == segments


# ---- what is UCX's own -----------------------------------------------------------------------------------------


def test_buffers_in_use_at_an_abort_are_never_freed() -> None:
    ranks = Group([ProcessRank(rank) for rank in range(2)])
    try:
        ranks.connect()
        ranks.prepare("rows", (8, 64))
        assert ranks.exchange("rows", 0, 0, 8) == []
        before = ranks.one(0, "abandoned", "rows")
        assert ranks.one(0, "enqueue", "rows", 1, 1, [8, 8], [8, 8]) is None
        assert ranks.all("abort") == [None] * 2
        assert (before, ranks.one(0, "abandoned", "rows")) == ([False, False], [False, True])
    finally:
        for rank in ranks.ranks:
            rank.kill()


def test_settings_are_ours_unless_the_user_has_his_own() -> None:
    ranks = Group([ProcessRank(rank, {"UCX_TLS": "tcp,self"}) for rank in range(2)])
    try:
        ranks.connect()
        ranks.prepare("rows", (8, 1 << 17))
        assert ranks.exchange("rows", 0, 0, 8) == []
        assert ranks.all("environment", "UCX_TLS") == ["tcp,self"] * 2
        assert ranks.all("environment", "UCX_MM_ERROR_HANDLING") == ["y"] * 2
        # Over TCP too a dead peer is noticed, at once.
        assert ranks.one(0, "enqueue", "rows", 1, 1, [8, 8], [8, 8]) is None
        ranks.ranks[0].post("wait", "rows", 1, 100.0)
        ranks.ranks[1].kill()
        assert ranks.answer(0, 10)[::2] == ("LinkError", 1)
    finally:
        for rank in ranks.ranks:
            rank.kill()


def test_a_network_device_that_is_not_there_is_named() -> None:
    rank = ProcessRank(0, net_devices="nope0")
    try:
        kind, message, _ = Group([rank]).one(0, "make", 1)
        assert kind == "ConfigError"
        assert "'nope0'" in message
        assert "lo" in message
    finally:
        rank.kill()


def test_the_tcp_port_listens_on_the_named_device_only() -> None:
    rank = ProcessRank(0)
    try:
        Group([rank]).one(0, "make", 1)
        inodes = {os.readlink(f"/proc/{rank.process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{rank.process.pid}/fd")}
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
        assert len(listening) == 1
        assert listening[0].startswith("0100007F:")  # 127.0.0.1
    finally:
        rank.kill()
