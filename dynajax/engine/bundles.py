"""Move tensors that share arrays, or are spread over several, in the memory of the host.

An array is made when the first of its tensors arrives and finished when the last is there. On CPU devices the memory
of the host is where shards lie, so that every element is copied once, from where it is to where it shall be; other
devices' shards pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dynajax.engine import _jax_private as private
from dynajax.engine import uninitialised
from dynajax.engine.host_view import Copy, View, bytes_of, same_bytes, word_of
from dynajax.engine.places import Places, memory_kind, shards_of
from dynajax.engine.report import Stopwatch
from dynajax.engine.shared_memory import Kind
from dynajax.engine.tree import Held, Leaf, located
from dynajax.errors import CheckError
from dynajax.planner import Move
from dynajax.vps.buffer import view

_ALIGNMENT = 64


class Bundles:
    """Carries the stages of a plan, as far as they move tensors that are not alone in their arrays."""

    def __init__(self, places: Places, watch: Stopwatch) -> None:
        self._places = places
        self._watch = watch
        self._open: dict[Held, _Unfinished] = {}

    def run(self, stage: Sequence[tuple[Move, Leaf]], check: bool) -> dict[int, jax.Array]:
        """Fill the arrays that a stage fills, and return those that are whole now, by their place in the tree.

        Args:
            stage: tensors to move.
            check: compare every copied piece with its source.

        Raises:
            CheckError: ``check`` found bytes that differ.
        """
        with self._watch.phase("group"):
            new = self._opened(stage)
        self._compile(new)
        with self._watch.phase("group"):
            for unfinished in new:
                unfinished.allocate(self._places)
            # What is passed on has to have come first.
            copies = [(move, self._copies(move, leaf, passed)) for passed in (False, True) for move, leaf in stage]
        with self._watch.phase("move"):
            for to, source in (copy for _, made in copies for copy in made):
                np.copyto(to, source)
        if check:
            with self._watch.phase("verify"):
                _compare(copies)
        with self._watch.phase("unpack"):
            return self._finished(stage)

    def prepare(self, stage: Sequence[tuple[Move, Leaf]]) -> None:
        """Compile what ``run`` will need; leaves may be without data."""
        self._compile(self._opened(stage))

    def _opened(self, stage: Sequence[tuple[Move, Leaf]]) -> list[_Unfinished]:
        """The arrays that the stage is the first to fill."""
        new: list[_Unfinished] = []
        for move, leaf in stage:
            for target in leaf.targets:
                if target not in self._open:
                    new.append(_Unfinished(target, leaf.sources[0].array, move, self._places))
                    self._open[target] = new[-1]
        return new

    def _compile(self, new: Sequence[_Unfinished]) -> None:
        """Have the programs that allocate."""
        with self._watch.compiling(uninitialised.compiled_so_far):
            for kind in (unfinished.kind for unfinished in new):
                if kind.is_owned_by_xla:
                    uninitialised.allocator(kind.devices, kind.shape, kind.dtype, 1)

    def _copies(self, move: Move, leaf: Leaf, passed: bool) -> list[Copy]:
        """``(to, from)`` views of every box to copy out of a source, or to pass on out of a target."""
        c, word = move.copies, word_of(move.tensor.itemsize)
        rows = np.flatnonzero(c.relayed == passed)
        target = [self._open[array].buffers for array in leaf.targets]
        source = target if passed else [_views(source.array, self._places) for source in leaf.sources]
        read, source_offset = located(leaf.targets if passed else leaf.sources, c.source_offset[rows])
        filled, target_offset = located(leaf.targets, c.target_offset[rows])
        columns = (
            filled, c.target[rows], target_offset, c.target_stride[rows],
            read, c.source[rows], source_offset, c.source_stride[rows], c.extent[rows],
        )  # fmt: skip
        return [
            (view(target[tk][t].view(word), to, ts, extent), view(source[sk][s].view(word), so, ss, extent))
            for tk, t, to, ts, sk, s, so, ss, extent in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _finished(self, stage: Sequence[tuple[Move, Leaf]]) -> dict[int, jax.Array]:
        whole: dict[int, jax.Array] = {}
        for target in (target for _, leaf in stage for target in leaf.targets):
            unfinished = self._open[target]
            unfinished.missing -= 1
            if not unfinished.missing:
                whole[target.index] = self._open.pop(target).array()
        return whole


class _Unfinished:
    """An array of which not all tensors have arrived.

    Attributes:
        missing: how many tensors it lacks.
        kind: what its shards are like that have to be made.
        buffers: bytes of the shard at each place.
    """

    def __init__(self, target: Held, like: Any, move: Move, places: Places) -> None:
        self.missing = target.tensors
        self.buffers: dict[int, View] = {}
        self._target, self._like = target, like
        sharding = target.stored.sharding
        self._order = private.device_order(sharding)
        self._number = places.numbers(sharding)
        self._kept = move.kept.tolist()  # only ever of a tensor whose one array becomes one array
        dtype, self._inner = private.physical_element(like.dtype)
        filled = tuple(d for d in self._order if self._number[d] not in self._kept)
        default = memory_kind(sharding) == self._order[0].default_memory().kind
        on_cpu = all(d.platform == "cpu" for d in self._order)
        shape = (*sharding.shard_shape(target.stored.array_shape), *self._inner)
        self.kind = Kind(filled, shape, dtype, default and on_cpu)
        self._owned: dict[int, jax.Array] = {}

    def allocate(self, places: Places) -> None:
        """Zeroed buffers: of XLA where shards are large, so that the next step can donate them, else of numpy."""
        kind = self.kind
        if kind.is_owned_by_xla:
            (shards,) = uninitialised.allocate(kind.devices, kind.shape, kind.dtype, 1)
            self._owned = {self._number[device]: shard for device, shard in shards.items()}
            self.buffers = {n: bytes_of(shard) for n, shard in self._owned.items()}
            for buffer in self.buffers.values():
                buffer[...] = 0
        else:
            self.buffers = {self._number[device]: _zeros(kind.nbytes) for device in kind.devices}
        if self._kept:
            stay = shards_of(self._like, places)
            self.buffers |= {n: np.asarray(stay[n]).reshape(-1).view(np.uint8) for n in self._kept}

    def array(self) -> jax.Array:
        """The array, once all is there."""
        base = private.physical(self._like)
        shards = [self._shard(self._number[device]) for device in self._order]
        stored = self._target.stored
        made = private.assemble((*stored.array_shape, *self._inner), base, stored.sharding, shards, self._order)
        return made if base is self._like else jax.random.wrap_key_data(made, impl=jax.random.key_impl(self._like))

    def _shard(self, number: int) -> Any:
        if number in self._owned:
            return self._owned[number]
        return self.buffers[number].view(self.kind.dtype).reshape(self.kind.shape)


def _views(array: jax.Array, places: Places) -> dict[int, View]:
    """The bytes of an array's shard at each place."""
    return {n: bytes_of(shard) for n, shard in shards_of(array, places).items()}


def _zeros(nbytes: int) -> View:
    """Zeros at an address that devices can use where it lies."""
    slab = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -slab.ctypes.data % _ALIGNMENT
    return slab[start : start + nbytes]


def _compare(copies: Sequence[tuple[Move, Sequence[Copy]]]) -> None:
    for move, made in copies:
        for row, (to, source) in enumerate(made):
            if not same_bytes(to, source):
                device = int(move.copies.target[row])
                raise CheckError(f"{move.tensor.path}: the bytes of place {device} are not those of its source")
