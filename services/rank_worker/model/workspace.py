"""Scratch arrays of a forward pass, declared in one table so that their bytes can be charged before they are allocated."""

from __future__ import annotations

from math import prod

from kernels.api import Kernels, Kind
from kernels.rows import Array
from latentpool.geometry import R_MAX, Geometry, shares

_KIND_BYTES: dict[str, int] = {"compute": 4, "f32": 4, "f64": 8, "i32": 4, "u64": 8}


def _columns(g: Geometry, world: int, rank: int) -> dict[str, tuple[tuple[int, ...], Kind]]:
    """Name -> (shape of one row, kind)."""
    d, n, r = g.hidden, g.streams, g.latent
    kda_heads = shares(g.kda_heads, world)[rank]
    w = kda_heads * g.kda_head_dim
    h = shares(g.heads, world)[rank]
    wide = max(
        shares(g.dense_width, world)[rank],
        shares(g.expert_width * g.shared_experts, world)[rank],
    )
    return {
        "streams": ((n, d), "compute"),
        "streams_next": ((n, d), "compute"),
        "x": ((d,), "compute"),
        "normed": ((d,), "compute"),
        "y": ((d,), "compute"),
        "hidden": ((d,), "compute"),
        "post": ((n,), "compute"),
        "comb": ((n, n), "compute"),
        # KDA
        "qkv": ((3 * w,), "compute"),
        "conv_before": ((3 * w,), "compute"),
        "conv_in": ((3 * w,), "compute"),
        "conv": ((3 * w,), "compute"),
        "narrow": ((g.kda_head_dim,), "compute"),
        "forget": ((w,), "compute"),
        "decay": ((w,), "f32"),
        "beta_raw": ((kda_heads,), "compute"),
        "beta": ((kda_heads,), "f32"),
        "kda_out": ((kda_heads, g.kda_head_dim), "compute"),
        "gate": ((w,), "compute"),
        "kda_gated": ((w,), "compute"),
        # MLA
        "q_a": ((g.q_rank,), "compute"),
        "q_normed": ((g.q_rank,), "compute"),
        "q": ((h, g.nope_dim), "compute"),
        "absorbed": ((h, r), "compute"),
        "attended": ((h, r), "compute"),
        "values": ((h, g.v_dim), "compute"),
        "latent_raw": ((r,), "compute"),
        "latent": ((r,), "compute"),
        "index_key_raw": ((g.index_dim,), "compute"),
        "index_pair": ((2, g.index_dim), "compute"),
        "index_part": ((g.index_dim,), "compute"),
        "members": ((2, g.index_dim), "compute"),
        "pooled": ((g.index_dim,), "compute"),
        "index_q": ((g.index_heads, g.index_dim), "compute"),
        "index_w_raw": ((g.index_heads,), "compute"),
        "index_w": ((g.index_heads,), "f32"),
        "lists": ((g.list_length,), "i32"),
        "counts": ((), "i32"),
        # MLP and MoE
        "gate_up": ((2 * wide,), "compute"),
        "activated": ((wide,), "compute"),
        "experts": ((g.experts_per_token,), "i32"),
        "expert_weights": ((g.experts_per_token,), "f32"),
        "shared": ((d,), "f32"),
    }


def workspace_rows(geometry: Geometry, chunk_rows: int, lanes: int) -> int:
    """Rows of the largest pass: a prompt chunk or a decode window a lane, with the convolution's rows in front, or the
    pool members of a window."""
    before = geometry.conv_taps - 1
    return max(chunk_rows + before, lanes * max(R_MAX + before, -(-R_MAX // geometry.pool) * geometry.pool))


class Workspace:
    """Named scratch of `rows` rows. A taken array is valid until its name is taken again."""

    def __init__(self, geometry: Geometry, kernels: Kernels, world: int, rank: int, rows: int) -> None:
        self._kernels = kernels
        self._columns = _columns(geometry, world, rank)
        self._rows = rows
        self._arrays: dict[str, Array] = {}
        self._taken: dict[tuple[str, int, int | None], Array] = {}

    def take(self, name: str, rows: int, width: int | None = None) -> Array:
        """The first `rows` rows of a scratch array, C-contiguous; `width` narrows a one-column array (gate_up of a layer
        whose MLP is narrower than the widest). Raises ValueError for more rows than declared."""
        key = (name, rows, width)
        taken = self._taken.get(key)
        if taken is not None:
            return taken
        if rows > self._rows:
            raise ValueError(f"{rows} rows of scratch {name!r} asked, {self._rows} declared")
        shape, kind = self._columns[name]
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = self._kernels.empty((self._rows * prod(shape),), kind)
        if width is not None:
            shape = (width,)
        taken = self._taken[key] = array[: rows * prod(shape)].reshape(rows, *shape)
        return taken


def workspace_bytes(geometry: Geometry, world: int, rank: int, rows: int) -> int:
    """Bytes of a Workspace with every array allocated (f32 carriers)."""
    return rows * sum(prod(shape) * _KIND_BYTES[kind] for shape, kind in _columns(geometry, world, rank).values())
