"""The id book: every page id is free, leased or fenced, and the lowest free id of a residue goes first.

Source: design section 5. The same calls give the same ids everywhere, so nothing here looks at clocks or hashes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain


class Kind(Enum):
    """What an id is. FENCED: given back, but a round that touches it is not answered yet."""

    FREE = "free"
    LEASED = "leased"
    FENCED = "fenced"


class Books:
    """Ids 0..pages-1 in `residues` free sets: id p belongs to residue p % residues, which is its owner's rank where ids
    have owners. Changes only through take, take_run, give_back and answered."""

    def __init__(self, pages: int, residues: int) -> None:
        if pages % residues:
            raise ValueError(f"{pages} ids do not divide over {residues} residues")
        self.pages = pages
        self.residues = residues
        self._free = [list(range(residue, pages, residues)) for residue in range(residues)]
        self._holders = [0] * pages
        self._fenced: dict[int, list[int]] = {}  # fence -> ids, in the order given back
        self._answered = 0

    # ---- asking: changes nothing -------------------------------------------------------------------------------

    def free(self, residue: int) -> int:
        """Ids that `take` could give now."""
        return len(self._free[residue])

    def can_take_run(self, first: int, count: int) -> bool:
        """Whether all of first..first+count-1 are free (one residue only)."""
        free = self._free[0]
        at = bisect_left(free, first)
        return at + count <= len(free) and free[at] == first and free[at + count - 1] == first + count - 1

    def kinds(self) -> list[Kind]:
        """The kind of every id, by id."""
        kinds = [Kind.LEASED if holders else Kind.FREE for holders in self._holders]
        for ids in self._fenced.values():
            for page in ids:
                kinds[page] = Kind.FENCED
        return kinds

    @property
    def fenced(self) -> int:
        """Ids that wait for an answer."""
        return sum(map(len, self._fenced.values()))

    # ---- acting ------------------------------------------------------------------------------------------------

    def take(self, residue: int, count: int) -> list[int]:
        """Leases the `count` lowest free ids of a residue to one holder. Ask `free` first: raises ValueError."""
        free = self._free[residue]
        if count > len(free):
            raise ValueError(f"{count} ids asked of residue {residue}, which has {len(free)} free")
        ids = free[:count]
        del free[:count]
        self._hold(ids)
        return ids

    def take_run(self, first: int, count: int) -> list[int]:
        """Leases first..first+count-1 to one holder. Ask `can_take_run` first: raises ValueError."""
        if not self.can_take_run(first, count):
            raise ValueError(f"ids {first}..{first + count - 1} are not all free")
        at = bisect_left(self._free[0], first)
        ids = self._free[0][at : at + count]
        del self._free[0][at : at + count]
        self._hold(ids)
        return ids

    def give_back(self, ids: Sequence[int], fence: int) -> None:
        """One holder lets go. An id without holders is free once rounds up to `fence` are answered. Raises ValueError for
        an id that nobody holds."""
        unheld = []
        for page in ids:
            if not self._holders[page]:
                raise ValueError(f"id {page} is given back, but nobody holds it")
            self._holders[page] -= 1
            if not self._holders[page]:
                unheld.append(page)
        if fence <= self._answered:
            self._release(unheld)
        elif unheld:
            self._fenced.setdefault(fence, []).extend(unheld)

    def answered(self, seq: int) -> None:
        """All rounds up to `seq` are answered by every rank: what they touched may be written anew. Repeats and lower
        values change nothing."""
        self._answered = max(self._answered, seq)
        for fence in [fence for fence in self._fenced if fence <= self._answered]:
            self._release(self._fenced.pop(fence))

    def _release(self, ids: Sequence[int]) -> None:
        for residue in {page % self.residues for page in ids}:
            free = self._free[residue]
            free += [page for page in ids if page % self.residues == residue]
            free.sort()  # two ascending runs: one merge, where inserting one by one would move the list for each

    def _hold(self, ids: Sequence[int]) -> None:
        for page in ids:
            self._holders[page] += 1

    # ---- proof -------------------------------------------------------------------------------------------------

    def check_integrity(self, held: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong, [] if nothing: every id is in exactly one place, free ids are of their residue in ascending
        order, fences are ahead of what is answered, and the holders counted here are those of `held` (the ids of each
        lease)."""
        violations: list[str] = []
        leases = Counter(page for ids in held for page in ids)
        for residue, free in enumerate(self._free):
            if free != sorted(set(free)):
                violations.append(f"free ids of residue {residue} are not in ascending order")
            if not set(range(residue, self.pages, self.residues)).issuperset(free):
                violations.append(f"residue {residue} has another residue's ids")
        for fence, ids in self._fenced.items():
            if fence <= self._answered:
                violations.append(f"{len(ids)} ids wait for round {fence}, but round {self._answered} is answered")
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
