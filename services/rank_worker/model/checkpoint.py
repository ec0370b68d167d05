"""Reads a checkpoint from disk: `open_checkpoint` checks all of it by its headers, `load_shard` reads one rank's slices.

Source: model specification section 2 (names, shapes, dtypes); design sections 8 (who reads what) and 12 (digest). A model
directory holds config.json and model.safetensors, or shards with model.safetensors.index.json.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from kernels.api import Kernels
from kernels.rows import Array
from latentpool.errors import CheckpointError
from latentpool.geometry import Geometry, Layer
from services.rank_worker.model.shard import Block, Hyper, Indexer, Kda, Mla, Mlp, Moe, Shard
from services.rank_worker.model.tensors import MODEL, Tensor, draft_tensors, layer_prefix, main_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_VISION = "model.visual."
_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
_DIGEST_BYTES = 64 * 1024
_LISTED = 50

Host = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes this rank reads in all)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file's header describes it. `start` and `stop` are byte offsets in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file: its size in bytes, its raw header, and what the header lists."""

    path: Path
    size: int
    header: bytes
    tensors: Mapping[str, Stored]


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint: `tensors` are those its geometry asks for, all of them present and whole."""

    model_dir: Path
    geometry: Geometry
    files: tuple[TensorFile, ...]
    tensors: Mapping[str, Stored]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over config.json, headers, file sizes and the first 64 KiB of each tensor, as hex. Reads the files."""
        digest = hashlib.sha256()
        _update(digest, (self.model_dir / "config.json").read_bytes())
        for file in self.files:
            _update(digest, file.header)
            digest.update(struct.pack("<Q", file.size))
            with file.path.open("rb") as source:
                for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.start):
                    source.seek(tensor.start)
                    digest.update(source.read(min(_DIGEST_BYTES, tensor.stop - tensor.start)))
        return digest.hexdigest()

    @cached_property
    def main(self) -> Mapping[str, Tensor]:
        """The main model's tensors: what `load_shard` reads."""
        return main_tensors(self.geometry)

    def shard_bytes(self, world: int, rank: int) -> int:
        """Bytes that `load_shard` reads for `rank` of `world`."""
        return sum(
            tensor.part_size(world, rank) * _DTYPES[self.tensors[name].dtype].itemsize for name, tensor in self.main.items()
        )


def _update(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)


# ---- opening and checking ------------------------------------------------------------------------------------


def open_checkpoint(model_dir: Path, geometry: Geometry) -> Checkpoint:
    """Reads every header and compares names, shapes, dtypes and sizes with the geometry. Tensors of the vision tower are
    skipped; those of a draft layer too, unless geometry.draft_layers. Raises one CheckpointError listing every problem."""
    problems: list[str] = []
    files, placed = _read_files(model_dir, problems)
    found = {name: tensor for file in files for name, tensor in file.tensors.items()}
    _refuse_fp8(model_dir, found)
    expected = main_tensors(geometry)
    draft = draft_tensors(geometry)
    if geometry.draft_layers:
        expected |= draft
    for name, tensor in expected.items():
        if name in found:
            problems += _faults(name, found[name], tensor.shape)
        elif name not in placed:
            problems.append(f"missing: {name} {list(tensor.shape)}")
    problems += [
        f"surplus: {name} {list(tensor.shape)} in {tensor.file}"
        for name, tensor in found.items()
        if name not in expected and name not in draft and not name.startswith(_VISION)
    ]
    if problems:
        raise CheckpointError(_listed(model_dir, problems))
    return Checkpoint(model_dir, geometry, tuple(files), {name: found[name] for name in expected})


def _read_files(model_dir: Path, problems: list[str]) -> tuple[list[TensorFile], set[str]]:
    """The readable files, in order of name, and the tensors whose absence is already told as a problem of the index or of
    an unreadable file."""
    if (model_dir / SINGLE).exists():
        file = _read_file(model_dir / SINGLE, problems)
        if file is None:  # nothing else is known: listing every tensor as missing would hide the reason
            raise CheckpointError(_listed(model_dir, problems))
        return [file], set()
    weight_map = _read_index(model_dir)
    files: list[TensorFile] = []
    told: set[str] = set()
    for name in sorted(set(weight_map.values())):
        file = _read_file(model_dir / name, problems)
        indexed = {tensor for tensor, where in weight_map.items() if where == name}
        if file is None:
            told |= indexed
            continue
        files.append(file)
        absent = sorted(indexed - file.tensors.keys())
        told |= set(absent)
        problems += [f"{INDEX} places {tensor} in {name}, which does not hold it" for tensor in absent]
        problems += [
            f"{name} holds {tensor}, which {INDEX} places {'in ' + weight_map[tensor] if tensor in weight_map else 'nowhere'}"
            for tensor in sorted(file.tensors.keys() - indexed)
        ]
    return files, told


