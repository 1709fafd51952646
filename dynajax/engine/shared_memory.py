"""Move by copies in the memory of the host: all CPU devices of a process live in one address space.

Target shards are filled by strided copies from where the source shards lie, and become arrays without a further copy.
An array is made when the first of its tensors arrives and finished when the last is there: nearly always one tensor,
which is alone in it. Large shards lie in memory that XLA owns, so that the next step can donate them; all others of
an array lie side by side in one aligned slab of numpy. Elements travel as raw words, so that no bit pattern can change,
but where parts are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dynajax.engine import _jax_private as private
from dynajax.engine import uninitialised
from dynajax.engine.check import check_moved
from dynajax.engine.host_view import View, bytes_of, bytes_of_each
from dynajax.engine.places import Places, shards_of
from dynajax.engine.processes import Processes
from dynajax.engine.recipe import Batch, Outline, Recipe, Recipes
from dynajax.engine.report import Stopwatch
from dynajax.engine.transport import Stage
from dynajax.engine.tree import Held

AT_ONCE = 1 << 25
"""Bytes of targets in a stage: the next one then fills memory that was read a moment ago, not pages never seen."""
_ALIGNMENT = 64
_THREADS = 2
_WORTH_A_THREAD = 4
"""Batches: to wake another thread for less takes longer than it saves."""


class SharedMemory:
    """The transport for CPU devices of one process.

    Args:
        places: what the plan's numbers mean.
        watch: where the time goes.
        recipes: what is known of the plan's stages from an earlier move.
    """

    name = "shared memory"
    overhead = 0

    def __init__(self, places: Places, watch: Stopwatch, recipes: Recipes | None = None) -> None:
        self._places, self._watch = places, watch
        self._recipes = recipes or Recipes(places)
        self._open: dict[Held, _Unfinished] = {}
        self._sent: list[jax.Array] = []
        self._pool = ThreadPoolExecutor(_THREADS - 1, thread_name_prefix="dynajax-copy")

    def fill(self, stage: Stage, share: bool, check: bool) -> dict[int, jax.Array]:
        """See ``Transport.fill``."""
        with self._watch.phase("group"):
            recipe = self._recipes.of(stage)
        self._compile(recipe)
        self._arrive()
        with self._watch.phase("group"):
            self._begin(recipe, stage)
            buffers = self._buffers(recipe, stage)
        with self._watch.phase("move"):
            self._sent = self._send_whole(recipe)
            for turn in recipe.turns:
                self._copy(turn, buffers)
        if check:
            self._arrive()
            with self._watch.phase("verify"):
                filled = {held: self._open[held].shards() for held in recipe.targets}
                check_moved(stage, filled, self._places, Processes(self._places.devices))
        with self._watch.phase("unpack"):
            return self._finished(stage, share)

    def prepare(self, stage: Stage) -> None:
        """See ``Transport.prepare``."""
        self._compile(self._recipes.of(stage))

    def close(self) -> None:
        """See ``Transport.close``."""
        self._pool.shutdown()

    def _arrive(self) -> None:
        """Wait for the shards that JAX copies.

        Meanwhile their sources are let go and the next stage is worked out, but nothing is allocated for it.
        """
        with self._watch.phase("move"):
            jax.block_until_ready(self._sent)
            self._sent = []

    def _compile(self, recipe: Recipe) -> None:
        """Have the programs that allocate."""
        with self._watch.compiling(uninitialised.compiled_so_far):
            for kind in recipe.kinds:
                for device in kind.devices if kind.is_owned_by_xla else ():
                    uninitialised.allocator(device, kind.shape, kind.dtype)

    def _begin(self, recipe: Recipe, stage: Stage) -> None:
        """Allocate the arrays that no stage has begun yet."""
        for move, leaf in stage:
            for held in leaf.targets:
                if held in recipe.opened and held not in self._open:
                    pieces = (
                        shards_of(leaf.sources[0].array, self._places)
                        if len(move.kept) or recipe.targets[held].whole
                        else {}
                    )
                    self._open[held] = _Unfinished(held, recipe.targets[held], leaf.sources[0].array, pieces)
        for kind, arrays in recipe.kinds.items():
            new = [self._open[held] for held in arrays]
            if kind.is_owned_by_xla:
                made = uninitialised.allocate(kind.devices, kind.shape, kind.dtype, len(new))
                for unfinished, shards in zip(new, made, strict=True):
                    unfinished.own(shards)
            else:
                for unfinished in new:
                    unfinished.buffers.insert(0, _aligned(kind.room * len(kind.devices)))
        for held, places in recipe.opened.items():
            self._open[held].clear(places)

    def _buffers(self, recipe: Recipe, stage: Stage) -> list[View]:
        """The table that boxes speak of."""
        table = [buffer for held in recipe.targets for buffer in self._open[held].buffers]
        for row, source, places in recipe.reads:
            pieces = shards_of(stage[row][1].sources[source].array, self._places)
            table += bytes_of_each([pieces[n] for n in places])
        return table

    def _send_whole(self, recipe: Recipe) -> list[jax.Array]:
        """Begin to copy shards that move as they are: JAX does that faster than we do, into memory of its own."""
        new = [self._open[held] for held in recipe.opened]
        moves = [(one, n, one.pieces[source]) for one in new for n, source in one.outline.whole.items()]
        if not moves:
            return []
        devices = [self._places.places[n][0] for _, n, _ in moves]
        sent = jax.device_put([piece for *_, piece in moves], devices)
        for (one, n, _), shard in zip(moves, sent, strict=True):
            one.owned[n] = shard
        return sent

    def _copy(self, turn: Sequence[Batch], buffers: list[View]) -> None:
        """Copy the batches of a turn, this thread and, if there are some, others each taking the next one."""
        left, helpers = iter(turn), min(len(turn) // _WORTH_A_THREAD, _THREADS - 1)
        others = [self._pool.submit(_copy_batches, left, buffers) for _ in range(helpers)]
        _copy_batches(left, buffers)
        for other in others:
            other.result()

    def _finished(self, stage: Stage, share: bool) -> dict[int, jax.Array]:
        whole: dict[int, jax.Array] = {}
        for held in (held for _, leaf in stage for held in leaf.targets):
            self._open[held].missing -= 1
            if not self._open[held].missing:
                whole[held.index] = self._open.pop(held).array(share)
        return whole


class _Unfinished:
    """A target array of which not all tensors have arrived.

    Attributes:
        missing: how many tensors it lacks.
        pieces: the source shards, if some stay or move as they are.
        buffers: in the order of the outline.
        owned: shards that XLA made, by place.
    """

    def __init__(self, held: Held, outline: Outline, like: Any, pieces: dict[int, jax.Array]) -> None:
        self.outline, self.pieces = outline, pieces
        self.missing = held.tensors
        self.buffers: list[View] = [bytes_of(pieces[n]) for n in sorted(outline.kept)]
        self.owned: dict[int, jax.Array] = {}
        self._held, self._like = held, like

    def own(self, shards: Sequence[jax.Array]) -> None:
        """Take shards that XLA has allocated."""
        self.owned |= zip(self.outline.made, shards, strict=True)
        self.buffers[:0] = bytes_of_each(shards)

    def clear(self, places: Sequence[int]) -> None:
        """Zeros at places that copies do not fill."""
        for number, start in map(self.outline.buffers.__getitem__, places):
            self.buffers[number][start : start + self.outline.kind.nbytes] = 0

    def shards(self) -> dict[int, View]:
        """The bytes of the shard at each place."""
        room, buffers = self.outline.kind.nbytes, self.outline.buffers.items()
        made = {n: self.buffers[number][start : start + room] for n, (number, start) in buffers}
        return made | {n: bytes_of(shard) for n, shard in self.owned.items()}

    def array(self, share: bool) -> jax.Array:
        """The array, once all is there."""
        stored = self._held.stored
        order = private.device_order(stored.sharding)
        shards = [self._shard(n, share) for n in self.outline.order]
        return private.assemble(stored.array_shape, self._like, stored.sharding, shards, order)

    def _shard(self, place: int, share: bool) -> Any:
        if place in self.outline.kept:
            return self.pieces[place] if share else np.asarray(self.pieces[place])
        if place in self.owned:
            return self.owned[place]
        number, start = self.outline.buffers[place]
        return np.ndarray(self.outline.kind.shape, self.outline.kind.dtype, self.buffers[number], start)


def _aligned(nbytes: int) -> View:
    """Bytes at an address that devices can use where it lies."""
    slab = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -slab.ctypes.data % _ALIGNMENT
    return slab[start : start + nbytes]


def _copy_batches(left: Iterator[Batch], buffers: Sequence[View]) -> None:
    for batch in left:
        _copy_batch(batch, buffers)


def _copy_batch(batch: Batch, buffers: Sequence[View]) -> None:
    for number, boxes in batch:
        table = [buffers[k] for k in number]
        for box in boxes:
            to, source = box.views(table)
            if box.added:
                np.add(to, source, out=to)
            else:
                np.copyto(to, source)
