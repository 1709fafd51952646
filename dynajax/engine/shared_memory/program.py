"""What the copies of a stage are, as far as its plan says it: which buffers are allocated, and what is copied to them.

Nothing here knows the data, so a move that is made again and again works it out once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from dynajax.arrays import _jax_private as private
from dynajax.arrays.dtypes import is_packed
from dynajax.arrays.host_view import word_of
from dynajax.engine.memories import Memories, located
from dynajax.engine.request import Leaf
from dynajax.engine.stored import Endpoint
from dynajax.planner import Move
from dynajax.types import Ints
from dynajax.vps.strided import StridedCopies, StridedCopy
from dynajax.vps.tiling import segment_sum

ALIGNMENT = 64
"""Bytes: numpy memory that begins at a multiple becomes an array where it lies."""
_WORTH_A_CALL = 1 << 15
_BATCH_BYTES = 1 << 20

Buffers = Mapping[int, tuple[int, int]]
"""Of each memory the number of its buffer, and where its shard begins in it."""
Batch = Sequence[tuple[Sequence[int], Sequence[StridedCopy]]]
"""Copies of some tensors, each with the numbers, in the table of buffers, of the buffers that they speak of."""


@dataclass(frozen=True)
class BufferSpec:
    """What target shards have to be alike in to be allocated together.

    Attributes:
        devices: those that get a buffer, in target order.
        shape, dtype: of one physical shard.
        is_owned_by_xla: whether XLA allocates them, each by itself, so that the next step can donate them.
    """

    devices: tuple[jax.Device, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_owned_by_xla: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one shard."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes from one shard to the next where they lie side by side."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Allocation:
    """The shards of one target array that do not stay where they are.

    Attributes:
        copied: memories whose shard is a source shard of another device, each with that shard's memory.
        made: memories that get a buffer, in target order.
        spec: what these buffers are like.
    """

    copied: Mapping[int, int]
    made: tuple[int, ...]
    spec: BufferSpec

    @cached_property
    def buffers(self) -> Buffers:
        """The buffers, which are one slab if numpy makes them."""
        alone = self.spec.is_owned_by_xla
        return {n: (k, 0) if alone else (0, k * self.spec.room) for k, n in enumerate(self.made)}

    @cached_property
    def count(self) -> int:
        """How many buffers there are."""
        return _count(self.buffers)


@dataclass(frozen=True, eq=False)
class _Template:
    """The copies of one tensor: the same for all that go the same way between arrays alike.

    Attributes:
        allocations: of its target arrays.
        read: memories whose shard of each source array is read.
        phases: its copies, in chunks; buffers are counted on from those of the target arrays to those read.
        filled: bytes of each target array in each memory that are of this tensor, shape (arrays, memories).
    """

    allocations: tuple[Allocation, ...]
    read: tuple[tuple[int, ...], ...]
    phases: Sequence[Sequence[_Chunk]]
    filled: Ints


class _Chunk(NamedTuple):
    """Copies of one phase that one thread makes, and their bytes."""

    copies: list[StridedCopy]
    nbytes: int


@dataclass(frozen=True, eq=False)
class StageCopies:
    """The copies of one stage.

    Attributes:
        targets: the arrays that it fills. Their buffers come first in the table of buffers, one array after the other.
        zeroed: of those that no stage before it fills, the memories whose buffer is not filled to the last byte.
        sources: of these, the arrays whose shards they copy whole, if they do.
        reads: what comes after them in the table: source array, and the memories that its shards are read in.
        phases: batches of copies. A phase begins when all of the phase before is done.
        finished: arrays that no later stage fills.
    """

    targets: Mapping[Endpoint, Allocation]
    zeroed: Mapping[Endpoint, tuple[int, ...]]
    sources: Mapping[Endpoint, Endpoint]
    reads: Sequence[tuple[Endpoint, tuple[int, ...]]]
    phases: Sequence[Sequence[Batch]]
    finished: tuple[Endpoint, ...]

    @cached_property
    def specs(self) -> dict[BufferSpec, list[Endpoint]]:
        """Arrays to allocate, by what their buffers are like."""
        groups: dict[BufferSpec, list[Endpoint]] = {}
        for end in self.zeroed:
            if self.targets[end].made:
                groups.setdefault(self.targets[end].spec, []).append(end)
        return groups


class CopyLowering:
    """Lowers the stages of a plan, in their order.

    Args:
        memories: what the numbers of the plan mean.
        leaves: all tensors of the plan.
        donatable: whether the next step is to reuse large target shards in place.
    """

    def __init__(self, memories: Memories, leaves: Sequence[Leaf], donatable: bool) -> None:
        self._memories, self._donatable = memories, donatable
        self._templates: dict[object, _Template] = {}
        self._allocations: dict[Endpoint, Allocation] = {}
        self._left = {end: end.tensors for leaf in leaves for end in leaf.targets}

    def stage(self, moves: Sequence[tuple[Move, Leaf]]) -> StageCopies:
        """The copies of the next stage."""
        templates = [self._template(move, leaf) for move, leaf in moves]
        ends = [
            (end, allocation, filled)
            for (_, leaf), template in zip(moves, templates, strict=True)
            for end, allocation, filled in zip(leaf.targets, template.allocations, template.filled, strict=True)
        ]
        opened: dict[Endpoint, list[Ints]] = {}
        for end, allocation, filled in ends:
            if end in opened or end not in self._allocations:
                opened.setdefault(end, []).append(filled)
            self._allocations.setdefault(end, allocation)
        targets = {end: self._allocations[end] for end, _, _ in ends}
        first, count = {}, 0
        for end, allocation in targets.items():
            first[end], count = count, count + allocation.count
        reads: list[tuple[Endpoint, tuple[int, ...]]] = []
        phases: list[list[tuple[list[int], _Chunk]]] = []
        for (_, leaf), template in zip(moves, templates, strict=True):
            number = [first[end] + k for end in leaf.targets for k in range(targets[end].count)]
            for source, memories in zip(leaf.sources, template.read, strict=True):
                reads.append((source, memories))
                number += range(count, count + len(memories))
                count += len(memories)
            phases += ([] for _ in range(len(template.phases) - len(phases)))
            for phase, chunks in zip(phases, template.phases, strict=False):
                phase += ((number, chunk) for chunk in chunks)
        finished = [end for end, _, _ in ends if self._is_last(end)]
        return StageCopies(
            targets,
            {end: _not_filled(end, targets[end], filled) for end, filled in opened.items()},
            {leaf.targets[0]: leaf.sources[0] for _, leaf in moves if targets[leaf.targets[0]].copied},
            reads,
            [list(_batches(phase)) for phase in phases],
            tuple(finished),
        )

    def _is_last(self, end: Endpoint) -> bool:
        self._left[end] -= 1
        return not self._left[end]

    def _template(self, move: Move, leaf: Leaf) -> _Template:
        ends = tuple(
            tuple((end.stored, end.tensors, end.layout) for end in side) for side in (leaf.sources, leaf.targets)
        )
        key = id(move.route), leaf.sources[0].like.dtype, ends
        if key not in self._templates:
            self._templates[key] = self._made(move, leaf)
        return self._templates[key]

    def _made(self, move: Move, leaf: Leaf) -> _Template:
        c, size, count = move.copies, move.tensor.itemsize, len(self._memories.listed)
        allocations = tuple(self._allocation(move, leaf, end) for end in leaf.targets)
        # A shard is known by its array, targets first, and its memory.
        to_array, to = located(leaf.targets, c.target_offset)
        read_array, origin = located(leaf.sources, c.source_offset)
        passed_array, passed = located(leaf.targets, c.source_offset)
        target = to_array * count + c.target
        source = np.where(c.relayed, passed_array, len(allocations) + read_array) * count + c.source
        filled = segment_sum(target[~c.added], c.volumes[~c.added] * size, len(allocations) * count).reshape(-1, count)
        rows = np.flatnonzero(~np.isin(c.target, list(allocations[0].copied)))
        read = [np.unique(c.source[rows[~c.relayed[rows] & (read_array[rows] == k)]]) for k in range(len(leaf.sources))]
        number, base = _table([*(a.buffers for a in allocations), *map(_each, read)], count)
        present, phase = np.unique(c.phases, return_inverse=True)
        fixed = np.stack([phase.ravel(), c.added.astype(np.int64), number[target], number[source]], axis=1)
        copies = StridedCopies(
            fixed[rows],
            c.extent[rows],
            (base[target] + to * size)[rows],
            c.target_stride[rows] * size,
            (base[source] + np.where(c.relayed, passed, origin) * size)[rows],
            c.source_stride[rows] * size,
        )
        phases: list[list[StridedCopy]] = [[] for _ in present]
        for which, copy in copies.merged().listed(word_of(size), allocations[0].spec.dtype):
            phases[which].append(copy)
        chunks = [list(_chunks(listed)) for listed in phases]
        return _Template(allocations, tuple(tuple(r.tolist()) for r in read), chunks, filled)

    def _allocation(self, move: Move, leaf: Leaf, end: Endpoint) -> Allocation:
        sharding = end.stored.sharding
        order, number = private.device_order(sharding), self._memories.numbers(sharding)
        dtype, shape = end.physical
        kept = frozenset(move.kept.tolist())  # only ever of a tensor whose one array becomes one array
        on_cpu = all(d.platform == "cpu" for d in order)
        default = on_cpu and end.memory_kind == order[0].default_memory().kind
        large = bool(shape) and math.prod(shape) * dtype.itemsize >= _WORTH_A_CALL
        owned = self._donatable and default and large and not is_packed(dtype)
        copied = self._copied(move, leaf) if owned else {}
        made = tuple(d for d in order if number[d] not in kept and number[d] not in copied)
        return Allocation(copied, tuple(number[d] for d in made), BufferSpec(made, shape, dtype, owned))

    def _copied(self, move: Move, leaf: Leaf) -> dict[int, int]:
        """Memories whose shard is that of another device, each with that shard's memory."""
        c, ends = move.copies, [*leaf.sources, *leaf.targets]
        alike = len({end.shard_shape for end in ends}) == 1 and all(end.layout is None for end in ends)
        if not leaf.has_own_target or not alike or (c.relayed | c.added).any():
            return {}
        moved = self._memories.differ(c.source, c.target) & (c.volumes == ends[0].room)
        rows = np.flatnonzero(moved & (c.source_offset == 0) & (c.target_offset == 0))
        straight = ((c.source_stride == c.target_stride) | (c.extent == 1))[rows].all(axis=1)
        return dict(zip(c.target[rows[straight]].tolist(), c.source[rows[straight]].tolist(), strict=True))


