"""What the copies of a stage are, as far as its plan says it: which buffers are made, and which boxes fill them.

Nothing here knows the data, so a link that carries out one plan in every iteration works it out once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from dynajax.engine import _jax_private as private
from dynajax.engine.boxes import Box, Boxes
from dynajax.engine.host_view import word_of
from dynajax.engine.places import Places, memory_kind
from dynajax.engine.transport import Stage
from dynajax.engine.tree import Held, Leaf, located
from dynajax.engine.words import is_packed
from dynajax.planner import Move
from dynajax.types import Ints
from dynajax.vps.tiling import segment_sum

_ALIGNMENT = 64
_WORTH_A_CALL = 1 << 15
_BATCH_BYTES = 1 << 20

Buffers = Mapping[int, tuple[int, int]]
"""Of each place the number of its buffer, and where its shard begins in it."""
Batch = Sequence[tuple[Sequence[int], Sequence[Box]]]
"""Boxes of some tensors, each with the numbers in the table of the buffers that its boxes speak of."""


@dataclass(frozen=True)
class Kind:
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
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False)
class Outline:
    """The shards of one target array.

    Attributes:
        order: places in target order.
        kept: places whose buffer is that of the source.
        whole: places whose shard is a source shard of another device, each with that shard's place.
        kind: what all other shards are like.
    """

    order: tuple[int, ...]
    kept: frozenset[int]
    whole: Mapping[int, int]
    kind: Kind

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Places that get a buffer."""
        return tuple(n for n in self.order if n not in self.kept and n not in self.whole)

    @cached_property
    def buffers(self) -> Buffers:
        """Those that are made, which are one slab if numpy makes them, and then those kept."""
        alone = self.kind.is_owned_by_xla
        made = {n: (k, 0) if alone else (0, k * self.kind.room) for k, n in enumerate(self.made)}
        count = len(made) if alone else min(len(made), 1)
        return made | {n: (count + k, 0) for k, n in enumerate(sorted(self.kept))}

    @cached_property
    def count(self) -> int:
        """How many buffers."""
        return _count(self.buffers)


@dataclass(frozen=True, eq=False)
class _Trail:
    """The copies of one tensor: the same for all that go the same way between arrays alike.

    Attributes:
        outlines: of its target arrays.
        read: places whose shard of each source array is read.
        turns: its boxes, in portions; buffers are counted on from those of the target arrays to those read.
        filled: bytes of each target array at each place that are of this tensor, shape (arrays, places).
    """

    outlines: tuple[Outline, ...]
    read: tuple[tuple[int, ...], ...]
    turns: Sequence[Sequence[_Portion]]
    filled: Ints


class _Portion(NamedTuple):
    """Boxes of one turn that one thread copies, and their bytes."""

    boxes: list[Box]
    nbytes: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """The copies of one stage.

    Attributes:
        targets: the arrays that it fills. Their buffers come first in the table of buffers, one array after the other.
        opened: those that no stage before it fills, with the places whose buffer the copies leave in part as it is.
        reads: what comes after them in the table: row of the stage, which of its source arrays, and of which places.
        turns: batches of boxes. A turn begins when all of the turn before is done.
    """

    targets: Mapping[Held, Outline]
    opened: Mapping[Held, tuple[int, ...]]
    reads: Sequence[tuple[int, int, tuple[int, ...]]]
    turns: Sequence[Sequence[Batch]]

    @cached_property
    def kinds(self) -> dict[Kind, list[Held]]:
        """Arrays to allocate, by what their shards are like."""
        groups: dict[Kind, list[Held]] = {}
        for held in self.opened:
            if self.targets[held].made:
                groups.setdefault(self.targets[held].kind, []).append(held)
        return groups


