"""E1 of the exactness contract at the level of rounds: a split group's logits are those of one where every rank keeps every
row, bit for bit, whatever was borrowed, fetched or carried.

`long_kpool16` is the model: its prompts drop tokens in selection from row 79 on, so sparse rows are everywhere.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from harness import Ranks, oracle

from latentpool.geometry import shares
from services.rank_worker import frames
from services.rank_worker.link import Channel, Link
from services.rank_worker.split.fetch import FetchedRows, least_staging_rows

MODEL, EXPECTED = oracle("long_kpool16")
IDS = EXPECTED["input_ids"].tolist()
PROMPT = IDS[:330]
STEPS = 24
PAGE = 64
WORLDS = [2, 3, pytest.param(4, marks=pytest.mark.full)]
KV = ["f32", "bf16"]


def made(world: int, *, split: bool = True, kv_dtype: str = "f32", lanes: int = 4, **settings: Any) -> Ranks:
    return Ranks(MODEL, world, kv_dtype=kv_dtype, split=split, lanes=lanes, pages=12 * world * lanes, **settings)


def pages_of(ranks: Ranks, owner: int, first: int, count: int = 8) -> list[int]:
    """Ids of local pages first.. of an owner."""
    return [(first + i) * ranks.world + owner for i in range(count)]


def lend(ranks: Ranks, lane: int, owner: int, first: int, count: int) -> None:
    """Borrows local pages first.. of every other rank for the lane's first slots."""
    others = [rank for rank in range(ranks.world) if rank != owner]
    ids = [(first + slot) * ranks.world + rank for slot in range(count) for rank in others]
    ranks.agree(frames.Borrow(lane, 0, ids))


def decoded(ranks: Ranks, lane: int, steps: int = STEPS) -> list[np.ndarray]:
    return [ranks.decode([lane])[0] for _ in range(steps)]


@cache
def reference(world: int, kv_dtype: str = "f32") -> np.ndarray:
    """Logits of the prompt and of greedy decode rows where nothing is split, [330 + STEPS, V]."""
    ranks = made(world, split=False, kv_dtype=kv_dtype)
    ranks.begin(0, range(8))
    logits, _ = ranks.prompt(0, PROMPT)
    rows = np.concatenate([logits, *decoded(ranks, 0)])
    ranks.close()
    return rows


def poison(ranks: Ranks, owner: int) -> None:
    """What nobody may read: latent planes of all ranks but the owner, discard pages, staging buffers."""
    for rank, (arena, rounds) in enumerate(zip(ranks.arenas, ranks.rounds, strict=True)):
        arena.latent[arena.latent_discard] = np.nan
        if rank != owner:
            arena.latent[: arena.local_pages] = np.nan
        assert rounds._split is not None
        rounds._split._staging.values[:-2] = np.nan


