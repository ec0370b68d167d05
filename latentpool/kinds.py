"""How the value of a setting is read and what is allowed: one `Kind` for each kind of value.

Each parses text, or a value of a TOML file; ValueError where it is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentpool.units import BYTES_ALLOWED, TOKENS_ALLOWED, parse_bytes, parse_tokens


@dataclass(frozen=True)
class Kind:
    """How a value is read: `parse` takes the text of a flag or variable, or a TOML value, and raises ValueError for what is
    not allowed; `allowed` says what is."""

    parse: Callable[[object], Any]
    allowed: str
    metavar: str


def choice(*names: str) -> Kind:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Kind(parse, " or ".join((", ".join(names[:-1]), names[-1])), "|".join(names))


def whole(least: int, most: int | None = None) -> Kind:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
        if number < least or (most is not None and number > most):
            raise ValueError
        return number

    return Kind(parse, f"a whole number from {least}" + (f" to {most}" if most is not None else ""), "N")


def real(least: float, most: float = math.inf) -> Kind:
    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
        if not least <= number <= most or math.isinf(number):
            raise ValueError
        return number

    return Kind(parse, f"a number from {least:g}" + (f" to {most:g}" if most < math.inf else ""), "X")


def _parse_share(value: object) -> float:
    share = real(0, 1).parse(value)
    if not share:
        raise ValueError
    return float(share)


def sized(parse_text: Callable[[str], int], allowed: str, metavar: str, least: int = 1) -> Kind:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        size = parse_text(str(value))
        if size < least:
            raise ValueError
        return size

    return Kind(parse, allowed, metavar)


def _parse_bool(value: object) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return known[str(value).lower()]


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _parse_page_rows(value: object) -> int:
    rows = whole(64, 512).parse(value)
    if rows & (rows - 1):
        raise ValueError
    return int(rows)


def multiple_of_64(most: int) -> Kind:
    def parse(value: object) -> int:
        rows = whole(64, most).parse(value)
        if rows % 64:
            raise ValueError
        return int(rows)

    return Kind(parse, f"a multiple of 64 from 64 to {most}", "N")


def _parse_address(value: object) -> str:
    host, colon, port = _parse_text(value).rpartition(":")
    if not colon or not host or not 0 <= int(port) <= 65535:
        raise ValueError
    return f"{host}:{port}"


def _parse_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, list):
        value = " ".join(str(item) for item in value)
    return tuple(whole(0, 2**32 - 1).parse(item) for item in _parse_text(value).replace(",", " ").split())


BYTES = sized(parse_bytes, BYTES_ALLOWED, "SIZE")
BYTES_OR_NONE = sized(parse_bytes, BYTES_ALLOWED, "SIZE", 0)
TOKENS = sized(parse_tokens, TOKENS_ALLOWED, "TOKENS")
SWITCH = choice("auto", "on", "off")
BOOL = Kind(_parse_bool, "true or false", "")
TEXT = Kind(_parse_text, "some text", "TEXT")
PATH = Kind(lambda value: Path(_parse_text(value)).expanduser(), "a path", "PATH")
ADDRESS = Kind(_parse_address, "host:port, with a port from 0 to 65535", "HOST:PORT")
SHARE = Kind(_parse_share, "a number above 0, at most 1", "X")
IDS = Kind(_parse_ids, "token ids such as 1 2 3", "IDS")
PAGE_ROWS = Kind(_parse_page_rows, "64, 128, 256 or 512", "64..512")
