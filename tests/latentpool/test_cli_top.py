"""latentpool top: rates of counters, and a picture that fits its screen."""

import itertools
import json
import time

import grpc
import pytest
from fake_admin import run, serving
from pseudo_terminal import Terminal
from rich.console import Console

from latentpool.cli.rates import Rates, counters
from latentpool.cli.top import View
from latentpool.v1 import pool_admin_pb2 as pb
from latentpool.v1 import pool_manager_pb2, rank_worker_pb2

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving() as (service, address):
        monkeypatch.setenv("LATENTPOOL_MANAGER", address)
        yield service


def told(rows=(0, 0), sent=0, conversations=2, kept=1, waiting=0):
    """A group of two ranks: conversation 1 reads a prompt of 1,000 tokens, 448 of them resumed; 2 replies; more of each."""
    running = [
        pb.ConversationInfo(
            conversation=1, state=pb.CONVERSATION_STATE_FILLING, owner=0, prompt_tokens=1_000, cached_tokens=448, rows=rows[0]
        ),
        pb.ConversationInfo(conversation=2, state=pb.CONVERSATION_STATE_DECODING, owner=1, prompt_tokens=100, rows=rows[1]),
    ]
    running += [pb.ConversationInfo(conversation=n, state=pb.CONVERSATION_STATE_DECODING) for n in range(3, conversations + 1)]
    running += [pb.ConversationInfo(conversation=100 + n, state=pb.CONVERSATION_STATE_WAITING) for n in range(waiting)]
    states = [pb.KeptInfo(state=n, at=64 * n, mark=pool_manager_pb2.MARK_SHARED, idle_seconds=n) for n in range(1, kept + 1)]
    runs = [
        pb.PageRun(first=0, count=4, stride=2, kind=pb.PAGE_KIND_LIVE, owner=0, conversation=1),
        pb.PageRun(first=1, count=2, stride=2, kind=pb.PAGE_KIND_KEPT, owner=1, state=1, holders=1),
        pb.PageRun(first=5, count=2, stride=2, kind=pb.PAGE_KIND_FREE, owner=1),
    ]
    links = rank_worker_pb2.LinkBytes(sums=sent, rows=sent)
    ranks = [pb.RankInfo(rank=0, state="ready", sent=links), pb.RankInfo(rank=1, state="suspected")]
    return pb.WatchResponse(
        pages=pb.ListPagesResponse(runs=runs, pages=8, page_rows=64, free=2),
        conversations=pb.ListConversationsResponse(conversations=running),
        kept=pb.ListKeptResponse(kept=states, bytes=1 << 20, budget_bytes=1 << 30),
        ranks=pb.GetRanksResponse(ranks=ranks, world=2, epoch=1, term=4, group_state="ready", router="r"),
    )


def drawn(view, response, now, height=1_000):
    console = Console(width=160, file=None)
    with console.capture() as shown:
        console.print(view.draw(response, now, height))
    return shown.get()


def words(text):
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_a_rate_is_what_a_counter_gained():
    rates = Rates()
    rates.add(10.0, {"a": 100, "b": 5})
    assert rates.of("a") is None
    rates.add(12.0, {"a": 300, "c": 1})
    assert (rates.of("a"), rates.of("b"), rates.of("c")) == (100.0, None, None)
    rates.add(13.0, {"a": 300, "c": 8})
    assert (rates.of("a"), rates.of("c")) == (200 / 3, 7.0)
    assert rates.sum(["a", "c", "d"]) == 200 / 3 + 7.0
    assert rates.sum(["d"]) is None


def test_a_rate_forgets_what_is_long_ago_and_what_began_anew():
    rates = Rates()
    for second in range(20):
        rates.add(float(second), {"a": 1_000 if second else 0, "b": 10 * second})
    assert (rates.of("a"), rates.of("b")) == (0.0, 10.0)
    rates.add(20.0, {"a": 50})
    assert rates.of("a") is None, "a parked conversation is computed again from its first row"
    rates.add(22.0, {"a": 90})
    assert rates.of("a") == 20.0


def test_resumed_rows_are_not_computed():
    assert counters(told(rows=(0, 100)))["reading", 1] == 0
    found = counters(told(rows=(512, 130), sent=7))
    assert found == {("reading", 1): 64, ("replying", 2): 130, ("sent", 0): 14, ("sent", 1): 0}


