"""`latentpool verify`: checks an installation, or a running group, against reference data."""

from __future__ import annotations

import asyncio
import dataclasses
import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from latentpool import config, logs
from latentpool.cli import reference
from latentpool.cli.calls import in_words
from latentpool.cli.options import FAILED, Json, takes
from latentpool.cli.services import served_kv_cache
from latentpool.client import Client
from latentpool.config import Settings
from latentpool.errors import LatentPoolError
from latentpool.geometry import DTYPE_BYTES, Geometry
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2 as pb

_SETTINGS = (
    "expected",
    "ranks",
    "kv_pages",
    "split",
    "borrow",
    "dtype",
    "kv_cache",
    "transport",
    "tolerance",
    "page_rows",
    "chunk_rows",
    "staging_rows",
    "audit",
    "context",
    "memory",
    "log_level",
)
_WORK_BYTES = 512 << 20


@takes(*_SETTINGS, needs=("expected",), defaults={"dtype": "f32", "kv_cache": "f32", "log_level": "error"})
def verify(
    settings: Settings,
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The checkpoint that the reference data is of.")],
    address: Annotated[
        str | None, typer.Option("--address", metavar="HOST:PORT", help="Check the running group of this router instead.")
    ] = None,
    json: Json = False,
) -> None:
    """Compares logits and greedy replies with reference data, on a temporary group or (--address) on a running one.

    \b
    latentpool verify MODEL_DIR --expected MODEL_DIR/expected.safetensors --ranks 2
    latentpool verify MODEL_DIR --expected FILE --ranks 3 --transport inproc --page-rows 64 --audit
    latentpool verify MODEL_DIR --expected FILE --address 127.0.0.1:7410 --json

    An error is the largest difference, relative to the largest logit. With --dtype bf16 rows are compared with float64
    (f64.logits) by their statistics, since bf16 rounding may move a selection. Exit code 0: everything within --tolerance
    and all ids equal. Data of another vocabulary is refused; where most rows differ altogether, the verdict says that it may
    be of another checkpoint. A running group is compared as it is: its dtypes, ranks and pages are its own.
    """
    assert settings.expected is not None
    logs.configure(settings.log_level)
    expected = reference.read_expected(settings.expected)
    if address is None:
        checks = asyncio.run(_temporary(settings, model, expected))
    else:
        router = config.parse("address", address, f"--address {address}")
        checks = asyncio.run(_running(router, settings.tolerance, expected))
    passed = all(check.passed is not False for check in checks) and any(check.passed for check in checks)
    if json:
        print(json_text.dumps({"passed": passed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        Console().print(report(checks))
        another = any(check.note == reference.ANOTHER for check in checks)
        print("passed" if passed else f"FAILED: {reference.ANOTHER}" if another else "FAILED")
    if not passed:
        raise typer.Exit(FAILED)


async def _running(router: str, tolerance: float, expected: reference.Expected) -> list[reference.Check]:
    with in_words("router", router, "--address"):
        async with Client(router) as client:
            model = await client.get_model()
            reference.check_vocabulary(expected, model.vocab_size)
            return await reference.compare(expected, _Asked(client), tolerance, model.dtype == "bf16")


async def _temporary(settings: Settings, model: Path, expected: reference.Expected) -> list[reference.Check]:
    from latentpool.cli.group import LocalGroup

    geometry = Geometry.from_file(model)
    reference.check_vocabulary(expected, geometry.vocab)
    longest = reference.longest(expected)
    context = settings.context or min(geometry.max_context, -(-(longest + 1) // 64) * 64)
    group = LocalGroup(
        model,
        settings.ranks,
        transport=settings.transport,
        dtype=settings.dtype,
        kv_cache=served_kv_cache(settings),
        kv_pages=settings.kv_pages,
        split=settings.split,
        borrow=settings.borrow,
        context=context,
        page_rows=settings.page_rows,
        chunk_rows=settings.chunk_rows,
        staging_rows=settings.staging_rows,
        audit=settings.audit,
        memory_bytes=settings.memory or _memory(settings, model, geometry),
    )
    async with group:
        return await _or_failed(
            group, reference.compare(expected, _Asked(group.client), settings.tolerance, settings.dtype == "bf16")
        )


async def _or_failed(group: Any, work: Any) -> list[reference.Check]:
    """The work's result; what the group failed of, if it does."""
    working = asyncio.create_task(work)
    failed = asyncio.create_task(group.failed())
    try:
        await asyncio.wait({working, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done() and not working.done():
            raise failed.result()
        return cast(list[reference.Check], await working)
    finally:
        for task in (working, failed):
            task.cancel()
        await asyncio.wait({working, failed})


def _memory(settings: Settings, model: Path, geometry: Geometry) -> int:
    """Enough for a rank of a small group: the whole checkpoint in the compute dtype, and work buffers. It is a limit; only
    pages that are written take memory."""
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    widened = DTYPE_BYTES[settings.dtype or geometry.dtype] // DTYPE_BYTES[geometry.dtype]
    return stored * max(1, widened) + 2 * _WORK_BYTES


class _Asked:
    """A group as the comparison sees it, over its public calls."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def score(self, ids: Sequence[int], decode_from: int | None) -> NDArray[np.float32]:
        rows: list[NDArray[np.float32]] = []
        async for event in self._client.score(ids, decode_from=decode_from, raw_logits=True):
            if isinstance(event, pb.ScoredRows):
                flat = np.frombuffer(event.logits, "<f4")
                rows.append(flat.reshape(len(event.best_ids), -1))
        if not rows:
            raise LatentPoolError("the router scored no rows")
        return np.concatenate(rows)

    async def generate(self, ids: Sequence[int], count: int) -> list[int]:
        reply: list[int] = []
        async for event in self._client.generate(ids, Sampling(max_tokens=count, ignore_eos=True)):
            if isinstance(event, pb.Chunk):
                reply += event.token_ids
        return reply


def report(checks: Sequence[reference.Check]) -> Table:
    """A row a key: what was measured, what is allowed, and the verdict."""
    table = Table(box=box.SIMPLE_HEAD)
    for name, justify in (("key", "left"), ("rows", "right"), ("error", "right"), ("allowed", "right"), ("verdict", "left")):
        table.add_column(name, justify=cast(Literal["left", "right"], justify), no_wrap=True)
    for check in checks:
        verdict = {True: Text("ok", "green"), False: Text("FAILED", "bold red"), None: Text("absent", "yellow")}[check.passed]
        if check.note and check.note != "absent":
            verdict.append(f" ({check.note})", "dim")
        table.add_row(check.key, str(check.rows or ""), _number(check.error), _number(check.limit), verdict)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
