"""Messages between a front and its engine: u32 little-endian length, then msgpack of one of these structs.

The front converts protobuf to these and back; the engine never sees protobuf. Array data travels as little-endian bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MAX_FRAME = 256 << 20
"""Bytes of the largest frame either side accepts."""


class _Frame(msgspec.Struct, tag=True, array_like=True):
    pass


# ---- round operations ------------------------------------------------------------------------------------------


class Bind(_Frame):
    """A conversation takes a lane: state cleared, position 0, nothing mapped. owner: the rank that alone keeps its latent
    rows where the group is split."""

    lane: int
    conversation: int
    temperature: float
    top_k: int
    seed: int
    top_p: float = 1.0
    min_p: float = 0.0
    owner: int = 0


class Table(_Frame):
    """Maps slots first_slot.. of a lane to page ids of its owner; both tables follow from the ids and the plan."""

    lane: int
    first_slot: int
    pages: list[int]


LOCAL, BORROWED, FETCH = 1, 2, 3
"""Prompt.mode, as the proto's PromptMode."""


class Prompt(_Frame):
    """A chunk of a prompt: tokens at positions start.. (a multiple of 64). logits: 0 none, 1 scores, 2 also raw.
    following: the token after the chunk, for the score of its last row; -1 unknown."""

    lane: int
    start: int
    tokens: list[int]
    last: bool
    logits: int = 0
    following: int = -1
    log_probs: int = 0
    mode: int = LOCAL


class Decode(_Frame):
    """A window of `rows` rows a lane; `forced` tokens lane-major, or empty: one row, the last sampled token.
    following: the token after each lane's window, for the score of its last row; empty where unknown."""

    lanes: list[int]
    rows: int
    forced: list[int]
    logits: int = 0
    following: list[int] = []
    log_probs: int = 0


class Free(_Frame):
    lane: int


class Ping(_Frame):
    pass


class Borrow(_Frame):
    """Other owners' pages for slots first_slot.. of a lane: in a slot one id of every rank but the owner, ascending ranks."""

    lane: int
    first_slot: int
    pages: list[int]


class Release(_Frame):
    """A lane's borrowed pages are given back."""

    lane: int


class Carry(_Frame):
    """Rows of slots first_slot.. move to these ids of `owner`; with `last` they take the old ones' place."""

    lane: int
    owner: int
    first_slot: int
    pages: list[int]
    last: bool


class Keep(_Frame):
    """The lane's state at its position `at` is kept as `state`; pages as the proto's Keep."""

    lane: int
    state: int
    at: int
    pages: list[int]


class Resume(_Frame):
    """A lane at position 0 goes on from a kept state."""

    lane: int
    state: int
    at: int


class Forget(_Frame):
    states: list[int]


Operation = Bind | Table | Prompt | Decode | Free | Ping | Borrow | Release | Carry | Keep | Resume | Forget


# ---- front -> engine -------------------------------------------------------------------------------------------


class Load(_Frame):
    """Read this rank's shard."""


class LayOut(_Frame):
    """Allocate the arena of the plan and connect the links."""

    pages: int
    lanes: int
    context: int
    split: bool
    epoch: int
    link_addresses: list[bytes]


class Round(_Frame):
    term: int
    epoch: int
    seq: int
    operations: list[Operation]


class Close(_Frame):
    """Finish what is queued, flush the links, exit 0."""


ToEngine = Load | LayOut | Round | Close


# ---- engine -> front -------------------------------------------------------------------------------------------


class Prepared(_Frame):
    """First frame: the engine has read config and headers. What the handshake compares."""

    checkpoint_digest: str
    config_json: str
    dtype: str
    kv_dtype: str
    numerics_digest: str
    page_rows: int
    total_bytes: int


class Loading(_Frame):
    loaded_bytes: int
    total_bytes: int


class Loaded(_Frame):
    room_bytes: int
    resident_bytes: int
    link_address: bytes
    assumed_memory_bytes: int = 0


class Ready(_Frame):
    resident_bytes: int


class Scores(_Frame):
    """As the proto's Scores: max f32, sum f64, best u32, next f32, raw f32, little-endian."""

    max: bytes
    sum: bytes
    best: bytes
    next: bytes
    raw: bytes
    top_ids: bytes = b""
    top_logits: bytes = b""


class OperationResult(_Frame):
    """rows_digest: hash of the cached rows that this rank sent, received or read, where ranks are compared; else 0."""

    digest: int
    tokens: list[int]
    scores: Scores | None = None
    rows_digest: int = 0


class LinkBytes(_Frame):
    """Bytes sent to all peers, by what they were, as the proto's LinkBytes."""

    sums: int = 0
    queries: int = 0
    outputs: int = 0
    rows: int = 0
    carries: int = 0
    samples: int = 0


class RoundResult(_Frame):
    seq: int
    results: list[OperationResult]
    compute_seconds: float
    exchange_seconds: float
    sent: LinkBytes


class Progress(_Frame):
    """A count that grows while the engine works (layers and operations), sent at most every half second of a round."""

    operations: int


class Failed(_Frame):
    """The last frame of a dying engine. `setup`: the operator's fault (a CheckpointError, ConfigError, GeometryError).
    peer: the rank a link failed on, -1 if none."""

    message: str
    setup: bool
    peer: int = -1


ToFront = Prepared | Loading | Loaded | Ready | RoundResult | Progress | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)
_length = struct.Struct("<I")


def encode(frame: Any) -> bytes:
    """One frame with its length in front."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME:
        raise ValueError(f"frame of {len(body)} bytes: at most {MAX_FRAME}")
    return _length.pack(len(body)) + body


def decode_to_engine(body: bytes) -> ToEngine:
    """The frame of a body (without its length). Raises msgspec.DecodeError."""
    return _to_engine.decode(body)


def decode_to_front(body: bytes) -> ToFront:
    """The frame of a body (without its length). Raises msgspec.DecodeError."""
    return _to_front.decode(body)


def frame_length(head: bytes) -> int:
    """Bytes of the body announced by a frame's first four bytes. Raises ValueError above MAX_FRAME."""
    (length,) = _length.unpack(head)
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes announced: at most {MAX_FRAME}")
    return int(length)
