"""Free ids by runs are a set whose lowest members go first."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool_manager.free_ids import FreeIds


@settings(deadline=None)
@given(data=st.data(), step=st.integers(1, 3), count=st.integers(0, 40))
def test_any_calls_against_a_set(data: st.DataObject, step: int, count: int) -> None:
    first = data.draw(st.integers(0, step - 1))
    ids, everything = FreeIds(first, step, count), set(range(first, first + count * step, step))
    free = set(everything)
    for _ in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["take", "run", "put"])):
            case "take":
                asked = data.draw(st.integers(0, len(free)))
                taken = ids.take(asked)
                assert taken == sorted(free)[:asked]
                free -= set(taken)
            case "run" if step == 1:
                start, length = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 12))
                run = list(range(start, start + length))
                assert ids.has_run(start, length) == (set(run) <= free)
                if set(run) <= free:
                    assert ids.take_run(start, length) == run
                    free -= set(run)
            case "put":
                taken = sorted(everything - free)
                back = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
                ids.put(back)
                free |= set(back)
        assert list(ids) == sorted(free)
        assert len(ids) == len(free)
        runs = list(ids.runs())
        assert all(left[-1] + step < right[0] for left, right in pairwise(runs)), "two runs touch"


def test_mistakes() -> None:
    ids = FreeIds(1, 2, 5)
    with pytest.raises(ValueError, match="6 ids asked, 5 are free"):
        ids.take(6)
    assert ids.take(3) == [1, 3, 5]
    for twice in ([7], [5, 7], [9]):
        with pytest.raises(ValueError, match="are free already"):
            ids.put(twice)
    assert not ids.has_run(8, 1)  # of the other residue
    assert ids.has_run(7, 2)
    assert not ids.has_run(7, 3)
