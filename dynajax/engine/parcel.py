"""What goes from array to array: which shards it leaves and fills, and in which words, grains and turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dynajax.engine import _jax_private as private
from dynajax.engine import programs
from dynajax.engine.places import Places, memory_kind, shards_of
from dynajax.engine.programs import Devices
from dynajax.engine.tree import Held, Leaf, located
from dynajax.engine.waves import Grains, grains_of, longest_run, messages, words_and_grain
from dynajax.engine.words import Words, is_packed, packed_again, whole_bytes
from dynajax.planner import Move
from dynajax.planner.route import Copies
from dynajax.types import Ints


@dataclass(frozen=True, eq=False)
class Ranks:
    """The devices of a move by number.

    Attributes:
        of_place: number of the device of each place.
        count: how many there are.
        here: numbers of those of this process, ascending.
    """

    of_place: Ints
    count: int
    here: Ints


class Arrival:
    """A target array on its way: nearly always of one tensor, which is alone in it.

    Attributes:
        held: what it stores and where.
        number: place of each of its devices.
        receivers: devices whose buffer is made, in the order of their ids; the others keep theirs.
        dtype: of the machine's numbers; a key is several.
        shape: of one physical shard.
        missing: how many of its tensors have not arrived.
        made: the finished buffers that are here, by place.
        filled: the unfinished ones as one array over the receivers, once there are any.
    """

    def __init__(self, held: Held, like: Any, kept: Collection[int], places: Places) -> None:
        self.held, self._like = held, like
        self.number = places.numbers(held.stored.sharding)
        self.receivers = _by_id(d for d, n in self.number.items() if n not in kept)
        self.dtype, inner = private.physical_element(like.dtype)
        self.shape = (*held.shard_shape, *inner)
        self.missing = held.tensors
        self.made: dict[int, jax.Array] = {}
        self.filled: jax.Array | None = None

    def receive(self, target: jax.Array) -> None:
        """Take over finished buffers from an array over the receivers."""
        kind = memory_kind(self.held.stored.sharding)
        for device, buffer in programs.gathered(packed_again(target, self.dtype)).items():
            if kind != device.default_memory().kind:
                buffer = jax.device_put(buffer, SingleDeviceSharding(device, memory_kind=kind))
            self.made[self.number[device]] = buffer

    def finish(self) -> None:
        """Give what is filled the type that it has, and take it over."""
        if self.filled is not None:
            retype = self.compile()
            self.receive(jax.block_until_ready(retype(self.filled)) if retype else self.filled)
            self.filled = None

    def compile(self) -> Any:
        """The program that gives it its type, or None if it is filled as what it is."""
        words = element_words(self.dtype)
        return None if words.carrier == words else programs.retype(self.receivers, self.shape, words)

    def so_far(self) -> jax.Array:
        """What is passed on of it."""
        assert self.filled is not None
        return self.filled

    def shards(self) -> dict[int, jax.Array]:
        """What is here so far, by place."""
        filled = {} if self.filled is None else programs.gathered(packed_again(self.filled, self.dtype))
        return self.made | {self.number[d]: buffer for d, buffer in filled.items()}

    def array(self) -> jax.Array:
        """The array, once all its buffers are finished."""
        stored = self.held.stored
        order = private.device_order(stored.sharding)
        buffers = [self.made[self.number[d]] for d in order]
        return private.assemble(stored.array_shape, self._like, stored.sharding, buffers, order)


class Parcel:
    """What of a tensor goes from one array to another: from one of its sources, or on from one of its targets.

    A tensor with arrays of its own before and after is one parcel. Of others, what is passed on is parcels of its own.

    Attributes:
        copies: its rows of the move's copies, with offsets in these two arrays.
        turns: when each of them is made, see ``Copies.phases``.
        geometry: the same for parcels with the same copies.
        source: the array, or the target that it is passed on from.
        target: where it goes.
        is_alone: for each of the two, whether nothing else goes from it, or to it.
        senders: devices of the source, in the order of their ids.
        source_shape: of one physical source shard.
        words, grain: how its elements travel; the grain in words.
        summed: what its words are if some of them are added to others.
        sizes: words of a source and of a target shard.
    """

    def __init__(self, leaf: Leaf, pair: Pair, places: Places, most: int) -> None:
        self.copies, self.turns, self.geometry = pair.copies, pair.turns, pair.geometry
        self.source, self.target, self._places = pair.source, pair.target, places
        self.is_alone = (
            not isinstance(pair.source, Arrival) and pair.source.tensors == 1,
            leaf.has_own_arrays,
        )
        _, inner = private.physical_element(leaf.sources[0].array.dtype)
        if isinstance(self.source, Arrival):
            self.senders, self.source_shape = self.source.receivers, self.source.shape
        else:
            self.senders = _by_id(self.source.stored.sharding.device_set)
            self.source_shape = (*self.source.shard_shape, *inner)
        self._inner = math.prod(inner)
        elements = math.prod(self.source_shape), math.prod(self.target.shape)
        run = longest_run(self.copies, elements[0] // self._inner, elements[1] // self._inner) * self._inner
        self.words, self.grain = words_and_grain(element_words(self.target.dtype).dtype, run, most, max(elements))
        self.summed = self.words if self.copies.added.any() else None
        self.sizes = self.words.count(elements[0]), self.words.count(elements[1])

    def grains(self, turn: int, grain: int, ranks: Ranks) -> tuple[Grains, Ints]:
        """What this process's devices send and receive, in grains of so many words, and what all send to each other."""
        c, rank = self.copies, ranks.of_place
        rows, size = np.flatnonzero(self.turns == turn), self.words.elements(self.grain) // self._inner
        mine = rows[np.isin(rank[c.source[rows]], ranks.here) | np.isin(rank[c.target[rows]], ranks.here)]
        parts = self.grain // grain
        return grains_of(c, mine, size, rank).finer(parts), messages(c, rows, size, rank, ranks.count) * parts

    def load(self) -> jax.Array:
        """The source shards as one array over the senders."""
        assert isinstance(self.source, Held)
        pieces = {next(iter(p.devices())): p for p in shards_of(self.source.array, self._places).values()}
        if memory_kind(self.source.stored.sharding) != self.senders[0].default_memory().kind:
            pieces = {d: jax.device_put(p, SingleDeviceSharding(d)) for d, p in pieces.items()}
        return whole_bytes(programs.spread(self.senders, self.source_shape, pieces, self.target.dtype))


