"""All ranks of the group: every one gets the same rounds, and a round is answered once all have answered it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from latentpool.errors import EpochError
from latentpool.v1 import rank_worker_pb2 as pb
from services.router.counters import Counters
from services.router.round_stream import RoundStream


@dataclass(slots=True)
class Flight:
    """A round that was sent, and the results of the ranks that have answered, in rank order."""

    round: pb.Round
    results: list[pb.RoundResult | None]

    @property
    def answered(self) -> bool:
        return None not in self.results


class Workers:
    """The round streams of one term and epoch. seq starts at 1."""

    def __init__(self, addresses: Sequence[str], dead_after: float) -> None:
        self.counters = Counters()
        self.seq = 0
        """Of the last round sent."""
        self._streams = [
            RoundStream(rank, address, dead_after, self.counters, self._on_result, self._on_end)
            for rank, address in enumerate(addresses)
        ]
        self._term = 0
        self._epoch = 0
        self._flights: deque[Flight] = deque()
        self._error: EpochError | None = None
        self._wake: Callable[[], None] = lambda: None

    async def open(self, term: int, epoch: int, key: bytes, wake: Callable[[], None]) -> None:
        """Opens all streams. `wake` is called whenever `collect` has something new to say. Raises EpochError naming a rank."""
        self._term, self._epoch, self._wake = term, epoch, wake
        await asyncio.gather(*(stream.open(term, epoch, key) for stream in self._streams))

    @property
    def in_flight(self) -> int:
        """Rounds sent and not collected."""
        return len(self._flights)

    async def send(self, operations: Sequence[pb.Operation]) -> None:
        """Sends the next round to every rank. Those that were collected are acknowledged."""
        self.counters.rounds += 1
        self.counters.run_ahead_rounds += bool(self._flights)
        self.seq += 1
        acknowledged = self.seq - len(self._flights) - 1
        round_ = pb.Round(
            term=self._term, epoch=self._epoch, seq=self.seq, acknowledged_seq=acknowledged, operations=operations
        )
        self._flights.append(Flight(round_, [None] * len(self._streams)))
        message = pb.RoundsRequest(round=round_)
        await asyncio.gather(*(stream.write(message) for stream in self._streams))

    def collect(self) -> Iterator[tuple[pb.Round, list[pb.RoundResult]]]:
        """Rounds that every rank has answered since the last call, oldest first, with the results in rank order. Raises
        EpochError once a rank cannot answer."""
        while self._flights and self._flights[0].answered:
            flight = self._flights.popleft()
            yield flight.round, [result for result in flight.results if result is not None]
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams))

    def _on_result(self, rank: int, result: pb.RoundResult) -> None:
        flight = self._flights[result.seq - self._flights[0].round.seq]
        if len(result.results) != len(flight.round.operations):
            raise EpochError(
                f"rank {rank} answered {len(result.results)} operations of round {result.seq}, which has "
                f"{len(flight.round.operations)}"
            )
        flight.results[rank] = result
        if self._flights[0].answered:
            self._wake()

    def _on_end(self, error: EpochError) -> None:
        self._error = self._error or error
        self._wake()
