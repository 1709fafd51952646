"""What an exchange carries at a time: one large leaf, or a crate that small leaves between the same devices share.

It goes in turns. What only has to be written goes in the first; of what is to be summed one part goes in each, so that
sums are made in the order of the plan; what is passed on goes when all that is there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dynajax.engine import programs
from dynajax.engine.batches import batches
from dynajax.engine.places import Places, memory_kind
from dynajax.engine.programs import Buckets, Devices, Hold
from dynajax.engine.transport import Outline
from dynajax.engine.tree import Leaf
from dynajax.engine.waves import (
    PASSED_ON,
    Grains,
    Wave,
    grains_of,
    longest_of,
    longest_run,
    messages,
    turns_of,
    waves_of,
    words_and_grain,
)
from dynajax.engine.words import Words, is_packed, packed_again, whole_bytes
from dynajax.planner import Move
from dynajax.vps.region import Ints

_SMALL = 8
"""A leaf is small if so many of its size fit in the buckets of a device."""
_WORD = Words(np.dtype(np.uint32))


class Parcel(Outline):
    """A leaf on its way.

    Attributes:
        senders: devices of the source, in the order of their ids.
        receivers: devices whose target buffer is made, likewise.
        source_shape: of one physical source shard.
        words, grain: how its elements travel; the grain in words.
        turns: when each copy is made, see ``turns_of``.
        summed: what its words are if some of them are added to others.
        sizes: words of a source and of a target shard.
        made: the target buffers by place, as far as they are made.
    """

    def __init__(self, move: Move, leaf: Leaf, places: Places, most: int) -> None:
        super().__init__(move, leaf, places)
        self.senders, self.receivers = _by_id(leaf.source.sharding.device_set), _by_id(self.filled)
        self.source_shape = (*leaf.source.sharding.shard_shape(leaf.source.array_shape), *self.inner)
        self._inner = math.prod(self.inner)
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
        return {n: piece for n, piece in self.pieces().items() if n in self.kept}

    def source(self) -> jax.Array:
        """The source shards as one array over the senders."""
        pieces = {next(iter(p.devices())): p for p in self.pieces().values()}
        if memory_kind(self.leaf.source.sharding) != self.senders[0].default_memory().kind:
            pieces = {d: jax.device_put(p, SingleDeviceSharding(d)) for d, p in pieces.items()}
        return whole_bytes(programs.spread(self.senders, self.source_shape, pieces, self.dtype))

    def receive(self, target: jax.Array) -> None:
        """Take over the target buffers from an array over the receivers."""
        kind = memory_kind(self.leaf.target.sharding)
        for device, buffer in programs.gathered(packed_again(target, self.dtype)).items():
            if not self.is_in_default_memory:
                buffer = jax.device_put(buffer, SingleDeviceSharding(device, memory_kind=kind))
            self.made[self.number[device]] = buffer


def _by_id(devices: Iterable[jax.Device]) -> Devices:
    return tuple(sorted(devices, key=lambda d: d.id))


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


@dataclass(eq=False)
class Cargo:
    """What travels together.

    Attributes:
        buckets: what it travels in.
        ranks: who travels.
        parcels: one large leaf, or what a crate holds.
        is_crate: whether it is a crate.
    """

    buckets: Buckets
    ranks: Ranks
    parcels: list[Parcel]
    is_crate: bool

    @property
    def senders(self) -> Devices:
        """Devices that hold the source."""
        return self.parcels[0].senders

    @property
    def receivers(self) -> Devices:
        """Devices that need the target."""
        return self.parcels[0].receivers

    def has_room_for(self, parcel: Parcel) -> bool:
        """True if the crate can hold one more."""
        return all(self._size(end) + parcel.sizes[end] <= self.buckets.total for end in (0, 1))

    def _size(self, end: int) -> int:
        return sum(p.sizes[end] for p in self.parcels)

    @cached_property
    def _grain(self) -> int:
        return min(p.grain for p in self.parcels)

    @cached_property
    def source(self) -> Hold:
        """Where grains are taken from."""
        return self._hold(0, self.parcels[0].source_shape, self.parcels[0].words)

    @cached_property
    def target(self) -> Hold:
        """Where grains are put."""
        return self._hold(1, self.parcels[0].shape, self.parcels[0].words.carrier)

    def _hold(self, end: int, shape: tuple[int, ...], words: Words) -> Hold:
        if self.is_crate:
            return Hold((1 << (self._size(end) - 1).bit_length(),), _WORD, self._grain)
        return Hold(shape, words, self._grain)

    @cached_property
    def _grains(self) -> dict[int, tuple[Grains, Ints]]:
        """What is copied in each turn, with the longest message of each XOR step; without what is empty."""
        found = {turn: self._cut(turn) for turn in sorted({int(t) for p in self.parcels for t in np.unique(p.turns)})}
        return {turn: (grains, longest) for turn, (grains, longest) in found.items() if longest.any()}

    def _cut(self, turn: int) -> tuple[Grains, Ints]:
        """All parcels in grains; those of one geometry are cut once."""
        cut: dict[tuple[int, Words], tuple[Grains, Ints]] = {}
        parts, sent = [], np.zeros((self.ranks.count, self.ranks.count), np.int64)
        for parcel, *at in zip(self.parcels, self._offsets(0), self._offsets(1), strict=True):
            key = id(parcel.move.route), parcel.words
            if key not in cut:
                cut[key] = parcel.grains(turn, self._grain, self.ranks)
            g, between = cut[key]
            sent += between
            read, write = at[turn == PASSED_ON] // self._grain, at[1] // self._grain
            parts.append(Grains(g.sender, g.receiver, g.source + read, g.target + write))
        return Grains.concatenate(parts), longest_of(sent)

    def _offsets(self, end: int) -> list[int]:
        """Word at which each parcel begins in its crate."""
        return list(itertools.accumulate((p.sizes[end] for p in self.parcels[:-1]), initial=0))

    @cached_property
    def used(self) -> int:
        """Words of each bucket that are packed: all, or the least power of two that the largest message fits in."""
        most = max(int(longest.max()) for _, longest in self._grains.values()) * self._grain
        return min(1 << (most - 1).bit_length(), self.buckets.words)

    def waves(self) -> Iterator[tuple[int, Wave]]:
        """The waves that carry it, each with its turn."""
        for turn, (grains, longest) in self._grains.items():
            for wave in waves_of(grains, longest, self.ranks.here, self.buckets.count, self.used // self._grain):
                yield turn, wave

    def packing(self, turn: int) -> tuple[Devices, Any]:
        """The devices that pack in a turn, and the program they do it by: out of sources, or of what came before."""
        passed = turn == PASSED_ON
        senders, hold = (self.receivers, self.target) if passed else (self.senders, self.source)
        return senders, programs.pack(senders, hold, self.buckets, self.used)

    def unpacking(self, turn: int) -> Any:
        """The program by which receivers unpack in a turn: they write, or add."""
        summed = self.parcels[0].summed if 0 < turn < PASSED_ON else None
        return programs.unpack(self.receivers, self.target, self.buckets, self.used, summed)

    def compile(self) -> None:
        """Have the programs that load, pack, unpack and unload it."""
        programs.zeros(self.receivers, self.target.shape, self.target.words.dtype)
        for turn in self._grains:
            self.packing(turn)
            self.unpacking(turn)
        if self.is_crate:
            programs.zeros(self.senders, self.source.shape, _WORD.dtype)
            for shape, words, members in self._calls(0):
                programs.put(self.senders, self.source.shape[0], shape, words, len(members))
            for shape, words, members in self._calls(1):
                programs.take(self.receivers, self.target.shape[0], shape, words, len(members))
        elif self._is_carried:
            programs.retype(self.receivers, self.target.shape, self.parcels[0].words)

    @property
    def _is_carried(self) -> bool:
        """True for a large leaf whose target is filled as another dtype."""
        return not self.is_crate and self.target.words != self.parcels[0].words

    def load(self) -> jax.Array:
        """The source shards, or the crate they are laid in."""
        if not self.is_crate:
            return self.parcels[0].source()
        crate = programs.zeros(self.senders, self.source.shape, _WORD.dtype)()
        for shape, words, members in self._calls(0):
            program = programs.put(self.senders, self.source.shape[0], shape, words, len(members))
            offsets = programs.tell(self.senders, [at for _, at in members])
            crate = program(crate, offsets, *[p.source() for p, _ in members])
        return crate

    def unload(self, target: jax.Array) -> None:
        """Give each parcel its target buffers."""
        if self._is_carried:
            target = programs.retype(self.receivers, self.target.shape, self.parcels[0].words)(target)
        if not self.is_crate:
            self.parcels[0].receive(target)
            return
        for shape, words, members in self._calls(1):
            program = programs.take(self.receivers, self.target.shape[0], shape, words, len(members))
            shards = program(target, programs.tell(self.receivers, [at for _, at in members]))
            for (parcel, _), shard in zip(members, shards, strict=True):
                parcel.receive(shard)

    def _calls(self, end: int) -> Iterator[tuple[tuple[int, ...], Words, list[tuple[Parcel, int]]]]:
        """Shards of one shape and the words where they lie in the crate, as many as share a call."""
        alike: dict[tuple[tuple[int, ...], Words], list[tuple[Parcel, int]]] = {}
        for parcel, at in zip(self.parcels, self._offsets(end), strict=True):
            alike.setdefault(((parcel.source_shape, parcel.shape)[end], parcel.words), []).append((parcel, at))
        for (shape, words), members in alike.items():
            left = iter(members)
            for count in batches(len(members)):
                yield shape, words, list(itertools.islice(left, count))


def is_small(words: int, buckets: Buckets) -> bool:
    """True for a shard that goes in a crate with others."""
    return 0 < words * _SMALL <= buckets.total


def cargoes_of(parcels: Sequence[Parcel], buckets: Buckets, ranks: Ranks) -> list[Cargo]:
    """Large leaves alone, small ones by the crate; leaves that stay whole are in none."""
    cargoes: list[Cargo] = []
    crates: dict[tuple[Devices, Devices, Words | None], Cargo] = {}
    for parcel in parcels:
        if not parcel.receivers:
            continue
        key = parcel.senders, parcel.receivers, parcel.summed
        crate = crates.get(key)
        if not is_small(max(parcel.sizes), buckets):
            cargoes.append(Cargo(buckets, ranks, [parcel], is_crate=False))
        elif crate is not None and crate.has_room_for(parcel):
            crate.parcels.append(parcel)
        else:
            crates[key] = Cargo(buckets, ranks, [parcel], is_crate=True)
            cargoes.append(crates[key])
    return cargoes
