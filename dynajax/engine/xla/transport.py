"""The transport for devices of any kind, of one or many processes: XLA programs compiled from the plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dynajax.arrays import _jax_private as private
from dynajax.arrays.spmd import Devices, Shape, array_of_blocks, blocks_of, of_this_process, replicated, rows
from dynajax.bytesize import format_bytes
from dynajax.engine.memories import Memories, shards_by_device
from dynajax.engine.report import Stopwatch
from dynajax.engine.request import Request
from dynajax.engine.stored import Endpoint
from dynajax.engine.transport import Path, Shards
from dynajax.engine.xla.lowering import ExchangeLowering, Finish, Launch, StagePrograms
from dynajax.engine.xla.programs import Loaded, load, payload_shape
from dynajax.engine.xla.steps import Placed, Steps
from dynajax.errors import BudgetError
from dynajax.planner import Plan
from dynajax.planner.exchanges.by_chunk import NOWHERE
from dynajax.planner.exchanges.part import wire_dtype
from dynajax.planner.exchanges.split import Half
from dynajax.processes.consensus import Processes

_SHARE = 2
"""One part in so many of the budget is for programs at most."""
_SHARDS = 4
"""Shards that a program has room for beside those of its arrays, where the budget allows: more would not be faster."""
_COMPILERS = 4

Blocks = dict[jax.Device, jax.Array]


@dataclass(frozen=True, eq=False)
class Xla:
    """Moves by XLA programs.

    Attributes:
        request: what is moved.
        memories: what the numbers of plans mean.
    """

    request: Request
    memories: Memories

    path: Path = "xla"
    at_once: int | None = None

    def room(self, budget: int) -> int:
        """See ``Transport``."""
        ends = (*self.request.sources, *self.request.targets)
        largest = max((end.room * end.like.dtype.itemsize for end in ends), default=0)
        return min(budget // _SHARE, max(_SHARDS * largest, 1 << 20))

    def lower(self, plan: Plan, room: int) -> XlaProgram:
        """See ``Transport``."""
        lowering = ExchangeLowering(plan, self.request.leaves, self.memories, room)
        if lowering.need > room:
            raise BudgetError(
                f"a budget of {format_bytes(plan.budget)} ({plan.budget} bytes) leaves {room} bytes for the programs "
                f"that exchange shards, and they need {lowering.need}; a budget that does is "
                f"{plan.budget + _SHARE * (lowering.need - room)} bytes"
            )
        return XlaProgram(self.memories, lowering.stages, room, lowering.need, lowering.travels)


@dataclass(frozen=True, eq=False)
class XlaProgram:
    """What carries out a plan by XLA programs.

    Attributes:
        memories: what the numbers of the plan mean.
        stages: what is launched in each stage of the plan.
        room: bytes that programs may need beside the shards.
        overhead: bytes that they need, as far as shapes tell.
        bytes_travelled: see ``Program``.
    """

    memories: Memories
    stages: tuple[StagePrograms, ...]
    room: int
    overhead: int
    bytes_travelled: int

    @cached_property
    def _placed(self) -> tuple[Placed, ...]:
        """All programs, each once, in the order in which they are needed."""
        return tuple(dict.fromkeys(placed for stage in self.stages for placed in stage.programs))

    def compile(self) -> None:
        """See ``Program``."""
        with ThreadPoolExecutor(_COMPILERS, thread_name_prefix="dynajax-compile") as pool:
            loaded = list(pool.map(_load, self._placed))
        for made in loaded:
            if made.temporary > self.room:
                raise BudgetError(
                    f"XLA says that a program of this move needs {made.temporary} bytes "
                    f"({format_bytes(made.temporary)}) beside the shards, and the budget leaves {self.room}; give a "
                    f"budget that is {_SHARE * (made.temporary - self.room)} bytes larger"
                )

    def start(self, arrays: Sequence[Any], watch: Stopwatch) -> XlaFilling:
        """See ``Program``."""
        return XlaFilling(self, arrays, watch)


def _load(placed: Placed) -> Loaded:
    with private.own_settings():
        return load(*placed)


class XlaFilling:
    """A move on its way by XLA programs; see ``Filling``."""

    def __init__(self, program: XlaProgram, arrays: Sequence[Any], watch: Stopwatch) -> None:
        self._program, self._arrays, self._watch = program, arrays, watch
        self._memories = program.memories
        self._processes = Processes(self._memories.devices)
        self._filled: dict[Endpoint, Blocks] = {}
        self._in_flight: list[jax.Array] = []
        self._needed = 0

    def fill(self, stage: int) -> dict[Endpoint, Shards]:
        """See ``Filling``."""
        with self._processes.waiting():
            for launch in self._program.stages[stage].launches:
                self._launch(launch)
            self._wait()
            with self._watch.phase("unpack"):
                return {finish.target: self._finished(finish) for finish in self._program.stages[stage].finished}

    def copies(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """See ``Filling``."""
        return jax.device_put(list(shards), [shard.sharding for shard in shards], may_alias=False)

    def close(self) -> None:
        """See ``Filling``."""
        self._filled, self._in_flight = {}, []

    def _launch(self, launch: Launch) -> None:
        targets = [self._filled.setdefault(target, {}) for _, target in launch.ends]
        for program, devices in launch.zeros:
            for blocks in targets:
                blocks |= blocks_of(load(program, devices)([])[0], devices)
        sources = targets if launch.is_onward else [self._source(source) for source, _ in launch.ends]
        for steps_of_groups in launch.steps:
            for steps in steps_of_groups:
                self._run(steps, sources, targets)
            self._in_flight += [block for blocks in targets for block in blocks.values()]
            self._needed += launch.need
            # Of two programs with collectives on CPU devices, each may hold threads that the other waits for.
            may_hang = self._memories.devices[0].platform == "cpu" and any(s.is_collective for s in steps_of_groups)
            if self._needed > self._program.room or may_hang:
                self._wait()

    def _wait(self) -> None:
        """Wait for what is on its way, so that programs give back what they needed."""
        with self._watch.phase("move"):
            jax.block_until_ready([block for block in self._in_flight if not block.is_deleted()])
        self._in_flight, self._needed = [], 0

    def _source(self, end: Endpoint) -> Blocks:
        """The shards of a source array, by device."""
        blocks = shards_by_device(self._arrays[end.index])
        return {d: _moved(b, d, _default_kind(d), end.memory_kind) for d, b in blocks.items()}

    def _finished(self, finish: Finish) -> dict[int, jax.Array]:
        """The shards of a target array, by the number of their memory."""
        end, blocks = finish.target, self._filled.pop(finish.target, {})
        if finish.zeros is not None:
            program, devices = finish.zeros
            blocks |= blocks_of(load(program, devices)([])[0], devices)
        if finish.close is not None:
            program, devices = finish.close
            shape = array_of_blocks(devices, program.exchange.target, wire_dtype(program.exchange.dtype), blocks)
            blocks |= blocks_of(load(program, devices)([shape])[0], devices)
        number = self._memories.numbers(end.stored.sharding)
        kind = end.memory_kind
        return {number[d]: _moved(b, d, kind, _default_kind(d)) for d, b in blocks.items()}

    # Steps ------------------------------------------------------------------------------------------------------------

    def _run(self, steps: Steps, sources: Sequence[Blocks], targets: Sequence[Blocks]) -> None:
        """Run a part of what a group does; each target gets its blocks."""
        if steps.is_one:
            program, devices = steps.one
            with self._watch.phase("move"):
                shards = [] if steps.is_onward else [_joined(steps, devices, s, False) for s in sources]
                told = self._told(steps, devices)
                made = load(program, devices)([*shards, *_carried(steps, devices, targets), *told])
            for blocks, array in zip(targets, made, strict=True):
                blocks |= blocks_of(array, devices)
            return
        with self._watch.phase("pack"):
            cut = self._cut_out(steps, sources)
        with self._watch.phase("move"):
            came = _copied(steps, cut) if steps.is_here else _sent_by_program(steps, cut)
        with self._watch.phase("unpack"):
            self._put_in_place(steps, came, targets)

    def _told(self, steps: Steps, devices: Devices, half: Half | None = None) -> list[jax.Array]:
        """What programs are told besides: see ``Given``; of one half that half's chunks alone."""
        if steps.part.shifts:
            return [replicated(devices, steps.part.shifts)]
        if steps.part.tables is None:
            return []
        here = [k for k, d in enumerate(steps.devices) if d in of_this_process(devices)]
        read, filled = steps.part.tables(np.asarray(here))
        if half is None:
            return [rows(devices, read), rows(devices, filled)]
        chunks, is_cut = [message.chunks for message in steps.exchange.messages], half is steps.split.cut
        return [rows(devices, half.told(read if is_cut else filled, chunks, 0 if is_cut else NOWHERE))]

    def _cut_out(self, steps: Steps, sources: Sequence[Blocks]) -> list[Blocks]:
        """What each sender has in each slot."""
        slots = steps.split.cut.exchange.messages
        if steps.cut is None:
            return [sources[0] for _ in slots] or [sources[0]]
        program, devices = steps.cut
        if not devices:
            return [{} for _ in slots]
        shards = [_joined(steps, devices, blocks, False) for blocks in sources]
        made = load(program, devices)([*shards, *self._told(steps, devices, steps.split.cut)])
        return [blocks_of(array, devices) for array in made]

    def _put_in_place(self, steps: Steps, came: Sequence[Blocks], targets: Sequence[Blocks]) -> None:
        """Make target shards of what each receiver has in each slot."""
        if steps.place is None:
            for blocks in came:
                targets[0].update(blocks)
            return
        program, devices = steps.place
        if not devices:
            return
        exchange, arguments = program.exchange, []
        for message, blocks in zip(exchange.messages, came, strict=True):
            shape, wire = payload_shape(message, exchange.chunk, steps.count), wire_dtype(exchange.dtype)
            # What a device is given that no message of the slot is for is not looked at.
            others = {d: _any_of(came, d, shape, wire) for d in devices if d not in blocks}
            arguments.append(array_of_blocks(devices, shape, wire, blocks | others))
        told = self._told(steps, devices, steps.split.placed)
        made = load(program, devices)([*arguments, *_carried(steps, devices, targets), *told])
        for blocks, array in zip(targets, made, strict=True):
            blocks |= blocks_of(array, devices)