@dataclass(frozen=True, eq=False)
class Pair:
    """Two arrays of a tensor, and the copies from the one to the other; see ``Parcel``."""

    source: Held | Arrival
    target: Arrival
    copies: Copies
    turns: Ints
    geometry: tuple[Any, ...]


def pairs_of(move: Move, leaf: Leaf, targets: Sequence[Arrival]) -> Iterator[Pair]:
    """The pairs of arrays of a tensor that something goes between; ``targets`` are those of ``leaf.targets``."""
    c, turns = move.copies, move.copies.phases
    if leaf.has_own_arrays:
        yield Pair(leaf.sources[0], targets[0], c, turns, (id(move.route),))
        return
    into, target_offset = located(leaf.targets, c.target_offset)
    for passed, held, arrays in ((False, leaf.sources, leaf.sources), (True, leaf.targets, targets)):
        out, source_offset = located(held, c.source_offset)
        mine = replace(c, source_offset=source_offset, target_offset=target_offset)
        for k, t in itertools.product(range(len(arrays)), range(len(targets))):
            rows = np.flatnonzero((c.relayed == passed) & (out == k) & (into == t))
            if len(rows):
                taken = Copies(*(getattr(mine, f.name)[rows] for f in fields(Copies)))
                yield Pair(arrays[k], targets[t], taken, turns[rows], (id(move.route), passed, k, t))


def element_words(dtype: np.dtype[Any]) -> Words:
    """How elements of a dtype are words, once those of less than a byte have one each."""
    return Words(np.dtype(np.uint8) if is_packed(dtype) else dtype)


def _by_id(devices: Iterable[jax.Device]) -> Devices:
    return tuple(sorted(devices, key=lambda d: d.id))
