"""The picture of the pool: cells, totals, colours, legend."""

from latentpool.cli.picture import Cell, bar, picture
from latentpool.v1 import pool_admin_pb2 as pb

LIVE, BORROWED, FREE, FENCED = pb.PAGE_KIND_LIVE, pb.PAGE_KIND_BORROWED, pb.PAGE_KIND_FREE, pb.PAGE_KIND_FENCED
KEPT = pb.PAGE_KIND_KEPT


def pool(*runs, pages):
    return pb.ListPagesResponse(runs=runs, pages=pages, free=3, reserved=2, page_rows=64)


def colours(drawn, characters):
    """Styles of the cells drawn as one of these characters."""
    spans = [(str(span.style), drawn.plain[span.start : span.end]) for span in drawn.spans]
    return {style for style, text in spans if text in characters}


def test_replicated_pages():
    drawn = picture(
        pool(
            pb.PageRun(first=0, count=2, stride=1, kind=LIVE, conversation=7),
            pb.PageRun(first=3, count=1, stride=1, kind=FENCED, conversation=7),
            pb.PageRun(first=2, count=1, stride=1, kind=FREE),
            pages=4,
        )
    ).plain
    assert drawn.startswith("4 pages of 64 rows, 256 tokens: 2 live, 1 fenced, 1 free; 2 reserved\n")
    assert " every rank 4 pages: 2 live, 1 fenced, 1 free\n            ██·▒\n" in drawn
    assert drawn.endswith("            █ conversation 7 2  ▒ fenced 1  · free 1")


def test_owned_pages_have_lines_and_totals_an_owner():
    drawn = picture(
        pool(
            pb.PageRun(first=0, count=3, stride=2, kind=FREE, owner=0),
            pb.PageRun(first=1, count=3, stride=2, kind=pb.PAGE_KIND_KEPT, owner=1),
            pages=6,
        )
    ).plain
    assert "     rank 0 3 pages: 3 free\n            ···\n" in drawn
    assert "     rank 1 3 pages: 3 kept\n            ▓▓▓\n" in drawn


def test_a_conversation_has_one_colour_on_its_owner_and_where_it_borrows():
    drawn = picture(
        pool(
            pb.PageRun(first=0, count=2, stride=2, kind=LIVE, owner=0, conversation=7),
            pb.PageRun(first=4, count=1, stride=2, kind=LIVE, owner=0, conversation=8),
            pb.PageRun(first=6, count=1, stride=2, kind=FREE, owner=0),
            pb.PageRun(first=1, count=2, stride=2, kind=BORROWED, owner=1, conversation=7),
            pb.PageRun(first=5, count=2, stride=2, kind=FREE, owner=1),
            pages=8,
        )
    )
    assert "     rank 0 4 pages: 3 live, 1 free\n            ███·\n" in drawn.plain
    assert "     rank 1 4 pages: 2 borrowed, 2 free\n            ▚▚··\n" in drawn.plain
    assert drawn.plain.endswith("            █ conversation 7 2  ▚ borrowed by 7 2  █ conversation 8 1  · free 3")
    assert len(colours(drawn, "▚")) == 1
    assert colours(drawn, "▚") < colours(drawn, "█")
    assert len(colours(drawn, "█")) == 2


def test_kept_and_shared_pages_have_marks_of_their_own():
    drawn = picture(
        pool(
            pb.PageRun(first=0, count=3, kind=KEPT, state=5, holders=1),
            pb.PageRun(first=3, count=2, kind=KEPT, state=5, holders=2),
            pb.PageRun(first=5, count=2, kind=LIVE, state=5, conversation=7, holders=2),
            pb.PageRun(first=7, count=1, kind=LIVE, conversation=7, holders=1),
            pb.PageRun(first=8, count=2, kind=LIVE, conversation=7, holders=2),
            pb.PageRun(first=10, count=1, kind=FENCED, conversation=7),
            pages=11,
        )
    )
    assert drawn.plain.startswith("11 pages of 64 rows, 704 tokens: 1 live, 6 shared, 3 kept, 1 fenced; 2 reserved\n")
    assert " every rank 11 pages: 1 live, 6 shared, 3 kept, 1 fenced\n            ▓▓▓▀▀▀▀█▀▀▒\n" in drawn.plain
    legend = drawn.plain.split("▒\n")[1].split()
    assert " ".join(legend) == (
        "█ conversation 7 1 ▀ shared by 7 2 ▀ kept, used by 7 2 ▀ shared by kept states 2 ▓ kept 3 ▒ fenced 1"
    )
    (colour,) = colours(drawn, "█")
    assert colours(drawn, "▀") == {colour, f"{colour} on blue", "blue"}, "what is kept lies on its colour"


def test_a_page_of_a_conversation_and_a_state_is_shared_whoever_counts_its_holders():
    drawn = picture(pool(pb.PageRun(first=0, count=2, kind=LIVE, state=5, conversation=7), pages=2)).plain
    assert "2 pages: 2 shared\n            ▀▀\n" in drawn


def test_a_bar_holds_all_pages_of_an_owner():
    cells = [*[Cell("live", 7)] * 3, *[Cell("free")] * 96, Cell("kept", kept=True)]
    assert bar(cells, 100).plain == "███" + "·" * 96 + "▓"
    assert bar(cells, 40).plain == "█" + "·" * 32 + "▓"
    assert bar([], 40).plain == ""


def test_one_page_in_use_shows_in_a_large_pool():
    drawn = picture(
        pool(
            pb.PageRun(first=0, count=99_999, stride=1, kind=FREE),
            pb.PageRun(first=99_999, count=1, stride=1, kind=LIVE, conversation=1),
            pages=100_000,
        )
    ).plain
    lines = drawn.splitlines()
    assert len(lines) <= 12
    assert sum(line.count("█") for line in lines[1:-2]) == 1
    assert "a cell is 196 pages" in drawn


def test_a_long_legend_breaks_between_its_entries():
    runs = [pb.PageRun(first=page, count=1, stride=1, kind=LIVE, conversation=page + 100) for page in range(20)]
    legend = picture(pool(*runs, pages=20)).plain.splitlines()[3:]
    assert len(legend) == 7
    assert all(len(line) <= 80 for line in legend)
    entries = [entry for line in legend for entry in line.strip().split("  ")]
    assert entries == [f"█ conversation {page + 100} 1" for page in range(20)]
