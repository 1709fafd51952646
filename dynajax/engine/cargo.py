"""What an exchange carries at a time: one large leaf, or a crate that small leaves between the same devices share.

It goes in turns. What only has to be written goes in the first; of what is to be summed one part goes in each, so that
sums are made in the order of the plan; what is passed on goes when all that is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dynajax.engine import programs
from dynajax.engine.batches import batches
from dynajax.engine.parcel import Parcel, Ranks
from dynajax.engine.programs import Buckets, Devices, Hold
from dynajax.engine.waves import PASSED_ON, Grains, Wave, longest_of, waves_of
from dynajax.engine.words import Words
from dynajax.vps.region import Ints

_SMALL = 8
"""A leaf is small if so many of its size fit in the buckets of a device."""
_WORD = Words(np.dtype(np.uint32))


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
