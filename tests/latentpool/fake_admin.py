"""A pool manager that answers operators as it is told, and commands that ask it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from typer.testing import CliRunner

from latentpool.cli.app import app
from latentpool.v1 import pool_admin_pb2_grpc


class Manager(pool_admin_pb2_grpc.PoolAdminServicer):
    """Answers each call with what `replies` holds under its name: a message, or (status, words); a watch with a list of them,
    then it waits until it is left."""

    def __init__(self):
        self.replies = {}
        self.asked = None

    def _reply(self, name, request, context):
        self.asked = request
        return self._told(self.replies[name], context)

    def _told(self, reply, context):
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

    def ListKept(self, request, context):  # noqa: N802
        return self._reply("kept", request, context)

    def Evict(self, request, context):  # noqa: N802
        return self._reply("evict", request, context)

    def Watch(self, request, context):  # noqa: N802
        self.asked = request
        for reply in self.replies["watch"]:
            yield self._told(reply, context)


@contextmanager
def serving():
    """The manager and its address."""
    service = Manager()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        pool_admin_pb2_grpc.add_PoolAdminServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield service, f"127.0.0.1:{port}"
        server.stop(0).wait()


def run(*arguments, **environment):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", **environment})
