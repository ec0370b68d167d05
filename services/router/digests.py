"""Compares what the ranks computed. Tokens reach a client only after W equal digests (design section 3.8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from latentpool.errors import DigestMismatchError
from latentpool.v1 import rank_worker_pb2 as pb


def compare(round_: pb.Round, results: Sequence[pb.RoundResult]) -> None:
    """Raises DigestMismatchError naming round, operation and ranks unless all ranks (in rank order) agree on every
    operation's digest, and those that hashed cached rows for it (a value that is not 0) on the rows. Operations count
    from 1."""
    for index, operation in enumerate(round_.operations):
        parts = [result.results[index] for result in results]
        computed = {rank: part.digest for rank, part in enumerate(parts)}
        rows = {rank: part.rows_digest for rank, part in enumerate(parts) if part.rows_digest}
        for values, differs in ((computed, "computed other bits"), (rows, "holds other rows")):
            if len(set(values.values())) > 1:
                kind = operation.WhichOneof("operation")
                raise DigestMismatchError(f"round {round_.seq}, operation {index + 1} ({kind}): {_blame(values, differs)}")


def _blame(digests: Mapping[int, int], differs: str) -> str:
    """Names the fewer, by rank."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, digest in digests.items():
        ranks[digest].append(rank)
    groups = sorted(ranks.values(), key=lambda group: (len(group), -group[0]))
    *others, most = groups
    odd = sorted(rank for group in others for rank in group)
    if len(odd) > 1:
        differs = differs.replace("holds", "hold")
    return f"{_names(odd)} {differs} than {_names(most)}"


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
