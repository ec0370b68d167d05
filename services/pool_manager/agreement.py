"""What members of a group must agree on, compared in words a person can act on (design section 8, handshake)."""

from __future__ import annotations

import json

from latentpool.errors import GeometryError, HandshakeError
from latentpool.geometry import Geometry
from latentpool.v1 import pool_manager_pb2 as pb

_COMPARED: tuple[tuple[str, str, str], ...] = (
    ("build", "build", "install the same release on every node"),
    ("checkpoint_digest", "checkpoint digest", "serve the same checkpoint on every node"),
    ("dtype", "compute dtype", "give every worker the same --dtype"),
    ("kv_dtype", "cache dtype", "give every worker the same --kv-cache"),
    ("page_rows", "page rows", "give every worker the same --page-rows"),
    ("drafts", "drafts", "give every worker the same --drafts or --no-drafts"),
    ("transport", "transport", "give every worker the same --transport"),
    (
        "numerics_digest",
        "numerics digest",
        "ranks must compute equal bits: the same processor kind, libraries and thread settings on every node",
    ),
)


def geometry_of(identity: pb.Identity) -> Geometry:
    """The geometry that a worker read, without the draft layer where it serves none. Raises HandshakeError."""
    try:
        geometry = Geometry.from_config(json.loads(identity.config_json))
    except (ValueError, AttributeError, GeometryError) as error:
        raise HandshakeError(f"config.json: {error}") from None
    return geometry if identity.drafts else geometry.without_drafts()


def check_rank(rank: int, identity: pb.Identity, world: int) -> None:
    """A rank must be one of this group's, and be told the same world. Raises HandshakeError naming both."""
    if identity.world != world:
        raise HandshakeError(f"rank {rank} was started for {identity.world} ranks, this group has {world}: use one --ranks")
    if rank >= world:
        raise HandshakeError(f"rank {rank} is not in this group of {world}: its ranks are 0 to {world - 1}")


def check_identity(rank: int, identity: pb.Identity, first_rank: int, first: pb.Identity) -> None:
    """Compares a worker with the first that joined. Raises HandshakeError naming both ranks, both values of everything
    that differs, and what to do."""
    differences = [
        f"{name} {_short(getattr(identity, key))} on rank {rank}, {_short(getattr(first, key))} on rank {first_rank}: {advice}"
        for key, name, advice in _COMPARED
        if getattr(identity, key) != getattr(first, key)
    ]
    differences += _geometry_differences(rank, identity, first_rank, first)
    if differences:
        raise HandshakeError(f"rank {rank} does not match rank {first_rank}: " + "; ".join(differences))


def _geometry_differences(rank: int, identity: pb.Identity, first_rank: int, first: pb.Identity) -> list[str]:
    """Named values of the geometry, not lines of the file: layout and keys that are not read do not matter."""
    ours, theirs = geometry_of(identity), geometry_of(first)
    names = [name for name in Geometry.__dataclass_fields__ if getattr(ours, name) != getattr(theirs, name)]
    if identity.drafts != first.drafts:
        names = [name for name in names if name != "draft_layers"]
    return [
        f"geometry: {name} {_short(getattr(ours, name))} on rank {rank}, {_short(getattr(theirs, name))} on rank {first_rank}: "
        "serve the same model on every node"
        for name in names
    ]


def _short(value: object) -> str:
    """A value as people write it; how many layers where the list would fill the screen."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple) and len(str(value)) > 80:
        return f"of {len(value)} layers"
    return str(value) or "(none)"
