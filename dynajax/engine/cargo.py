"""What an exchange carries at a time: what goes from one array to another, where small arrays share crates.

It goes in turns. What only has to be written goes in the first; of what is to be summed one part goes in each, so that
sums are made in the order of the plan; what is passed on goes when all that is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dynajax.engine import programs
from dynajax.engine.batches import batches
from dynajax.engine.parcel import Arrival, Parcel, Ranks
from dynajax.engine.programs import Buckets, Devices, Hold
from dynajax.engine.tree import Held
from dynajax.engine.waves import Grains, Wave, longest_of, waves_of
from dynajax.engine.words import Words
from dynajax.planner.route import RELAYED
from dynajax.types import Ints

_SMALL = 8
"""A leaf is small if so many of its size fit in the buckets of a device."""
_WORD = Words(np.dtype(np.uint32))


@dataclass(eq=False)
class Cargo:
    """What travels together.

    Attributes:
        buckets: what it travels in.
        ranks: who travels.
        parcels: what travels.
        crated: for either end, whether the shards lie side by side in a crate; else all parcels have one array there.
    """

    buckets: Buckets
    ranks: Ranks
    parcels: list[Parcel]
    crated: tuple[bool, bool]
    _crate: jax.Array | None = None

    @property
    def senders(self) -> Devices:
        """Devices that hold the source."""
        return self.parcels[0].senders

    @property
    def receivers(self) -> Devices:
        """Devices that need the target."""
        return self.parcels[0].target.receivers

    def has_room_for(self, parcel: Parcel) -> bool:
        """True if its crates can hold one more."""
        ends = [end for end in (0, 1) if self.crated[end]]
        return all(self._size(end) + parcel.sizes[end] <= self.buckets.total for end in ends)

    def _size(self, end: int) -> int:
        return sum(p.sizes[end] for p in self.parcels)

    @cached_property
    def _grain(self) -> int:
        return min(p.grain for p in self.parcels)

    @cached_property
    def source(self) -> Hold:
        """Where grains are taken from."""
        words = self.parcels[0].words
        passed = isinstance(self.parcels[0].source, Arrival)
        return self._hold(0, self.parcels[0].source_shape, words.carrier if passed else words)

    @cached_property
    def target(self) -> Hold:
        """Where grains are put."""
        return self._hold(1, self.parcels[0].target.shape, self.parcels[0].words.carrier)

    def _hold(self, end: int, shape: tuple[int, ...], words: Words) -> Hold:
        if self.crated[end]:
            return Hold((1 << (self._size(end) - 1).bit_length(),), _WORD, self._grain)
        return Hold(shape, words, self._grain)

    @cached_property
    def _grains(self) -> dict[int, tuple[Grains, Ints]]:
        """What is copied in each turn, with the longest message of each XOR step; without what is empty."""
        found = {turn: self._cut(turn) for turn in sorted({int(t) for p in self.parcels for t in np.unique(p.turns)})}
        return {turn: (grains, longest) for turn, (grains, longest) in found.items() if longest.any()}

    def _cut(self, turn: int) -> tuple[Grains, Ints]:
        """All parcels in grains; those of one geometry are cut once."""
        cut: dict[tuple[Any, Words], tuple[Grains, Ints]] = {}
        parts, sent = [], np.zeros((self.ranks.count, self.ranks.count), np.int64)
        for parcel, *at in zip(self.parcels, self._offsets(0), self._offsets(1), strict=True):
            key = parcel.geometry, parcel.words
            if key not in cut:
                cut[key] = parcel.grains(turn, self._grain, self.ranks)
            g, between = cut[key]
            sent += between
            read, write = at[self._passes_on(turn)] // self._grain, at[1] // self._grain
            parts.append(Grains(g.sender, g.receiver, g.source + read, g.target + write))
        return Grains.concatenate(parts), longest_of(sent)

    def _offsets(self, end: int) -> list[int]:
        """Word at which each parcel begins in its crate; its offsets in an array are its own."""
        if not self.crated[end]:
            return [0] * len(self.parcels)
        return list(itertools.accumulate((p.sizes[end] for p in self.parcels[:-1]), initial=0))

    @cached_property
    def used(self) -> int:
        """Words of each bucket that are packed: all, or the least power of two that the largest message fits in."""
        most = max(int(longest.max()) for _, longest in self._grains.values()) * self._grain
        return min(1 << (most - 1).bit_length(), self.buckets.words)

    @property
    def turns(self) -> Collection[int]:
        """The turns that it travels in."""
        return self._grains.keys()

    def waves(self, turn: int) -> Iterator[Wave]:
        """The waves that carry it in a turn."""
        grains, longest = self._grains[turn]
        return waves_of(grains, longest, self.ranks.here, self.buckets.count, self.used // self._grain)

    def _passes_on(self, turn: int) -> bool:
        """True if it is taken out of where it went in earlier turns."""
        return turn == RELAYED and isinstance(self.parcels[0].source, Held)

    def packing(self, turn: int) -> tuple[Devices, Any]:
        """The devices that pack in a turn, and the program they do it by."""
        senders, hold = (self.receivers, self.target) if self._passes_on(turn) else (self.senders, self.source)
        return senders, programs.pack(senders, hold, self.buckets, self.used)

    def unpacking(self, turn: int) -> Any:
        """The program by which receivers unpack in a turn: they write, or add."""
        summed = self.parcels[0].summed if 0 < turn < RELAYED else None
        return programs.unpack(self.receivers, self.target, self.buckets, self.used, summed)

    def compile(self) -> None:
        """Have the programs that load, pack, unpack and unload it."""
        programs.zeros(self.receivers, self.target.shape, self.target.words.dtype)
        for turn in self._grains:
            self.packing(turn)
            self.unpacking(turn)
        if self.crated[0]:
            programs.zeros(self.senders, self.source.shape, _WORD.dtype)
            for shape, words, members in self._calls(0):
                programs.put(self.senders, self.source.shape[0], shape, words, len(members))
        if self.crated[1]:
            for shape, words, members in self._calls(1):
                programs.take(self.receivers, self.target.shape[0], shape, words, len(members))
        else:
            self.parcels[0].target.compile()

    def begin(self) -> None:
        """Make zeros of where it goes, if nothing is there yet."""
        target = self.parcels[0].target
        if self.crated[1] or target.filled is None:
            self.into = programs.zeros(self.receivers, self.target.shape, self.target.words.dtype)()

    @property
    def into(self) -> jax.Array:
        """Where it goes: its crate, or the array."""
        filled = self._crate if self.crated[1] else self.parcels[0].target.filled
        assert filled is not None
        return filled

    @into.setter
    def into(self, filled: jax.Array) -> None:
        if self.crated[1]:
            self._crate = filled
        else:
            self.parcels[0].target.filled = filled

    def load(self, turn: int) -> Callable[[], jax.Array]:
        """Get what it is taken out of in a turn, which may be what every wave changes."""
        source = self.parcels[0].source
        if self._passes_on(turn):
            return lambda: self.into
        if isinstance(source, Arrival):
            return source.so_far
        loaded = self._loaded()
        return lambda: loaded

    def _loaded(self) -> jax.Array:
        """The source shards, or the crate they are laid in."""
        if not self.crated[0]:
            return self.parcels[0].load()
        crate = programs.zeros(self.senders, self.source.shape, _WORD.dtype)()
        for shape, words, members in self._calls(0):
            program = programs.put(self.senders, self.source.shape[0], shape, words, len(members))
            offsets = programs.tell(self.senders, [at for _, at in members])
            crate = program(crate, offsets, *[p.load() for p, _ in members])
        return crate

    def unload(self) -> None:
        """Give each parcel its target buffers, if they are in a crate."""
        if self.crated[1]:
            for shape, words, members in self._calls(1):
                program = programs.take(self.receivers, self.target.shape[0], shape, words, len(members))
                shards = program(self.into, programs.tell(self.receivers, [at for _, at in members]))
                for (parcel, _), shard in zip(members, shards, strict=True):
                    parcel.target.receive(shard)
            self._crate = None

    def _calls(self, end: int) -> Iterator[tuple[tuple[int, ...], Words, list[tuple[Parcel, int]]]]:
        """Shards of one shape and the words where they lie in the crate, as many as share a call."""
        alike: dict[tuple[tuple[int, ...], Words], list[tuple[Parcel, int]]] = {}
        for parcel, at in zip(self.parcels, self._offsets(end), strict=True):
            alike.setdefault(((parcel.source_shape, parcel.target.shape)[end], parcel.words), []).append((parcel, at))
        for (shape, words), members in alike.items():
            left = iter(members)
            for count in batches(len(members)):
                yield shape, words, list(itertools.islice(left, count))


def is_small(words: int, buckets: Buckets) -> bool:
    """True for a shard that goes in a crate with others."""
    return 0 < words * _SMALL <= buckets.total


def cargoes_of(parcels: Sequence[Parcel], buckets: Buckets, ranks: Ranks) -> list[Cargo]:
    """What goes between the same two arrays or crates goes together; leaves that stay whole are in none."""
    cargoes: list[Cargo] = []
    latest: dict[tuple[Any, ...], Cargo] = {}
    for parcel in parcels:
        if not parcel.target.receivers:
            continue
        crated = _crated(parcel, buckets)
        ends = [None if in_crate else end for end, in_crate in zip((parcel.source, parcel.target), crated, strict=True)]
        words = None if all(crated) else parcel.words
        key = (parcel.senders, parcel.target.receivers, parcel.summed, *ends, words)
        cargo = latest.get(key)
        if cargo is not None and cargo.has_room_for(parcel):
            cargo.parcels.append(parcel)
        else:
            latest[key] = Cargo(buckets, ranks, [parcel], crated)
            cargoes.append(latest[key])
    return cargoes


def _crated(parcel: Parcel, buckets: Buckets) -> tuple[bool, bool]:
    """Which ends go in crates: small arrays without anything else; of a tensor alone in both arrays, both or none."""
    if all(parcel.is_alone):
        both = is_small(max(parcel.sizes), buckets)
        return both, both
    source, target = (alone and is_small(n, buckets) for alone, n in zip(parcel.is_alone, parcel.sizes, strict=True))
    return source, target