@pytest.mark.parametrize("kv_dtype", KV)
@pytest.mark.parametrize("borrowed", [0, 128, 330])
@pytest.mark.parametrize("world", WORLDS)
def test_split_equals_replicated(world: int, borrowed: int, kv_dtype: str) -> None:
    """Every owner in turn; chunks of 128; borrowed pages that cover all, a part or nothing of the prompt."""
    for owner in range(world):
        ranks = made(world, kv_dtype=kv_dtype)
        ranks.begin(0, pages_of(ranks, owner, 3), owner=owner)
        if borrowed:
            lend(ranks, 0, owner, 20, -(-borrowed // PAGE))
        logits, _ = ranks.prompt(0, PROMPT, 128, borrowed=borrowed)
        poison(ranks, owner)
        np.testing.assert_array_equal(np.concatenate([logits, *decoded(ranks, 0)]), reference(world, kv_dtype))
        ranks.close()


@pytest.mark.parametrize("case", ["tiny", "shared_index", "real_ratio"])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_several_latent_layers_and_shared_selections(world: int, case: str) -> None:
    """A layer without an indexer reads what the one before selected; each layer's rows travel for themselves."""
    model, expected = oracle(case)
    prompt = expected["input_ids"].tolist()
    rows = []
    for split in (False, True):
        ranks = Ranks(model, world, split=split, pages=24 * world)
        ranks.begin(0, pages_of(ranks, 1, 0, 10) if split else range(10), owner=int(split))
        logits, _ = ranks.prompt(0, prompt, 64)
        rows.append(np.concatenate([logits, *decoded(ranks, 0, 8)]))
        if split:
            ranks.agree(frames.Carry(0, 0, 0, pages_of(ranks, 0, 10, 10), True))
            poison(ranks, 0)
        rows.append(np.concatenate(decoded(ranks, 0, 4)))
        ranks.close()
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_array_equal(rows[1], rows[3])


@pytest.mark.parametrize("limit", [64, 192, 576])
@pytest.mark.parametrize("world", WORLDS)
def test_a_tiny_staging_buffer_changes_nothing(world: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least buffer that is allowed, and pieces of 7 rows: parts down to some rows of a block, and many pieces."""
    monkeypatch.setattr("services.rank_worker.split.fetch.PIECE_ROWS", 7)
    parts: list[int] = []
    cut = FetchedRows._cut

    def watched(self: FetchedRows, selection: Any, rows: slice) -> Any:
        for part in cut(self, selection, rows):
            parts.append(part.rows.stop - part.rows.start)
            yield part

    monkeypatch.setattr(FetchedRows, "_cut", watched)
    ranks = made(world)
    least = least_staging_rows(ranks.geometry)
    ranks.close()
    ranks = made(world, staging_rows=least, context=1728)
    prompt = (IDS * 6)[:1100]
    ranks.begin(0, pages_of(ranks, 1, 0, 20), owner=1)
    logits, _ = ranks.prompt(0, prompt, limit)
    ranks.close()
    whole = made(world, split=False, context=1728)
    whole.begin(0, range(20))
    np.testing.assert_array_equal(logits, whole.prompt(0, prompt, limit)[0])
    whole.close()
    assert min(parts) < 64  # some rows of a block


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("world", WORLDS)
def test_many_owners_in_one_round(world: int, width: int) -> None:
    """Lanes of all owners, two of them of one owner, decode in one operation, in changing order and number."""
    lanes = world + 1
    forced = IDS[330:]
    split, whole = made(world, lanes=lanes), made(world, split=False, lanes=lanes)
    for lane in range(lanes):
        prompt = PROMPT[lane : lane + 100 + 37 * lane]
        split.begin(lane, pages_of(split, lane % world, 8 * lane), owner=lane % world)
        whole.begin(lane, range(8 * lane, 8 * lane + 8))
        np.testing.assert_array_equal(split.prompt(lane, prompt)[0], whole.prompt(lane, prompt)[0])
    for step in range(12):
        some = [(step + shift) % lanes for shift in range(1 + step % lanes)]
        fed = forced[step * width * lanes :][: width * len(some)]
        np.testing.assert_array_equal(split.decode(some, width, fed)[0], whole.decode(some, width, fed)[0])
    split.close()
    whole.close()


@pytest.mark.parametrize("kv_dtype", KV)
@pytest.mark.parametrize("world", WORLDS)
def test_a_carried_conversation_goes_on(world: int, kv_dtype: str) -> None:
    """In the middle of its fill, then in the middle of its reply, to one rank after another, a page at a time, beside another
    lane's decode; what it left behind is poisoned. The rows that cross the link are the rows that it has."""
    ranks = made(world, kv_dtype=kv_dtype)
    ranks.begin(1, pages_of(ranks, 0, 40, 4), owner=0)
    ranks.prompt(1, PROMPT[:70])
    ranks.begin(0, pages_of(ranks, 0, 0), owner=0)
    logits = [ranks.agree(frames.Prompt(0, 0, PROMPT[:192], False, 2, PROMPT[192], mode=frames.FETCH))]
    rows = [ranks.logits(logits[0], 0)]
    owner, at, first, moved = 0, 192, 8, 0
    row_bytes = ranks.geometry.latent_bytes(kv_dtype)

    def carry(target: int) -> None:
        nonlocal owner, first, moved
        new = pages_of(ranks, target, first)
        for slot, page in enumerate(new):
            results = ranks.agree(frames.Carry(0, target, slot, [page], slot == len(new) - 1), frames.Decode([1], 1, []))
            moved += sum(result.sent.carries for result in results)
            assert (
                bool(results[owner].results[0].rows_digest)
                == bool(results[target].results[0].rows_digest)
                == (slot * PAGE < at)
            )
        poison_pages(ranks, owner, first - 8)
        owner, first = target, first + 8

    carry(1)
    assert moved == at * row_bytes
    rest = ranks.agree(frames.Prompt(0, 192, PROMPT[192:], True, 2, mode=frames.FETCH))
    rows.append(ranks.logits(rest, 0))
    at = len(PROMPT)
    for target in [*range(2, world), 0]:
        rows += decoded(ranks, 0, 3)
        at += 3
        moved = 0
        carry(target)
        assert moved == at * row_bytes
    rows += decoded(ranks, 0, STEPS - 3 * (world - 1))
    np.testing.assert_array_equal(np.concatenate(rows), reference(world, kv_dtype))
    ranks.close()


def poison_pages(ranks: Ranks, owner: int, first: int) -> None:
    ranks.arenas[owner].latent[first : first + 8] = np.nan
    for arena in ranks.arenas:
        arena.index[[page * ranks.world + owner for page in range(first, first + 8)]] = np.nan


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("f32", "f32"), ("f32", "bf16"), ("bf16", "bf16")])
@pytest.mark.parametrize("world", WORLDS)
def test_bytes_on_the_link_are_those_of_the_formulas(world: int, dtype: str, kv_dtype: str) -> None:
    """Queries and outputs: rows * heads * r values of the compute dtype each way; fetched: the union's rows."""
    element = {"f32": 4, "bf16": 2}[dtype]
    ranks = Ranks(MODEL, world, dtype=dtype, kv_dtype=kv_dtype, split=True, lanes=2, pages=24 * world)
    g = ranks.geometry
    heads = shares(g.heads, world)
    ranks.begin(0, pages_of(ranks, 1, 0), owner=1)
    ranks.begin(1, pages_of(ranks, 0, 8), owner=0)
    unions: list[int] = []
    cut = FetchedRows._cut

    def watched(self: FetchedRows, selection: Any, rows: slice) -> Any:
        for part in cut(self, selection, rows):
            unions.append(len(part.union))
            yield part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FetchedRows, "_cut", watched)
        ranks.prompt(1, PROMPT[:70])
        ranks.agree(frames.Prompt(0, 0, PROMPT[:320], False, mode=frames.FETCH))
        unions.clear()
        results = ranks.agree(frames.Prompt(0, 320, PROMPT[320:], True, mode=frames.FETCH))
    layers = len(g.mla_layers)
    assert layers == len(g.indexed_layers)  # a union serves one layer
    union = sum(unions) // world  # every rank computes the same ones
    assert 0 < union < 320 * layers
    rows = [result.sent.rows for result in results]
    assert rows == [union * (world - 1) * g.latent_bytes(kv_dtype) // layers if rank == 1 else 0 for rank in range(world)]

    width = 3
    results = ranks.agree(frames.Decode([0, 1], width, IDS[:6]))
    for rank, result in enumerate(results):
        row = g.latent * element * layers
        owned = {0: width, 1: width}
        away = sum(count for owner, count in owned.items() if owner != rank)
        assert result.sent.queries == away * heads[rank] * row
        assert result.sent.outputs == owned.get(rank, 0) * sum(h for peer, h in enumerate(heads) if peer != rank) * row
        assert result.sent.rows == result.sent.carries == 0
    ranks.close()


def test_exchanges_of_a_decode_round_do_not_depend_on_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two a latent layer more than in a replicated group."""
    count = [0]
    start = Channel.start

    def counted(self: Channel, *args: Any) -> Any:
        count[0] += self.link.rank == 0
        return start(self, *args)

    monkeypatch.setattr(Channel, "start", counted)
    seen = []
    for split in (False, True):
        ranks = made(2, split=split)
        for lane in range(3):
            ids = pages_of(ranks, lane % 2, 8 * lane) if split else list(range(8 * lane, 8 * lane + 8))
            ranks.begin(lane, ids, owner=lane % 2 if split else 0)
            ranks.prompt(lane, PROMPT[: 70 + lane])
        for lanes in ([0], [0, 1, 2]):
            count[0] = 0
            ranks.agree(frames.Decode(lanes, 1, []))
            seen.append(count[0])
        layers = len(ranks.geometry.mla_layers)
        ranks.close()
    assert seen[0] == seen[1]
    assert seen[2] == seen[3] == seen[0] + 2 * layers


def test_queries_travel_while_the_selection_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every selection of a decode round stands between the start of a journey of queries and the wait for it."""
    ranks = made(2)
    for lane in range(2):
        ranks.begin(lane, pages_of(ranks, lane, 8 * lane), owner=lane)
        ranks.prompt(lane, PROMPT[: 70 + lane])
    seen: list[str] = []
    under_way: list[Any] = []
    start, wait, select = Channel.start, Link.wait, ranks.kernels[0].select

    def started(self: Channel, *args: Any) -> Any:
        slot = start(self, *args)
        if self.link.rank == 0 and self._kind == "queries":
            under_way.append(slot)
            seen.append("start")
        return slot

    def waited(self: Link, slot: Any) -> None:
        if self.rank == 0 and under_way and slot is under_way[-1]:
            seen.append("wait")
        wait(self, slot)

    def selected(*args: Any) -> None:
        seen.append("select")
        select(*args)

    monkeypatch.setattr(Channel, "start", started)
    monkeypatch.setattr(Link, "wait", waited)
    monkeypatch.setattr(ranks.kernels[0], "select", selected)
    ranks.agree(frames.Decode([0, 1], 1, []))
    layers, full = ranks.geometry.mla_layers, ranks.geometry.indexed_layers
    assert seen == [step for layer in layers for step in ("start", *["select"] * (layer in full), "wait")]
    ranks.close()
