"""Compares what the ranks computed. Tokens reach a client only after W equal digests (design section 3.8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from latentpool.errors import DigestMismatchError
from latentpool.v1 import rank_worker_pb2 as pb


def compare(round_: pb.Round, results: Sequence[pb.RoundResult]) -> None:
    """Raises DigestMismatchError naming round, operation and ranks unless all ranks (in rank order) agree on every
    operation's digest. Operations count from 1."""
    for index, operation in enumerate(round_.operations):
        digests = [result.results[index].digest for result in results]
        if len(set(digests)) > 1:
            kind = operation.WhichOneof("operation")
            raise DigestMismatchError(f"round {round_.seq}, operation {index + 1} ({kind}): {_blame(digests)}")


def _blame(digests: Sequence[int]) -> str:
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        ranks[digest].append(rank)
    groups = sorted(ranks.values(), key=lambda group: (len(group), -group[0]))
    *others, most = groups
    odd = sorted(rank for group in others for rank in group)
    return f"{_names(odd)} computed other bits than {_names(most)}"


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
