"""Commands that ask the pool manager, against one that answers as it is told."""

import json

import grpc
import pytest
from fake_admin import run, serving
from rich.console import Console

from latentpool.cli import tables
from latentpool.cli.conversations import state
from latentpool.v1 import pool_admin_pb2 as pb
from latentpool.v1 import rank_worker_pb2

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving() as (service, address):
        monkeypatch.setenv("LATENTPOOL_MANAGER", address)
        yield service


def test_a_carry_tells_where_it_came_from_and_what_it_moved(manager):
    manager.replies["carry"] = pb.CarryResponse(from_owner=0, to_owner=2, pages=1_234, seconds=0.416)
    shown = run("carry", "7", "--to", "2")
    assert (shown.exit_code, shown.stdout) == (0, "conversation 7: from rank 0 to rank 2, 1,234 pages in 0.42 s\n")
    assert manager.asked == pb.CarryRequest(conversation=7, owner=2)
    shown = run("carry", "7", "--json")
    assert json.loads(shown.stdout) == {"from_owner": 0, "to_owner": 2, "pages": 1234, "seconds": 0.416}
    assert not manager.asked.HasField("owner"), "without --to the pool manager chooses"
    run("carry", "7", "--to", "0")
    assert manager.asked.HasField("owner")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.NOT_FOUND, "no conversation 7 runs or waits"),
        (grpc.StatusCode.FAILED_PRECONDITION, "rank 1 has 3 free pages and conversation 7 needs 12"),
        (grpc.StatusCode.INVALID_ARGUMENT, "rank 5: the group has ranks 0 to 1"),
        (grpc.StatusCode.ABORTED, "conversation 7 ended on its way to rank 1"),
        (grpc.StatusCode.UNAVAILABLE, "no router is connected"),
    ],
)
def test_a_refused_carry_is_one_line(manager, code, words):
    manager.replies["carry"] = (code, words)
    shown = run("carry", "7")
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert shown.stderr.startswith("latentpool: ")
    assert shown.stderr.endswith(f"{words}\n")
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("carry",), ("carry", "one"), ("carry", "-1"), ("carry", "7", "--to", "x")])
def test_a_carry_of_nothing_is_wrong_usage(manager, arguments):
    assert run(*arguments).exit_code == 2
    assert manager.asked is None


def test_which_ranks_there_are_says_who_knows(manager):
    manager.replies["carry"] = (grpc.StatusCode.INVALID_ARGUMENT, "rank 9: this group has ranks 0 to 1")
    shown = run("carry", "7", "--to", "9")
    assert (shown.exit_code, shown.stderr) == (1, "latentpool: rank 9: this group has ranks 0 to 1\n")
    assert manager.asked == pb.CarryRequest(conversation=7, owner=9)
    for rank in ("-1", str(1 << 32)):
        shown = run("carry", "7", "--to", rank)
        assert (shown.exit_code, shown.stderr) == (2, f"latentpool: --to {rank}: a rank is a number from 0 to 7\n")


