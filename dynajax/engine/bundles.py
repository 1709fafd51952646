"""Move tensors that share arrays, or are spread over several, in the memory of the host.

An array is made when the first of its tensors arrives and finished when the last is there. On CPU devices the memory
of the host is where shards lie, so that every element is copied once, from where it is to where it shall be; other
devices' shards pass through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dynajax.engine import _jax_private as private
from dynajax.engine.places import Places, shards_of
from dynajax.engine.report import Stopwatch
from dynajax.engine.shared_memory import Copy, Words, bytes_of, word_of
from dynajax.engine.tree import Held, Leaf, located
from dynajax.errors import CheckError
from dynajax.planner import Move
from dynajax.vps.buffer import view

_ALIGNMENT = 64

Ends = Mapping[tuple[int, int], Words]
"""Buffers by array of a tensor and place."""


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
            for move, leaf in stage:
                for target in leaf.targets:
                    if target not in self._open:
                        self._open[target] = _Unfinished(target, leaf.sources[0].array, move, self._places)
            copies = [(move, self._copies(move, leaf)) for move, leaf in stage]
        with self._watch.phase("move"):
            for to, source in (copy for _, made in copies for copy in made):
                np.copyto(to, source)
        if check:
            with self._watch.phase("verify"):
                _compare(copies)
        with self._watch.phase("unpack"):
            return self._finished(stage)

    def _copies(self, move: Move, leaf: Leaf) -> list[Copy]:
        """``(to, from)`` views of every box to copy."""
        c, word = move.copies, word_of(move.tensor.itemsize)
        read, source_offset = located(leaf.sources, c.source_offset)
        filled, target_offset = located(leaf.targets, c.target_offset)
        held = [shards_of(source.array, self._places) for source in leaf.sources]
        source: Ends = {
            (k, n): bytes_of(held[k][n]).view(word) for k, n in set(zip(read.tolist(), c.source.tolist(), strict=True))
        }
        target: Ends = {
            (k, n): self._open[leaf.targets[k]].buffers[n].view(word)
            for k, n in set(zip(filled.tolist(), c.target.tolist(), strict=True))
        }
        rows = zip(
            filled.tolist(), c.target.tolist(), target_offset.tolist(), c.target_stride.tolist(),
            read.tolist(), c.source.tolist(), source_offset.tolist(), c.source_stride.tolist(),
            c.extent.tolist(), strict=True,
        )  # fmt: skip
        return [
            (view(target[tk, t], to, ts, extent), view(source[sk, s], so, ss, extent))
            for tk, t, to, ts, sk, s, so, ss, extent in rows
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
    """An array of which not all tensors have arrived: a zeroed buffer for each place, or one that stays."""

    def __init__(self, target: Held, like: jax.Array, move: Move, places: Places) -> None:
        self.missing = target.tensors
        self._target, self._like = target, like
        sharding = target.stored.sharding
        self._order = private.device_order(sharding)
        self._number = places.numbers(sharding)
        dtype, self._inner = private.physical_element(like.dtype)
        self._dtype = dtype
        self._shard = (*sharding.shard_shape(target.stored.array_shape), *self._inner)
        kept = set(move.kept.tolist())  # only ever of a tensor whose one array becomes one array
        nbytes = int(np.prod(self._shard, dtype=np.int64)) * dtype.itemsize
        self.buffers = {n: _zeros(nbytes) for n in self._number.values() if n not in kept}
        if kept:
            stay = shards_of(like, places)
            self.buffers |= {n: np.asarray(stay[n]).reshape(-1).view(np.uint8) for n in kept}

    def array(self) -> jax.Array:
        """The array, once all is there."""
        base = private.physical(self._like)
        shards = [self.buffers[self._number[d]].view(self._dtype).reshape(self._shard) for d in self._order]
        stored = self._target.stored
        made = private.assemble((*stored.array_shape, *self._inner), base, stored.sharding, shards, self._order)
        return made if base is self._like else jax.random.wrap_key_data(made, impl=jax.random.key_impl(self._like))


def _zeros(nbytes: int) -> Words:
    """Zeros at an address that devices can use where it lies."""
    slab = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -slab.ctypes.data % _ALIGNMENT
    return slab[start : start + nbytes]


def _compare(copies: Sequence[tuple[Move, Sequence[Copy]]]) -> None:
    for move, made in copies:
        for row, (to, source) in enumerate(made):
            if not np.array_equal(to, source):
                device = int(move.copies.target[row])
                raise CheckError(f"{move.tensor.path}: the bytes of place {device} are not those of its source")