class Recipes:
    """Makes the recipes of a plan's stages, in their order, and keeps them.

    Args:
        places: what the plan's numbers mean.
        donatable: whether the next step is to reuse large target shards in place.
    """

    def __init__(self, places: Places, donatable: bool = True) -> None:
        self._places, self._donatable = places, donatable
        self._trails: dict[object, _Trail] = {}
        self._outlines: dict[Held, Outline] = {}
        self._recipes: dict[tuple[Move, ...], Recipe] = {}

    def of(self, stage: Stage) -> Recipe:
        """The recipe of a stage; its leaves may be without data."""
        moves = tuple(move for move, _ in stage)
        if moves not in self._recipes:
            self._recipes[moves] = self._made(stage)
        return self._recipes[moves]

    def _made(self, stage: Stage) -> Recipe:
        trails = [self._trail(move, leaf) for move, leaf in stage]
        ends = [
            (held, outline, filled)
            for (_, leaf), trail in zip(stage, trails, strict=True)
            for held, outline, filled in zip(leaf.targets, trail.outlines, trail.filled, strict=True)
        ]
        opened: dict[Held, list[Ints]] = {}
        for held, outline, filled in ends:
            if held in opened or held not in self._outlines:
                opened.setdefault(held, []).append(filled)
            self._outlines.setdefault(held, outline)
        targets = {held: self._outlines[held] for held, _, _ in ends}
        first, count = {}, 0
        for held, outline in targets.items():
            first[held], count = count, count + outline.count
        reads: list[tuple[int, int, tuple[int, ...]]] = []
        turns: list[list[tuple[list[int], _Portion]]] = []
        for row, ((_, leaf), trail) in enumerate(zip(stage, trails, strict=True)):
            number = [first[held] + k for held in leaf.targets for k in range(targets[held].count)]
            for source, places in enumerate(trail.read):
                reads.append((row, source, places))
                number += range(count, count + len(places))
                count += len(places)
            turns += ([] for _ in range(len(trail.turns) - len(turns)))
            for turn, portions in zip(turns, trail.turns, strict=False):
                turn += ((number, portion) for portion in portions)
        cleared = {held: _left_open(held, targets[held], filled) for held, filled in opened.items()}
        return Recipe(targets, cleared, reads, [list(_batches(turn)) for turn in turns])

    def _trail(self, move: Move, leaf: Leaf) -> _Trail:
        ends = tuple(tuple((end.stored, end.tensors) for end in side) for side in (leaf.sources, leaf.targets))
        key = id(move.route), leaf.sources[0].array.dtype, ends
        if key not in self._trails:
            self._trails[key] = self._traced(move, leaf)
        return self._trails[key]

    def _traced(self, move: Move, leaf: Leaf) -> _Trail:
        c, size, places = move.copies, move.tensor.itemsize, len(self._places.places)
        outlines = tuple(self._outline(move, leaf, held) for held in leaf.targets)
        # A shard is known by its array, targets first, and its place.
        to_array, to = located(leaf.targets, c.target_offset)
        read_array, origin = located(leaf.sources, c.source_offset)
        passed_array, passed = located(leaf.targets, c.source_offset)
        target = to_array * places + c.target
        source = np.where(c.relayed, passed_array, len(outlines) + read_array) * places + c.source
        filled = segment_sum(target[~c.added], c.volumes[~c.added] * size, len(outlines) * places).reshape(-1, places)
        rows = np.flatnonzero(~np.isin(c.target, list(outlines[0].whole)))
        read = [np.unique(c.source[rows[~c.relayed[rows] & (read_array[rows] == k)]]) for k in range(len(leaf.sources))]
        number, base = _table([*(o.buffers for o in outlines), *map(_each, read)], places)
        present, turn = np.unique(c.phases, return_inverse=True)
        fixed = np.stack([turn.ravel(), c.added.astype(np.int64), number[target], number[source]], axis=1)
        boxes = Boxes(
            fixed[rows],
            c.extent[rows],
            (base[target] + to * size)[rows],
            c.target_stride[rows] * size,
            (base[source] + np.where(c.relayed, passed, origin) * size)[rows],
            c.source_stride[rows] * size,
        )
        turns: list[list[Box]] = [[] for _ in present]
        for which, box in boxes.merged().listed(word_of(size), outlines[0].kind.dtype):
            turns[which].append(box)
        portions = [list(_portions(listed)) for listed in turns]
        return _Trail(outlines, tuple(tuple(r.tolist()) for r in read), portions, filled)

    def _outline(self, move: Move, leaf: Leaf, held: Held) -> Outline:
        sharding = held.stored.sharding
        order, number = private.device_order(sharding), self._places.numbers(sharding)
        dtype, inner = private.physical_element(leaf.sources[0].array.dtype)
        shape = (*held.shard_shape, *inner)
        kept = frozenset(move.kept.tolist())  # only ever of a tensor whose one array becomes one array
        on_cpu = all(d.platform == "cpu" for d in order)
        default = on_cpu and memory_kind(sharding) == order[0].default_memory().kind
        large = bool(shape) and math.prod(shape) * dtype.itemsize >= _WORTH_A_CALL
        owned = self._donatable and default and large and not is_packed(dtype)
        whole = self._whole(move, leaf) if owned else {}
        made = tuple(d for d in order if number[d] not in kept and number[d] not in whole)
        return Outline(tuple(number[d] for d in order), kept, whole, Kind(made, shape, dtype, owned))

    def _whole(self, move: Move, leaf: Leaf) -> dict[int, int]:
        """Places whose shard is that of another device, each with that shard's place."""
        c, ends = move.copies, [*leaf.sources, *leaf.targets]
        shapes = {end.shard_shape for end in ends}
        if len(ends) > 2 or len(shapes) > 1 or any(end.tensors > 1 for end in ends) or (c.relayed | c.added).any():
            return {}
        moved = self._places.differ(c.source, c.target) & (c.volumes == ends[0].room)
        rows = np.flatnonzero(moved & (c.source_offset == 0) & (c.target_offset == 0))
        alike = ((c.source_stride == c.target_stride) | (c.extent == 1))[rows].all(axis=1)
        return dict(zip(c.target[rows[alike]].tolist(), c.source[rows[alike]].tolist(), strict=True))


