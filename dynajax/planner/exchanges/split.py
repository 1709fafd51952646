"""An exchange taken apart: what senders cut out, which message goes where, and what receivers put in place.

Rounds are for what travels. A device cuts out only what it sends, one message after the other, and puts in place only
what it receives; so of one kind of message there are as many slots as a device has, not as there are rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynajax.planner.exchanges.exchange import Box, Exchange, Message, Shape, Slice, Starts, Sum
from dynajax.types import Ints


@dataclass(frozen=True)
class Sent:
    """One message on its way.

    Attributes:
        sender, receiver: devices of the group.
        message: row of the exchange's messages that it is of.
        cut, placed: the slot that it is cut out to, and the one that it is put in place from; −1 in another process.
    """

    sender: int
    receiver: int
    message: int
    cut: int
    placed: int


@dataclass(frozen=True, eq=False)
class Half:
    """What senders cut out, or receivers put in place.

    Attributes:
        devices: those that do, by their numbers in the group.
        exchange: what they do, a message for each slot.
        rows: for each slot, the message of the whole exchange that it is of, by device.
    """

    devices: tuple[int, ...]
    exchange: Exchange
    rows: tuple[dict[int, int], ...]

    def told(self, table: Ints, chunks: Sequence[int], missing: int) -> Ints:
        """The chunks that slots are made of, from those that the messages of the whole exchange are.

        Args:
            table: chunks of all messages in turn, shape (devices, chunks).
            chunks: how many each message has.
            missing: stands for no chunk.
        """
        starts = [0, *itertools.accumulate(chunks)]
        made = [np.empty((len(self.devices), 0), table.dtype)]
        for slot, message in zip(self.rows, self.exchange.messages, strict=True):
            part = np.full((len(self.devices), message.chunks), missing, table.dtype)
            for k, device in enumerate(self.devices):
                if device in slot:
                    part[k] = table[k, starts[slot[device]] : starts[slot[device] + 1]]
            made.append(part)
        return np.concatenate(made, axis=1)


@dataclass(frozen=True, eq=False)
class Split:
    """An exchange in three steps.

    Attributes:
        cut: what the senders of this process do.
        placed: what its receivers do.
        sent: what goes from slot to slot.
    """

    cut: Half
    placed: Half
    sent: tuple[Sent, ...]

    @staticmethod
    def of(exchange: Exchange, senders: Sequence[int], receivers: Sequence[int]) -> Split:
        """Take an exchange without a collective apart.

        Args:
            exchange: of a group.
            senders, receivers: devices of this process that cut out, and that put in place.
        """
        cut, placed, sent = _Slots(exchange, senders), _Slots(exchange, receivers), []
        for row, message in enumerate(exchange.messages):
            for a, b in message.pairs or [(k, k) for k in message.receivers]:
                sent.append(Sent(a, b, row, cut.take(row, a), placed.take(row, b)))
        return Split(cut.half(is_cut=True), placed.half(is_cut=False), tuple(sent))


class _Slots:
    """The messages of some devices by slot."""

    def __init__(self, exchange: Exchange, devices: Sequence[int]) -> None:
        self._exchange, self._devices = exchange, tuple(devices)
        self._slot: dict[tuple[object, int], int] = {}
        self._used: dict[tuple[object, int], int] = {}
        self._rows: list[dict[int, int]] = []
        # What is added stays in its order, so that each message has a slot of its own.
        self._is_ordered = any(message.added for message in exchange.messages)

    def take(self, row: int, device: int) -> int:
        """The slot of a device for its message of ``row``."""
        if device not in self._devices:
            return -1
        kind = row if self._is_ordered else _kind(self._exchange.messages[row])
        number = self._used.get((kind, device), 0)
        self._used[kind, device] = number + 1
        slot = self._slot.setdefault((kind, number), len(self._slot))
        self._rows += [{} for _ in range(slot + 1 - len(self._rows))]
        self._rows[slot][device] = row
        return slot

    def half(self, is_cut: bool) -> Half:
        """What the devices do with their slots."""
        messages = tuple(self._message(rows, is_cut) for rows in self._rows)
        place = {device: k for k, device in enumerate(self._devices)}
        sums = tuple(
            Sum(
                replace(s.filled, start=tuple(s.filled.start[d] for d in self._devices)),
                tuple(place[d] for d in s.receivers if d in place),
            )
            for s in self._exchange.sums
        )
        exchange = replace(self._exchange, devices=len(self._devices), messages=messages, sums=() if is_cut else sums)
        return Half(self._devices, replace(exchange, parts=0 if is_cut else exchange.parts), tuple(self._rows))

    def _message(self, rows: dict[int, int], is_cut: bool) -> Message:
        """A slot as a message that stays: of each device its own, with nothing of the other side but its shape."""
        messages = self._exchange.messages
        first = messages[next(iter(rows.values()))]
        cuts = []
        for k, cut in enumerate(first.boxes):
            of = {device: messages[row].boxes[k] for device, row in rows.items()}
            nowhere = ((0,) * len(cut.read.size),) * len(self._devices)
            elsewhere = ((0,) * len(cut.filled.size),) * len(self._devices)
            read = self._starts({d: c.read.start[d] for d, c in of.items()}) if is_cut else nowhere
            filled = elsewhere if is_cut else self._starts({d: c.filled.start[d] for d, c in of.items()})
            slot = None
            if cut.slot is not None and not is_cut:
                slot = tuple(of[d].slot[d] if d in of else 0 for d in self._devices)  # pyright: ignore
            cuts.append(Box(replace(cut.read, start=read), replace(cut.filled, start=filled), slot))
        receivers = tuple(k for k, device in enumerate(self._devices) if device in rows)
        return replace(first, boxes=tuple(cuts), pairs=(), receivers=receivers)

    def _starts(self, start: dict[int, Shape]) -> Starts:
        """A start for each device: its own, or that of the first for those without."""
        other = next(iter(start.values()))
        return tuple(start.get(device, other) for device in self._devices)


def _kind(message: Message) -> object:
    """Equal for messages that one slot can be for."""

    def shape(s: Slice) -> object:
        return s.size, s.along

    return tuple((shape(c.read), shape(c.filled), c.slot is None) for c in message.boxes), message.chunks
