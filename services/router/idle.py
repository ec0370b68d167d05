"""Idle time computes replies on the prompt path, so that the next turn resumes where they ended (design section 3.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np

from latentpool.geometry import BLOCK
from latentpool.sampling import Sampling
from services.router.conversations import Conversation, Times
from services.router.delivery import Mailbox
from services.router.kept import APART, Keeping


def after(c: Conversation, ids: Iterator[int], keep_from: int, wake: asyncio.Event, now: float) -> Conversation | None:
    """The idle conversation over all that was said, prompt and reply; None where there is too little to keep behind what is
    kept already."""
    keeping, total = c.keeping, c.tokens_so_far
    at = total // BLOCK * BLOCK
    if keeping.blocks is None or not keep_from or at < max(keep_from, keeping.at + APART):
        return None
    tokens = np.concatenate((c.tokens, np.array(c.generated, np.uint32)))
    return Conversation(
        id=next(ids),
        request_id=c.request_id,
        tokens=tokens,
        sampling=Sampling(),
        seed=0,
        stops=frozenset(),
        limit=total,
        mailbox=Mailbox(wake),
        times=Times(arrived=now),
        idle=True,
        keeping=Keeping(keeping.blocks.over(tokens, at)),
    )
