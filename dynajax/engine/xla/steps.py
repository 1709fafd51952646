"""The programs that one part of what a group does needs, and the devices that each runs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from dynajax.arrays.spmd import Devices, Shape, of_this_process
from dynajax.engine.xla.programs import ProgramSpec, Step, payload_shape
from dynajax.planner.exchanges.exchange import Exchange
from dynajax.planner.exchanges.part import Part, need, retyped, wire_dtype
from dynajax.planner.exchanges.split import Split

Placed = tuple[ProgramSpec, Devices]
"""A program and where it runs."""


@dataclass(frozen=True, eq=False)
class Steps:
    """A part of what a group does, on devices, for some arrays alike.

    If every device has the source and is to have the target, one program does it. Else messages are cut out on the
    devices that have the source, travel, and are put in place on those that are to have the target. In one process
    messages travel as copies from device to device; in several a program of all devices sends them.

    Attributes:
        part: what is done.
        devices: of the group, in its order.
        senders, receivers: numbers of those that have the source, and of those that are to have the target.
        count: arrays alike.
        carried: whether target shards are there that are filled in part.
        is_open: whether the target shards stay as elements travel, since more is to come.
        is_onward: whether the source is what the target has so far.
        layout: order of the dims of source shards in memory; None if row-major.
        is_here: whether all devices of the move are of this process.
    """

    part: Part
    devices: Devices
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    count: int
    carried: bool
    is_open: bool
    is_onward: bool
    layout: Shape | None
    is_here: bool

    @cached_property
    def split(self) -> Split:
        """What is cut out, sent, and put in place, if no program does it all."""
        return Split.of(self.exchange, self._here(self.senders), self._here(self.receivers))

    @cached_property
    def is_copied(self) -> bool:
        """Whether shards move as they are, which in one process takes no program."""
        messages = self.exchange.messages
        whole = all(c.read.size == self.exchange.source == self.exchange.target for m in messages for c in m.boxes)
        simple = self.is_here and self.layout is None and not (self.carried or self.is_open or self.part.shifts)
        reached = sorted(k for message in messages for k in message.receivers) == sorted(self.receivers)
        return simple and whole and reached and self._has_one_cut_each(self.exchange)

    @property
    def need(self) -> int:
        """Bytes that a device needs beside the shards."""
        return 0 if self.is_copied else self.count * (need(self.exchange) + retyped(self.exchange))

    @property
    def is_collective(self) -> bool:
        """Whether devices wait for each other in a program."""
        talks = any(a != b for message in self.exchange.messages for a, b in message.pairs)
        return (self.is_one or not self.is_here) and (talks or self.exchange.collective is not None)

    @cached_property
    def is_one(self) -> bool:
        """Whether one program does it all."""
        return not self.is_copied and len(self.senders) == len(self.receivers) == len(self.devices)

    @cached_property
    def cut(self) -> Placed | None:
        """What cuts messages out; None if they are source shards as they are."""
        half = self.split.cut
        uncut = all(c.read.size == half.exchange.source for m in half.exchange.messages for c in m.boxes)
        if self.is_copied or (uncut and self.layout is None and self._is_untouched(half.exchange)):
            return None
        program = ProgramSpec(Step.CUT, half.exchange, self.count, layout=self.layout)
        return replace(program, shifts=len(self.part.shifts)), self.of(half.devices)

    @cached_property
    def place(self) -> Placed | None:
        """What puts messages in their places; None if each receiver gets one, its target shard as it is."""
        half, target = self.split.placed, self.exchange.target
        whole = all(c.read.size == c.filled.size == target for m in half.exchange.messages for c in m.boxes)
        alone = [len(m.receivers) for m in half.exchange.messages] == [len(half.devices)]
        begun = self.carried or bool(half.exchange.sums)
        if self.is_copied or (whole and alone and not begun and self._is_untouched(half.exchange)):
            return None
        program = ProgramSpec(Step.PLACE, half.exchange, self.count, self.carried, self.is_open)
        return replace(program, shifts=len(self.part.shifts)), self.of(half.devices)

    @cached_property
    def one(self) -> Placed:
        """What does it all, if one program does."""
        flags = self.carried, self.is_open, self.is_onward
        return ProgramSpec(
            Step.ALL, self.exchange, self.count, *flags, len(self.part.shifts), self.layout
        ), self.devices

    @cached_property
    def send(self) -> Placed:
        """What sends messages between processes."""
        return ProgramSpec(Step.SEND, self.exchange, self.count), self.devices

    @cached_property
    def stand_ins(self) -> tuple[Placed, ...]:
        """For each message what makes zeros on the devices of this process that send nothing, for ``send``."""
        exchange, dtype = self.exchange, str(wire_dtype(self.exchange.dtype))
        sent = [{s.sender for s in self.split.sent if s.message == k} for k in range(len(exchange.messages))]
        others = [of_this_process(self.of([k for k in range(len(self.devices)) if k not in some])) for some in sent]
        shapes = [payload_shape(m, exchange.chunk, self.count) for m in exchange.messages]
        return tuple(
            (ProgramSpec(Step.ZEROS, Exchange(len(d), (), s, dtype)), d) for s, d in zip(shapes, others, strict=True)
        )

    @property
    def programs(self) -> Iterator[Placed]:
        """All that is to be compiled in this process."""
        if self.is_one:
            yield self.one
        elif not self.is_copied:
            yield from (placed for placed in (self.cut, self.place) if placed is not None and placed[1])
        if not (self.is_one or self.is_here):
            yield self.send
            yield from (placed for placed in self.stand_ins if placed[1])

    @property
    def exchange(self) -> Exchange:
        """What is done."""
        return self.part.exchange

    def of(self, numbers: Sequence[int]) -> Devices:
        """The devices of these numbers."""
        return tuple(self.devices[k] for k in numbers)

    def _here(self, numbers: Sequence[int]) -> list[int]:
        """Those of some numbers whose device is of this process."""
        return [k for k in numbers if of_this_process((self.devices[k],))]

    def _has_one_cut_each(self, exchange: Exchange) -> bool:
        return (
            self.count == 1
            and [len(message.boxes) for message in exchange.messages] == [1] * len(exchange.messages) != []
        )

    def _is_untouched(self, exchange: Exchange) -> bool:
        """Whether messages of one box each are handed on as they are."""
        plain = wire_dtype(exchange.dtype) == jnp.dtype(exchange.dtype)
        return plain and not self.part.shifts and self._has_one_cut_each(exchange)
