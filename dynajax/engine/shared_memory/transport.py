"""The transport for CPU devices of one process, which all live in one address space.

Target shards are filled by strided copies from where the source shards lie, and become arrays without a further copy.
An array is begun when the first of its tensors arrives and finished when the last is there: nearly always one tensor,
which is alone in it. Large shards lie in memory that XLA owns, so that the next step can donate them; all others of
an array lie side by side in one aligned slab of numpy. Elements travel as raw words, so that no bit pattern can change,
but where parts are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dynajax.arrays import _jax_private as private
from dynajax.arrays.host_view import View, bytes_of_each
from dynajax.engine.memories import Memories, shards_of
from dynajax.engine.report import Stopwatch
from dynajax.engine.request import Request
from dynajax.engine.shared_memory import uninitialised
from dynajax.engine.shared_memory.program import ALIGNMENT, Allocation, Batch, CopyLowering, StageCopies
from dynajax.engine.stored import Endpoint
from dynajax.engine.transport import Path
from dynajax.planner import Plan

_AT_ONCE = 1 << 25
_THREADS = 2
_WORTH_A_THREAD = 4
"""Batches: to wake another thread for less takes longer than it saves."""


@dataclass(frozen=True, eq=False)
class SharedMemory:
    """Moves by copies in memory.

    Attributes:
        request: what is moved.
        memories: what the numbers of plans mean.
        donatable: whether the next step is to reuse large target shards in place.
    """

    request: Request
    memories: Memories
    donatable: bool = True

    path: Path = "shared memory"
    at_once: int | None = _AT_ONCE
    """The next stage then fills memory that was read a moment ago, not pages never seen."""

    def room(self, budget: int) -> int:
        """See ``Transport``: it needs nothing."""
        return 0

    def lower(self, plan: Plan, room: int) -> CopyProgram:
        """See ``Transport``."""
        lowering = CopyLowering(self.memories, self.request.leaves, self.donatable)
        stages = [[(plan.moves[k], self.request.leaves[k]) for k in stage] for stage in plan.stages]
        return CopyProgram(self.memories, tuple(map(lowering.stage, stages)), plan.bytes_moved)


@dataclass(frozen=True, eq=False)
class CopyProgram:
    """What carries out a plan by copies.

    Attributes:
        memories: what the numbers of the plan mean.
        stages: the copies of each stage.
        bytes_travelled: see ``Program``.
    """

    memories: Memories
    stages: tuple[StageCopies, ...]
    bytes_travelled: int

    overhead: int = 0

    def compile(self) -> None:
        """Have the programs that allocate."""
        with private.own_settings():
            for spec in (spec for stage in self.stages for spec in stage.specs):
                for device in spec.devices if spec.is_owned_by_xla else ():
                    uninitialised.allocator(device, spec.shape, spec.dtype)

    def start(self, arrays: Sequence[Any], watch: Stopwatch) -> CopyFilling:
        """See ``Program``."""
        return CopyFilling(self, arrays, watch)


class CopyFilling:
    """A move on its way by copies; see ``Filling``."""

    def __init__(self, program: CopyProgram, arrays: Sequence[Any], watch: Stopwatch) -> None:
        self._program, self._arrays, self._watch = program, arrays, watch
        self._begun: dict[Endpoint, _Construction] = {}
        self._sent: list[jax.Array] = []
        self._pool = ThreadPoolExecutor(_THREADS - 1, thread_name_prefix="dynajax-copy")

    def fill(self, stage: int) -> dict[Endpoint, Mapping[int, Any]]:
        """See ``Filling``."""
        copies = self._program.stages[stage]
        # Meanwhile the sources of the last stage were let go, but nothing is allocated before its copies are there.
        self._arrive()
        with self._watch.phase("group"):
            self._begin(copies)
            buffers = self._buffers(copies)
        with self._watch.phase("move"):
            self._send_whole(copies)
            for phase in copies.phases:
                self._copy(phase, buffers)
        with self._watch.phase("unpack"):
            return {end: self._begun.pop(end).shards() for end in copies.finished}

    def copies(self, shards: Sequence[jax.Array]) -> list[np.ndarray[Any, Any]]:
        """See ``Filling``: another view of the same memory, which no step can donate."""
        return [np.asarray(shard) for shard in shards]

    def close(self) -> None:
        """See ``Filling``."""
        self._pool.shutdown()

    def _arrive(self) -> None:
        """Wait for the shards that JAX copies."""
        with self._watch.phase("move"):
            jax.block_until_ready(self._sent)
            self._sent = []

    def _begin(self, copies: StageCopies) -> None:
        """Allocate the arrays that no stage has begun yet."""
        for end in copies.zeroed:
            self._begun[end] = _Construction(copies.targets[end])
        for spec, ends in copies.specs.items():
            new = [self._begun[end] for end in ends]
            if spec.is_owned_by_xla:
                made = uninitialised.allocate(spec.devices, spec.shape, spec.dtype, len(new))
                for construction, shards in zip(new, made, strict=True):
                    construction.own(shards)
            else:
                for construction in new:
                    construction.buffers = [_aligned(spec.room * len(spec.devices))]
        for end, memories in copies.zeroed.items():
            self._begun[end].clear(memories)

    def _buffers(self, copies: StageCopies) -> list[View]:
        """The table that copies speak of."""
        table = [buffer for end in copies.targets for buffer in self._begun[end].buffers]
        for source, memories in copies.reads:
            shards = shards_of(self._arrays[source.index], self._program.memories)
            table += bytes_of_each([shards[n] for n in memories], source.layout)
        return table

    def _send_whole(self, copies: StageCopies) -> None:
        """Begin to copy shards that move as they are: JAX does that faster than we do, into memory of its own."""
        shards: list[jax.Array] = []
        to: list[tuple[_Construction, int]] = []
        for target, source in copies.sources.items():
            held = shards_of(self._arrays[source.index], self._program.memories)
            for memory, origin in copies.targets[target].copied.items():
                shards.append(held[origin])
                to.append((self._begun[target], memory))
        if shards:
            self._sent = jax.device_put(shards, [self._program.memories.listed[n][0] for _, n in to])
            for (construction, memory), shard in zip(to, self._sent, strict=True):
                construction.owned[memory] = shard

    def _copy(self, phase: Sequence[Batch], buffers: list[View]) -> None:
        """Copy the batches of a phase, this thread and, if there are some, others each taking the next one."""
        left, helpers = iter(phase), min(len(phase) // _WORTH_A_THREAD, _THREADS - 1)
        others = [self._pool.submit(_copy_batches, left, buffers) for _ in range(helpers)]
        _copy_batches(left, buffers)
        for other in others:
            other.result()


class _Construction:
    """The shards of a target array of which not all tensors have arrived.

    Attributes:
        buffers: in the order of the allocation.
        owned: shards that XLA made, by memory.
    """

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self.buffers: list[View] = []
        self.owned: dict[int, jax.Array] = {}

    def own(self, shards: Sequence[jax.Array]) -> None:
        """Take shards that XLA has allocated."""
        self.owned |= zip(self._allocation.made, shards, strict=True)
        self.buffers = bytes_of_each(shards)

    def clear(self, memories: Sequence[int]) -> None:
        """Zeros where copies do not fill."""
        for number, start in map(self._allocation.buffers.__getitem__, memories):
            self.buffers[number][start : start + self._allocation.spec.nbytes] = 0

    def shards(self) -> dict[int, Any]:
        """All shards, by memory."""
        spec = self._allocation.spec
        made = {
            n: np.ndarray(spec.shape, spec.dtype, self.buffers[number], start)
            for n, (number, start) in self._allocation.buffers.items()
            if n not in self.owned
        }
        return made | self.owned


def _aligned(nbytes: int) -> View:
    """Bytes at an address that devices can use where it lies."""
    slab = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -slab.ctypes.data % ALIGNMENT
    return slab[start : start + nbytes]


def _copy_batches(left: Iterator[Batch], buffers: Sequence[View]) -> None:
    for batch in left:
        _copy_batch(batch, buffers)


def _copy_batch(batch: Batch, buffers: Sequence[View]) -> None:
    for number, copies in batch:
        table = [buffers[k] for k in number]
        for copy in copies:
            to, source = copy.views(table)
            if copy.added:
                np.add(to, source, out=to)
            else:
                np.copyto(to, source)
