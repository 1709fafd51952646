"""Move by copies in shared memory: all CPU devices of a process live in one address space.

Target shards of a leaf lie side by side in one aligned slab, are filled by strided copies from where
the source shards lie, and become arrays without a further copy. Elements travel as raw words, so that
no bit pattern can change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dynajax.engine import _jax_private as private
from dynajax.engine.places import Places
from dynajax.engine.report import Stopwatch
from dynajax.engine.tree import Leaf
from dynajax.errors import CheckError
from dynajax.planner import Move
from dynajax.vps.buffer import view

_ALIGNMENT = 64
_THREADS = 2
_BATCH_BYTES = 1 << 22
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

Words = NDArray[Any]
Copy = tuple[Words, Words]


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
            copies = [copy for fill in fills for copy in fill.copies()]
        with self._watch.phase("move"):
            list(self._pool.map(_copy_batch, _batches(copies)))
        if check:
            with self._watch.phase("verify"):
                for fill in fills:
                    fill.check()
        with self._watch.phase("unpack"):
            return [fill.array(share) for fill in fills]

    def close(self) -> None:
        """See ``Transport.close``."""
        self._pool.shutdown()


class _Fill:
    """One leaf on its way: its source shards as words, and the slab of its target shards."""

    def __init__(self, move: Move, leaf: Leaf, places: Places) -> None:
        self.move, self.leaf = move, leaf
        self.base = private.physical(leaf.array)
        number = places.numbers(leaf.array.sharding)
        self.pieces = {number[s.device]: s.data for s in self.base.addressable_shards}
        self.order = private.device_order(leaf.target)
        self.target_number = places.numbers(leaf.target)
        self.kept = set(move.kept.tolist())
        self.shape = (*leaf.target.shard_shape(leaf.array.shape), *self.base.shape[leaf.array.ndim :])
        self.slab = self._allocate()

    def _allocate(self) -> dict[int, Words]:
        """An aligned flat buffer for each target place whose buffer does not stay."""
        nbytes = math.prod(self.shape) * self.base.dtype.itemsize
        room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        filled = [n for n in self.target_number.values() if n not in self.kept]
        slab = np.empty(room * len(filled) + _ALIGNMENT, np.uint8)
        start = -slab.ctypes.data % _ALIGNMENT
        return {n: slab[start + k * room : start + k * room + nbytes] for k, n in enumerate(filled)}

    def copies(self) -> list[Copy]:
        """``(to, from)`` views of every box to copy."""
        c, word = self.move.copies, _word(self.move.tensor.itemsize)
        source = {n: _bytes_of(self.pieces[n]).view(word) for n in np.unique(c.source).tolist()}
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
            if number not in self.kept:
                buffers.append(self.slab[number].view(self.base.dtype).reshape(self.shape))
            else:
                piece = self.pieces[number]
                buffers.append(piece if share else np.asarray(piece))
        made = private.assemble(self.base, self.leaf.target, buffers, self.order)
        if self.base is self.leaf.array:
            return made
        return jax.random.wrap_key_data(made, impl=jax.random.key_impl(self.leaf.array))


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


def _bytes_of(piece: jax.Array) -> Words:
    """The bytes of a single-device array, where they lie.

    ``np.asarray`` would do, but takes a hold on the buffer that outlives the copy and keeps it from being freed or
    donated. Types below a byte are packed in the buffer and have to be unpacked.
    """
    if piece.size == 0:
        return np.empty(0, np.uint8)
    if _is_packed(piece.dtype):
        return np.asarray(piece).reshape(-1).view(np.uint8)
    return np.asarray(_Memory(piece))


def _is_packed(dtype: Any) -> bool:
    kind = (
        jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else None
    )
    return kind is not None and kind(dtype).bits < 8


def _word(itemsize: int) -> np.dtype[Any]:
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