def test_everything_at_a_glance():
    view = View()
    drawn(view, told(rows=(448, 100)), 0.0)
    lines = words(drawn(view, told(rows=(704, 121), sent=1 << 20, waiting=1), 2.0))
    assert lines[0] == "group: ready; epoch 1, term 4; router r"
    assert lines[1] == "2 running, 1 waiting; reading 128, replying 10.5 tokens/s"
    assert lines[2] == "8 pages of 64 rows, 512 tokens: 4 live, 2 kept, 2 free; 0 reserved"
    assert "0 ready 1.00 MiB/s ████ 4 live" in lines
    assert "1 suspected 0 B/s ▓▓·· 2 kept, 2 free" in lines
    assert "1 filling 70% rank 0 704 of 1,000 448 0 128 0.0 s" in lines
    assert "2 decoding rank 1 121 0 10.5 0.0 s" in lines
    assert "1 kept prompt: 1.00 MiB of 1.00 GiB a rank" in lines
    assert "1 shared every rank 64 0 B 0 1.0 s ago" in lines


def test_idle_work_is_counted_for_itself():
    looked = told(rows=(448, 100), waiting=1)
    for state in (pb.CONVERSATION_STATE_WAITING, pb.CONVERSATION_STATE_FILLING):
        looked.conversations.conversations.add(conversation=9, state=state, idle=True)
    assert words(drawn(View(), looked, 0.0))[1].startswith("2 running, 1 waiting, 2 keeping; ")


@pytest.mark.parametrize(("conversations", "kept"), [(2, 1), (2, 100), (100, 1), (100, 100), (9, 9)])
@pytest.mark.parametrize("height", [24, 30, 40])
def test_it_fits_its_screen_and_counts_what_does_not(conversations, kept, height):
    shown = drawn(View(), told(conversations=conversations, kept=kept), 0.0, height)
    assert len(shown.splitlines()) <= height
    lines = words(shown)
    rows = [sum(line.split()[1] in kinds for line in lines) for kinds in (("decoding", "filling"), ("shared",))]
    for number, row, thing in zip((conversations, kept), rows, ("conversations", "kept prompts"), strict=True):
        assert row >= min(number, 2)
        assert (f"and {number - row} {thing} more" in lines) == (row < number)


def test_once_takes_two_looks_for_the_rates(manager):
    manager.replies["watch"] = [told(rows=(448, 100)), told(rows=(448, 150)), told(rows=(448, 900))]
    shown = run("top", "--once", "--interval", "0.5")
    assert shown.exit_code == 0, shown.output
    assert manager.asked.interval_seconds == 0.5
    assert "replying 100 tokens/s" in shown.stdout
    assert shown.stdout == run("top", "--interval", "0.5").stdout, "where stdout is no terminal"
    assert json.loads(run("top", "--json").stdout)["conversations"]["conversations"][1]["rows"] == "100"


@pytest.mark.parametrize("command", [("top", "--interval", "0.2"), ("pages", "--watch")])
def test_ctrl_c_is_how_one_leaves(manager, command):
    def again_and_again():
        for rows in itertools.count(100, 10):
            yield told(rows=(448, rows))
            time.sleep(0.1)

    manager.replies["watch"] = again_and_again()
    terminal = Terminal(*command)
    try:
        terminal.until("8 pages of 64 rows, 512 tokens: 4 live, 2 kept, 2 free; ", times=3)
        terminal.ctrl_c()
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
    assert "Traceback" not in terminal.shown
    assert "latentpool: " not in terminal.shown
    assert terminal.shown.count("\x1b[?1049h") == terminal.shown.count("\x1b[?1049l") == 1, "the screen is given back"


def test_a_group_that_goes_ends_the_view_with_its_words(manager):
    manager.replies["watch"] = [told(), (grpc.StatusCode.UNAVAILABLE, "the pool manager stops")]
    terminal = Terminal("top")
    try:
        assert terminal.process.wait(20) == 1
        terminal.until("the pool manager stops")
    finally:
        terminal.close()
    assert "Traceback" not in terminal.shown


def test_an_interval_that_nobody_serves(manager):
    assert run("top", "--interval", "0.1").exit_code == 2
    assert manager.asked is None
