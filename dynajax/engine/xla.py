"""Move by XLA programs on any backend: pieces packed into flat buckets, exchanged in XOR rounds, unpacked.

A wave packs grains of a cargo into the buckets of every sender, exchanges the buckets, and unpacks them where they
came to. The exchange is one program for all moves between the same devices with the same budget; the other programs
know the shape of a shard, never a layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.engine import _jax_private as private
from dynajax.engine import programs
from dynajax.engine.cargo import Cargo, cargoes_of, is_small
from dynajax.engine.check import check_moved
from dynajax.engine.host_view import View, bytes_of
from dynajax.engine.parcel import Arrival, Parcel, Ranks, element_words, pairs_of
from dynajax.engine.places import Places, shards_of
from dynajax.engine.processes import Processes
from dynajax.engine.programs import Buckets, Devices
from dynajax.engine.report import Stopwatch
from dynajax.engine.transport import Stage
from dynajax.engine.tree import Held, Leaf
from dynajax.engine.waves import Wave
from dynajax.errors import BudgetError

_AREAS = 8
"""What a device holds at most beside its shards, in areas of buckets: two crates, one area, two tables of grains as
long as it where grains are single words, and what the programs need for themselves."""
_SHARE = 2
"""One part in so many of the budget is for that."""
_FEWEST_WORDS, _MOST_WORDS = 16, 1 << 20


def buckets_within(budget: int, devices: int) -> Buckets:
    """The largest buckets that their share of the budget has room for.

    Raises:
        BudgetError: none fit; names the smallest budget that would do.
    """
    count = _steps(devices)
    room = budget // (_SHARE * _AREAS * 4 * count)
    if room < _FEWEST_WORDS:
        least = _SHARE * _AREAS * 4 * count * _FEWEST_WORDS
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) has no room for the buckets of an exchange between "
            f"{devices} devices; the smallest that has is {least} bytes ({format_bytes(least)})"
        )
    return Buckets(count, min(1 << (room.bit_length() - 1), _MOST_WORDS))


def enough(longest: int, devices: int, leaves: Iterable[Leaf]) -> int:
    """The budget with which larger buckets would have nothing more to carry.

    Args:
        longest: bytes from one device to another, at most.
        devices, leaves: as for ``overhead``.
    """
    words = max(_FEWEST_WORDS, 1 << max(longest // 4 - 1, 0).bit_length())
    buckets = Buckets(_steps(devices), words)
    return _SHARE * max(_AREAS * 4 * buckets.total, _most_copied(leaves, buckets))


def overhead(budget: int, devices: int, leaves: Iterable[Leaf] = ()) -> int:
    """Bytes of the budget that a device needs beside its shards: for buckets, and to give a large leaf its dtype back.

    Args:
        budget: of the whole move.
        devices: how many it is between.
        leaves: what is moved.

    Raises:
        BudgetError: the budget has no room for that; names one that has.
    """
    buckets = buckets_within(budget, devices)
    copied = _most_copied(leaves, buckets)
    least = _AREAS * 4 * buckets.total + copied
    if least > budget:
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) has no room for a copy of {format_bytes(copied)} of "
            f"a leaf of small floats beside the buckets of an exchange; {2 * copied} bytes do"
        )
    return least


def _steps(devices: int) -> int:
    """Rounds in which each device meets every other one."""
    return 1 << max(devices - 1, 0).bit_length()


def _most_copied(leaves: Iterable[Leaf], buckets: Buckets) -> int:
    return max((_copied(leaf, target, buckets) for leaf in leaves for target in leaf.targets), default=0)


def _copied(leaf: Leaf, target: Held, buckets: Buckets) -> int:
    """Bytes of a target shard that is copied once more, 0 if it is not."""
    dtype, inner = private.physical_element(leaf.sources[0].array.dtype)
    words, elements = element_words(dtype), target.room * math.prod(inner)
    crated = leaf.has_own_arrays and is_small(words.count(elements), buckets)
    return 0 if crated or words.carrier == words else elements * dtype.itemsize


class Xla:
    """The transport for devices of any kind.

    Args:
        places: what the plan's numbers mean.
        processes: those that take part.
        watch: where the time goes.
        budget: bytes that a device may hold above its base.
        leaves: what is moved.
    """

    name = "xla"

    def __init__(
        self, places: Places, processes: Processes, watch: Stopwatch, budget: int, leaves: Iterable[Leaf]
    ) -> None:
        self._places, self._processes, self._watch = places, processes, watch
        self._devices: Devices = places.devices
        number = {d: k for k, d in enumerate(self._devices)}
        self._here = programs.of_this_process(self._devices)
        here = np.asarray([number[d] for d in self._here], np.int64)
        of_place = np.asarray([number[d] for d, _ in places.places], np.int64)
        self._ranks = Ranks(of_place, len(self._devices), here)
        self._buckets = buckets_within(budget, len(self._devices))
        self._open: dict[Held, Arrival] = {}
        self._area: dict[jax.Device, jax.Array] = {}
        self.overhead = overhead(budget, len(self._devices), leaves)

    def fill(self, stage: Stage, share: bool, check: bool) -> dict[int, jax.Array]:
        """See ``Transport.fill``."""
        with self._watch.phase("group"):
            cargoes = self._cargoes(stage)
        with self._watch.compiling(programs.compiled_so_far):
            self._compile(cargoes)
        for cargo in cargoes:
            if cargo.crated[1]:
                self._carry([cargo])
        # Arrays are filled turn by turn, since what is added or passed on may have come from several others.
        self._carry([cargo for cargo in cargoes if not cargo.crated[1]])
        if check:
            with self._watch.phase("verify"):
                targets = {held for _, leaf in stage for held in leaf.targets}
                filled = {held: _seen(self._open[held].shards()) for held in targets}
                check_moved(stage, filled, self._places, self._processes)
        with self._watch.phase("unpack"):
            return self._finished(stage, share)

    def prepare(self, stage: Stage) -> None:
        """See ``Transport.prepare``."""
        self._compile(self._cargoes(stage))

    def close(self) -> None:
        """See ``Transport.close``."""
        self._area, self._open = {}, {}

    def _cargoes(self, stage: Stage) -> list[Cargo]:
        parcels: list[Parcel] = []
        for move, leaf in stage:
            for held in leaf.targets:
                if held not in self._open:
                    self._open[held] = Arrival(held, leaf.sources[0].array, set(move.kept.tolist()), self._places)
            pairs = pairs_of(move, leaf, [self._open[held] for held in leaf.targets])
            parcels += (Parcel(leaf, pair, self._places, self._buckets.words) for pair in pairs)
        return cargoes_of(parcels, self._buckets, self._ranks)

    def _compile(self, cargoes: Sequence[Cargo]) -> None:
        if cargoes:
            programs.zeros(self._devices, (self._buckets.total,), np.dtype(np.uint32))
            programs.exchange(self._devices, self._buckets)
        for cargo in cargoes:
            cargo.compile()

    def _carry(self, cargoes: Sequence[Cargo]) -> None:
        """Fill target shards with cargoes, which go together turn by turn."""
        with self._watch.phase("unpack"):
            for cargo in cargoes:
                cargo.begin()
        for turn in sorted({turn for cargo in cargoes for turn in cargo.turns}):
            for cargo in (cargo for cargo in cargoes if turn in cargo.turns):
                with self._watch.phase("pack"):
                    source = cargo.load(turn)
                for wave in cargo.waves(turn):
                    with self._watch.phase("pack"):
                        self._pack(cargo, turn, wave, source())
                    with self._watch.phase("move"):
                        self._exchange(wave)
                    with self._watch.phase("unpack"):
                        self._unpack(cargo, turn, wave)
        with self._watch.phase("unpack"):
            for cargo in cargoes:
                cargo.unload()

    def _finished(self, stage: Stage, share: bool) -> dict[int, jax.Array]:
        """The target arrays that are whole, by their place in the tree."""
        whole: list[Arrival] = []
        for move, leaf in stage:
            for arrival in (self._open[held] for held in leaf.targets):
                arrival.missing -= 1
                if not arrival.missing:
                    arrival.finish()
                    whole.append(self._open.pop(arrival.held))
            if len(move.kept):
                pieces = shards_of(leaf.sources[0].array, self._places)
                whole[-1].made |= _kept({n: pieces[n] for n in move.kept.tolist() if n in pieces}, share)
        return {
            arrival.held.index: array
            for arrival, array in zip(whole, jax.block_until_ready([a.array() for a in whole]), strict=True)
        }

    def _pack(self, cargo: Cargo, turn: int, wave: Wave, buffer: jax.Array) -> None:
        senders, program = cargo.packing(turn)
        self._fill(program(self._over(senders), buffer, self._rows(senders, wave.source)))

    def _exchange(self, wave: Wave) -> None:
        if wave.rounds.any():
            program = programs.exchange(self._devices, self._buckets)
            told = programs.tell(self._devices, wave.rounds), programs.tell(self._devices, wave.count)
            # Waited for: of two programs with collectives in flight, each may hold threads that the other waits for.
            with self._processes.waiting():
                self._fill(jax.block_until_ready(program(self._over(self._devices), *told)))

    def _unpack(self, cargo: Cargo, turn: int, wave: Wave) -> None:
        grains = self._rows(cargo.receivers, wave.target)
        cargo.into = jax.block_until_ready(cargo.unpacking(turn)(cargo.into, self._over(cargo.receivers), grains))

    def _rows(self, devices: Devices, table: np.ndarray) -> jax.Array:
        return programs.place(devices, table, self._here)

    def _over(self, devices: Devices) -> jax.Array:
        """The buckets of some devices, as one array."""
        shape = (self._buckets.total,)
        if not self._area:
            made = programs.zeros(self._devices, shape, np.dtype(np.uint32))()
            self._area = programs.gathered(made)
        return programs.spread(devices, shape, self._area, np.uint32)

    def _fill(self, area: jax.Array) -> None:
        self._area |= programs.gathered(area)


def _seen(shards: dict[int, jax.Array]) -> dict[int, View]:
    """The bytes of shards once they are computed."""
    jax.block_until_ready(list(shards.values()))
    return {n: bytes_of(shard) for n, shard in shards.items()}


def _kept(pieces: dict[int, jax.Array], share: bool) -> dict[int, jax.Array]:
    """The buffers that stay, or copies of them."""
    if share or not pieces:
        return pieces
    stay = list(pieces.values())
    return dict(zip(pieces, jax.device_put(stay, [piece.sharding for piece in stay], may_alias=False), strict=True))
