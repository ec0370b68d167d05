"""Takes rows out of a rank's scores: an operation scores several conversations, or rows that were delivered before."""

from __future__ import annotations

from latentpool.errors import EpochError
from latentpool.v1 import rank_worker_pb2 as pb


def cut(scores: pb.Scores, first: int, rows: int, of: int) -> pb.Scores:
    """Rows first..first+rows-1 of scores of `of` rows. Raises EpochError where an array does not divide into so many."""
    if rows == of:
        return scores
    part = pb.Scores()
    for field, data in scores.ListFields():
        width, rest = divmod(len(data), of)
        if rest:
            raise EpochError(f"a rank sent {len(data)} bytes of scores ({field.name}), which are not {of} rows")
        setattr(part, field.name, data[first * width : (first + rows) * width])
    return part
