"""The plan against the design's golden table (real geometry, bf16) and against properties that hold for any room."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentpool.errors import ConfigError, GeometryError, PlanRefusedError
from latentpool.geometry import Geometry
from services.pool_manager.plan import Choice, Plan, choose, decide, lane_fixed, plan, to_proto, window_pages

REAL = Geometry.from_file(Path(__file__).parents[2] / "data" / "glm-5.3-flash")
GIB = 1 << 30
MIB = 1 << 20
FIXED = {1: 300 * MIB, 2: 180 * MIB, 3: round(106.7 * MIB)}
M = 1 << 20
K = 1 << 10


def real(
    world: int,
    context: int,
    lanes: int,
    room_gib: float,
    *,
    mode: str = "pages",
    split: bool = False,
    order: str = "new",
    cache: int = 16 * GIB,
    **more: object,
) -> Plan:
    room = [round(room_gib * GIB)] * world
    return plan(room, context, lanes, cache, REAL, world, mode, split, [FIXED[world]] * world, "bf16", order=order, **more)  # type: ignore[arg-type]


def gib(count: int) -> float:
    return count / GIB


def test_bytes_of_the_real_geometry() -> None:
    assert REAL.row_bytes("bf16") == 13_056
    assert 512 * REAL.row_bytes("bf16") == 6_684_672
    assert window_pages(M, 512) == 2_049
    small = real(1, 512, 1, 1)
    assert small.ledgers[0].page_bytes == 6_684_672
    for world, token in ((2, 6_912), (3, 4_864), (4, 3_840)):
        split = plan([20 * GIB] * world, M, 1, 0, REAL, world, "pages", True, [0] * world, "bf16")
        assert split.ledgers[0].page_bytes == 512 * token * world


# (world, context, lanes, room GiB, order, split, pages, cache GiB)
GOLDEN = [
    pytest.param(2, M, 8, 15.2, "stated", False, 2_056, 1.17, id="1M x8 W2 stated"),
    pytest.param(2, M, 8, 15.2, "new", False, 2_056, 1.17, id="1M x8 W2 new"),
    pytest.param(2, M, 8, 15.2, "new", True, 4_104, 0.443, id="1M x8 W2 split"),
    pytest.param(2, 128 * K, 4, 9.5, "stated", False, 260, 7.35, id="128k x4 W2 stated"),
    pytest.param(2, 128 * K, 4, 9.5, "new", False, 1_028, 2.57, id="128k x4 W2 new"),
    pytest.param(2, 128 * K, 4, 9.5, "new", True, 2 * 514, 5.58, id="128k x4 W2 split"),
    pytest.param(2, 256 * K, 8, 15.2, "stated", False, 520, 10.73, id="256k x8 W2 stated"),
    pytest.param(2, 256 * K, 8, 15.2, "new", False, 2_052, 1.19, id="256k x8 W2 new"),
    pytest.param(2, 256 * K, 8, 15.2, "new", True, 2 * 1_026, 7.21, id="256k x8 W2 split"),
    pytest.param(3, M, 8, 37.62, "stated", False, 3_355, 16, id="1M x8 W3 stated"),
    pytest.param(3, M, 8, 37.62, "new", False, 4_098, 11.38, id="1M x8 W3 new"),
    pytest.param(3, M, 8, 37.62, "new", True, 9_006, 16, id="1M x8 W3 split"),
]


@pytest.mark.parametrize(("world", "context", "lanes", "room", "order", "split", "pages", "cache"), GOLDEN)
def test_golden(world: int, context: int, lanes: int, room: float, order: str, split: bool, pages: int, cache: float) -> None:
    got = real(world, context, lanes, room, order=order, split=split)
    assert got.stream_pages == pages
    digits = 3 if cache == 0.443 else 2
    assert round(gib(got.cache_bytes), digits) == cache


@pytest.mark.parametrize(("context", "lanes", "room", "owned"), [(M, 8, 15.2, 2_119), (128 * K, 4, 9.5, 1_361)])
def test_golden_split_without_cache(context: int, lanes: int, room: float, owned: int) -> None:
    got = real(2, context, lanes, room, split=True, cache=0)
    assert got.owner_pages == owned
    assert got.stream_pages == got.pages == 2 * owned


def test_golden_arena_and_tokens() -> None:
    assert real(2, M, 8, 15.2).pages == 2_056 + 187 == 2_243
    split = real(2, M, 8, 15.2, split=True)
    assert split.pages == 4_238
    assert (split.owner_pages, split.stream_tokens) == (2_052, 2_101_248)
    assert real(3, M, 8, 37.62, split=True).owner_pages == 3_002
    assert real(2, 128 * K, 4, 9.5).stream_tokens == 526_336


def test_golden_fixed_parts_leave_fewer_pages_than_two_windows() -> None:
    got = real(2, M, 8, 26)
    assert got.stream_pages == 3_978 < 2 * got.window_pages


def test_windows_refusal_names_the_numbers_and_what_would_be_served() -> None:
    with pytest.raises(PlanRefusedError) as refused:
        real(2, M, 8, 12.75 + 2.33, mode="windows")
    text = str(refused.value)
    assert text.startswith(
        "--parallel 8 needs 90.48 GiB for its streams at a 1048576-token window, and the memory budget leaves 2.33 GiB: "
        "serve --parallel 1, or lower --context"
    )
    assert "the largest --parallel at --context 1048576 is 1" in text
    assert "--kv-pages on would serve --parallel 8 at --context 1048576" in text
    largest = int(text.split("the largest --context at --parallel 8 is ")[1].split(";")[0])
    assert largest % 512 == 0
    real(2, largest, 8, 12.75 + 2.33, mode="windows")
    with pytest.raises(PlanRefusedError):
        real(2, largest + 512, 8, 12.75 + 2.33, mode="windows")
    real(2, M, 1, 12.75 + 2.33, mode="windows")


def test_windows_refusal_where_not_even_one_stream_fits() -> None:
    with pytest.raises(PlanRefusedError) as refused:
        real(2, M, 2, 9.5, mode="windows")
    text = str(refused.value)
    assert text.startswith("--context 1048576 needs 12.75 GiB for one stream, and the memory budget leaves 9.50 GiB: lower")
    assert "no --parallel is served at --context 1048576" in text
    assert "--kv-pages on would not serve --parallel 2 at --context 1048576" in text


@pytest.mark.parametrize("split", [False, True])
def test_pages_refusal_names_what_would_be_served(split: bool) -> None:
    with pytest.raises(PlanRefusedError) as refused:
        real(2, M, 8, 13.6, split=split)
    text = str(refused.value)
    pages = 2_049 + (4 if split else 8) - 1
    need = pages * (6.75 if split else 6.375) / 1024 + 7 * 180 / 1024
    assert text.startswith(
        f"--parallel 8 needs {need:.2f} GiB for its streams at a 1048576-token window ({pages} pages a rank at least), "
        "and the memory budget leaves 13.60 GiB: serve --parallel "
    )
    lanes = int(text.split("the largest --parallel at --context 1048576 is ")[1].split(";")[0])
    context = int(text.split("the largest --context at --parallel 8 is ")[1])
    real(2, M, lanes, 13.6, split=split)
    real(2, context, 8, 13.6, split=split)
    for worse in ((M, lanes + 1), (context + 512, 8)):
        with pytest.raises(PlanRefusedError):
            real(2, *worse, 13.6, split=split)
    assert "--kv-pages" not in text


def test_refusal_names_the_rank_with_the_least_room() -> None:
    with pytest.raises(PlanRefusedError, match=r"leaves 13.00 GiB: .*; rank 1 has the least room;"):
        plan([15 * GIB, 13 * GIB], M, 8, 0, REAL, 2, "pages", False, [180 * MIB] * 2, "bf16")


def test_first_sequence_outside_the_pool_sets_no_window_aside() -> None:
    got = real(2, M, 8, 3, engine_paged=False, cache=GIB)
    room, page = 3 * GIB - 7 * 180 * MIB, 6_684_672
    assert got.stream_pages == 8 + (room - 8 * page - GIB) // page
    assert got.cache_bytes == GIB
    tight = real(2, M, 8, (7 * 180 * MIB + 8 * page) / GIB, engine_paged=False, cache=GIB)
    assert (tight.stream_pages, tight.cache_bytes) == (8, 0)


@pytest.mark.parametrize(
    ("kv_pages", "split", "world", "wanted"),
    [
        ("auto", "auto", 1, ("windows", False)),
        ("auto", "auto", 2, ("pages", True)),
        ("auto", "off", 2, ("pages", False)),
        ("auto", "on", 8, ("pages", True)),
        ("on", "auto", 1, ("pages", False)),
        ("on", "auto", 3, ("pages", True)),
        ("on", "off", 1, ("pages", False)),
        ("off", "auto", 4, ("windows", False)),
        ("off", "off", 4, ("windows", False)),
    ],
)
def test_decide(kv_pages: Choice, split: Choice, world: int, wanted: tuple[str, bool]) -> None:
    assert decide(kv_pages, split, world) == wanted


def test_decide_refuses_what_excludes_one_another() -> None:
    with pytest.raises(ConfigError, match=r"^--split on --kv-pages off: windows are whole on every rank"):
        decide("off", "on", 2)
    with pytest.raises(ConfigError, match=r"^--split on --ranks 1: one rank keeps every row anyway"):
        decide("auto", "on", 1)


def chosen(split: Choice, context: int, lanes: int, room: int, **changes: object) -> Plan:
    """At W = 2, without a budget for kept states."""
    arguments: dict[str, object] = {
        "room": [room] * 2,
        "context": context,
        "lanes": lanes,
        "cache_budget": 0,
        "geometry": REAL,
        "world": 2,
        "fixed": [FIXED[2]] * 2,
        "kv_dtype": "bf16",
    }
    return choose("auto", split, **(arguments | changes))  # type: ignore[arg-type]


ONE_WINDOW = 257
"""Pages of a conversation of 128k tokens."""


def test_owners_are_chosen_where_they_serve() -> None:
    got = chosen("auto", 128 * K, 1, ONE_WINDOW * 512 * 2 * 6_912)
    assert (got.split, got.owner_pages, got.note) == (True, ONE_WINDOW, "")
    assert got == chosen("on", 128 * K, 1, ONE_WINDOW * 512 * 2 * 6_912)


def test_auto_falls_back_where_only_rows_on_every_rank_serve_the_context() -> None:
    room = ONE_WINDOW * 512 * 2 * 6_912 - 1
    got = chosen("auto", 128 * K, 1, room)
    assert (got.split, got.residues) == (False, 1)
    assert got.note == (
        "rows are kept on every rank, because with owners --context 131072 needs 1.69 GiB for one stream, and the memory "
        "budget leaves 1.69 GiB: lower --context"
    )
    assert replace(got, note="") == chosen("off", 128 * K, 1, room)
    assert to_proto(got).note == got.note
    with pytest.raises(PlanRefusedError, match=r"needs 1\.69 GiB for one stream"):
        chosen("on", 128 * K, 1, room)


def test_auto_refuses_in_the_words_of_the_layout_that_serves_the_longer_context() -> None:
    """One lane: a split page costs more, so rows on every rank go further. Many lanes: they need a page a lane there, and
    half a page a lane with owners."""
    for lanes, room, split in ((1, ONE_WINDOW * 512 * 13_056 - 1, False), (40, 2 * GIB + 39 * FIXED[2], True)):
        with pytest.raises(PlanRefusedError) as auto:
            chosen("auto", 256 * K, lanes, room)
        with pytest.raises(PlanRefusedError) as other:
            chosen("on" if split else "off", 256 * K, lanes, room)
        assert str(auto.value) == str(other.value)
        largest = int(str(auto.value).split(f"the largest --context at --parallel {lanes} is ")[1].split(";")[0])
        assert chosen("auto", largest, lanes, room).split == split
        with pytest.raises(PlanRefusedError):
            chosen("auto", largest + 512, lanes, room)


def test_windows_have_no_owners_to_fall_back_from() -> None:
    got = choose(
        "off", "auto", room=[GIB] * 2, context=K, lanes=1, cache_budget=0, geometry=REAL, world=2, fixed=[0, 0], kv_dtype="bf16"
    )  # fmt: skip
    assert (got.paged, got.split, got.note) == (False, False, "")


def test_lane_fixed_charges_the_slack_rows_of_windows() -> None:
    paged = lane_fixed(REAL, 2, 0, "bf16", "bf16", "pages", M, 512)
    assert paged == REAL.lane_fixed_bytes(2, 0, "bf16")
    assert lane_fixed(REAL, 2, 0, "bf16", "bf16", "windows", M, 512) == paged + 512 * 13_056
    assert lane_fixed(REAL, 2, 0, "bf16", "bf16", "windows", M - 100, 512) == paged + 612 * 13_056


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"context": M + 1}, "--context 1048577: the model serves 1 to 1048576 tokens"),
        ({"context": 0}, "--context 0"),
        ({"lanes": 0}, "--parallel 0: at least 1"),
        ({"page_rows": 96}, "--page-rows 96: 64, 128, 256 or 512"),
        ({"cache": -1}, "--cache -1"),
        ({"mode": "windows", "split": True}, "--split on --kv-pages off"),
    ],
)
def test_values_that_no_room_serves(values: dict[str, object], text: str) -> None:
    arguments: dict[str, object] = {"world": 2, "context": M, "lanes": 1, "room_gib": 20.0} | values
    with pytest.raises(ConfigError, match=text):
        real(**arguments)  # type: ignore[arg-type]


def test_world_above_the_limit_is_refused() -> None:
    with pytest.raises(GeometryError, match="9 ranks"):
        plan([GIB] * 9, M, 1, 0, REAL, 9, "pages", False, [0] * 9, "bf16")


def test_proto_mirrors_the_plan() -> None:
    got = real(2, M, 8, 15.2)
    message = to_proto(got)
    for name in ("world", "paged", "split", "context", "lanes", "page_rows", "window_pages", "stream_pages", "pages"):
        assert getattr(message, name) == getattr(got, name)
    assert (message.cache_bytes, message.kv_dtype, message.note) == (got.cache_bytes, "bf16", "")
    assert [entry.rank for entry in message.ledgers] == [0, 1]
    assert all(
        entry.room_bytes == entry.stream_bytes + entry.lane_bytes + entry.cache_bytes + entry.unused_bytes
        for entry in message.ledgers
    )


# ---- properties --------------------------------------------------------------------------------------------------

rooms = st.integers(1 * GIB, 80 * GIB)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    world = draw(st.integers(1, 4))
    mode = draw(st.sampled_from(["pages", "windows"]))
    return {
        "room": draw(st.lists(rooms, min_size=world, max_size=world)),
        "context": draw(st.integers(1, M)),
        "lanes": draw(st.integers(1, 16)),
        "cache_budget": draw(st.sampled_from([0, 1, GIB, 16 * GIB])),
        "geometry": REAL,
        "world": world,
        "mode": mode,
        "split": mode == "pages" and draw(st.booleans()),
        "fixed": draw(st.lists(st.integers(0, 300 * MIB), min_size=world, max_size=world)),
        "kv_dtype": draw(st.sampled_from(["f32", "bf16", "fp8"])),
        "page_rows": draw(st.sampled_from([64, 512])),
        "engine_paged": draw(st.booleans()),
        "order": draw(st.sampled_from(["new", "stated"])),
    }


def planned(case: dict[str, object], **changes: object) -> Plan | None:
    try:
        return plan(**(case | changes))  # type: ignore[arg-type]
    except PlanRefusedError:
        return None


@given(cases())
@settings(deadline=None)
def test_ledgers_add_up_and_the_arena_fits(case: dict[str, object]) -> None:
    got = planned(case)
    if got is None:
        return
    world, room, fixed = case["world"], case["room"], case["fixed"]
    assert isinstance(world, int)
    assert isinstance(room, list)
    assert isinstance(fixed, list)
    assert len(got.ledgers) == world
    assert got.pages % got.residues == got.stream_pages % got.residues == 0
    for rank, entry in enumerate(got.ledgers):
        assert entry.rank == rank
        parts = (entry.stream_bytes, entry.lane_bytes, entry.cache_bytes, entry.unused_bytes)
        assert min(parts) >= 0
        assert sum(parts) == entry.room_bytes == room[rank]
        owned = got.pages // got.residues * entry.page_bytes
        slack = (got.stream_pages * got.page_rows - got.lanes * got.context) * REAL.row_bytes(got.kv_dtype)
        outside = 0 if got.paged else slack  # charged to `fixed` and before room
        assert owned - outside + (got.lanes - 1) * fixed[rank] <= room[rank]
    if case["engine_paged"] or not got.paged:
        assert got.owner_pages >= got.window_pages + math.ceil(got.lanes / got.residues) - 1


@given(cases(), st.integers(0, 40 * GIB))
@settings(deadline=None)
def test_more_room_never_serves_less(case: dict[str, object], more: int) -> None:
    room = case["room"]
    assert isinstance(room, list)
    got, larger = planned(case), planned(case, room=[size + more for size in room])
    if got is None:
        return
    assert larger is not None
    assert larger.stream_pages >= got.stream_pages
    assert larger.pages >= got.pages


@given(cases())
@settings(deadline=None)
def test_uneven_rooms_give_the_minimum_over_ranks(case: dict[str, object]) -> None:
    world, room, fixed = case["world"], case["room"], case["fixed"]
    assert isinstance(world, int)
    assert isinstance(room, list)
    assert isinstance(fixed, list)
    got = planned(case)
    even = [planned(case, room=[room[r]] * world, fixed=[fixed[r]] * world) for r in range(world)]
    served = [one.stream_pages for one in even if one is not None]
    assert (got is None) == (len(served) < world)
    if got is not None:
        assert got.stream_pages == min(served)


@given(cases())
@settings(deadline=None)
def test_pages_hold_the_rows_of_windows_up_to_the_stated_slack(case: dict[str, object]) -> None:
    """In the same room, as many rows as the windows that could be served, less a page of rounding and the fixed parts of
    the lanes that windows could not have served."""
    case = case | {"split": False, "engine_paged": True, "order": "new", "cache_budget": 0}
    pages = planned(case, mode="pages")
    lanes = case["lanes"]
    assert isinstance(lanes, int)
    served = next((n for n in range(lanes, 0, -1) if planned(case, mode="windows", lanes=n) is not None), 0)
    if pages is None or not served:
        return
    fixed, context, rows = case["fixed"], case["context"], case["page_rows"]
    assert isinstance(fixed, list)
    assert isinstance(context, int)
    assert isinstance(rows, int)
    lost = math.ceil((lanes - served) * max(fixed) / REAL.row_bytes(pages.kv_dtype))
    assert pages.stream_tokens >= served * context - lost - rows
