"""A leaf on its way through an exchange: which shards it leaves and fills, and in which words, grains and turns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dynajax.engine import _jax_private as private
from dynajax.engine import programs
from dynajax.engine.places import Places, memory_kind, shards_of
from dynajax.engine.programs import Devices
from dynajax.engine.tree import Leaf
from dynajax.engine.waves import Grains, grains_of, longest_run, messages, turns_of, words_and_grain
from dynajax.engine.words import is_packed, packed_again, whole_bytes
from dynajax.planner import Move
from dynajax.vps.region import Ints


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


class Parcel:
    """A leaf on its way.

    Attributes:
        number: place of each device of the target.
        kept: places whose buffer stays.
        senders: devices of the source, in the order of their ids.
        receivers: devices whose target buffer is made, likewise.
        dtype: of the machine's numbers; a key is several.
        source_shape, shape: of one physical source shard, and of a target shard.
        words, grain: how its elements travel; the grain in words.
        turns: when each copy is made, see ``turns_of``.
        summed: what its words are if some of them are added to others.
        sizes: words of a source and of a target shard.
        made: the target buffers by place, as far as they are made.
    """

    def __init__(self, move: Move, leaf: Leaf, places: Places, most: int) -> None:
        self.move, self.leaf, self._places = move, leaf, places
        self.number = places.numbers(leaf.target.sharding)
        self.kept = set(move.kept.tolist())
        self.senders = _by_id(leaf.source.sharding.device_set)
        self.receivers = _by_id(d for d, n in self.number.items() if n not in self.kept)
        self.dtype, inner = private.physical_element(leaf.array.dtype)
        self.source_shape, self.shape = (
            (*end.sharding.shard_shape(end.array_shape), *inner) for end in (leaf.source, leaf.target)
        )
        self._inner = math.prod(inner)
        elements = math.prod(self.source_shape), math.prod(self.shape)
        run = longest_run(move.copies, elements[0] // self._inner, elements[1] // self._inner) * self._inner
        dtype = np.dtype(np.uint8) if is_packed(self.dtype) else self.dtype
        self.words, self.grain = words_and_grain(dtype, run, most, max(elements))
        self.turns = turns_of(move.copies)
        self.summed = self.words if move.copies.added.any() else None
        self.sizes = self.words.count(elements[0]), self.words.count(elements[1])
        self.made: dict[int, jax.Array] = {}

    def grains(self, turn: int, grain: int, ranks: Ranks) -> tuple[Grains, Ints]:
        """What this process's devices send and receive, in grains of so many words, and what all send to each other."""
        c, rank = self.move.copies, ranks.of_place
        rows, size = np.flatnonzero(self.turns == turn), self.words.elements(self.grain) // self._inner
        mine = rows[np.isin(rank[c.source[rows]], ranks.here) | np.isin(rank[c.target[rows]], ranks.here)]
        parts = self.grain // grain
        return grains_of(c, mine, size, rank).finer(parts), messages(c, rows, size, rank, ranks.count) * parts

    def staying(self) -> dict[int, jax.Array]:
        """The source buffers that are target buffers too, by place."""
        if not self.kept:
            return {}
        return {n: piece for n, piece in self._pieces().items() if n in self.kept}

    def source(self) -> jax.Array:
        """The source shards as one array over the senders."""
        pieces = {next(iter(p.devices())): p for p in self._pieces().values()}
        if memory_kind(self.leaf.source.sharding) != self.senders[0].default_memory().kind:
            pieces = {d: jax.device_put(p, SingleDeviceSharding(d)) for d, p in pieces.items()}
        return whole_bytes(programs.spread(self.senders, self.source_shape, pieces, self.dtype))

    def receive(self, target: jax.Array) -> None:
        """Take over the target buffers from an array over the receivers."""
        kind = memory_kind(self.leaf.target.sharding)
        for device, buffer in programs.gathered(packed_again(target, self.dtype)).items():
            if kind != device.default_memory().kind:
                buffer = jax.device_put(buffer, SingleDeviceSharding(device, memory_kind=kind))
            self.made[self.number[device]] = buffer

    def array(self) -> jax.Array:
        """The target array, once all buffers of this process are made."""
        goal = self.leaf.target
        order = private.device_order(goal.sharding)
        buffers = [self.made[self.number[d]] for d in order]
        return private.assemble(goal.array_shape, self.leaf.array, goal.sharding, buffers, order)

    def _pieces(self) -> dict[int, jax.Array]:
        """The physical source shards that are here, by place."""
        return shards_of(self.leaf.array, self._places)


def _by_id(devices: Iterable[jax.Device]) -> Devices:
    return tuple(sorted(devices, key=lambda d: d.id))
