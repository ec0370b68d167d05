"""The receipt is a hash that anybody can compute again."""

import hashlib
import struct

import numpy as np
import pytest

from latentpool.receipts import receipt


def test_a_receipt_hashes_version_length_and_ids() -> None:
    packed = struct.pack("<BI5I", 1, 3, 7, 8, 2**32 - 1, 154_879, 0)
    assert receipt([7, 8, 2**32 - 1], [154_879, 0]) == hashlib.sha256(packed).hexdigest()
    assert receipt(np.array([7, 8, 2**32 - 1], np.uint32), [154_879, 0]) == hashlib.sha256(packed).hexdigest()


@pytest.mark.parametrize("other", [([1, 2], [3]), ([1], [2, 4]), ([1], [2]), ([], [1, 2, 3])])
def test_where_the_prompt_ends_and_every_id_count(other) -> None:
    assert receipt([1], [2, 3]) != receipt(*other)
