"""Between the wire's protobuf and the engine's frames. The engine never sees protobuf (design section 12)."""

from __future__ import annotations

from latentpool.v1 import pool_manager_pb2, rank_worker_pb2
from services.rank_worker import frames


def round_to_frame(message: rank_worker_pb2.Round) -> frames.Round:
    """The engine's round. Raises ValueError naming the operation that this build does not know or that holds nothing."""
    operations: list[frames.Operation] = []
    for index, operation in enumerate(message.operations, start=1):
        frame = _operation(operation)
        if frame is None:
            raise ValueError(f"round {message.seq}, operation {index} is empty or of a kind that this build does not know")
        operations.append(frame)
    return frames.Round(term=message.term, epoch=message.epoch, seq=message.seq, operations=operations)


def _operation(message: rank_worker_pb2.Operation) -> frames.Operation | None:
    match message.WhichOneof("operation"):
        case "bind":
            bind = message.bind
            return frames.Bind(
                lane=bind.lane,
                conversation=bind.conversation,
                temperature=bind.temperature,
                top_k=bind.top_k,
                seed=bind.seed,
                top_p=bind.top_p,
                min_p=bind.min_p,
                owner=bind.owner,
            )
        case "table":
            table = message.table
            return frames.Table(lane=table.lane, first_slot=table.first_slot, pages=list(table.pages))
        case "prompt":
            prompt = message.prompt
            return frames.Prompt(
                lane=prompt.lane,
                start=prompt.start,
                tokens=list(prompt.tokens),
                last=prompt.last,
                logits=int(prompt.logits),
                following=prompt.following if prompt.HasField("following") else -1,
                log_probs=prompt.log_probs,
                mode=int(prompt.mode) or frames.LOCAL,
            )
        case "decode":
            decode = message.decode
            return frames.Decode(
                lanes=list(decode.lanes),
                rows=decode.rows,
                forced=list(decode.forced),
                logits=int(decode.logits),
                following=list(decode.following),
                log_probs=decode.log_probs,
            )
        case "free":
            return frames.Free(lane=message.free.lane)
        case "ping":
            return frames.Ping()
        case "borrow":
            borrow = message.borrow
            return frames.Borrow(lane=borrow.lane, first_slot=borrow.first_slot, pages=list(borrow.pages))
        case "release":
            return frames.Release(lane=message.release.lane)
        case "carry":
            carry = message.carry
            return frames.Carry(
                lane=carry.lane,
                owner=carry.owner,
                first_slot=carry.first_slot,
                pages=list(carry.pages),
                last=carry.last,
            )
        case "keep":
            keep = message.keep
            return frames.Keep(lane=keep.lane, state=keep.state, at=keep.at, pages=list(keep.pages))
        case "resume":
            resume = message.resume
            return frames.Resume(lane=resume.lane, state=resume.state, at=resume.at)
        case "forget":
            return frames.Forget(states=list(message.forget.states))
        case None:
            return None


def result_to_proto(frame: frames.RoundResult, with_tokens: bool) -> rank_worker_pb2.RoundResult:
    """The result as it travels. Every rank samples the same tokens; only rank 0 sends them (`with_tokens`)."""
    return rank_worker_pb2.RoundResult(
        seq=frame.seq,
        results=[_operation_result(result, with_tokens) for result in frame.results],
        compute_seconds=frame.compute_seconds,
        exchange_seconds=frame.exchange_seconds,
        sent=link_bytes(frame.sent),
    )


def link_bytes(frame: frames.LinkBytes) -> rank_worker_pb2.LinkBytes:
    return rank_worker_pb2.LinkBytes(**{name: getattr(frame, name) for name in frame.__struct_fields__})


def _operation_result(frame: frames.OperationResult, with_tokens: bool) -> rank_worker_pb2.OperationResult:
    scores = frame.scores
    return rank_worker_pb2.OperationResult(
        digest=frame.digest,
        tokens=frame.tokens if with_tokens else (),
        scores=None if scores is None else _scores(scores),
        rows_digest=frame.rows_digest,
    )


def _scores(frame: frames.Scores) -> rank_worker_pb2.Scores:
    return rank_worker_pb2.Scores(
        max=frame.max,
        sum=frame.sum,
        best=frame.best,
        next=frame.next,
        raw=frame.raw,
        top_ids=frame.top_ids,
        top_logits=frame.top_logits,
    )


def lay_out_to_frame(message: pool_manager_pb2.LayOut) -> frames.LayOut:
    """What the engine needs to know of the plan."""
    return frames.LayOut(
        pages=message.plan.pages,
        lanes=message.plan.lanes,
        context=message.plan.context,
        split=message.plan.split,
        epoch=message.epoch,
        link_addresses=list(message.link_addresses),
    )