def _joined(steps: Steps, devices: Devices, blocks: Blocks, is_target: bool) -> jax.Array:
    """The source shards, or the open target shards, of some devices as one array."""
    exchange = steps.exchange
    shape, dtype = (exchange.target, wire_dtype(exchange.dtype)) if is_target else (exchange.source, exchange.dtype)
    return array_of_blocks(devices, shape, dtype, blocks)


def _carried(steps: Steps, devices: Devices, targets: Sequence[Blocks]) -> list[jax.Array]:
    """The target shards that are filled further."""
    return [_joined(steps, devices, blocks, True) for blocks in targets] if steps.carried else []


def _copied(steps: Steps, cut: Sequence[Blocks]) -> list[Blocks]:
    """What each receiver has in each slot, copied from device to device."""
    came: list[Blocks] = [{} for _ in range(1 + max(sent.placed for sent in steps.split.sent))]
    blocks = [cut[sent.cut][steps.devices[sent.sender]] for sent in steps.split.sent]
    # Source shards that become target shards as they are: on one device that has to be a buffer of its own too.
    is_own = steps.cut is not None or steps.place is not None
    devices = [steps.devices[sent.receiver] for sent in steps.split.sent]
    put = jax.device_put(blocks, devices, may_alias=None if is_own else False)
    for sent, block in zip(steps.split.sent, put, strict=True):
        came[sent.placed][steps.devices[sent.receiver]] = block
    return came


