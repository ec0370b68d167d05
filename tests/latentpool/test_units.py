import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentpool.units import format_bytes, format_tokens, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("15.2GiB", 16_320_875_724),
        ("180 MiB", 188_743_680),
        ("16gib", 17_179_869_184),
        ("4GB", 4_000_000_000),
        ("512", 512),
        ("512B", 512),
        ("1,024KiB", 1_048_576),
    ],
)
def test_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "count"), [("1M", 1_048_576), ("128k", 131_072), ("1.5k", 1536), ("4096", 4096), ("1m", 1_048_576)]
)
def test_tokens(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1GiB2", "1 Gi", "1e9", "nan", "1k"])
def test_what_is_not_a_size_says_what_is(text):
    with pytest.raises(ValueError, match="a size such as"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "1GiB", "1.3", "0.0001k", "-5"])
def test_what_is_not_a_token_count_says_what_is(text):
    with pytest.raises(ValueError, match="a number of tokens such as"):
        parse_tokens(text)


def test_printing():
    assert format_bytes(2_501_818_449) == "2.33 GiB"
    assert format_bytes(188_743_680) == "180.00 MiB"
    assert format_bytes(1023) == "1023 B"
    assert format_tokens(1 << 20) == "1,048,576 (1M)"
    assert format_tokens(526_336) == "526,336 (514k)"
    assert format_tokens(1000) == "1,000"


@given(st.integers(0, 1 << 50))
def test_printed_bytes_read_back_within_their_last_decimal(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(1, count / 100)
