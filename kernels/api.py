"""The contract of the operations: shapes, dtypes, rounding points, and the invariance each must keep.

Source: model specification section 3; design section 3 (exactness) and 12 (interfaces).

Dtypes. `compute` arrays hold values of the compute dtype (f32 or bf16) in whatever carrier the backend likes (NumPy keeps
bf16 values in float32 arrays); `f32`, `f64`, `i32`, `u64` are what they say. Rounding happens where an output is declared
`compute`, once, from an f32 result, to nearest even; nowhere else unless an operation says so.

Shapes. T rows: on the prompt path T is a multiple of 64 and rows come in blocks of 64 of ONE conversation, the last block
padded (`rows` says how many are real; `attend` says where fewer may come); on the decode path T is any number >= 1 of rows
of any conversations. Outputs are preallocated by the caller, C-contiguous, and wholly overwritten unless said otherwise.
Inputs are never changed. No output overlaps an input. What changes from round to round arrives as array data; sizes known to
the host are plain ints.

Invariance. PROMPT: a row depends on its own block (and on the state or cache before it), not on how many blocks one call
carries. DECODE: a row depends on its own inputs, not on how many rows there are or where it stands. `tests/kernels` holds
every backend to both, bit for bit.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from kernels.rows import Array, RowView

KEY_TILE = 64
"""Keys a tile of attention or pools a tile of scoring holds; tiles are always padded to full size."""
KEY_CHUNK = 512
"""Entries of a selection list that share one (max, sum, accumulator); chunks merge in list order."""

Kind = Literal["compute", "f32", "f64", "i32", "u64"]


class Path(enum.Enum):
    """Which of the two paths a token is computed on; a row's bits may differ between them (design 3.1)."""

    PROMPT = "prompt"
    DECODE = "decode"


