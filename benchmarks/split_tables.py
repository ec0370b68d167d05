"""The tables that benchmarks/split.py prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table


def tables(report: dict[str, Any]) -> Iterator[Table]:
    yield layout(report["layout"])
    yield use(report["use"])
    yield rates(report["speed"])
    yield decode_rounds(report)
    yield attention(report["attention_us_a_layer"])
    yield carry(report)


def _table(title: str, first: str, *names: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table


def layout(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "the real model (bf16, no cache): tokens that the pages hold", "", "replicated", "split", "ratio", "bytes a token",
        "split", "whole conversations", "split",
    )  # fmt: skip
    for row in rows:
        kept, split = row["replicated"], row["split"]
        name = f"W={row['world']}, {row['room_bytes'] / 2**30:.2f} GiB a rank, {row['lanes']} x {row['context']:,}"
        table.add_row(
            name, f"{kept['tokens']:,}", f"{split['tokens']:,}", f"{row['ratio']:.2f} x",
            f"{kept['bytes_a_token']:,.0f}", f"{split['bytes_a_token']:,.0f}",
            str(kept["whole_conversations"]), str(split["whole_conversations"]),
        )  # fmt: skip
    return table


def use(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "the small model, filled until the first has to wait", "", "at once", "split", "ratio", "tokens held then", "split",
        "tokens of the pages", "split", "ratio", "seconds to fill", "split",
    )  # fmt: skip
    for row in rows:
        kept, split = row["replicated"], row["split"]
        cells = [f"W={row['world']}, {kept['arena_bytes_a_rank'] / 2**20:.1f} MiB of pages a rank"]
        cells += [f"{kept['at_once']}", f"{split['at_once']}", f"{split['at_once'] / kept['at_once']:.2f} x"]
        cells += [f"{kept['tokens']:,}", f"{split['tokens']:,}"]
        cells += [
            f"{kept['page_tokens']:,}",
            f"{split['page_tokens']:,}",
            f"{split['page_tokens'] / kept['page_tokens']:.2f} x",
        ]
        table.add_row(*cells, f"{kept['filled_in_seconds']:.1f}", f"{split['filled_in_seconds']:.1f}")
    return table


def rates(speed: dict[str, Any]) -> Table:
    names = {"replicated": "replicated", "split": "split, borrowed", "split, no borrowing": "split, fetched"}
    table = _table(
        "W=2, tokens a second (least to most of the runs)", "", *names.values(), "split / replicated", "fetched / replicated"
    )
    for kind, label in (("decode", "decode, streams: {}"), ("prefill", "a prompt of {} tokens")):
        of = speed[kind]
        for size, kept in of["replicated"].items():
            cells, ratios = [], []
            for name in names:
                one = of.get(name, {}).get(size)
                cells.append(_rate(one) if one else "")
                if name != "replicated":
                    ratios.append(f"{one['tokens_per_second'] / kept['tokens_per_second']:.2f} x" if one else "")
            table.add_row(label.format(size), *cells, *ratios)
    return table


def _rate(one: dict[str, Any]) -> str:
    return f"{one['tokens_per_second']:,.1f} ({min(one['runs']):,.0f} to {max(one['runs']):,.0f})"


def decode_rounds(report: dict[str, Any]) -> Table:
    table = _table(
        "W=2, a decode round, ms by rank (median)", "", "compute", "exchange", "bare exchanges", "sums, bytes a token",
        "queries", "outputs", "by the formulas",
    )  # fmt: skip
    formulas, link = report["formulas"], report["link"]["exchange_seconds"]
    for name in ("replicated", "split"):
        for streams, one in report["speed"]["decode"][name].items():
            floor = formulas[f"exchanges_{name}"] * link[_nearest(link, 1024 * int(streams))]
            sent = one["sent_bytes_a_token"]
            expected = {"sums": formulas["sums"], "samples": formulas["samples"]}
            if name == "split":
                expected |= {kind: formulas[kind] for kind in ("queries", "outputs")}
            agree = all(abs(count - expected.get(kind, 0)) < 0.5 for kind, count in sent.items())
            table.add_row(
                f"{name}, streams: {streams}",
                " / ".join(f"{seconds * 1e3:.2f}" for seconds in one["compute_seconds"]),
                " / ".join(f"{seconds * 1e3:.2f}" for seconds in one["exchange_seconds"]),
                f"{floor * 1e3:.2f}",
                *(f"{sent.get(kind, 0):,.0f}" for kind in ("sums", "queries", "outputs")),
                "equal" if agree else "DIFFERENT",
            )
    return table


def _nearest(sizes: dict[Any, float], size: int) -> Any:
    return min(sizes, key=lambda one: abs(int(one) - size))


def attention(of: dict[str, Any]) -> Table:
    """The selection stands between `send queries` and the rest, and is in none. Medians do not add up to the whole."""
    parts = ("whole", "send queries", "take queries", "attend", "return outputs", "outputs exchanged")
    heads = (*parts[:-1], "of that exchanging")
    table = _table("W=2, attention of a decode round, us a latent layer by rank (medians)", "", *heads)
    for name, sizes in of.items():
        for streams, ranks in sizes.items():
            cells = (" / ".join(f"{one.get(part, 0.0):,.0f}" for one in ranks) for part in parts)
            table.add_row(
                f"{name}, streams: {streams}", *(cell if name == "split" or n == 0 else "" for n, cell in enumerate(cells))
            )
    return table


def carry(report: dict[str, Any]) -> Table:
    table = _table(
        "W=2, a carry (medians)", "", "rows", "bytes a row", "ms", "ms in engines", "ms at the link's rate", "rounds",
        "us a row", "a stream's longest gap, ms", "median gap before",
    )  # fmt: skip
    of, speed, row = report["carry"], report["link"]["bytes_per_second"], report["formulas"]["carry_bytes_a_row"]
    for name in ("alone", "beside_a_stream"):
        runs = of[name]
        moved = statistics.median(run["bytes"] for run in runs)
        seconds = statistics.median(run["seconds"] for run in runs)
        gaps = [run["longest_gap_seconds"] for run in runs if "longest_gap_seconds" in run]
        table.add_row(
            name.replace("_", " "), f"{moved / row:,.0f}", f"{row:,}", f"{seconds * 1e3:,.0f}",
            f"{statistics.median(max(run['engine_seconds']) for run in runs) * 1e3:,.0f}", f"{moved / speed * 1e3:,.1f}",
            f"{statistics.median(run['rounds'] for run in runs):g}", f"{seconds * row / moved * 1e6:.1f}",
            f"{statistics.median(gaps) * 1e3:,.0f} (most {max(gaps) * 1e3:,.0f})" if gaps else "",
            f"{of['gap_seconds_before']['p50'] * 1e3:,.0f}" if gaps else "",
        )  # fmt: skip
    return table
