"""Errors as gRPC statuses with rich details: ErrorInfo with numbers, BadRequest for fields, QuotaFailure and RetryInfo."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from latentpool.errors import BusyError, EpochError, LatentPoolError, NotServedError, ReplayError, RequestError

DOMAIN = "latentpool"
RETRY_SECONDS = 1
_CODES: tuple[tuple[type[LatentPoolError], grpc.StatusCode, str], ...] = (  # the first that fits
    (NotServedError, grpc.StatusCode.FAILED_PRECONDITION, "NOT_SERVED"),
    (BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY"),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST"),
    (EpochError, grpc.StatusCode.UNAVAILABLE, "EPOCH_ENDED"),
    (ReplayError, grpc.StatusCode.DATA_LOSS, "REPLAY_DIFFERS"),
)


def status(error: LatentPoolError, retry_seconds: int = RETRY_SECONDS) -> grpc.Status:
    """What a client is told: the error's own words, and its numbers for programs. `retry_seconds`: when to try again, if that
    may help."""
    code, reason = next(
        ((code, reason) for kind, code, reason in _CODES if isinstance(error, kind)), (grpc.StatusCode.INTERNAL, "INTERNAL")
    )
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    if isinstance(error, RequestError):
        info.metadata.update({name: str(number) for name, number in error.numbers.items()})
    message = status_pb2.Status(code=code.value[0], message=str(error), details=[_packed(info)])
    if isinstance(error, RequestError) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        message.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, BusyError):
        failure = error_details_pb2.QuotaFailure.Violation(subject="group", description=str(error))
        message.details.append(_packed(error_details_pb2.QuotaFailure(violations=[failure])))
    if error.retryable:
        delay = duration_pb2.Duration(seconds=retry_seconds)
        message.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return rpc_status.to_status(message)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
