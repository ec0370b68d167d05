"""The router's numbers for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from latentpool.metrics import Sample, counter, gauge
from services.router.conversations import Book, Phase
from services.router.counters import Counters

HELP = {
    "rounds": "Rounds sent.",
    "run_ahead_rounds": "Rounds sent while the round before was not answered.",
    "resent_rounds": "Rounds sent to a rank again, because its stream broke before the answer.",
    "prompt_rows": "Rows answered on the prompt path, replayed ones included.",
    "decode_rows": "Rows answered on the decode path, replayed and late ones included.",
    "late_stops": "Replies that ended while rows past their end were under way.",
    "parked": "Times a conversation gave its pages to others.",
    "replayed_tokens": "Reply tokens sampled again after parking, and compared.",
    "borrowed_chunks": "Chunks of prompts that were computed on copies in borrowed pages.",
    "fetched_chunks": "Chunks of prompts that were computed on rows that the owner sent.",
    "recalls": "Times a fill lost its borrowed pages before they were used up.",
    "carries": "Times a conversation's rows moved to another owner.",
    "carried_pages": "Pages of answered slices, those of carries that did not end included.",
    "keeps": "States of conversations kept, those that were evicted since included.",
    "resumes": "Times a conversation went on from a kept state.",
    "resumed_tokens": "Tokens that were resumed instead of computed.",
    "forgets": "Kept states that ended, because the pool manager evicted them.",
    "idle_fills": "Replies that idle time computed as prompts, to keep their states.",
    "idle_dropped": "Replies whose states idle time did not keep, because something else came first.",
    "mailbox_stalls": "Times a conversation stopped because its client did not read.",
}
"""What each of Counters counts."""


def samples(counters: Counters, book: Book) -> Iterator[Sample]:
    for field in fields(Counters):
        yield counter(f"latentpool_router_{field.name}_total", HELP[field.name], getattr(counters, field.name))
    phases = Counter(conversation.phase for conversation in book if not conversation.idle)
    for phase in Phase:
        if phase is not Phase.ENDED:
            help = "Conversations that live, by phase of their life."
            yield gauge("latentpool_router_conversations", help, phases[phase], phase=phase.value)
    yield gauge("latentpool_router_waiting", "Conversations that wait for a lane.", len(book.queue))