def _count(buffers: Buffers) -> int:
    """How many buffers there are."""
    return len({number for number, _ in buffers.values()})


def _each(places: Ints) -> Buffers:
    """A buffer of its own for each place."""
    return {n: (k, 0) for k, n in enumerate(places.tolist())}


def _table(arrays: Iterable[Buffers], places: int) -> tuple[Ints, Ints]:
    """Number and beginning of the buffer of each shard, all arrays' buffers counted on; shape (arrays * places,)."""
    arrays, count = list(arrays), 0
    table = np.zeros((2, len(arrays), places), np.int64)
    for k, buffers in enumerate(arrays):
        for place, (number, base) in buffers.items():
            table[:, k, place] = count + number, base
        count += _count(buffers)
    return table[0].ravel(), table[1].ravel()


def _left_open(held: Held, outline: Outline, filled: Sequence[Ints]) -> tuple[int, ...]:
    """Places with a buffer that copies leave in part as it is, given the bytes that each of some tensors fills."""
    if len(filled) < held.tensors:
        return outline.made
    total = np.sum(filled, axis=0)
    return tuple(n for n in outline.made if total[n] < outline.kind.nbytes)


def _portions(boxes: Iterable[Box]) -> Iterator[_Portion]:
    """Runs of boxes of about a batch; larger boxes are cut."""
    run: list[Box] = []
    nbytes = 0
    for box in (part for whole in boxes for part in whole.cut(_BATCH_BYTES)):
        run.append(box)
        nbytes += box.nbytes
        if nbytes >= _BATCH_BYTES:
            yield _Portion(run, nbytes)
            run, nbytes = [], 0
    if run:
        yield _Portion(run, nbytes)


def _batches(turn: Iterable[tuple[list[int], _Portion]]) -> Iterator[Batch]:
    """Portions of a MB or so together, so that threads share the work and small tensors share a call."""
    batch: list[tuple[list[int], list[Box]]] = []
    room = _BATCH_BYTES
    for number, (boxes, nbytes) in turn:
        batch.append((number, boxes))
        room -= nbytes
        if room <= 0:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch
