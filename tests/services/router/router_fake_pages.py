"""The books of a fake manager: every page is free, leased, lent, a carry's, a kept state's or fenced, and comes back once
nobody holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Lease:
    owner: int
    pages: list[int]
    borrowed: list[int] = field(default_factory=list)
    recalled: bool = False
    new_owner: int = -1
    moving: list[int] = field(default_factory=list)
    """Pages at the new owner."""
    shared: int = 0
    """Pages in front that are a kept state's too."""
    owed: int = 0
    """Pages asked for and not granted: nobody is admitted with them."""

    @property
    def all(self) -> list[int]:
        return self.pages + self.borrowed + self.moving


class FakePages:
    def __init__(self, total: int, owners: int, violation: Callable[[str], None]) -> None:
        self.total, self.owners = total, owners
        self.violation = violation
        self.free = list(range(total))
        self.leases: dict[int, Lease] = {}
        self.fenced: list[tuple[int, list[int]]] = []
        self.states: dict[int, list[int]] = {}
        """Pages of kept states, shared ones included."""

    def of(self, pages: list[int], owner: int) -> list[int]:
        return [page for page in pages if page % self.owners == owner]

    def owed(self, owner: int) -> int:
        return sum(lease.owed for lease in self.leases.values() if lease.owner == owner)

    def spare(self, owner: int) -> int:
        """Free pages of an owner that are owed to nobody."""
        return len(self.of(self.free, owner)) - self.owed(owner)

    def coming(self, owner: int, parking: set[int]) -> int:
        """Pages of an owner that are free or will be."""
        kept = {page for pages in self.states.values() for page in pages}
        pages = self.free + [page for _, fenced in self.fenced for page in fenced if page not in kept]
        for name, lease in self.leases.items():
            if name in parking:
                pages = pages + lease.all
            else:
                pages = pages + (lease.pages if lease.moving else []) + (lease.borrowed if lease.recalled else [])
        return len(self.of([*{*pages}], owner))

    def take(self, owner: int, count: int) -> list[int]:
        taken = self.of(self.free, owner)[:count]
        self.free = [page for page in self.free if page not in taken]
        return taken

    # ---- leases ---------------------------------------------------------------------------------------------------

    def lease(self, name: int, owner: int, count: int, shared: Sequence[int] = ()) -> Lease:
        """So many pages, the first of them a kept state's."""
        self.leases[name] = Lease(owner, [*shared, *self.take(owner, count - len(shared))], shared=len(shared))
        return self.leases[name]

    def lend(self, name: int, slots: int) -> None:
        """So many slots at most: as many as every other owner can spare."""
        lease = self.leases[name]
        lenders = [owner for owner in range(self.owners) if owner != lease.owner]
        slots = max(min([slots, *(self.spare(owner) for owner in lenders)]), 0) if lenders else 0
        lease.borrowed = [self.take(owner, 1)[0] for _ in range(slots) for owner in lenders]

    def extend(self, name: int, count: int) -> list[int]:
        lease = self.leases[name]
        taken = self.take(lease.owner, count)
        lease.owed = count - len(taken)
        lease.pages += taken
        return taken

    def move(self, name: int, owner: int, count: int) -> list[int]:
        lease = self.leases[name]
        assert owner != lease.owner
        assert not lease.moving
        lease.owed, lease.new_owner, lease.moving = 0, owner, self.take(owner, count)
        assert len(lease.moving) == count >= len(lease.pages)
        return lease.moving

    # ---- what comes back --------------------------------------------------------------------------------------------

    def finish(self, name: int, fence: int) -> int:
        lease = self.leases.pop(name, None)
        pages = [] if lease is None else lease.all
        self.fenced.append((fence, pages))
        return len(pages)

    def released(self, name: int, fence: int) -> None:
        lease = self.leases.get(name)
        if lease is None or not lease.borrowed:
            self.violation(f"conversation {name} released what it did not borrow")
            return
        self.fenced.append((fence, lease.borrowed))
        lease.borrowed = []

    def moved(self, name: int, fence: int) -> None:
        lease = self.leases.get(name)
        if lease is None or not lease.moving or lease.borrowed:
            self.violation(f"conversation {name} was carried: {lease}")
            return
        self.fenced.append((fence, lease.pages))
        lease.owner, lease.pages, lease.moving, lease.shared = lease.new_owner, lease.moving, [], 0

    def lift(self, answered: int) -> list[int]:
        """Pages whose fence is answered and that nobody holds; they are free."""
        lifted = {page for seq, pages in self.fenced if seq <= answered for page in pages}
        self.fenced = [(seq, pages) for seq, pages in self.fenced if seq > answered]
        lifted -= {page for pages in self.held() for page in pages}
        self.free = sorted([*self.free, *lifted])
        return sorted(lifted)

    def held(self) -> list[list[int]]:
        """By each holder."""
        return [
            *(lease.all for lease in self.leases.values()), *self.states.values(), *(pages for _, pages in self.fenced)
        ]  # fmt: skip

    def check(self, when: str) -> None:
        held = {page for pages in self.held() for page in pages}
        if sorted([*self.free, *held]) != list(range(self.total)):
            self.violation(f"{when}: of {self.total} pages {len(self.free)} are free and {held} held")
        own = [page for lease in self.leases.values() for page in lease.all[lease.shared :]]
        if len(own) != len({*own}):
            self.violation(f"{when}: leases share pages: {own}")
