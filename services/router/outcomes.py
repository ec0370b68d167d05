"""What an answered round brings: tokens and scores to mailboxes, comparisons to those that replay, ends to replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from latentpool.errors import EpochError, ReplayError
from latentpool.v1 import rank_worker_pb2 as pb
from latentpool.v1 import router_pb2
from services.router.conversations import Conversation, Phase
from services.router.counters import Counters
from services.router.delivery import Tokens
from services.router.score_rows import cut
from services.router.scores import assemble, sampled


class Outcomes:
    """Gives conversations what their rows brought, each thing once: what was delivered before parking is compared where it is a
    token and dropped where it is a score. `leave` is called with every conversation that this ends, and then `replied` with
    those whose reply is complete."""

    def __init__(
        self,
        vocab: int,
        clock: Callable[[], float],
        counters: Counters,
        leave: Callable[[Conversation], None],
        replied: Callable[[Conversation], None] = lambda _: None,
    ) -> None:
        self._vocab = vocab
        self._clock = clock
        self._counters = counters
        self._leave = leave
        self._replied = replied

    def give(self, operation: pb.Operation, conversations: Sequence[Conversation], parts: Sequence[pb.OperationResult]) -> None:
        """One operation's results, of every rank in rank order. What belongs to conversations that ended is dropped. Raises
        EpochError where a result has not the promised shape."""
        if operation.HasField("prompt"):
            self._prompted(conversations[0], operation.prompt, parts)
        elif operation.HasField("decode"):
            self._decoded(conversations, operation.decode, parts)
        elif operation.HasField("resume"):
            self._resumed(conversations[0], operation.resume)

    # ---- operations ---------------------------------------------------------------------------------------------

    def _prompted(self, c: Conversation, prompt: pb.Prompt, parts: Sequence[pb.OperationResult]) -> None:
        rows = len(prompt.tokens)
        self._counters.prompt_rows += rows
        if prompt.mode == pb.PROMPT_MODE_BORROWED:
            self._counters.borrowed_chunks += 1
            c.borrowed_tokens += rows
        elif prompt.mode == pb.PROMPT_MODE_FETCH:
            self._counters.fetched_chunks += 1
            c.fetched_tokens += rows
        if c.phase is Phase.ENDED:
            return
        c.keeping.began = True
        first, c.answered = c.answered, c.answered + rows
        if c.scoring is not None:
            self._scored(c, first, rows, [part.scores for part in parts])
            return
        self._filling(c)
        if prompt.last:
            tokens = _tokens(parts[0], 1)
            if c.generated:
                self._compare(c, first + rows, tokens)
            else:
                self._said(c, tokens[0], _log_probs(parts, tokens, prompt.log_probs)[0])

    def _resumed(self, c: Conversation, resume: pb.Resume) -> None:
        self._counters.resumes += 1
        self._counters.resumed_tokens += resume.at
        if c.phase is Phase.ENDED:
            return
        c.answered = resume.at
        if not c.keeping.began:
            c.keeping.cached, c.keeping.cached_from = resume.at, c.keeping.mark
        self._filling(c)

    def _decoded(self, conversations: Sequence[Conversation], decode: pb.Decode, parts: Sequence[pb.OperationResult]) -> None:
        rows, of = decode.rows, decode.rows * len(conversations)
        self._counters.decode_rows += of
        tokens = _tokens(parts[0], of) if not decode.logits else []
        log_probs = _log_probs(parts, tokens, decode.log_probs)
        for i, c in enumerate(conversations):
            if c.phase is Phase.ENDED:
                continue
            first, c.answered = c.answered, c.answered + rows
            if c.scoring is not None:
                self._scored(c, first, rows, [cut(part.scores, i * rows, rows, of) for part in parts])
            elif decode.forced:
                self._filling(c)
                self._compare(c, c.answered, tokens[i * rows : (i + 1) * rows])
            else:
                self._said(c, tokens[i], log_probs[i])

    # ---- what they bring ----------------------------------------------------------------------------------------

    def _filling(self, c: Conversation) -> None:
        """Counts prompt tokens. While a parked reply's own tokens run again it says, with a full count, that work goes on."""
        c.mailbox.put(router_pb2.Filling(tokens_done=min(c.answered, c.prompt_rows), tokens_total=c.prompt_rows))

    def _compare(self, c: Conversation, end: int, tokens: Sequence[int]) -> None:
        """Tokens sampled after the rows up to `end`, which the client has already."""
        first = end - len(tokens) + 1 - len(c.tokens)
        self._counters.replayed_tokens += len(tokens)
        for index, token in enumerate(tokens, start=first):
            if token != c.generated[index]:
                error = ReplayError(
                    f"token {index} of the reply is {token} when it is computed again after parking, and {c.generated[index]} "
                    f"was delivered: this reply cannot go on"
                )
                c.mailbox.fail(error)
                self._leave(c)
                return

    def _said(self, c: Conversation, token: int, log_prob: router_pb2.TokenLogProb | None) -> None:
        reason = c.take(token, self._clock())
        spoken = not (reason == router_pb2.FINISH_REASON_STOP and token in c.stops)
        wanted = c.sampling.log_probs
        log_probs = [] if wanted is None or log_prob is None else [_first(log_prob, wanted)]
        c.mailbox.put(Tokens(len(c.generated) - 1, [token], int(spoken), log_probs))
        if reason is not None:
            self._counters.late_stops += c.sent > c.answered
            self._complete(c, reason)

    def _scored(self, c: Conversation, first: int, rows: int, parts: Sequence[pb.Scores]) -> None:
        assert c.scoring is not None
        new = first + rows - max(first, c.scored)
        if new <= 0:
            return
        start = first + rows - new
        c.scored = start + new
        following = c.tokens[start + 1 : c.scored + 1].tolist()
        parts = [cut(part, rows - new, new, rows) for part in parts]
        for message in assemble(parts, new, start, following, self._vocab, c.scoring.raw):
            c.mailbox.put(message)
        c.times.first_token = c.times.first_token or self._clock()
        if c.scored == len(c.tokens):
            self._complete(c, router_pb2.FINISH_REASON_UNSPECIFIED)

    def _complete(self, c: Conversation, reason: router_pb2.FinishReason.ValueType) -> None:
        """The last event of a stream. Its handler adds the receipt."""
        times, now = c.times, self._clock()
        completion = router_pb2.Completion(
            finish_reason=reason,
            usage=router_pb2.Usage(
                prompt_tokens=c.prompt_rows,
                generated_tokens=len(c.tokens) - c.prompt_rows + len(c.generated),
                parked=c.parked,
                borrowed_tokens=c.borrowed_tokens,
                fetched_tokens=c.fetched_tokens,
                carried=c.carried,
                cached_tokens=c.keeping.cached,
                cached_from=c.keeping.cached_from,
            ),
            owner=c.owner,
            seed=c.seed,
            timings=router_pb2.Timings(
                queued_seconds=times.admitted - times.arrived,
                first_token_seconds=times.first_token - times.arrived,
                total_seconds=now - times.arrived,
            ),
            stop=c.stop,
        )
        c.mailbox.put(completion)
        self._leave(c)
        if c.scoring is None:
            self._replied(c)


def _tokens(part: pb.OperationResult, count: int) -> Sequence[int]:
    if len(part.tokens) != count:
        raise EpochError(f"rank 0 returned {len(part.tokens)} sampled tokens where {count} were asked")
    return part.tokens


def _log_probs(
    parts: Sequence[pb.OperationResult], tokens: Sequence[int], wanted: int
) -> Sequence[router_pb2.TokenLogProb | None]:
    """One a sampled token, with wanted - 1 likeliest beside it; None each where none was asked for."""
    return sampled([part.scores for part in parts], tokens, wanted - 1) if wanted else [None] * len(tokens)


def _first(log_prob: router_pb2.TokenLogProb, top: int) -> router_pb2.TokenLogProb:
    """With the `top` likeliest only: others in the operation may have wanted more."""
    return router_pb2.TokenLogProb(
        log_prob=log_prob.log_prob, top_ids=log_prob.top_ids[:top], top_log_probs=log_prob.top_log_probs[:top]
    )