def _sent_by_program(steps: Steps, cut: Sequence[Blocks]) -> list[Blocks]:
    """What each receiver has in each slot, sent by a program of all devices."""
    program, devices = steps.send
    messages, wire = steps.exchange.messages, wire_dtype(steps.exchange.dtype)
    rounds: list[Blocks] = [{} for _ in messages]
    for sent in steps.split.sent:
        if sent.cut >= 0:
            rounds[sent.message][devices[sent.sender]] = cut[sent.cut][devices[sent.sender]]
    arguments = []
    for message, blocks, (zeros, others) in zip(messages, rounds, steps.stand_ins, strict=True):
        if message.pairs:
            made = blocks_of(load(zeros, others)([])[0], others) if others else {}
            arguments.append(array_of_blocks(devices, zeros.exchange.target, wire, blocks | made))
    sent_on = iter(load(program, devices)(arguments))
    rounds = [blocks_of(next(sent_on), devices) if m.pairs else b for m, b in zip(messages, rounds, strict=True)]
    came: list[Blocks] = [{} for _ in range(1 + max(sent.placed for sent in steps.split.sent))]
    for sent in steps.split.sent:
        if sent.placed >= 0:
            came[sent.placed][devices[sent.receiver]] = rounds[sent.message][devices[sent.receiver]]
    return came


def _any_of(payloads: Sequence[Blocks], device: jax.Device, shape: Shape, dtype: Any) -> jax.Array:
    """A block of this shape on a device: any that is there, or else zeros."""
    there = (blocks[device] for blocks in payloads if device in blocks)
    found = next((block for block in there if block.shape == shape), None)
    return jax.device_put(np.zeros(shape, dtype), device) if found is None else found


@functools.cache
def _default_kind(device: jax.Device) -> str:
    return device.default_memory().kind


def _moved(block: jax.Array, device: jax.Device, kind: str | None, present: str | None) -> jax.Array:
    """A block in a memory of its device."""
    return block if kind == present else jax.device_put(block, SingleDeviceSharding(device, memory_kind=kind))
