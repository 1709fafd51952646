"""From a plan to launches: which transfers between arrays programs are called for, on which devices, in which order.

A transfer is what goes from one array to another; a tensor with arrays of its own is one transfer. Small arrays that go
the same way share a launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynajax.arrays.spmd import of_this_process
from dynajax.engine.memories import Memories, located
from dynajax.engine.request import Leaf
from dynajax.engine.stored import Endpoint
from dynajax.engine.xla.programs import ProgramSpec, Step
from dynajax.engine.xla.steps import Placed, Steps
from dynajax.planner import Copies, Move, Plan
from dynajax.planner.exchanges.exchange import Exchange
from dynajax.planner.exchanges.groups import Group, groups_of, taken
from dynajax.planner.exchanges.part import need, retyped, wire_dtype

_MOST_ARRAYS = 16
"""Arrays alike that a program is made for at once: it takes as long to compile as they are many."""
_SMALL = 1 << 20
"""Bytes that they may need together: of larger ones nothing is gained."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """What goes from one array to another.

    Attributes:
        source, target: the arrays.
        is_onward: whether it goes on out of a target, once that is filled.
        is_alone: whether nothing else goes to the target.
        groups: what the groups of devices do.
    """

    source: Endpoint
    target: Endpoint
    is_onward: bool
    is_alone: bool
    groups: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Launch:
    """Transfers alike that programs are called for together.

    Attributes:
        ends: source and target of each.
        is_onward: whether the source is what the target has so far.
        zeros: what makes the open target shards that steps expect and nothing has made yet.
        steps: what the groups do that have a device of this process: first parts, then second ones, and so on.
        need: bytes that a device needs meanwhile beside the shards.
    """

    ends: tuple[tuple[Endpoint, Endpoint], ...]
    is_onward: bool
    zeros: tuple[Placed, ...]
    steps: tuple[tuple[Steps, ...], ...]
    need: int


@dataclass(frozen=True, eq=False)
class Finish:
    """What is left to do for a target array once all of it has come.

    Attributes:
        target: the array.
        zeros: what makes the shards of devices that nothing comes to; None if there are none.
        close: what makes open shards what they are; None if there are none.
    """

    target: Endpoint
    zeros: Placed | None
    close: Placed | None


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """A stage of a plan: what is launched, and what is finished then."""

    launches: tuple[Launch, ...]
    finished: tuple[Finish, ...]

    @property
    def programs(self) -> Iterator[Placed]:
        """All that is to be compiled."""
        for launch in self.launches:
            yield from launch.zeros
            for steps in itertools.chain(*launch.steps):
                yield from steps.programs
        for finish in self.finished:
            yield from (placed for placed in (finish.zeros, finish.close) if placed is not None)


class ExchangeLowering:
    """Lowers the stages of a plan.

    Args:
        plan: what is carried out.
        leaves: one for each move of the plan.
        memories: what the numbers of the plan mean.
        room: bytes that a device may need beside the shards.
    """

    def __init__(self, plan: Plan, leaves: Sequence[Leaf], memories: Memories, room: int) -> None:
        self._plan, self._leaves, self._memories, self._room = plan, leaves, memories, room
        number = {device: k for k, device in enumerate(memories.devices)}
        self._device = np.asarray([number[device] for device, _ in memories.listed], np.int64)
        self._process = np.asarray([device.process_index for device in memories.devices], np.int64)
        self._groups: dict[tuple[Any, ...], tuple[Group, ...]] = {}
        self._left = {end: end.tensors for leaf in leaves for end in leaf.targets}
        # Of each target the devices whose shard is to be made, those where that has begun, and those where it is open.
        self._made: dict[Endpoint, set[jax.Device]] = {}
        self._begun: dict[Endpoint, set[jax.Device]] = {end: set() for end in self._left}
        self._open: dict[Endpoint, set[jax.Device]] = {end: set() for end in self._left}
        self.travels = 0
        self.stages = tuple(self._stage(rows) for rows in plan.stages)
        self.need = max((launch.need for stage in self.stages for launch in stage.launches), default=0)

    def _stage(self, rows: Sequence[int]) -> StagePrograms:
        moves = [(self._plan.moves[k], self._leaves[k]) for k in rows]
        for move, leaf in moves:
            kept = {self._memories.listed[n][0] for n in move.kept.tolist()}
            for end in leaf.targets:
                self._made[end] = set(end.stored.sharding.device_set) - kept
        transfers = [transfer for move, leaf in moves for transfer in self._transfers(move, leaf)]
        # What goes on out of a target goes when all of the stage is there.
        transfers.sort(key=lambda transfer: transfer.is_onward)
        launches = [self._launch(some) for some in self._together(transfers)]
        finished = []
        for end in (end for _, leaf in moves for end in leaf.targets):
            self._left[end] -= 1
            if not self._left[end]:
                finished.append(self._finish(end))
        return StagePrograms(tuple(launches), tuple(finished))

    def _transfers(self, move: Move, leaf: Leaf) -> Iterator[Transfer]:
        """The transfers of a tensor."""
        c = move.copies
        if leaf.has_own_target and not c.relayed.any():
            yield self._transfer(leaf.sources[0], leaf.targets[0], False, True, c, id(move.route))
            return
        into, target_offset = located(leaf.targets, c.target_offset)
        for onward, ends in ((False, leaf.sources), (True, leaf.targets)):
            out, source_offset = located(ends, c.source_offset)
            mine = replace(c, source_offset=source_offset, target_offset=target_offset)
            for k, t in itertools.product(range(len(ends)), range(len(leaf.targets))):
                rows = np.flatnonzero((c.relayed == onward) & (out == k) & (into == t))
                if len(rows):
                    key = (id(move.route), onward, k, t)
                    yield self._transfer(ends[k], leaf.targets[t], onward, False, taken(mine, rows), key)

    def _transfer(
        self, source: Endpoint, target: Endpoint, onward: bool, alone: bool, copies: Copies, key: object
    ) -> Transfer:
        (dtype, before), (_, after) = source.physical, target.physical
        asked = key, before, after, dtype
        if asked not in self._groups:
            words = len(before) - len(source.shard_shape)
            physical = _of_words(copies, before[-1]) if words else copies
            between = replace(physical, source=self._device[copies.source], target=self._device[copies.target])
            whole = Exchange(0, before, after, str(dtype))
            self._groups[asked] = tuple(groups_of(between, whole, self._room, self._process))
        groups = self._groups[asked]
        self.travels += sum(group.travels for group in groups) * wire_dtype(dtype).itemsize
        return Transfer(source, target, onward, alone, groups)

    def _together(self, transfers: Iterable[Transfer]) -> list[list[Transfer]]:
        """Transfers in turn, small ones alike together."""
        made: list[list[Transfer]] = []
        latest: dict[object, list[Transfer]] = {}
        for transfer in transfers:
            alike = (transfer.groups, transfer.source.layout)
            known, most = latest.get(alike, []), min(self._room, _SMALL) // max(_need(transfer.groups), 1)
            if transfer.is_alone and 0 < len(known) < min(most, _MOST_ARRAYS):
                known.append(transfer)
            else:
                made.append([transfer])
                latest[alike] = made[-1] if transfer.is_alone else []
        return made

    def _launch(self, transfers: Sequence[Transfer]) -> Launch:
        first, count = transfers[0], len(transfers)
        rounds: list[list[Steps]] = [[] for _ in range(max((len(g.parts) for g in first.groups), default=0))]
        zeros: list[Placed] = []
        sources = self._made[first.target] if first.is_onward else first.source.stored.sharding.device_set
        for group in first.groups:
            devices = tuple(self._memories.devices[k] for k in group.devices.tolist())
            senders, receivers = (
                tuple(k for k, d in enumerate(devices) if d in has) for has in (sources, self._made[first.target])
            )
            made, begun = {devices[k] for k in receivers}, self._begun[first.target]
            # What begins with one of several parts would lie beside the shard until it is there.
            several = len(group.parts) > 1
            carried, stays_open = several or not begun.isdisjoint(made), several or not first.is_alone
            if carried and not made <= begun:
                zeros += self._alone(Step.ZEROS, first.target, made - begun, is_open=True)
            for number, part in enumerate(group.parts):
                rounds[number].append(
                    Steps(
                        part,
                        devices,
                        senders,
                        receivers,
                        count,
                        carried=carried,
                        is_open=stays_open,
                        is_onward=first.is_onward,
                        layout=None if first.is_onward else first.source.layout,
                        is_here=self._memories.are_here,
                    )
                )
            for end in (transfer.target for transfer in transfers):
                self._begun[end] |= made
                self._open[end] |= made if stays_open else set()
        here = tuple(tuple(s for s in steps if of_this_process(s.devices)) for steps in rounds)
        ends = tuple((transfer.source, transfer.target) for transfer in transfers)
        need_of_all = max((s.need for some in rounds for s in some), default=0)
        return Launch(ends, first.is_onward, tuple(zeros), here, need_of_all)

    def _finish(self, end: Endpoint) -> Finish:
        zeros = self._alone(Step.ZEROS, end, self._made[end] - self._begun[end])
        small = wire_dtype(end.physical[0]) != jnp.dtype(end.physical[0])
        close = self._alone(Step.CLOSE, end, self._open[end] if small else set())
        return Finish(end, zeros[0] if zeros else None, close[0] if close else None)

    def _alone(self, step: Step, end: Endpoint, devices: set[jax.Device], is_open: bool = False) -> list[Placed]:
        """A program of target shards, on those of some devices that are of this process."""
        here = of_this_process(tuple(sorted(devices, key=lambda d: d.id)))
        exchange = Exchange(len(here), (), end.physical[1], str(end.physical[0]))
        return [(ProgramSpec(step, exchange, is_open=is_open), here)] if here else []


def _need(groups: Sequence[Group]) -> int:
    """Bytes that a device needs beside the shards of one transfer."""
    return max((need(p.exchange) + retyped(p.exchange) for group in groups for p in group.parts), default=0)


def _of_words(copies: Copies, words: int) -> Copies:
    """Copies of elements as copies of the words that each is made of, which lie in a dim of their own."""
    rows = len(copies.source)
    ones, extent = np.ones((rows, 1), np.int64), np.full((rows, 1), words)
    return replace(
        copies,
        extent=np.concatenate([copies.extent, extent], axis=1),
        source_offset=copies.source_offset * words,
        target_offset=copies.target_offset * words,
        source_stride=np.concatenate([copies.source_stride * words, ones], axis=1),
        target_stride=np.concatenate([copies.target_stride * words, ones], axis=1),
    )
