"""The picture of the pool: cells, totals, colours, legend."""

from latentpool.cli.picture import picture
from latentpool.v1 import pool_admin_pb2 as pb

LIVE, BORROWED, FREE, FENCED = pb.PAGE_KIND_LIVE, pb.PAGE_KIND_BORROWED, pb.PAGE_KIND_FREE, pb.PAGE_KIND_FENCED


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
    assert drawn.startswith("4 pages of 64 rows (256 tokens): 3 free, 2 reserved\n")
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