def _count(buffers: Buffers) -> int:
    """How many buffers there are."""
    return len({number for number, _ in buffers.values()})


def _each(memories: Ints) -> Buffers:
    """A buffer of its own for each memory."""
    return {n: (k, 0) for k, n in enumerate(memories.tolist())}


def _table(arrays: Iterable[Buffers], memories: int) -> tuple[Ints, Ints]:
    """Number and start of the buffer of each shard, all arrays' buffers counted on; shape (arrays * memories,)."""
    arrays, count = list(arrays), 0
    table = np.zeros((2, len(arrays), memories), np.int64)
    for k, buffers in enumerate(arrays):
        for memory, (number, base) in buffers.items():
            table[:, k, memory] = count + number, base
        count += _count(buffers)
    return table[0].ravel(), table[1].ravel()


def _not_filled(end: Endpoint, allocation: Allocation, filled: Sequence[Ints]) -> tuple[int, ...]:
    """Memories whose buffer copies leave in part as it is, given the bytes that each of some tensors fills."""
    if len(filled) < end.tensors:
        return allocation.made
    total = np.sum(filled, axis=0)
    return tuple(n for n in allocation.made if total[n] < allocation.spec.nbytes)


def _chunks(copies: Iterable[StridedCopy]) -> Iterator[_Chunk]:
    """Runs of copies of about a batch; larger ones are cut."""
    run: list[StridedCopy] = []
    nbytes = 0
    for copy in (part for whole in copies for part in whole.cut(_BATCH_BYTES)):
        run.append(copy)
        nbytes += copy.nbytes
        if nbytes >= _BATCH_BYTES:
            yield _Chunk(run, nbytes)
            run, nbytes = [], 0
    if run:
        yield _Chunk(run, nbytes)


def _batches(phase: Iterable[tuple[list[int], _Chunk]]) -> Iterator[Batch]:
    """Chunks of a MB or so together, so that threads share the work and small tensors share a call."""
    batch: list[tuple[list[int], list[StridedCopy]]] = []
    room = _BATCH_BYTES
    for number, (copies, nbytes) in phase:
        batch.append((number, copies))
        room -= nbytes
        if room <= 0:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch
