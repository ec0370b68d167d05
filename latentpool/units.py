"""Sizes as people write them: bytes with decimal (kB, MB, ...) or binary (KiB, MiB, ...) units, tokens with k and M.

A token count's k is 1,024 and M is 1,048,576, as context lengths are named: 128k is 131,072 tokens.
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, **_BINARY}
_TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}

BYTES_ALLOWED = "a size such as 15.2GiB, 180MiB or a number of bytes"
TOKENS_ALLOWED = "a number of tokens such as 1M (1,048,576), 128k (131,072) or 4096"


def _parse(text: str, units: dict[str, int], allowed: str) -> Fraction:
    match = _NUMBER.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if match is None or match[2].lower() not in units:
        raise ValueError(allowed)
    return Fraction(match[1]) * units[match[2].lower()]


def parse_bytes(text: str) -> int:
    """Bytes of "15.2GiB", "180 MiB", "4GB" or "4096", rounded down to whole bytes. Raises ValueError with what is allowed."""
    return int(_parse(text, _BYTES, BYTES_ALLOWED))


def parse_tokens(text: str) -> int:
    """Tokens of "1M", "128k", "1.5k" or "4096". Raises ValueError for anything that is not a whole number of tokens."""
    tokens = _parse(text, _TOKENS, TOKENS_ALLOWED)
    if tokens.denominator != 1:
        raise ValueError(TOKENS_ALLOWED)
    return int(tokens)


def format_bytes(count: int) -> str:
    """Two decimals of the largest binary unit that leaves at least 1: "2.33 GiB"; below 1 KiB whole bytes: "512 B"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def format_tokens(count: int) -> str:
    """A token count with its digits grouped, and its short name where that is exact: "1,048,576 (1M)", "526,336 (514k)"."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if count >= unit and count % unit == 0:
            return f"{count:,} ({count // unit}{name})"
    return f"{count:,}"
