"""What verify measures, against the reference data itself and against planted faults."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from latentpool.cli.reference import ANOTHER, check_vocabulary, compare, longest, prefixes, read_expected
from latentpool.errors import ConfigError

ORACLE = Path(__file__).parents[1] / "data" / "oracle"


class Replay:
    """Answers from the file itself, row by row, with a fault where one is planted."""

    def __init__(self, expected, key="", row=0, amount=0.0):
        self.expected, self.key, self.row, self.amount = expected, key, row, amount
        self.asked = []

    async def score(self, ids, decode_from):
        self.asked.append((len(ids), decode_from))
        prefix = self._prefix(ids)
        size = len(self.expected[prefix + "input_ids"])
        logits = self.expected[prefix + "logits"].copy()
        if len(ids) > size:  # prompt and greedy ids: the last id's row is nobody's
            assert decode_from == size
            logits = np.concatenate([logits[:-1], self.expected[prefix + "greedy.logits"], logits[-1:]])
            return self._faulty(prefix + "greedy.logits", logits, size - 1)
        if decode_from is not None:
            logits[decode_from - 1 :] = self.expected[prefix + "decode.logits"]
            return self._faulty(prefix + "decode.logits", logits, decode_from - 1)
        return self._faulty(prefix + "logits", logits, 0)

    async def generate(self, ids, count):
        prefix = self._prefix(ids)
        reply = self.expected[prefix + "greedy.ids"].tolist()
        assert len(reply) == count
        if self.key == prefix + "greedy.ids":
            reply[self.row] += 1
        return reply

    def _prefix(self, ids):
        for prefix in prefixes(self.expected):
            prompt = self.expected[prefix + "input_ids"].tolist()
            if list(ids) in (prompt, prompt + self.expected[prefix + "greedy.ids"].tolist()):
                return prefix
        raise AssertionError("a prompt that is not in the file")

    def _faulty(self, key, logits, first):
        if key == self.key:
            logits[first + self.row, 7] += self.amount
        return logits


def expected_of(case):
    return read_expected(ORACLE / case / "expected.safetensors")


def failed(checks):
    return [check.key for check in checks if check.passed is False]


@pytest.mark.parametrize("case", ["tiny", "edge", "shared_index", "real_ratio"])
async def test_the_reference_passes_against_itself(case):
    expected = expected_of(case)
    checks = await compare(expected, Replay(expected), 0.0)
    assert failed(checks) == []
    assert [check.key for check in checks if check.passed is None] == (
        [f"len{n}.decode.logits" for n in (1, 3, 4, 5, 63, 64, 65)] if case == "edge" else []
    )


@pytest.mark.parametrize("key", ["logits", "decode.logits", "greedy.logits"])
async def test_a_fault_in_one_number_is_found_and_named(key):
    expected = expected_of("tiny")
    scale = np.abs(expected["f64.logits"]).max()
    checks = await compare(expected, Replay(expected, key, 5, 3e-4 * scale), 2e-4)
    assert failed(checks) == [key]
    (check,) = [check for check in checks if check.passed is False]
    assert check.error == pytest.approx(3e-4, rel=1e-2)
    assert check.note == "worst row 5"
    assert failed(await compare(expected, Replay(expected, key, 5, 1e-4 * scale), 2e-4)) == []


async def test_nan_fails():
    expected = expected_of("tiny")
    assert failed(await compare(expected, Replay(expected, "logits", 0, np.nan), 2e-4)) == ["logits"]


async def test_another_greedy_id_is_named():
    expected = expected_of("edge")
    checks = await compare(expected, Replay(expected, "len63.greedy.ids", 3), 2e-4)
    assert failed(checks) == ["len63.greedy.ids"]
    wanted = int(expected["len63.greedy.ids"][3])
    assert [check.note for check in checks if check.passed is False] == [f"id 3 is {wanted + 1}, not {wanted}"]


async def test_decode_rows_are_asked_on_the_decode_path():
    expected = expected_of("tiny")
    replay = Replay(expected)
    await compare(expected, replay, 2e-4)
    split = int(expected["decode.split"][0])
    assert replay.asked == [(48, None), (48, split), (48 + 32, 48)]


async def test_bf16_is_accepted_by_rows():
    expected = expected_of("real_ratio")
    # The reference's own bf16 results meet the acceptance that was set for them.
    own = {**expected, "logits": expected["bf16.logits"], "decode.logits": expected["bf16.decode.logits"]}
    assert failed(await compare(expected, Replay(own), 2e-4, bf16=True)) == []
    worse = {**own, "logits": own["logits"] + 0.02 * np.abs(own["logits"]).max()}
    assert set(failed(await compare(expected, Replay(worse), 2e-4, bf16=True))) == {"f64.logits", "f64.logits, decoded"}


@pytest.mark.parametrize("bf16", [False, True])
async def test_data_of_another_checkpoint_is_suspected_where_most_rows_differ(bf16):
    expected = expected_of("tiny")
    mirrored = {key: value[:, ::-1] if key.endswith("logits") else value for key, value in expected.items()}
    checks = await compare(expected, Replay(mirrored), 2e-4, bf16=bf16)
    assert {check.note for check in checks if check.passed is False} >= {ANOTHER}
    scale = np.abs(expected["f64.logits"]).max()
    one = {**expected, "logits": expected["logits"].copy()}
    one["logits"][3] += 2 * scale
    assert ANOTHER not in {check.note for check in await compare(expected, Replay(one), 2e-4, bf16=bf16)}


def test_data_of_another_vocabulary_is_refused():
    expected = expected_of("edge")
    check_vocabulary(expected, 256)
    words = "^--expected was made by another checkpoint: its len1.logits are of 256 tokens, and this model has 2048$"
    with pytest.raises(ConfigError, match=words):
        check_vocabulary(expected, 2048)
    ids = {"input_ids": np.array([3, 300])}
    check_vocabulary(ids, 301)
    words = "^--expected was made by another checkpoint: its input_ids have token 300, and this model has 300 tokens$"
    with pytest.raises(ConfigError, match=words):
        check_vocabulary(ids, 300)


def test_longest_conversation():
    assert longest(expected_of("tiny")) == 80
    assert longest(expected_of("edge")) == 97


def test_files_that_are_not_reference_data(tmp_path):
    with pytest.raises(ConfigError, match=r"--expected .*absent"):
        read_expected(tmp_path / "absent.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(ConfigError, match=r"--expected .*broken"):
        read_expected(tmp_path / "broken.safetensors")
    save_file({"logits": np.zeros((1, 2), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="has no input_ids"):
        read_expected(tmp_path / "other.safetensors")
