"""Move by copies in shared memory: all CPU devices of a process live in one address space.

Target shards are filled by strided copies from where the source shards lie, and become arrays without
a further copy. Large ones lie in memory that XLA owns, so that the next step can donate them; small
ones of a leaf lie side by side in one aligned slab of numpy. Elements travel as raw words, so that no
bit pattern can change.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dynajax.engine import _jax_private as private
from dynajax.engine import uninitialised
from dynajax.engine.places import Places, memory_kind, shards_of
from dynajax.engine.report import Stopwatch
from dynajax.engine.tree import Leaf
from dynajax.errors import CheckError
from dynajax.planner import Move
from dynajax.vps.buffer import view

_ALIGNMENT = 64
_THREADS = 2
_BATCH_BYTES = 1 << 22
_WORTH_A_CALL = 1 << 15
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

Words = NDArray[Any]
Copy = tuple[Words, Words]
_T = TypeVar("_T", bound="_Outline")


class Transport(Protocol):
    """Carries out one stage of a plan."""

    def run(self, stage: Sequence[tuple[Move, Leaf]], share: bool, check: bool) -> list[jax.Array]:
        """The target arrays of a stage; source arrays stay as they are.

        Args:
            stage: what to move.
            share: True if the buffers that stay may be shared with the source (which is then given up); False if
                the target needs an alias of its own.
            check: compare every copied piece with its source.
        """
        ...

    def prepare(self, stage: Sequence[tuple[Move, Leaf]]) -> None:
        """Compile what ``run`` will need; leaves may be without data."""
        ...

    def close(self) -> None:
        """Give back threads and buffers."""
        ...


class SharedMemory:
    """The transport for CPU devices of one process."""

    def __init__(self, places: Places, watch: Stopwatch) -> None:
        self._places = places
        self._watch = watch
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dynajax-copy")

    def run(self, stage: Sequence[tuple[Move, Leaf]], share: bool, check: bool) -> list[jax.Array]:
        """See ``Transport.run``."""
        with self._watch.phase("group"):
            fills = [_Fill(move, leaf, self._places) for move, leaf in stage]
            kinds = _by_kind(fills)
        self._compile(kinds)
        with self._watch.phase("group"):
            for kind, alike in kinds.items():
                _allocate(kind, alike)
            for fill in fills:
                fill.clear_padding()
            copies = [copy for fill in fills for copy in fill.copies()]
        with self._watch.phase("move"):
            list(self._pool.map(_copy_batch, _batches(copies)))
        if check:
            with self._watch.phase("verify"):
                for fill in fills:
                    fill.check()
        with self._watch.phase("unpack"):
            return [fill.array(share) for fill in fills]

    def prepare(self, stage: Sequence[tuple[Move, Leaf]]) -> None:
        """See ``Transport.prepare``."""
        self._compile(_by_kind(_Outline(move, leaf, self._places) for move, leaf in stage))

    def _compile(self, kinds: Mapping[_Kind, Sequence[_Outline]]) -> None:
        """Have the programs that allocate; finding what was compiled before does not count as compiling."""
        start, compiled = time.perf_counter(), uninitialised.allocator.cache_info().misses
        for kind, alike in kinds.items():
            if kind.is_owned_by_xla:
                for count in uninitialised.batches(len(alike)):
                    uninitialised.allocator(kind.devices, kind.shape, kind.dtype, count)
        found_all = uninitialised.allocator.cache_info().misses == compiled
        self._watch.seconds["group" if found_all else "compile"] += time.perf_counter() - start

    def close(self) -> None:
        """See ``Transport.close``."""
        self._pool.shutdown()


@dataclass(frozen=True)
class _Kind:
    """What target shards have to be alike in to be allocated together.

    Attributes:
        devices: those whose buffer does not stay, in target order.
        shape, dtype: of one physical shard.
        in_default_memory: False for shards in a host memory kind.
    """

    devices: tuple[jax.Device, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_default_memory: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one shard."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_owned_by_xla(self) -> bool:
        """True for shards worth a call of XLA: their memory can be donated by the next step."""
        large = bool(self.devices) and bool(self.shape) and self.nbytes >= _WORTH_A_CALL
        return large and self.in_default_memory and not _is_packed(self.dtype)


class _Outline:
    """The target shards of one leaf: on which devices, of what kind, and which of them stay."""

    def __init__(self, move: Move, leaf: Leaf, places: Places) -> None:
        self.move, self.leaf = move, leaf
        self.order = private.device_order(leaf.target.sharding)
        self.target_number = places.numbers(leaf.target.sharding)
        self.kept = set(move.kept.tolist())
        dtype, inner = private.physical_element(leaf.array.dtype)
        filled = tuple(d for d in self.order if self.target_number[d] not in self.kept)
        self.inner = inner
        shape = (*leaf.target.sharding.shard_shape(leaf.target.array_shape), *inner)
        default = all(memory_kind(leaf.target.sharding) == d.default_memory().kind for d in filled[:1])
        self.kind = _Kind(filled, shape, dtype, default)


class _Fill(_Outline):
    """One leaf on its way: its source shards, and the buffers of its target shards."""

    def __init__(self, move: Move, leaf: Leaf, places: Places) -> None:
        super().__init__(move, leaf, places)
        self.base = private.physical(leaf.array)
        self.pieces = shards_of(leaf.array, places)
        self.slab: dict[int, Words] = {}
        self.owned: dict[int, jax.Array] = {}

    def clear_padding(self) -> None:
        """Zeros in buffers that the copies do not fill."""
        if not self.leaf.target.is_plain:
            for buffer in self.slab.values():
                buffer[...] = 0

    def copies(self) -> list[Copy]:
        """``(to, from)`` views of every box to copy."""
        c, word = self.move.copies, word_of(self.move.tensor.itemsize)
        source = {n: bytes_of(self.pieces[n]).view(word) for n in np.unique(c.source).tolist()}
        target = {n: b.view(word) for n, b in self.slab.items()}
        rows = zip(
            c.target.tolist(), c.source.tolist(), c.extent.tolist(), c.target_offset.tolist(),
            c.target_stride.tolist(), c.source_offset.tolist(), c.source_stride.tolist(), strict=True,
        )  # fmt: skip
        return [(view(target[t], to, ts, e), view(source[s], so, ss, e)) for t, s, e, to, ts, so, ss in rows]

    def check(self) -> None:
        """Compare what was copied with its source, while both are there."""
        for row, (to, source) in enumerate(self.copies()):
            if not np.array_equal(to, source):
                device = int(self.move.copies.target[row])
                raise CheckError(f"{self.move.tensor.path}: the bytes of place {device} are not those of its source")

    def array(self, share: bool) -> jax.Array:
        """The target array."""
        buffers: list[Any] = []
        for device in self.order:
            number = self.target_number[device]
            if number in self.owned:
                buffers.append(self.owned[number])
            elif number not in self.kept:
                buffers.append(self.slab[number].view(self.base.dtype).reshape(self.kind.shape))
            else:
                piece = self.pieces[number]
                buffers.append(piece if share else np.asarray(piece))
        goal = self.leaf.target
        made = private.assemble((*goal.array_shape, *self.inner), self.base, goal.sharding, buffers, self.order)
        if self.base is self.leaf.array:
            return made
        return jax.random.wrap_key_data(made, impl=jax.random.key_impl(self.leaf.array))


def _by_kind(outlines: Iterable[_T]) -> dict[_Kind, list[_T]]:
    groups: dict[_Kind, list[_T]] = {}
    for outline in outlines:
        groups.setdefault(outline.kind, []).append(outline)
    return groups


def _allocate(kind: _Kind, fills: list[_Fill]) -> None:
    """Give the fills their target buffers: XLA's own where shards are large, else slabs of numpy."""
    if kind.is_owned_by_xla:
        made = uninitialised.allocate(kind.devices, kind.shape, kind.dtype, len(fills))
        for fill, shards in zip(fills, made, strict=True):
            fill.owned = {fill.target_number[d]: shard for d, shard in shards.items()}
            fill.slab = {n: bytes_of(shard) for n, shard in fill.owned.items()}
        return
    room = -(-kind.nbytes // _ALIGNMENT) * _ALIGNMENT
    for fill in fills:
        slab = np.empty(room * len(kind.devices) + _ALIGNMENT, np.uint8)
        start = -slab.ctypes.data % _ALIGNMENT
        for k, device in enumerate(kind.devices):
            fill.slab[fill.target_number[device]] = slab[start + k * room : start + k * room + kind.nbytes]


class _Memory:
    """Bytes at an address, for numpy; keeps their owner alive."""

    def __init__(self, owner: jax.Array) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (owner.unsafe_buffer_pointer(), False),
            "shape": (owner.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_of(piece: jax.Array) -> Words:
    """The bytes of a single-device array, where they lie if that is the memory of the process.

    There ``np.asarray`` would do, but takes a hold on the buffer that outlives the view and keeps it from being freed
    or donated. Types below a byte are packed in the buffer and have to be unpacked.
    """
    if piece.size == 0:
        return np.empty(0, np.uint8)
    if _is_packed(piece.dtype) or next(iter(piece.devices())).platform != "cpu":
        return np.asarray(piece).reshape(-1).view(np.uint8)
    return np.asarray(_Memory(piece))


def _is_packed(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def word_of(itemsize: int) -> np.dtype[Any]:
    """A dtype to copy elements of so many bytes as."""
    return np.dtype(_WORDS.get(itemsize, f"V{itemsize}"))


def _copy_batch(batch: list[Copy]) -> None:
    for to, source in batch:
        np.copyto(to, source)


def _batches(copies: Iterable[Copy]) -> list[list[Copy]]:
    """Runs of copies of a few MB each, so that threads share the work and small copies share a call."""
    batches: list[list[Copy]] = []
    room = 0
    for copy in _split(copies):
        if room <= 0:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1].append(copy)
        room -= copy[0].nbytes
    return batches


def _split(copies: Iterable[Copy]) -> Iterable[Copy]:
    """Cut copies larger than a batch along their longest dim."""
    for to, source in copies:
        parts = -(-to.nbytes // _BATCH_BYTES)
        dim = max(range(to.ndim), key=lambda d: to.shape[d], default=0)
        if parts <= 1 or to.shape[dim] < parts:
            yield to, source
            continue
        cuts = [to.shape[dim] * k // parts for k in range(parts + 1)]
        lead = (slice(None),) * dim
        for a, b in itertools.pairwise(cuts):
            yield to[(*lead, slice(a, b))], source[(*lead, slice(a, b))]
