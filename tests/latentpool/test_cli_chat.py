"""latentpool chat against a router that answers as it is told: from a pipe, and on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from pseudo_terminal import Terminal
from typer.testing import CliRunner

from latentpool.cli.app import app
from latentpool.v1 import pool_manager_pb2, router_pb2_grpc
from latentpool.v1 import router_pb2 as pb

pytestmark = pytest.mark.timeout(60)


class Router(router_pb2_grpc.RouterServicer):
    """Echoes the newest message in two pieces, as if every earlier token had been kept."""

    def __init__(self) -> None:
        self.chats: list[list[tuple[str, str]]] = []
        self.has_tokenizer = True
        self.refusals: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.hang, self.left = False, threading.Event()

    def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetModelResponse(has_tokenizer=self.has_tokenizer)

    def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        messages = [(message.role, message.content) for message in request.chat.messages]
        self.chats.append(messages)
        newest = messages[-1][1]
        if newest in self.refusals:
            context.abort(*self.refusals[newest])
        yield pb.GenerateResponse(chunk=pb.Chunk(text="you said "))
        if self.hang:
            context.add_callback(self.left.set)
            self.left.wait(50)
        yield pb.GenerateResponse(chunk=pb.Chunk(text=newest))
        cached = 64 * (len(messages) // 2)
        mark = pool_manager_pb2.MARK_REPLY if cached else pool_manager_pb2.MARK_UNSPECIFIED
        usage = pb.Usage(prompt_tokens=100, cached_tokens=cached, cached_from=mark, generated_tokens=5)
        yield pb.GenerateResponse(completion=pb.Completion(finish_reason=pb.FINISH_REASON_STOP, usage=usage))


@pytest.fixture
def router(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    monkeypatch.chdir(tmp_path)
    service = Router()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        router_pb2_grpc.add_RouterServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        monkeypatch.setenv("LATENTPOOL_ADDRESS", f"127.0.0.1:{port}")
        yield service
        service.left.set()
        server.stop(0).wait()


def chat(messages: str | bytes, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["chat", *arguments], input=messages)


def test_each_line_is_a_turn_of_one_talk(router: Router) -> None:
    ran = chat("hello\n\n  and again  \n", "--system", "be brief")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout == "you said hello\nyou said and again\n"
    first = [("system", "be brief"), ("user", "hello")]
    assert router.chats == [first, [*first, ("assistant", "you said hello"), ("user", "and again")]]
    told = [line for line in ran.stderr.splitlines() if line]
    assert told[0].startswith("100 prompt tokens (64 cached from a reply mark), 5 generated (ended by stop)")
    assert told[1].startswith("100 prompt tokens (128 cached from a reply mark)")
    assert len(told) == 2


def test_a_turn_can_be_taken_back(router: Router) -> None:
    ran = chat("/undo\none\ntwo\n/undo\nthree\n/quit\nfour\n")
    assert ran.exit_code == 0
    assert [messages[-1][1] for messages in router.chats] == ["one", "two", "three"]
    assert router.chats[-1] == [("user", "one"), ("assistant", "you said one"), ("user", "three")]
    assert ran.stderr.index("there is nothing to take back") < ran.stderr.index("are taken back")


def test_from_a_pipe_a_refusal_ends_the_talk(router: Router) -> None:
    router.refusals["long"] = (grpc.StatusCode.FAILED_PRECONDITION, "chat: 9,000 tokens, and --context is 1,024")
    ran = chat("hello\nlong\nmore\n")
    assert (ran.exit_code, ran.stdout) == (1, "you said hello\n")
    assert ran.stderr.endswith("latentpool: chat: 9,000 tokens, and --context is 1,024\n")
    assert len(router.chats) == 2


def test_what_is_no_text_and_who_cannot_chat(router: Router) -> None:
    ran = chat(b"ab\xff\n")
    assert (ran.exit_code, ran.stderr) == (2, "latentpool: stdin: is not UTF-8 text\n")
    router.has_tokenizer = False
    ran = chat("hello\n")
    assert ran.exit_code == 1
    assert "has no tokenizer.json" in ran.stderr
    assert router.chats == []


@pytest.fixture
def terminal(router: Router) -> Iterator[Terminal]:
    opened = Terminal("chat")
    yield opened
    opened.close()


def test_a_refused_message_does_not_end_a_talk_on_a_terminal(router: Router, terminal: Terminal) -> None:
    router.refusals["long"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    terminal.until("> ")
    terminal.type("long\n")
    terminal.until("the queue is full")
    terminal.type("hello\n")
    terminal.until("you said hello")
    terminal.until("100 prompt tokens (0 cached)")
    assert router.chats[-1] == [("user", "hello")]
    terminal.type("/quit\n")
    assert terminal.process.wait(20) == 0
    assert "Traceback" not in terminal.shown


@pytest.mark.parametrize("moment", ["between turns", "in a reply"])
def test_ctrl_c_leaves_at_once_and_nothing_behind(router: Router, terminal: Terminal, moment: str) -> None:
    terminal.until("> ")
    if moment == "in a reply":
        router.hang = True
        terminal.type("hello\n")
        terminal.until("you said ")
    terminal.ctrl_c()
    assert terminal.process.wait(20) == 130
    assert "Traceback" not in terminal.shown
    if moment == "in a reply":
        assert router.left.wait(10), "the request is cancelled"


def test_ctrl_d_ends_a_talk(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0