def _read_index(model_dir: Path) -> dict[str, str]:
    path = model_dir / INDEX
    if not path.exists():
        raise CheckpointError(f"{model_dir}: holds neither {SINGLE} nor {INDEX}")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read as an index with a weight_map: {error!r}") from None


def _read_file(path: Path, problems: list[str]) -> TensorFile | None:
    """Reads one header. None, and a problem told, if the file or its header cannot be read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as source:
            prefix = source.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= size - 8:
                problems.append(f"{path.name}: truncated inside its header ({size:,} bytes)")
                return None
            header = source.read(length)
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")
        return None
    try:
        entries = json.loads(header)
        tensors = {name: _stored(path.name, 8 + length, entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        problems.append(f"{path.name}: its header is not a safetensors header")
        return None
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if size != end:
        what = "truncated" if size < end else "longer than its header says"
        problems.append(f"{path.name}: {what} ({size:,} bytes, {end:,} expected)")
    problems += [
        f"truncated: {name} ends at byte {tensor.stop:,} of {path.name}, which has {size:,}"
        for name, tensor in tensors.items()
        if tensor.stop > size
    ]
    return TensorFile(path, size, header, tensors)


def _stored(file: str, base: int, entry: Mapping[str, Any]) -> Stored:
    start, stop = (base + int(offset) for offset in entry["data_offsets"])
    return Stored(file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), start, stop)


def _refuse_fp8(model_dir: Path, found: Mapping[str, Stored]) -> None:
    for name, tensor in found.items():
        if tensor.dtype.startswith("F8_") or name.endswith(".weight_scale_inv"):
            raise CheckpointError(
                f"{model_dir}: block-FP8 checkpoint ({name} is {tensor.dtype}): not supported on the NumPy backend; "
                "use the BF16 release"
            )


def _faults(name: str, stored: Stored, shape: tuple[int, ...]) -> Iterable[str]:
    if stored.shape != shape:
        yield f"wrong shape: {name} is {list(stored.shape)}, config.json makes it {list(shape)}"
    elif stored.dtype not in _DTYPES:
        yield f"wrong dtype: {name} is {stored.dtype}, {' or '.join(_DTYPES)} is read"
    elif stored.stop - stored.start != prod(shape) * _DTYPES[stored.dtype].itemsize:
        yield f"wrong size: {name} has {stored.stop - stored.start:,} bytes for {stored.dtype} {list(shape)}"


def _listed(model_dir: Path, problems: Sequence[str]) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    return "\n  ".join(
        [f"{model_dir}: the checkpoint is not what its config.json promises, {count}:", *problems[:_LISTED], *more]
    )


# ---- loading -------------------------------------------------------------------------------------------------


def load_shard(checkpoint: Checkpoint, world: int, rank: int, kernels: Kernels, progress: Progress) -> Shard:
    """Reads this rank's slices of the main model and uploads them in the form of services.rank_worker.model.shard.
    `progress` is called after each tensor. Raises CheckpointError if a file changed or cannot be read."""
    with ExitStack() as stack:
        try:
            handles = {file.path.name: stack.enter_context(safe_open(file.path, framework="np")) for file in checkpoint.files}
            return _Loader(checkpoint, world, rank, kernels, progress, handles).shard()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{checkpoint.model_dir}: reading failed: {error}") from error


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        world: int,
        rank: int,
        kernels: Kernels,
        progress: Progress,
        handles: Mapping[str, Any],
    ) -> None:
        self.checkpoint = checkpoint
        self.geometry = checkpoint.geometry
        self.world, self.rank = world, rank
        self.kernels = kernels
        self.progress = progress
        self.handles = handles
        self.done = 0
        self.total = checkpoint.shard_bytes(world, rank)

    # ---- one array ---------------------------------------------------------------------------------------------

    def read(self, name: str) -> Host:
        """This rank's part of a tensor, in the dtype of the file."""
        source = self.handles[self.checkpoint.tensors[name].file].get_slice(name)
        part: Host = source[self.checkpoint.main[name].part(self.world, self.rank)]
        self.done += part.nbytes
        self.progress(self.done, self.total)
        return part

    def upload(self, part: Host, kind: Literal["compute", "f32"] = "compute") -> Array:
        return self.kernels.upload(np.ascontiguousarray(part), kind)

    def weight(self, name: str) -> Array:
        return self.upload(self.read(name))

    def f32(self, name: str) -> Array:
        return self.upload(self.read(name), "f32")

    def rows(self, *names: str) -> Host:
        return np.concatenate([self.read(name) for name in names])

    # ---- parts of the model --------------------------------------------------------------------------------------

    def shard(self) -> Shard:
        return Shard(
            embed=self.weight(f"{MODEL}embed_tokens.weight"),
            blocks=tuple(self.block(layer, layer_prefix(i)) for i, layer in enumerate(self.geometry.layers)),
            norm=self.weight(f"{MODEL}norm.weight"),
            head=self.weight("lm_head.weight"),
        )

    def block(self, layer: Layer, at: str) -> Block:
        attn = f"{at}self_attn."
        return Block(
            attn_hyper=self.hyper(f"{at}hc_attn_"),
            attn_norm=self.weight(f"{at}input_layernorm.weight"),
            attn=self.kda(attn) if layer.kind == "kda" else self.mla(layer, attn),
            ffn_hyper=self.hyper(f"{at}hc_ffn_"),
            ffn_norm=self.weight(f"{at}post_attention_layernorm.weight"),
            ffn=self.moe(f"{at}mlp.") if layer.sparse_mlp else self.mlp(f"{at}mlp."),
        )

    def hyper(self, at: str) -> Hyper:
        return Hyper(fn=self.f32(f"{at}fn"), base=self.f32(f"{at}base"), scale=self.f32(f"{at}scale"))

    def kda(self, at: str) -> Kda:
        conv = self.rows(*(f"{at}{name}_conv1d.weight" for name in "qkv"))
        return Kda(
            qkv=self.upload(self.rows(*(f"{at}{name}_proj.weight" for name in "qkv"))),
            conv=self.upload(conv[:, 0, :].T, "f32"),
            f_a=self.weight(f"{at}f_a_proj.weight"),
            f_b=self.weight(f"{at}f_b_proj.weight"),
            dt_bias=self.f32(f"{at}dt_bias"),
            a_log=self.f32(f"{at}A_log"),
            b=self.weight(f"{at}b_proj.weight"),
            g_a=self.weight(f"{at}g_a_proj.weight"),
            g_b=self.weight(f"{at}g_b_proj.weight"),
            o_norm=self.f32(f"{at}o_norm.weight"),
            o=self.weight(f"{at}o_proj.weight"),
        )

    def mla(self, layer: Layer, at: str) -> Mla:
        g = self.geometry
        # A head's rows stand together: d_n rows of B^K, then d_v rows of B^V (specification 3.5).
        kv_b = self.read(f"{at}kv_b_proj.weight").reshape(-1, g.nope_dim + g.v_dim, g.latent)
        return Mla(
            q_a=self.weight(f"{at}q_a_proj.weight"),
            q_norm=self.weight(f"{at}q_a_layernorm.weight"),
            q_b=self.weight(f"{at}q_b_proj.weight"),
            kv_a=self.weight(f"{at}kv_a_proj_with_mqa.weight"),
            kv_norm=self.weight(f"{at}kv_a_layernorm.weight"),
            b_k=self.upload(kv_b[:, : g.nope_dim].transpose(0, 2, 1)),
            b_v=self.upload(kv_b[:, g.nope_dim :]),
            o=self.weight(f"{at}o_proj.weight"),
            indexer=self.indexer(f"{at}indexer.") if layer.index == "full" else None,
        )

    def indexer(self, at: str) -> Indexer:
        return Indexer(
            q_b=self.weight(f"{at}wq_b.weight"),
            k=self.weight(f"{at}wk.weight"),
            k_norm=self.weight(f"{at}k_norm.weight"),
            k_bias=self.weight(f"{at}k_norm.bias"),
            weights=self.weight(f"{at}weights_proj.weight"),
            ape=self.weight(f"{at}index_kpool_compress_ape"),
            gate=self.weight(f"{at}index_kpool_compress_gate"),
        )

    def mlp(self, at: str) -> Mlp:
        return Mlp(
            gate_up=self.upload(self.rows(f"{at}gate_proj.weight", f"{at}up_proj.weight")),
            down=self.weight(f"{at}down_proj.weight"),
        )

    def moe(self, at: str) -> Moe:
        experts = [f"{at}experts.{e}." for e in range(self.geometry.experts)]
        return Moe(
            router=self.f32(f"{at}gate.weight"),
            bias=self.f32(f"{at}gate.e_score_correction_bias"),
            gate_up=self.stacked([[f"{e}gate_proj.weight", f"{e}up_proj.weight"] for e in experts]),
            down=self.stacked([[f"{e}down_proj.weight"] for e in experts]),
            shared=self.mlp(f"{at}shared_experts."),
        )

    def stacked(self, experts: Sequence[Sequence[str]]) -> Array:
        """Experts along a new first axis, each filled in place: a layer's experts are the largest thing held twice."""
        dtypes = {self.checkpoint.tensors[name].dtype for names in experts for name in names}
        first = self.rows(*experts[0])
        whole = np.empty((len(experts), *first.shape), _DTYPES["F32" if "F32" in dtypes else "BF16"])
        whole[0] = first
        for e, names in enumerate(experts[1:], start=1):
            whole[e] = self.rows(*names)
        return self.upload(whole)