class Kernels(Protocol):
    """One backend with its compute dtype. Stateless apart from scratch memory; one instance serves one rank."""

    name: str
    """"numpy" or "cuda"; part of the numerics digest."""
    dtype: str
    """Compute dtype: "f32" or "bf16"."""
    wire: np.dtype[np.generic]
    """What `compute` values travel in between ranks: float32 or bfloat16."""

    # ---- memory ----------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], kind: Kind) -> Array:
        """Uninitialised C-contiguous array."""

    def cache(self, shape: Sequence[int], kv_dtype: str) -> Array:
        """A plane of the arena in a cache dtype ("f32", "bf16"), zeroed."""

    def upload(self, array: Array, kind: Kind) -> Array:
        """A host array (any float or integer dtype) as an array of `kind` on the device, rounded if needed."""

    def host(self, array: Array) -> Array:
        """A numpy array with the same values; `compute` arrays come as float32. May be a view."""

    # ---- products --------------------------------------------------------------------------------------------

    def linear(self, path: Path, x: Array, w: Array, out: Array) -> None:
        """out = x wᵀ. x compute [T, K], w compute [N, K], out compute [T, N]; accumulates in f32, rounds once."""

    def linear_f32(self, path: Path, x: Array, w: Array, out: Array) -> None:
        """out = x wᵀ unrounded: x compute [T, K], w compute [N, K], out f32 [T, N]. Partial sums, router."""

    def embed(self, tokens: Array, table: Array, first_id: int, out: Array) -> None:
        """Rows of this rank's part of the embedding. tokens i32 [T], table compute [V_r, d] for ids first_id.., out f32
        [T, d]: zeros where the token is another rank's."""

    def sum_ranks(self, parts: Sequence[Array], out: Array) -> None:
        """out = parts[0] + parts[1] + ... in that order in f32, then rounded. parts f32 [T, d], out compute [T, d]."""

    def add(self, a: Array, b: Array, out: Array) -> None:
        """out = a + b, all f32 [T, d]; out may be a."""

    # ---- norms and activations -------------------------------------------------------------------------------

    def rms_norm(self, x: Array, w: Array, eps: float, out: Array) -> None:
        """Specification 3.1: f32 inside, rounded, then times w (compute [d]) and rounded. x, out compute [T, d]."""

    def layer_norm(self, x: Array, w: Array, b: Array, eps: float, out: Array) -> None:
        """Population variance, wholly f32 with w and b, rounded once. x, out compute [T, n], w, b compute [n]."""

    def swiglu(self, gate_up: Array, limit: float, out: Array) -> None:
        """silu(min(g, limit)) * clamp(u, -limit, limit); gate_up compute [T, 2f] (gate, then up), out compute [T, f].
        The silu is rounded, then the product."""

    # ---- hyper-connections (specification 3.3) -------------------------------------------------------------

    def hyper_spread(self, e: Array, out: Array) -> None:
        """Every stream a copy: e compute [T, d], out compute [T, N, d]."""

    def hyper_pre(
        self, path: Path, X: Array, fn: Array, base: Array, scale: Array, rms_eps: float, hyper_eps: float, iters: int,
        x: Array, post: Array, comb: Array,
    ) -> None:  # fmt: skip
        """Steps 1 to 6. X compute [T, N, d]; fn f32 [(2+N)N, N d], base f32 [(2+N)N], scale f32 [3]; outputs x compute
        [T, d] (before its norm), post compute [T, N], comb compute [T, N, N] (C, not transposed)."""

    def hyper_post(self, X: Array, y: Array, post: Array, comb: Array, out: Array) -> None:
        """Step 8: out[n] = round(round(post[n] y) + round(sum_j comb[j, n] X[j])), the sum in f32. y compute [T, d],
        X, out compute [T, N, d]."""

    def hyper_mean(self, X: Array, out: Array) -> None:
        """Mean over streams, ascending in f32, rounded once. X compute [T, N, d], out compute [T, d]."""

    def scale(self, x: Array, factor: float, out: Array) -> None:
        """out = x * factor in f32. x compute, out f32, same shape. The indexer's head weights."""

    # ---- a lane's rings: the rows before a token -------------------------------------------------------------

    def read_ring(self, ring: Array, lanes: Array, positions: Array, out: Array) -> None:
        """out[i] = ring[lanes[i], positions[i] % n], zeros where positions[i] < 0. ring [lanes, n, width] as `cache` made
        it, lanes, positions i32 [M], out compute [M, width]."""

    def write_ring(self, rows: Array, ring: Array, lanes: Array, positions: Array) -> None:
        """ring[lanes[i], positions[i] % n] = rows[i]. rows compute [M, width], positions >= 0; no two rows share a place."""

    # ---- KDA (specification 3.4) ---------------------------------------------------------------------------

    def kda_conv(self, u: Array, w: Array, out: Array) -> None:
        """Causal depthwise convolution and silu in f32, rounded once. u compute [B, c-1+T, C] with the c-1 rows before
        row 0 in front (zeros before the conversation), w f32 [c, C], out compute [B, T, C]. Taps ascending."""

    def kda_gate(self, f: Array, dt_bias: Array, a_log: Array, bound: float, out: Array) -> None:
        """Step 3: log decay G = bound * sigmoid(exp(a_log[head]) (f + dt_bias)). f compute [T, H D], dt_bias f32 [H D],
        a_log f32 [H], out f32 [T, H D]."""

    def sigmoid(self, x: Array, out: Array) -> None:
        """x compute, out f32, same shape. Step 4: beta."""

    def kda_prompt(
        self, q: Array, k: Array, v: Array, G: Array, beta: Array, rows: int, state_in: Array, state_out: Array, out: Array
    ) -> None:  # fmt: skip
        """Steps 5 and 6 in chunked form, block after block. q, k, v compute [T, H, D] after convolution, G f32 [T, H, D],
        beta f32 [T, H]; state_in, state_out f32 [H, D key, D value] (may be the same array); out compute [T, H, D]. G >= -10.
        Rows from `rows` on are padding: treated as G = 0, beta = 0, k = 0 whatever they hold; their outputs are zeros."""

    def kda_decode(
        self, q: Array, k: Array, v: Array, G: Array, beta: Array, states: Array, source: Array, target: Array, out: Array
    ) -> None:  # fmt: skip
        """Steps 5 and 6 token by token. q, k, v compute [B, R, H, D], G f32 [B, R, H, D], beta f32 [B, R, H]; states f32
        [slots, H, D, D]: window b starts from states[source[b]] and its state after R rows goes to states[target[b]]
        (source, target i32 [B]; all targets differ, no target is another window's source). out compute [B, R, H, D]."""

    def kda_output(self, o: Array, gate: Array, w: Array, eps: float, out: Array) -> None:
        """Step 7 in f32, rounded once. o compute [T, H, D], gate compute [T, H D], w f32 [D], out compute [T, H D]."""

    # ---- latent rows, pools, selection (specification 3.5, 3.6) ----------------------------------------------

    def write_rows(self, rows: Array, view: RowView, pages: Array, offsets: Array) -> None:
        """view.values[pages[i], offsets[i]] = rows[i] in the cache dtype. rows compute [T, width], pages, offsets i32 [T].
        Several rows may name the discard page."""

    def read_rows(self, view: RowView, pages: Array, offsets: Array) -> Array:
        """A new array [T, width] of the cache's own dtype: what the arena really holds (for digests)."""

    def stored_rows(self, rows: Array, view: RowView) -> Array:
        """A new array [T, width]: what `read_rows` would give after `write_rows` of rows compute [T, width]."""

    def export_rows(self, view: RowView, pages: Array, offsets: Array, out: Array) -> None:
        """out = the rows as `view` holds them, into a link buffer: out [T, width] of the cache dtype, pages, offsets i32
        [T]."""

    def import_rows(self, rows: Array, view: RowView, pages: Array, offsets: Array) -> None:
        """Stores rows [T, width] of the cache dtype, as `export_rows` gave them, unchanged."""

    def copy_pages(self, plane: Array, source: Array, target: Array) -> None:
        """plane[target[i]] = plane[source[i]], whole pages of all layers: plane as `cache` made it, source, target i32 [n];
        no page is in both."""

    def pack(self, x: Array, out: Array) -> None:
        """out = x in the form that travels: x compute, out a link buffer of `wire`, same shape. Exact."""

    def unpack(self, x: Array, out: Array) -> None:
        """The inverse of `pack`: x a link buffer, out compute, same shape (out need not be contiguous)."""

    def absorb(self, path: Path, q: Array, w: Array, out: Array) -> None:
        """Per head product of MLA's absorbed form. q compute [T, h, a], w compute [h, b, a], out compute [T, h, b]
        = w[head] q[head], f32 inside. Queries: w = (B^K)ᵀ [h, r, d_n]; outputs: w = B^V [h, d_v, r]."""

    def attend(
        self, path: Path, q: Array, view: RowView, lanes: Array, positions: Array, lists: Array, counts: Array,
        scale: float, out: Array, tiles: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Sparse attention in absorbed form: key = value = latent row. q compute [T, h, r]; row t of lane lanes[t] at
        positions[t] attends to rows lists[t, :counts[t]] of `view`. lanes, positions, counts i32 [T], lists i32 [T, Lmax].
        The list is cut in chunks of KEY_CHUNK entries, a chunk in tiles of KEY_TILE; each chunk gives (max, sum,
        accumulator) in f32, tiles added in order, chunks merged in order; probabilities are not rounded. out compute
        [T, h, r] = accumulator / sum. Entries past counts[t] are padding: never read as rows, masked by selection.
        A row with counts[t] == positions[t] + 1 is dense; on the prompt path a block's dense rows (its first ones, of one
        lane, whose lists are prefixes of one another) may be multiplied together over the longest one's list.
        counts[t] == 0 (a padding row) gives zeros. On the prompt path fewer than 64 rows of a block may come together where
        none of them is dense. tiles: heads of several ranks side by side, tiles[i] of each; a head gets the bits that its
        rank's heads alone would get. Empty: all heads are one rank's."""

    def pool_keys(self, keys: Array, gates: Array, ape: Array, out: Array) -> None:
        """Pooled keys: softmax over the P members, per channel, of gates + ape in f32, rounded; products with keys and
        their sum, members ascending, rounded as the specification says. keys, gates compute [n, P, d_I], ape compute
        [P, d_I], out compute [n, d_I]."""

    def select(
        self, path: Path, q: Array, weights: Array, view: RowView, lanes: Array, positions: Array, pool: int, kept: int,
        lists: Array, counts: Array,
    ) -> None:  # fmt: skip
        """Section 3.6: the `kept` best complete pools of each row by sum_i weights[i] relu(q_i . key / sqrt(d_I)) in f32
        (heads ascending or one reduction over a contiguous last axis), ties to the lower pool, and the tail. q compute
        [T, n_I, d_I], weights f32 [T, n_I], view: pooled keys (row p of a lane is pool p). lists i32 [T, kept*pool+pool-1]:
        ascending positions, tail last, padded with -1; counts i32 [T]. A row at positions[t] with positions[t] + 1 <=
        kept*pool + pool - 1 is dense, 0..t, and is not scored. positions[t] < 0 marks a padding row: counts 0."""

    # ---- experts (specification 3.7) -------------------------------------------------------------------------

    def route(
        self, path: Path, x: Array, w: Array, bias: Array, groups: int, groups_kept: int, normalise: bool, scale: float,
        experts: Array, weights: Array,
    ) -> None:  # fmt: skip
        """Steps 1 to 3, f32. x compute [T, d], w f32 [E, d], bias f32 [E]; experts i32 [T, k] ascending, weights f32
        [T, k]. Ties go to the lower expert (and the lower group)."""

    def experts(
        self, path: Path, x: Array, experts: Array, weights: Array, rows: int, gate_up: Array, down: Array, limit: float,
        out: Array,
    ) -> None:  # fmt: skip
        """Routed partial sums of this rank's columns: out[t] = sum over chosen experts, ascending, of weight * (down
        swiglu(gate_up x)), f32. gate_up compute [E, 2 m_r, d] (gate rows, then up), down compute [E, d, m_r], out f32
        [T, d]. Gate, up and the swiglu are rounded as in `linear` and `swiglu`. Rows from `rows` on are padding: zeros."""

    # ---- sampling (design 3.7) -------------------------------------------------------------------------------

    def candidates(
        self, logits: Array, first_id: int, temperature: Array, kept: Array, seed: Array, position: Array,
        scores: Array, ids: Array,
    ) -> None:  # fmt: skip
        """This rank's best per row. logits compute [T, V_r] for ids first_id..; temperature f64 [T] (0 is greedy), kept i32
        [T], seed u64 [T], position u64 [T] (absolute position of the token to be drawn); scores f64 [T, C], ids i32 [T, C],
        both padded with (-inf, -1). kept = 0: the one best of logit / temperature + gumbel, or the best logit where greedy.
        kept = n: the n best logits as they are, descending, ties to the lower id; C >= n."""

    def mass(self, logits: Array, top: Array, temperature: Array, out: Array) -> None:
        """Probability mass of this rank's columns in 64-bit fixed point: sum of floor(exp((logit - top) / temperature) *
        2**44). logits compute [T, V_r], top f64 [T] the largest logit of all ranks, temperature f64 [T] (0: the sum is 0),
        out u64 [T]. exp in defined fp64 steps, so the sum over ranks is the same however columns are split."""

    def draw(
        self, scores: Array, ids: Array, columns: Array, masses: Array, temperature: Array, top_k: Array, top_p: Array,
        min_p: Array, seed: Array, position: Array, out: Array,
    ) -> None:  # fmt: skip
        """The token of each row from all ranks' candidates. scores f64 [W, T, C], ids i32 [W, T, C], columns i32 [W] the
        vocabulary columns of each rank, masses u64 [W, T], top_k i32 [T] (0: none), top_p f64 [T] (1: none), min_p f64 [T]
        (0: none), out i32 [T]. Rows without a cut: the best candidate. Rows with one: raw logits, merged in descending order,
        ties to the lower id; the top_k best; of them the shortest prefix whose mass (as in `mass`, of the top_k set or of
        the whole vocabulary) reaches top_p of the whole; of them those whose mass is at least min_p of the largest's; the
        best logit / temperature + gumbel of those. out = -1 where the cut reaches past what the candidates of a rank with
        more than C columns can tell: ask again with twice as many. Temperature 0 takes the best logit whatever the cuts."""

    def score_rows(
        self, logits: Array, first_id: int, following: Array, max_: Array, sum_: Array, best: Array, next_: Array
    ) -> None:
        """Per row of this rank's columns: max_ f32 [T], sum_ f64 [T] of exp(logit - max), best i32 [T] (lowest id on
        ties), next_ f32 [T] the logit of following[t] (i32, -1 unknown), NaN where it is not here."""
