"""Exchanges in rounds of messages that are cut out of shards, and put in their places, box by box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dynajax.planner.exchanges.exchange import Box, Exchange, Message, Shape, Slice, Starts, Sum
from dynajax.planner.exchanges.messages import Messages
from dynajax.planner.exchanges.part import Part, in_turn, need
from dynajax.planner.exchanges.slices import Slices
from dynajax.planner.route import Copies
from dynajax.types import Ints
from dynajax.vps.algebra import row_keys

_MOST_KINDS = 4
_MOST_OVER = 1.25
"""Rounds of boxes may take so much longer than the busiest device needs."""


def by_box(copies: Copies, read: Slices, filled: Slices, whole: Exchange, room: int) -> list[Part] | None:
    """What a group does in rounds of boxes; None if there are too many kinds of them for that.

    Args:
        copies: between the devices of the group.
        read, filled: the slices that they are.
        whole: says what the shards are.
        room: bytes that a device may need beside them.
    """
    boxes = _Boxes.of(copies, read, filled, whole)
    if boxes is None:
        return None
    count = 1
    while True:
        parts = list(boxes.parts(count, room))
        most = max(need(part.exchange) for part in parts)
        if most <= room or count >= boxes.longest:
            return parts
        count = min(max(count + 1, count * most // max(room, 1)), boxes.longest)


@dataclass(frozen=True, eq=False)
class _Boxes:
    """The boxes of a group, one row each.

    Attributes:
        whole: says what the shards are.
        read, filled: where each is.
        kind: equal for boxes of one shape at both ends.
        messages: which messages they make.
        sums: which of the sums of its receiver each is a part of, and which of these parts, shape (2, boxes); None
            without sums.
    """

    whole: Exchange
    read: Slices
    filled: Slices
    kind: Ints
    messages: Messages
    sums: Ints | None

    @staticmethod
    def of(copies: Copies, read: Slices, filled: Slices, whole: Exchange) -> _Boxes | None:
        """The boxes that copies are; None if there are too many kinds of them, or sums of unlike parts."""
        sizes = np.concatenate([np.zeros((len(read.size), 1), np.int64), read.size, filled.size], axis=1)
        kind = np.unique(row_keys(sizes), return_inverse=True)[1]
        messages = Messages.of(np.zeros_like(kind), copies.source, copies.target, kind, copies.volumes)
        sent = messages.kind[messages.sent]
        rounds = messages.rounds
        volumes = np.zeros(rounds.max(initial=-1) + 1, np.int64)
        np.maximum.at(volumes, rounds[messages.sent], messages.volume[messages.sent])
        many = (messages.kind < 0).any() or len(np.unique(sent)) > _MOST_KINDS or len(np.unique(kind)) > 4 * _MOST_KINDS
        if many or volumes.sum() > _MOST_OVER * messages.busiest:
            return None
        sums = None
        if copies.added.any():
            sums = _sums(copies, kind)
            if sums is None:
                return None
        return _Boxes(whole, read, filled, kind, messages, sums)

    @cached_property
    def parts_of_sum(self) -> int:
        """How many parts each sum has; 0 without sums."""
        return 0 if self.sums is None else int(self.sums[1].max()) + 1

    @cached_property
    def longest(self) -> int:
        """Length of the longest box along the dim that it is cut along: more parts than that there cannot be."""
        return int(self.read.size.max(initial=1))

    @cached_property
    def along(self) -> list[tuple[int, int, int] | None]:
        """For each kind the dims of source and target that its boxes are cut along, and how long they are there."""
        found: list[tuple[int, int, int] | None] = []
        for row in np.unique(self.kind, return_index=True)[1].tolist():
            sizes = self.read.size[row].tolist(), self.filled.size[row].tolist()
            read, filled = ([dim for dim, n in enumerate(size) if n > 1] for size in sizes)
            if not read:
                found.append(None)
                continue
            k = int(np.argmax([sizes[0][dim] for dim in read]))
            found.append((read[k], filled[k], sizes[0][read[k]]))
        return found

    def parts(self, count: int, room: int) -> Iterator[Part]:
        """The boxes in ``count`` parts, and in each as many rounds at a time as fit the room."""
        for number in range(count):
            cut = _Cutting(self, count, number)
            messages = [m for m in map(cut.message, self._rounds()) if m.boxes]
            sums = cut.sums()
            exchange = replace(self.whole, sums=tuple(sums), parts=self.parts_of_sum if sums else 0)

            def fit(some: Sequence[Message], exchange: Exchange = exchange) -> bool:
                return need(replace(exchange, messages=tuple(some))) <= room

            for some in [messages] if sums else in_turn(messages, fit):
                yield Part(replace(exchange, messages=tuple(some)), cut.shifts)

    def _rounds(self) -> list[Ints]:
        """Messages that stay, kind by kind, and then those of each round."""
        m = self.messages
        stay = np.flatnonzero(m.rounds < 0)
        groups = [stay[m.kind[stay] == kind] for kind in np.unique(m.kind[stay])]
        return groups + [np.flatnonzero(m.rounds == r) for r in range(m.rounds.max(initial=-1) + 1)]


def _sums(copies: Copies, kind: Ints) -> Ints | None:
    """Which sum of its receiver each copy is a part of, and which part; None if sums have unlike numbers of parts."""
    turn = copies.phases
    box = np.cumsum(turn == 0) - 1
    first = np.flatnonzero(turn == 0)
    count = np.bincount(box)
    receiver = copies.target[first]
    order = np.argsort(receiver, kind="stable")
    begins = np.searchsorted(receiver[order], receiver[order])
    number = np.empty(len(first), np.int64)
    number[order] = np.arange(len(first)) - begins
    alike = (count == count[0]).all() and (kind == kind[0]).all()
    return np.stack([number[box], turn]) if alike else None


@dataclass(frozen=True, eq=False)
class _Cutting:
    """One of the parts that boxes are cut in."""

    boxes: _Boxes
    count: int
    number: int

    def _span(self, kind: int) -> tuple[int, int]:
        """Where the part of a box of this kind begins, and how long it is."""
        along = self.boxes.along[kind]
        if along is None:
            return 0, int(self.number == 0)
        start, stop = (along[2] * k // self.count for k in (self.number, self.number + 1))
        return start, stop - start

    @property
    def shifts(self) -> Shape:
        """Where the parts of boxes begin, for each kind; empty if boxes are whole."""
        return tuple(self._span(kind)[0] for kind in range(len(self.boxes.along))) if self.count > 1 else ()

    def message(self, chosen: Ints) -> Message:
        """Messages of one kind as one round, or as what stays; without cuts if this part has nothing of them."""
        m = self.boxes.messages
        sender, receiver = m.sender[chosen], m.receiver[chosen]
        pairs = tuple(zip(sender.tolist(), receiver.tolist(), strict=True)) if m.rounds[chosen[0]] >= 0 else ()
        cuts = []
        for k in range(int(m.first[chosen[0] + 1] - m.first[chosen[0]])):
            rows = m.rows[m.first[chosen] + k]
            if self._span(int(self.boxes.kind[rows[0]]))[1]:
                cuts.append(self._cut(rows, sender, receiver))
        return Message(tuple(cuts), pairs, tuple(sorted(receiver.tolist())))

    def _cut(self, rows: Ints, sender: Ints, receiver: Ints) -> Box:
        slot, boxes = None, self.boxes
        if boxes.sums is not None:
            number, turn = boxes.sums[:, rows]
            slots = (number * boxes.parts_of_sum + turn)[:, None]
            slot = tuple(k for (k,) in _starts(boxes.whole.devices, receiver, slots))
        read, filled = self._slice(boxes.read, rows, sender, 0), self._slice(boxes.filled, rows, receiver, 1)
        return Box(read, filled, slot)

    def _slice(self, slices: Slices, rows: Ints, devices: Ints, end: int) -> Slice:
        """The slices of some boxes of one kind, one a device: at the source (``end`` 0) or the target."""
        kind = int(self.boxes.kind[rows[0]])
        size, along = slices.size[rows[0]].tolist(), self.boxes.along[kind]
        starts = _starts(self.boxes.whole.devices, devices, slices.start[rows])
        if self.count == 1 or along is None:
            return Slice(tuple(size), starts)
        size[along[end]] = self._span(kind)[1]
        return Slice(tuple(size), starts, (along[end], kind))

    def sums(self) -> list[Sum]:
        """The sums that are made, each of all devices that have one of this number."""
        boxes, made = self.boxes, []
        if boxes.sums is None or not self._span(0)[1]:
            return []
        number, turn = boxes.sums
        receiver = np.empty(len(number), np.int64)
        receiver[boxes.messages.rows] = np.repeat(boxes.messages.receiver, np.diff(boxes.messages.first))
        for k in range(int(number.max()) + 1):
            rows = np.flatnonzero((number == k) & (turn == 0))
            where = self._slice(boxes.filled, rows, receiver[rows], 1)
            made.append(Sum(where, tuple(sorted(receiver[rows].tolist()))))
        return made


def _starts(devices: int, chosen: Ints, start: Ints) -> Starts:
    """A start for each device: its own, or that of the first for those without."""
    table = np.tile(start[0], (devices, 1))
    table[chosen] = start
    return tuple(map(tuple, table.tolist()))
