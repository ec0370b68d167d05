"""The free ids of one residue, lowest first, as ascending runs: a call costs what it asks for, not what the arena holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence


class FreeIds:
    """Of the ids first, first + step, ... (`count` of them) those that are free; all at first. Runs never touch."""

    def __init__(self, first: int, step: int, count: int) -> None:
        self._first = first
        self._step = step
        self._starts = [0] if count else []  # in steps from the first id; a run is starts[i]..stops[i]-1
        self._stops = [count] if count else []
        self._count = count

    # ---- asking: changes nothing -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Ids in ascending order."""
        for run in self.runs():
            yield from run

    def runs(self) -> Iterator[range]:
        """Ids in ascending order, a run at a time."""
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield self._ids(start, stop)

    def has_run(self, first: int, count: int) -> bool:
        """Whether all of `count` ids from id `first` on are free."""
        start, rest = divmod(first - self._first, self._step)
        at = bisect_right(self._starts, start) - 1
        return not rest and at >= 0 and start + count <= self._stops[at]

    # ---- acting ------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Removes the `count` lowest ids. Raises ValueError where there are fewer."""
        if count > self._count:
            raise ValueError(f"{count} ids asked, {self._count} are free")
        self._count -= count
        ids: list[int] = []
        emptied = 0
        while count:
            start = self._starts[emptied]
            stop = min(start + count, self._stops[emptied])
            ids += self._ids(start, stop)
            count -= stop - start
            if stop == self._stops[emptied]:
                emptied += 1
            else:
                self._starts[emptied] = stop
        del self._starts[:emptied], self._stops[:emptied]
        return ids

    def take_run(self, first: int, count: int) -> list[int]:
        """Removes `count` ids from id `first` on. Ask `has_run` first."""
        start = (first - self._first) // self._step
        at = bisect_right(self._starts, start) - 1
        stop, end = start + count, self._stops[at]
        left = [(self._starts[at], start)] if self._starts[at] < start else []
        right = [(stop, end)] if stop < end else []
        self._starts[at : at + 1] = [run[0] for run in left + right]
        self._stops[at : at + 1] = [run[1] for run in left + right]
        self._count -= count
        return list(self._ids(start, stop))

    def put(self, ids: Iterable[int]) -> None:
        """Adds ids of this residue that are not free, in any order. Raises ValueError for one that is free already."""
        for start, stop in _runs_of(sorted((page - self._first) // self._step for page in ids)):
            self._put(start, stop)

    def _put(self, start: int, stop: int) -> None:
        at = bisect_right(self._starts, start)
        if (at and self._stops[at - 1] > start) or (at < len(self._starts) and self._starts[at] < stop):
            raise ValueError(f"some of ids {self._ids(start, stop)} are free already")
        joins_left = at > 0 and self._stops[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == stop
        if joins_left and joins_right:
            del self._starts[at], self._stops[at - 1]
        elif joins_left:
            self._stops[at - 1] = stop
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)
        self._count += stop - start

    def _ids(self, start: int, stop: int) -> range:
        return range(self._first + start * self._step, self._first + stop * self._step, self._step)


def _runs_of(ascending: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each run of consecutive numbers. Leases are mostly one run."""
    if not ascending:
        return
    if ascending[-1] - ascending[0] + 1 == len(ascending):
        yield ascending[0], ascending[-1] + 1
        return
    start = last = ascending[0]
    for number in ascending[1:]:
        if number != last + 1:
            yield start, last + 1
            start = number
        last = number
    yield start, last + 1
