"""What the loop did, counted: tests prove with it that a mechanism happened, operators read it in the log at the end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """All start at zero with a term and only grow."""

    rounds: int = 0
    """Rounds sent."""
    run_ahead_rounds: int = 0
    """Of them, sent while the round before was not answered."""
    resent_rounds: int = 0
    """Rounds sent to a rank again, because its stream broke before the answer."""
    prompt_rows: int = 0
    """Rows answered on the prompt path, replayed ones included."""
    decode_rows: int = 0
    """Rows answered on the decode path, replayed and late ones included."""
    late_stops: int = 0
    """Replies that ended while rows past their end were under way."""
    parked: int = 0
    """Times a conversation gave its pages to others."""
    replayed_tokens: int = 0
    """Reply tokens sampled again after parking, and compared."""
    borrowed_chunks: int = 0
    """Chunks of prompts answered that were computed on copies in borrowed pages."""
    fetched_chunks: int = 0
    """Chunks of prompts answered that were computed on rows that the owner sent."""
    recalls: int = 0
    """Times a fill lost its borrowed pages before they were used up."""
    carries: int = 0
    """Times a conversation's rows moved to another owner."""
    carried_pages: int = 0
    """Pages of answered slices, those of carries that did not end included."""
    keeps: int = 0
    """Kept states, those that were evicted since included."""
    resumes: int = 0
    """Times a conversation went on from a kept state."""
    resumed_tokens: int = 0
    """Tokens that were not computed for it."""
    forgets: int = 0
    """Kept states that ended, because the manager said so."""
    idle_fills: int = 0
    """Replies that idle time computed as prompts, to keep their states."""
    idle_dropped: int = 0
    """Of those begun or waiting, given up because something else came first."""
    mailbox_stalls: int = 0
    """Times a conversation stopped because its client did not read."""
