"""Commands that ask the pool manager, against one that answers as it is told."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from latentpool.cli import pool
from latentpool.cli.app import app
from latentpool.v1 import pool_admin_pb2 as pb
from latentpool.v1 import pool_admin_pb2_grpc, rank_worker_pb2

pytestmark = pytest.mark.timeout(60)


class Manager(pool_admin_pb2_grpc.PoolAdminServicer):
    """Answers each call with what `replies` holds under its name: a message, or (status, words)."""

    def __init__(self):
        self.replies = {}
        self.asked = None

    def _reply(self, name, request, context):
        self.asked = request
        reply = self.replies[name]
        if isinstance(reply, tuple):
            context.abort(*reply)
        return reply

    def ListPages(self, request, context):  # noqa: N802
        return self._reply("pages", request, context)

    def ListConversations(self, request, context):  # noqa: N802
        return self._reply("conversations", request, context)

    def GetRanks(self, request, context):  # noqa: N802
        return self._reply("ranks", request, context)

    def Carry(self, request, context):  # noqa: N802
        return self._reply("carry", request, context)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    service = Manager()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        pool_admin_pb2_grpc.add_PoolAdminServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        monkeypatch.setenv("LATENTPOOL_MANAGER", f"127.0.0.1:{port}")
        yield service
        server.stop(0).wait()


def run(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


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


@pytest.mark.parametrize("arguments", [("carry",), ("carry", "one"), ("carry", "-1"), ("carry", "7", "--to", "8")])
def test_a_carry_of_nothing_is_wrong_usage(manager, arguments):
    assert run(*arguments).exit_code == 2
    assert manager.asked is None


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
    table = pool._table("rank", "state", "host", "address", "loaded", "resident", "room", "heard")
    table.add_row(*row)
    pool._show(Console(width=40), table)
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in row)
