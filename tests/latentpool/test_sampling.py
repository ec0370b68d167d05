"""Sampling parameters: the limits, by name, and the way through the message."""

import pytest

from latentpool.errors import RequestError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 100.0, "top_k": 1024, "seed": 0, "max_tokens": 1},
        {"temperature": 1e-300, "top_k": 1, "seed": 2**64 - 1, "max_tokens": 2**32 - 1, "stop_token_ids": (0, 255)},
        {"ignore_eos": True},
        {"top_p": 1.0, "min_p": 0.0, "log_probs": 0},
        {"top_p": 5e-324, "min_p": 1.0, "log_probs": 20, "stop": ("x",) * 16},
        {"stop": ("é" * 128, "\x00", " ")},
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
        ("temperature", 5e-324, "temperature = 5e-324: at least 1e-300 where it is not 0 (greedy)"),
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
        ("top_p", 0.0, "top_p = 0.0: above 0 and at most 1 (all)"),
        ("top_p", -0.5, "top_p = -0.5: above 0 and at most 1 (all)"),
        ("top_p", 1.0000001, "top_p = 1.0000001: above 0 and at most 1 (all)"),
        ("top_p", float("nan"), "top_p = nan: above 0 and at most 1 (all)"),
        ("top_p", float("inf"), "top_p = inf: above 0 and at most 1 (all)"),
        ("min_p", -1e-9, "min_p = -1e-09: 0 (all) to 1"),
        ("min_p", 1.5, "min_p = 1.5: 0 (all) to 1"),
        ("min_p", float("nan"), "min_p = nan: 0 (all) to 1"),
        ("log_probs", -1, "log_probs = -1: 0 to 20 likeliest tokens; leave it out for none"),
        ("log_probs", 21, "log_probs = 21: 0 to 20 likeliest tokens; leave it out for none"),
        ("stop", ("x",) * 17, "stop = 17 strings: at most 16"),
    ],
)
def test_other_values_are_refused_by_name(field: str, value, words: str) -> None:
    with pytest.raises(RequestError) as raised:
        Sampling(**{field: value}).check(256)
    assert str(raised.value) == words
    assert raised.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("", "stop[1] = 0 bytes of UTF-8: 1 to 256"),
        ("x" * 257, "stop[1] = 257 bytes of UTF-8: 1 to 256"),
        ("é" * 129, "stop[1] = 258 bytes of UTF-8: 1 to 256"),
        ("a\ufffd", "stop[1] = a string with U+FFFD, which stands for bytes that are not text: leave it out"),
    ],
)
def test_a_stop_string_is_refused_by_its_index(stop: str, words: str) -> None:
    with pytest.raises(RequestError) as raised:
        Sampling(stop=("fine", stop)).check(256)
    assert str(raised.value) == words
    assert raised.value.field == "sampling.stop[1]"


def test_what_is_left_out_of_the_message_cuts_nothing() -> None:
    sampling = Sampling.from_proto(router_pb2.Sampling())
    assert (sampling.top_p, sampling.min_p, sampling.stop, sampling.log_probs) == (1.0, 0.0, (), None)
    assert Sampling.from_proto(router_pb2.Sampling(top_p=0.0)).top_p == 0.0  # stated, and refused


@pytest.mark.parametrize(
    "values",
    [
        {"seed": -1},
        {"stop": ("\ud800",)},
        {"log_probs": -1},
        {"top_k": 2**32},
        {"max_tokens": -5},
        {"stop_token_ids": (2**32,)},
    ],
)
def test_what_the_message_cannot_hold_is_a_request_error_too(values: dict) -> None:
    with pytest.raises(RequestError, match="sampling parameters: "):
        Sampling(**values).to_proto()
