"""A rank worker's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from latentpool.metrics import Sample, counter, gauge
from latentpool.v1 import pool_manager_pb2 as pb
from services.rank_worker import frames


@dataclass(slots=True)
class Work:
    """What the engine did since it is ready; times in seconds."""

    rounds: int = 0
    compute_seconds: float = 0.0
    exchange_seconds: float = 0.0

    def add(self, result: frames.RoundResult) -> None:
        self.rounds += 1
        self.compute_seconds += result.compute_seconds
        self.exchange_seconds += result.exchange_seconds


def samples(rank: int, work: Work, beat: pb.Heartbeat) -> Iterator[Sample]:
    for kind in frames.LinkBytes.__struct_fields__:
        help = "Bytes that the rank sent to all its peers, by what they were."
        yield counter("latentpool_link_sent_bytes_total", help, getattr(beat.sent, kind), rank=rank, kind=kind)
    yield counter("latentpool_worker_rounds_total", "Rounds that the engine answered.", work.rounds, rank=rank)
    for name, seconds, what in (
        ("compute", work.compute_seconds, "Seconds of rounds without those that waited for peers."),
        ("exchange", work.exchange_seconds, "Seconds of rounds in which the engine waited for peers."),
    ):
        yield counter(f"latentpool_worker_{name}_seconds_total", what, seconds, rank=rank)
    yield gauge("latentpool_worker_resident_bytes", "Resident memory of the engine.", beat.resident_bytes, rank=rank)
    loaded = "Bytes of the shard that are loaded."
    yield gauge("latentpool_worker_loaded_bytes", loaded, beat.loaded_bytes, rank=rank)