def test_conversations_say_what_they_do_and_whose_they_are(manager):
    manager.replies["conversations"] = pb.ListConversationsResponse(
        conversations=[
            pb.ConversationInfo(conversation=1, state=pb.CONVERSATION_STATE_RUNNING, lane=0, owner=0, pages=5, borrowed=3),
            pb.ConversationInfo(conversation=2, state=pb.CONVERSATION_STATE_CARRYING, lane=1, owner=1, carried_to=0),
            pb.ConversationInfo(conversation=3, state=pb.CONVERSATION_STATE_PARKING, lane=2, owner=1),
            pb.ConversationInfo(conversation=4, state=pb.CONVERSATION_STATE_WAITING),
            pb.ConversationInfo(conversation=5, state=pb.CONVERSATION_STATE_RUNNING, lane=3),
        ]
    )
    lines = [line.split() for line in run("conversations").stdout.splitlines()]
    rows = {line[0]: " ".join(line[1:]) for line in lines if line and line[0].isdigit()}
    assert rows["1"] == "running 0 rank 0 0 5 3 0 0.0 s"
    assert rows["2"].startswith("carrying to rank 0 1 rank 1 ")
    assert rows["3"].startswith("parking 2 rank 1 ")
    assert rows["4"] == "waiting 0 0 0 0.0 s"
    assert rows["5"].startswith("running 3 every rank ")


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"state": pb.CONVERSATION_STATE_FILLING, "prompt_tokens": 900, "rows": 448}, "filling 49%"),
        ({"state": pb.CONVERSATION_STATE_FILLING, "prompt_tokens": 900}, "filling 0%"),
        ({"state": pb.CONVERSATION_STATE_DECODING, "prompt_tokens": 900, "rows": 950}, "decoding"),
        ({"state": pb.CONVERSATION_STATE_FILLING, "prompt_tokens": 900, "rows": 450, "idle": True}, "keeping 50%"),
        ({"state": pb.CONVERSATION_STATE_RUNNING, "prompt_tokens": 900, "idle": True}, "keeping 0%"),
        ({"state": pb.CONVERSATION_STATE_WAITING, "prompt_tokens": 900, "idle": True}, "waiting to keep"),
        ({"state": pb.CONVERSATION_STATE_PARKING, "prompt_tokens": 900, "idle": True}, "giving way"),
        ({"state": pb.CONVERSATION_STATE_CARRYING, "prompt_tokens": 900, "carried_to": 2}, "carrying to rank 2"),
        ({"state": 99}, "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_conversation_does(info, words):
    assert state(pb.ConversationInfo(**info)) == words


def test_conversations_say_what_was_cached(manager):
    entry = pb.ConversationInfo(conversation=1, state=pb.CONVERSATION_STATE_DECODING, prompt_tokens=9_000, cached_tokens=8_960)
    manager.replies["conversations"] = pb.ListConversationsResponse(conversations=[entry])
    assert "9,000           8,960" in run("conversations").stdout
    assert json.loads(run("conversations", "--json").stdout)[0]["cached_tokens"] == 8_960


def test_ranks_say_what_they_sent(manager):
    sent = rank_worker_pb2.LinkBytes(sums=97 << 20, queries=5 << 18, outputs=5 << 18, rows=1 << 19, samples=9)
    ranks = [
        pb.RankInfo(rank=0, state="ready", sent=sent),
        pb.RankInfo(rank=1, state="ready"),
        pb.RankInfo(rank=2, state="absent"),
    ]
    manager.replies["ranks"] = pb.GetRanksResponse(ranks=ranks, world=3, group_state="ready")
    shown = run("ranks").stdout
    assert "100.00 MiB (sums 97%, queries 1%, outputs 1%, rows <1%, samples <1%)" in shown
    told = json.loads(run("ranks", "--json").stdout)["ranks"][0]["sent"]
    assert {kind: int(count) for kind, count in told.items()} == {
        "sums": 97 << 20,
        "queries": 5 << 18,
        "outputs": 5 << 18,
        "rows": 1 << 19,
        "carries": 0,
        "samples": 9,
    }


def test_pages_by_owner(manager):
    runs = [
        pb.PageRun(first=0, count=2, stride=2, kind=pb.PAGE_KIND_LIVE, owner=0, conversation=3),
        pb.PageRun(first=1, count=2, stride=2, kind=pb.PAGE_KIND_BORROWED, owner=1, conversation=3),
    ]
    manager.replies["pages"] = pb.ListPagesResponse(runs=runs, pages=4, page_rows=64)
    shown = run("pages").stdout
    assert "rank 0 2 pages: 2 live\n" in shown
    assert "rank 1 2 pages: 2 borrowed\n" in shown
    assert "borrowed by 3 2" in shown


def test_pages_again_and_again(manager):
    """Where stdout is no terminal a watch prints one picture after another."""
    runs = [pb.PageRun(first=0, count=2, stride=1, kind=pb.PAGE_KIND_LIVE, conversation=7)]
    pages = [pb.ListPagesResponse(runs=runs, pages=2, page_rows=64, reserved=held) for held in (5, 6)]
    gone = (grpc.StatusCode.UNAVAILABLE, "the pool manager stops")
    manager.replies["watch"] = [*(pb.WatchResponse(pages=told) for told in pages), gone]
    shown = run("pages", "--watch")
    assert [line for line in shown.stdout.splitlines() if "reserved" in line] == [
        "2 pages of 64 rows, 128 tokens: 2 live; 5 reserved",
        "2 pages of 64 rows, 128 tokens: 2 live; 6 reserved",
    ]
    assert shown.stdout.count("██") == 2
    assert manager.asked.interval_seconds == 1.0
    assert shown.exit_code == 1
    assert shown.stderr.endswith("the pool manager stops\n")
    assert shown.stderr.count("\n") == 1
    for other in ("--check", "--json"):
        refused = run("pages", "--watch", other)
        assert (refused.exit_code, refused.stderr) == (2, f"latentpool: --watch: goes without {other}\n")


def test_a_narrow_terminal_loses_no_word_of_a_table(capsys):
    row = (
        "0",
        "ready",
        "a-long-host-name",
        "127.0.0.1:7420",
        "221.96 KiB of 221.96 KiB",
        "61.55 MiB",
        "118.02 MiB",
        "1.1 s ago",
    )
    table = tables.table("rank", "state", "host", "address", "loaded", "resident", "room", "heard")
    table.add_row(*row)
    tables.show(Console(width=40), table)
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in row)
