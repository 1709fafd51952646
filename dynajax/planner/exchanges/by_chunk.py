"""Exchanges in rounds of messages made of chunks: for boxes of many sizes, and for those that are no slices.

A chunk is the longest run of elements that lies side by side at both ends of every copy, at multiples of its length.
Which chunks a message is made of is told to the programs in tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dynajax.errors import LayoutError
from dynajax.planner.exchanges.exchange import Exchange, Message
from dynajax.planner.exchanges.messages import Messages, in_pieces
from dynajax.planner.exchanges.part import Part, in_turn, need
from dynajax.planner.route import Copies
from dynajax.types import Ints
from dynajax.vps.algebra import expand

NOWHERE = 2**31 - 1
"""The chunk of a target that does not exist: what comes for it is dropped."""
_START_UP = 1 << 16
"""Bytes that could travel while a round begins."""
_MOST_ROUNDS = 32
"""Of a program: it takes as long to compile as it has rounds."""


def by_chunk(copies: Copies, whole: Exchange, room: int, itemsize: int) -> list[Part]:
    """What a group does in rounds of chunks.

    Args:
        copies: between the devices of the group.
        whole: says what the shards are.
        room: bytes that a device may need beside them.
        itemsize: bytes of an element.

    Raises:
        LayoutError: a shard has more chunks than 32 bits count.
    """
    sizes = math.prod(whole.source), math.prod(whole.target)
    run = longest_run(copies, *sizes)
    most = max(room // (2 * itemsize), 1)
    chunk = run if run <= most else max(k for k in _divisors(run) if k <= most)
    if max(sizes) // chunk >= NOWHERE:
        raise LayoutError(
            f"a shard of {max(sizes)} elements that moves in runs of {chunk} has more runs than 32 bits count; choose "
            "layouts that cut it into longer runs, or smaller shards"
        )
    chunks = _Chunks(copies, chunk)
    whole = replace(whole, chunk=chunk)
    fitting = max((room - need(whole)) // (2 * itemsize * chunk + 8), 1)
    rounds = chunks.rounds(fitting, max(_START_UP // (itemsize * chunk), 1))

    def exchange(some: Sequence[_Round]) -> Exchange:
        return replace(whole, messages=tuple(r.done for r in some))

    together = in_turn(rounds, lambda some: len(some) <= _MOST_ROUNDS and need(exchange(some)) <= room)
    return [Part(exchange(some), (), _Named(chunks, tuple(some))) for some in together]


def longest_run(c: Copies, source: int, target: int) -> int:
    """Elements that lie side by side, at multiples of their number, at both ends of every copy; 1 if nothing does.

    Args:
        c: boxes to copy.
        source, target: elements of either buffer.
    """
    run = np.ones(len(c.extent), np.int64)
    dense = np.ones(len(c.extent), bool)
    common = math.gcd(source, target, *np.unique(c.source_offset).tolist(), *np.unique(c.target_offset).tolist())
    for dim in reversed(range(c.extent.shape[1])):
        extent, strides = c.extent[:, dim], (c.source_stride[:, dim], c.target_stride[:, dim])
        several = extent > 1
        dense &= ~several | ((strides[0] == run) & (strides[1] == run))
        run = np.where(dense, run * extent, run)
        for stride in strides:
            common = math.gcd(common, *np.unique(stride[several & ~dense]).tolist())
    return max(math.gcd(common, *np.unique(run).tolist()), 1)


def _divisors(number: int) -> Iterator[int]:
    for k in range(1, math.isqrt(number) + 1):
        if number % k == 0:
            yield from (k, number // k)


@dataclass(frozen=True, eq=False)
class _Round:
    """Messages, or pieces of them, that travel together or stay.

    Attributes:
        done: what programs do with them.
        message, start: which messages they are of, and their first chunks.
    """

    done: Message
    message: Ints
    start: Ints


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Copies cut in chunks.

    Attributes:
        copies: what is copied.
        size: elements of a chunk.
    """

    copies: Copies
    size: int

    @cached_property
    def messages(self) -> Messages:
        """The messages that the copies make, measured in chunks; what is added goes in a phase of its own."""
        c = self.copies
        counts = c.volumes // self.size
        return Messages.of(c.phases, c.source, c.target, np.zeros_like(counts), counts)

    @cached_property
    def _ends(self) -> Ints:
        """All chunks counted through, message after message: the number past the last of each copy."""
        return np.cumsum(self.copies.volumes[self.messages.rows] // self.size)

    def rounds(self, most: int, start_up: int) -> Iterator[_Round]:
        """The messages phase by phase: what stays, then what is sent; see ``in_pieces``."""
        m = self.messages
        for phase in np.unique(m.phase).tolist():
            mine = m.phase == phase
            stay, sent = np.flatnonzero(mine & ~m.sent), np.flatnonzero(mine & m.sent)
            longest = int(m.volume[stay].max(initial=0))
            for start in range(0, longest, most):
                some = stay[m.volume[stay] > start]
                yield self._round(some, np.full(len(some), start), min(most, longest - start), phase > 0)
            if len(sent):
                for pieces in in_pieces(m.sender[sent], m.receiver[sent], m.volume[sent], most, start_up):
                    for number in range(int(pieces.round.max()) + 1):
                        now = pieces.round == number
                        yield self._round(sent[pieces.message[now]], pieces.start[now], pieces.size, phase > 0)

    def _round(self, message: Ints, start: Ints, size: int, added: bool) -> _Round:
        ends = self.messages.sender[message].tolist(), self.messages.receiver[message].tolist()
        pairs = tuple((a, b) for a, b in zip(*ends, strict=True) if a != b)
        return _Round(Message((), pairs, tuple(sorted(ends[1])), size, added), message, start)

    def addresses(self, message: Ints, start: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
        """The chunks of pieces: which piece each is of, its place there, and where it is in source and target."""
        c, m = self.copies, self.messages
        counts = c.volumes[m.rows] // self.size
        first = (self._ends - counts)[m.first[:-1]][message] + start
        piece, number = expand(first, first + np.minimum(size, m.volume[message] - start))
        at = np.searchsorted(self._ends, number, side="right")
        row, left = m.rows[at], (number - (self._ends - counts)[at]) * self.size
        source, target = c.source_offset[row], c.target_offset[row]
        for dim in reversed(range(c.extent.shape[1])):
            left, index = np.divmod(left, c.extent[row, dim])
            source = source + index * c.source_stride[row, dim]
            target = target + index * c.target_stride[row, dim]
        return piece, number - first[piece], source // self.size, target // self.size


@dataclass(frozen=True, eq=False)
class _Named:
    """Names the chunks of some rounds; see ``Tables``."""

    chunks: _Chunks
    rounds: tuple[_Round, ...]

    def __call__(self, devices: Ints) -> tuple[np.ndarray, np.ndarray]:
        """The chunks that the messages of some devices of the group are made of."""
        m, width = self.chunks.messages, sum(r.done.chunks for r in self.rounds)
        read, filled = (np.full((len(devices), width), value, np.int32) for value in (0, NOWHERE))
        at = 0
        for r in self.rounds:
            mine = np.isin(m.sender[r.message], devices) | np.isin(m.receiver[r.message], devices)
            message, start = r.message[mine], r.start[mine]
            piece, place, source, target = self.chunks.addresses(message, start, r.done.chunks)
            for table, end, chunk in ((read, m.sender, source), (filled, m.receiver, target)):
                owner = end[message][piece]
                here = np.isin(owner, devices)
                table[np.searchsorted(devices, owner[here]), at + place[here]] = chunk[here]
            at += r.done.chunks
        return read, filled
