"""Messages: what one device has for another, and the rounds in which all of them travel.

A message is all that goes from a device to another in one phase; in a later phase goes what arrived before. Messages
of one *kind* are cut alike, so a round of them needs no padding: rounds are the colours of a graph for each phase and
kind (``planner.exchanges.colouring``). Where there are too many kinds for that, messages are cut in chunks instead.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.planner.exchanges.colouring import coloured
from dynajax.types import Ints
from dynajax.vps.algebra import grouped, row_keys
from dynajax.vps.tiling import segment_sum

MOST_BOXES = 16
"""Boxes of a message that is cut out box by box."""


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages, one row each; those of a device to itself are what stays on it.

    Attributes:
        phase, sender, receiver: shape (messages,), sorted.
        kind: equal for messages whose boxes are alike, one by one; −1 if there are too many boxes to tell.
        volume: elements of each.
        rows: the copies of message k are ``rows[first[k]:first[k + 1]]``, in their order.
    """

    phase: Ints
    sender: Ints
    receiver: Ints
    kind: Ints
    volume: Ints
    rows: Ints
    first: Ints

    @staticmethod
    def of(phase: Ints, sender: Ints, receiver: Ints, kind: Ints, volume: Ints) -> Messages:
        """The messages that copies make.

        Args:
            phase, sender, receiver: of each copy.
            kind: equal for copies of boxes that are alike.
            volume: elements of each copy.
        """
        rows = np.lexsort((receiver, sender, phase))
        ends = np.stack([phase, sender, receiver], axis=1)[rows]
        begins = np.flatnonzero(np.append(True, (ends[1:] != ends[:-1]).any(axis=1))[: len(rows)])
        first = np.append(begins, len(rows))
        message = np.repeat(np.arange(len(begins)), np.diff(first))
        made = ends[begins]
        return Messages(
            made[:, 0],
            made[:, 1],
            made[:, 2],
            _kinds(kind[rows], first),
            segment_sum(message, volume[rows], len(begins)),
            rows,
            first,
        )

    @cached_property
    def sent(self) -> np.ndarray:
        """True for messages that leave their device."""
        return self.sender != self.receiver

    @cached_property
    def rounds(self) -> Ints:
        """The round of each message that is sent, counted from 0 through all phases and kinds; −1 for what stays.

        What stays on some devices shares a round with what is sent to others, if that makes no rounds more: then all
        devices do alike in it.
        """
        number, count = np.full(len(self.sender), -1), 0
        devices = len(np.union1d(self.sender, self.receiver))
        rows, first = grouped(np.stack([self.phase, self.kind], axis=1))
        for span in itertools.pairwise(first.tolist()):
            mine = rows[slice(*span)]
            sent = mine[self.sent[mine]]
            colour = coloured(self.sender[sent], self.receiver[sent])
            used = int(colour.max(initial=-1)) + 1
            if used and len(sent) < len(mine) < len(sent) + devices:
                with_rest = coloured(self.sender[mine], self.receiver[mine])
                if int(with_rest.max()) < used:
                    sent, colour = mine, with_rest
            number[sent] = count + colour
            count += used
        return number

    @cached_property
    def busiest(self) -> int:
        """The most elements that one device sends or receives."""
        size = 1 + int(max(self.sender.max(initial=-1), self.receiver.max(initial=-1)))
        volume = self.volume[self.sent]
        return int(
            max(segment_sum(end[self.sent], volume, size).max(initial=0) for end in (self.sender, self.receiver))
        )


def _kinds(kind: Ints, first: Ints) -> Ints:
    """Equal for messages whose rows have equal kinds in turn; −1 for those of more than ``MOST_BOXES`` rows."""
    count = np.diff(first)
    width = min(int(count.max(initial=0)), MOST_BOXES)
    listed = np.full((len(count), width), -1)
    message = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(kind)) - np.repeat(first[:-1], count)
    few = place < width
    listed[message[few], place[few]] = kind[few]
    if not listed.size:
        return np.zeros(len(count), np.int64)
    _, number = np.unique(row_keys(listed), return_inverse=True)
    return np.where(count > MOST_BOXES, -1, number)


@dataclass(frozen=True, eq=False)
class EvenPieces:
    """Pieces of messages, all as long, in rounds.

    Attributes:
        size: chunks of each piece; the last of a message may have less to carry.
        message: the message that each is a piece of.
        start: its first chunk there.
        round: in which it travels, counted from 0.
    """

    size: int
    message: Ints
    start: Ints
    round: Ints


def in_pieces(sender: Ints, receiver: Ints, count: Ints, most: int, start_up: int) -> list[EvenPieces]:
    """Messages of any numbers of chunks, cut so that rounds carry pieces of one length and at most a tenth of padding.

    Either all are cut as long, or those of like length are; whichever takes less time.

    Args:
        sender, receiver, count: devices and chunks of each message.
        most: chunks of a piece, at most.
        start_up: chunks that could travel while a round begins.
    """
    whole = -(-count // -(-count // most))
    ways = [_clustered(count, whole)]
    ways += [[_cut(count, np.arange(len(count)), 1 << k)] for k in range(min(int(whole.max()), most).bit_length())]
    found: list[tuple[int, list[tuple[int, Ints, Ints]]]] = []
    for way in ways:
        carried = sum(size * len(message) for size, message, _ in way)
        if 10 * carried <= 11 * int(count.sum()):
            rounds = [_most(sender[message], receiver[message]) for _, message, _ in way]
            found.append((sum(n * (size + start_up) for n, (size, *_) in zip(rounds, way, strict=True)), way))
    _, best = min(found, key=lambda cost_and_way: cost_and_way[0])
    return [EvenPieces(size, m, start, coloured(sender[m], receiver[m])) for size, m, start in best]


def _clustered(count: Ints, whole: Ints) -> list[tuple[int, Ints, Ints]]:
    """Messages of like length cut in pieces as long as those of the longest of them."""
    ways, left = [], np.argsort(-whole, kind="stable")
    while len(left):
        size = int(whole[left[0]])
        alike = 21 * whole[left] >= 20 * size
        ways.append(_cut(count, left[alike], size))
        left = left[~alike]
    return ways


def _cut(count: Ints, message: Ints, size: int) -> tuple[int, Ints, Ints]:
    """Messages cut in pieces of ``size``: that, and the message and the start of each piece."""
    pieces = -(-count[message] // size)
    which = np.repeat(np.arange(len(message)), pieces)
    number = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return size, message[which], number * size


def _most(sender: Ints, receiver: Ints) -> int:
    """The most messages that one device sends, or receives."""
    return max(int(np.unique(end, return_counts=True)[1].max(initial=0)) for end in (sender, receiver))
