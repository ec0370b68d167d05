"""Every error a user or an operator can meet.

LatentPoolError
├── RequestError                the caller's fault: gRPC INVALID_ARGUMENT unless said otherwise
│   ├── NotServedError          can never be served by this group (too long, too large): FAILED_PRECONDITION
│   └── BusyError               could be served later: RESOURCE_EXHAUSTED, retryable
├── SetupError                  the operator's fault: stops a command or a service before it serves
│   ├── ConfigError             a flag, variable or TOML value is not allowed
│   ├── GeometryError           config.json asks for what is not supported, by name
│   ├── CheckpointError         tensors missing, surplus, misshapen or truncated
│   ├── PlanRefusedError        the plan does not fit in the room
│   └── HandshakeError          two members of a group do not agree
├── ReplayError                 ours: a reply that was computed again came out differently, and ends: DATA_LOSS
└── EpochError                  ours: an engine, a link or a digest failed and the epoch ends: UNAVAILABLE
    ├── LinkError               the data plane lost or timed out on a rank
    └── DigestMismatchError     ranks computed different bits
"""

from __future__ import annotations


class LatentPoolError(Exception):
    """Root of all errors raised on purpose. `str(error)` is one message that a person can act on."""

    retryable = False


class RequestError(LatentPoolError):
    """The request is malformed or names values that are not allowed. `field` is the path of the field at fault ("" if none),
    `numbers` the message's numbers for programs; both travel in the status details."""

    def __init__(self, message: str, field: str = "", **numbers: int | float) -> None:
        super().__init__(message)
        self.field = field
        self.numbers = numbers


class NotServedError(RequestError):
    """The request can never be served by this group, whatever else runs; the message has the numbers."""


class BusyError(RequestError):
    """The request fits the group but not now."""

    retryable = True


class SetupError(LatentPoolError):
    """A command or service cannot start as configured."""


class ConfigError(SetupError):
    """A setting's value is not allowed; the message names the setting, its source and what is allowed."""


class GeometryError(SetupError):
    """config.json describes a model that this build does not serve; the message names the key and value."""


class CheckpointError(SetupError):
    """The checkpoint's tensors are not what its config.json promises; the message lists all of them."""


class PlanRefusedError(SetupError):
    """The plan does not fit in the room; the message has the numbers and what would fit."""


class HandshakeError(SetupError):
    """Two members of a group do not agree (build, checkpoint, geometry, dtypes, numerics, secret)."""


class ReplayError(LatentPoolError):
    """A conversation that was computed again gave another token than was delivered; the message names both."""


class EpochError(LatentPoolError):
    """The epoch ended; everything that lived in it is gone."""

    retryable = True


class LinkError(EpochError):
    """The data plane failed. `rank` is the peer it failed on, or None if unknown."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class DigestMismatchError(EpochError):
    """Ranks disagree on the bits of an operation; the message names round, operation and ranks."""
