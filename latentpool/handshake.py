"""How members of a group prove that they share its secret: HMAC-SHA256 over both sides' nonces.

The secret never crosses the network. An empty secret is allowed on loopback only (the services check that); the proof is
made all the same, so that there is one code path.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

Role = Literal["worker", "router", "manager"]


def nonce() -> bytes:
    """32 fresh random bytes; one a handshake."""
    return secrets.token_bytes(32)


def prove(secret: bytes, role: Role, theirs: bytes, ours: bytes, detail: bytes = b"") -> bytes:
    """The proof that `role` knows the secret: theirs is the nonce it was given, ours the nonce it chose."""
    message = b"\x00".join((b"latentpool-v1", role.encode(), theirs.hex().encode(), ours.hex().encode(), detail))
    return hmac.digest(secret, message, "sha256")


def proven(secret: bytes, role: Role, theirs: bytes, ours: bytes, mac: bytes, detail: bytes = b"") -> bool:
    """Whether `mac` is what `prove` gives for the same values, in constant time."""
    return hmac.compare_digest(prove(secret, role, theirs, ours, detail), mac)
