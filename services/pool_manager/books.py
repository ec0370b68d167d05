"""The id book: every page id is free, leased or fenced, and the lowest free id of a residue goes first.

Source: design section 5. The same calls give the same ids everywhere, so nothing here looks at clocks or hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain

from services.pool_manager.free_ids import FreeIds


class Kind(Enum):
    """What an id is. FENCED: given back, but a round that touches it is not answered yet."""

    FREE = "free"
    LEASED = "leased"
    FENCED = "fenced"


class Books:
    """Ids 0..pages-1 in `residues` free sets: id p belongs to residue p % residues, which is its owner's rank where ids
    have owners. An id may have several holders. Changes only through take, take_run, hold, give_back and answered."""

    def __init__(self, pages: int, residues: int) -> None:
        if pages % residues:
            raise ValueError(f"{pages} ids do not divide over {residues} residues")
        self.pages = pages
        self.residues = residues
        self._free = [FreeIds(residue, residues, pages // residues) for residue in range(residues)]
        self._holders = [0] * pages
        self._fenced: dict[int, list[int]] = {}  # fence -> ids, in the order given back
        self._fenced_of = [0] * residues
        self._late: dict[int, int] = {}  # id that is still held -> the highest fence of those that let go of it
        self._answered = 0

    # ---- asking: changes nothing -------------------------------------------------------------------------------

    def free(self, residue: int) -> int:
        """Ids that `take` could give now."""
        return len(self._free[residue])

    def fenced(self, residue: int) -> int:
        """Ids that wait for an answer."""
        return self._fenced_of[residue]

    def holders(self, page: int) -> int:
        """How many hold an id."""
        return self._holders[page]

    def can_take_run(self, first: int, count: int) -> bool:
        """Whether all of first..first+count-1 are free (one residue only)."""
        return self._free[0].has_run(first, count)

    def kinds(self) -> list[Kind]:
        """The kind of every id, by id."""
        kinds = [Kind.LEASED if holders else Kind.FREE for holders in self._holders]
        for ids in self._fenced.values():
            for page in ids:
                kinds[page] = Kind.FENCED
        return kinds

    # ---- acting ------------------------------------------------------------------------------------------------

    def take(self, residue: int, count: int) -> list[int]:
        """Leases the `count` lowest free ids of a residue to one holder. Ask `free` first: raises ValueError."""
        if count > self.free(residue):
            raise ValueError(f"{count} ids asked of residue {residue}, which has {self.free(residue)} free")
        ids = self._free[residue].take(count)
        self._hold(ids)
        return ids

    def take_run(self, first: int, count: int) -> list[int]:
        """Leases first..first+count-1 to one holder. Ask `can_take_run` first: raises ValueError."""
        if not self.can_take_run(first, count):
            raise ValueError(f"ids {first}..{first + count - 1} are not all free")
        ids = self._free[0].take_run(first, count)
        self._hold(ids)
        return ids

    def hold(self, ids: Sequence[int]) -> None:
        """One more holder of ids that have some. Raises ValueError for an id that nobody holds."""
        for page in ids:
            if not self._holders[page]:
                raise ValueError(f"id {page} is to be shared, but nobody holds it")
        self._hold(ids)

    def give_back(self, ids: Sequence[int], fence: int) -> None:
        """One holder lets go. An id without holders is free once rounds up to the highest fence that any holder gave are
        answered. Raises ValueError for an id that nobody holds."""
        unheld: dict[int, list[int]] = {}
        for page in ids:
            if not self._holders[page]:
                raise ValueError(f"id {page} is given back, but nobody holds it")
            self._holders[page] -= 1
            last = max(fence, self._late.pop(page, fence))
            if not self._holders[page]:
                unheld.setdefault(last, []).append(page)
            elif last > self._answered:
                self._late[page] = last
        for last, pages in unheld.items():
            if last <= self._answered:
                self._release(pages)
            else:
                self._fenced.setdefault(last, []).extend(pages)
                self._count_fenced(pages, 1)

    def answered(self, seq: int) -> None:
        """All rounds up to `seq` are answered by every rank: what they touched may be written anew. Repeats and lower
        values change nothing."""
        self._answered = max(self._answered, seq)
        for fence in [fence for fence in self._fenced if fence <= self._answered]:
            ids = self._fenced.pop(fence)
            self._count_fenced(ids, -1)
            self._release(ids)
        self._late = {page: fence for page, fence in self._late.items() if fence > self._answered}

    def _release(self, ids: Sequence[int]) -> None:
        for residue, part in self._by_residue(ids):
            self._free[residue].put(part)

    def _count_fenced(self, ids: Sequence[int], sign: int) -> None:
        for residue, part in self._by_residue(ids):
            self._fenced_of[residue] += sign * len(part)

    def _by_residue(self, ids: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        if self.residues == 1:
            return [(0, ids)]
        residues = {page % self.residues for page in ids}
        return [(residue, [page for page in ids if page % self.residues == residue]) for residue in residues]

    def _hold(self, ids: Sequence[int]) -> None:
        for page in ids:
            self._holders[page] += 1

    # ---- proof -------------------------------------------------------------------------------------------------

    def check_integrity(self, held: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong, [] if nothing: every id is in exactly one place, free ids ascend, counts are right, fences are
        ahead of what is answered, and the holders counted here are those of `held` (the ids of each lease and state)."""
        violations: list[str] = []
        fenced = Counter(page % self.residues for ids in self._fenced.values() for page in ids)
        leases = Counter(page for ids in held for page in ids)
        for residue, free in enumerate(map(list, self._free)):
            if fenced[residue] != self._fenced_of[residue]:
                violations.append(
                    f"residue {residue} counts {self._fenced_of[residue]} ids that wait for an answer, and {fenced[residue]} do"
                )
            if len(free) != self.free(residue):
                violations.append(f"residue {residue} counts {self.free(residue)} free ids, and {len(free)} are")
            if free != sorted(set(free)):
                violations.append(f"free ids of residue {residue} are not in ascending order")
        for fence, ids in self._fenced.items():
            if fence <= self._answered:
                violations.append(f"{len(ids)} ids wait for round {fence}, but round {self._answered} is answered")
        for page, fence in self._late.items():
            if fence <= self._answered or not self._holders[page]:
                violations.append(f"id {page} remembers round {fence} for {self._holders[page]} holders")
        unheld = sorted(chain(*self._free, *self._fenced.values()))
        counted = {page: holders for page, holders in enumerate(self._holders) if holders}
        if counted == leases and sorted(chain(unheld, counted)) == list(range(self.pages)):
            return violations
        places = Counter(unheld)
        for page, holders in enumerate(self._holders):
            if holders != leases[page]:
                violations.append(f"id {page} counts {holders} holders, and {leases[page]} leases have it")
            if places[page] + (holders > 0) != 1:
                violations.append(f"id {page} is in {places[page]} free or fenced sets with {holders} holders")
        strangers = sorted(page for page in leases | places if not 0 <= page < self.pages)
        if strangers:
            violations.append(f"ids {strangers} are not of this arena of {self.pages} pages")
        return violations
