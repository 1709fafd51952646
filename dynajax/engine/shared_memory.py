"""Move by copies in shared memory: all CPU devices of a process live in one address space.

Target shards are filled by strided copies from where the source shards lie, and become arrays without
a further copy. Large ones lie in memory that XLA owns, so that the next step can donate them; small
ones of a leaf lie side by side in one aligned slab of numpy. Elements travel as raw words, so that no
bit pattern can change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np

from dynajax.engine import uninitialised
from dynajax.engine.batches import batches
from dynajax.engine.host_view import Copy, View, bytes_of, word_of
from dynajax.engine.places import Places
from dynajax.engine.report import Stopwatch
from dynajax.engine.transport import Outline, Stage
from dynajax.engine.tree import Leaf
from dynajax.engine.words import is_packed
from dynajax.planner import Move
from dynajax.vps.buffer import view

_ALIGNMENT = 64
_THREADS = 2
_BATCH_BYTES = 1 << 22
_WORTH_A_CALL = 1 << 15

_T = TypeVar("_T", bound="_Shards")


class SharedMemory:
    """The transport for CPU devices of one process."""

    name = "shared memory"
    overhead = 0

    def __init__(self, places: Places, watch: Stopwatch) -> None:
        self._places = places
        self._watch = watch
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dynajax-copy")

    def run(self, stage: Stage, share: bool) -> list[jax.Array]:
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
            # What is passed on has to have come first.
            turns = [[copy for fill in fills for copy in fill.copies(relayed)] for relayed in (False, True)]
        with self._watch.phase("move"):
            whole = _send_whole(fills)
            for copies in turns:
                list(self._pool.map(_copy_batch, _batches(copies)))
            jax.block_until_ready(whole)
        with self._watch.phase("unpack"):
            return [fill.target(share) for fill in fills]

    def prepare(self, stage: Stage) -> None:
        """See ``Transport.prepare``."""
        self._compile(_by_kind(_Shards(move, leaf, self._places) for move, leaf in stage))

    def _compile(self, kinds: Mapping[Kind, Sequence[_Shards]]) -> None:
        """Have the programs that allocate."""
        with self._watch.compiling(uninitialised.compiled_so_far):
            for kind, alike in kinds.items():
                if kind.is_owned_by_xla:
                    for count in batches(len(alike)):
                        uninitialised.allocator(kind.devices, kind.shape, kind.dtype, count)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._pool.shutdown()


@dataclass(frozen=True)
class Kind:
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
        return large and self.in_default_memory and not is_packed(self.dtype)


class _Shards(Outline):
    """The target shards of one leaf.

    Attributes:
        whole: places whose shard is a source shard of another device, each with that shard's place.
        kind: what the others that do not stay are like.
    """

    def __init__(self, move: Move, leaf: Leaf, places: Places) -> None:
        super().__init__(move, leaf, places)
        self.kind = Kind(self.filled, self.shape, self.dtype, self.is_in_default_memory)
        self.whole = self._whole() if self.kind.is_owned_by_xla else {}
        if self.whole:
            rest = tuple(d for d in self.filled if self.number[d] not in self.whole)
            self.kind = replace(self.kind, devices=rest)

    def _whole(self) -> dict[int, int]:
        c, source = self.move.copies, self.leaf.source
        elements = math.prod(self.shape) // math.prod(self.inner)
        if self.shape != (*source.sharding.shard_shape(source.array_shape), *self.inner) or c.relayed.any():
            return {}
        moved = self._places.differ(c.source, c.target) & (c.volumes == elements)
        rows = np.flatnonzero(moved & (c.source_offset == 0) & (c.target_offset == 0))
        alike = ((c.source_stride == c.target_stride) | (c.extent == 1))[rows].all(axis=1)
        return dict(zip(c.target[rows[alike]].tolist(), c.source[rows[alike]].tolist(), strict=True))


class _Fill(_Shards):
    """One leaf on its way: its source shards, and the buffers of its target shards."""

    def __init__(self, move: Move, leaf: Leaf, places: Places) -> None:
        super().__init__(move, leaf, places)
        self._sources = self.pieces()
        self.slab: dict[int, View] = {}
        self.owned: dict[int, jax.Array] = {}

    def clear_padding(self) -> None:
        """Zeros in buffers that the copies do not fill."""
        if not self.leaf.target.is_plain:
            for buffer in self.slab.values():
                buffer[...] = 0

    def copies(self, relayed: bool) -> list[Copy]:
        """``(to, from)`` views of every box to copy out of a source, or to pass on out of a target."""
        c, word = self.move.copies, word_of(self.move.tensor.itemsize)
        rows = np.flatnonzero((c.relayed == relayed) & ~np.isin(c.target, list(self.whole)))
        target = {n: b.view(word) for n, b in self.slab.items()}
        source = target
        if not relayed:
            source = {n: bytes_of(self._sources[n]).view(word) for n in np.unique(c.source[rows]).tolist()}
        columns = (c.target, c.source, c.extent, c.target_offset, c.target_stride, c.source_offset, c.source_stride)
        return [
            (view(target[t], to, ts, e), view(source[s], so, ss, e))
            for t, s, e, to, ts, so, ss in zip(*(column[rows].tolist() for column in columns), strict=True)
        ]

    def whole_pieces(self) -> list[tuple[int, jax.Array, jax.Device]]:
        """Source shards that move as they are: for which place, which, and to which device."""
        device = {n: d for d, n in self.number.items()}
        return [(n, self._sources[source], device[n]) for n, source in self.whole.items()]

    def target(self, share: bool) -> jax.Array:
        """The target array."""
        kept = {n: piece if share else np.asarray(piece) for n, piece in self._sources.items() if n in self.kept}
        slab = {n: b.view(self.dtype).reshape(self.shape) for n, b in self.slab.items() if n not in self.owned}
        return self.array(kept | slab | self.owned)


def _by_kind(outlines: Iterable[_T]) -> dict[Kind, list[_T]]:
    groups: dict[Kind, list[_T]] = {}
    for outline in outlines:
        groups.setdefault(outline.kind, []).append(outline)
    return groups


def _allocate(kind: Kind, fills: list[_Fill]) -> None:
    """Give the fills their target buffers: XLA's own where shards are large, else slabs of numpy."""
    if kind.is_owned_by_xla:
        made = uninitialised.allocate(kind.devices, kind.shape, kind.dtype, len(fills))
        for fill, shards in zip(fills, made, strict=True):
            fill.owned |= {fill.number[d]: shard for d, shard in shards.items()}
            fill.slab = {n: bytes_of(shard) for n, shard in fill.owned.items()}
        return
    room = -(-kind.nbytes // _ALIGNMENT) * _ALIGNMENT
    for fill in fills:
        slab = np.empty(room * len(kind.devices) + _ALIGNMENT, np.uint8)
        start = -slab.ctypes.data % _ALIGNMENT
        for k, device in enumerate(kind.devices):
            fill.slab[fill.number[device]] = slab[start + k * room : start + k * room + kind.nbytes]


def _send_whole(fills: Iterable[_Fill]) -> list[jax.Array]:
    """Begin to copy shards that move as they are: JAX does that faster than we do, into memory of its own."""
    moves = [(fill, *piece) for fill in fills for piece in fill.whole_pieces()]
    sent = jax.device_put([piece for _, _, piece, _ in moves], [device for *_, device in moves]) if moves else []
    for (fill, number, _, _), piece in zip(moves, sent, strict=True):
        fill.owned[number] = piece
    return sent


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
