"""Sampling parameters: the limits, by name, and the way through the message."""

import pytest

from latentpool.errors import RequestError
from latentpool.sampling import Sampling


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 100.0, "top_k": 1024, "seed": 0, "max_tokens": 1},
        {"temperature": 1e-300, "top_k": 1, "seed": 2**64 - 1, "max_tokens": 2**32 - 1, "stop_token_ids": (0, 255)},
        {"ignore_eos": True},
    ],
)
def test_allowed_values_pass_and_survive_the_message(values: dict) -> None:
    sampling = Sampling(**values)
    sampling.check(256)
    assert Sampling.from_proto(sampling.to_proto()) == sampling


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1e-9, "temperature = -1e-09: a finite number from 0 (greedy) to 100"),
        ("temperature", 100.5, "temperature = 100.5: a finite number from 0 (greedy) to 100"),
        ("temperature", float("inf"), "temperature = inf: a finite number from 0 (greedy) to 100"),
        ("temperature", float("nan"), "temperature = nan: a finite number from 0 (greedy) to 100"),
        ("top_k", 1025, "top_k = 1025: 0 (all) to 1024"),
        ("top_k", -1, "top_k = -1: 0 (all) to 1024"),
        ("seed", -1, "seed = -1: 0 to 18446744073709551615"),
        ("seed", 2**64, "seed = 18446744073709551616: 0 to 18446744073709551615"),
        ("max_tokens", 0, "max_tokens = 0: at least 1; leave it out for as many as fit"),
        ("stop_token_ids", (1, 256), "stop_token_ids = 256: ids of this model are 0 to 255"),
        ("stop_token_ids", (-1,), "stop_token_ids = -1: ids of this model are 0 to 255"),
    ],
)
def test_other_values_are_refused_by_name(field: str, value, words: str) -> None:
    with pytest.raises(RequestError) as raised:
        Sampling(**{field: value}).check(256)
    assert str(raised.value) == words
    assert raised.value.field == f"sampling.{field}"


@pytest.mark.parametrize("values", [{"seed": -1}, {"top_k": 2**32}, {"max_tokens": -5}, {"stop_token_ids": (2**32,)}])
def test_what_the_message_cannot_hold_is_a_request_error_too(values: dict) -> None:
    with pytest.raises(RequestError, match="sampling parameters: "):
        Sampling(**values).to_proto()
