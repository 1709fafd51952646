"""From the copies between two arrays to what the groups of devices that talk have to do.

A group does its exchange by one native collective, in rounds of boxes, or in rounds of chunks, whichever it is first
fit for. What does not fit the room that is given is cut in parts, done one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dynajax.planner.exchanges.by_box import by_box
from dynajax.planner.exchanges.by_chunk import by_chunk
from dynajax.planner.exchanges.collective import by_collective
from dynajax.planner.exchanges.exchange import Exchange
from dynajax.planner.exchanges.part import Part, retyped, travels, wire_dtype
from dynajax.planner.exchanges.slices import Slices
from dynajax.planner.route import Copies
from dynajax.types import Ints


@dataclass(frozen=True, eq=False)
class Group:
    """Devices that talk, directly or through others, and what they do.

    Attributes:
        devices: their numbers, ascending; exchanges number them from 0.
        parts: what they do, one after the other.
    """

    devices: Ints
    parts: tuple[Part, ...]

    @property
    def travels(self) -> int:
        """Elements that cross from device to device, padding included."""
        return sum(travels(part.exchange) for part in self.parts)


_Way = Callable[[Copies, Exchange, int], Sequence[Part] | None]
_SlicesWay = Callable[[Copies, Slices, Slices, Exchange, int], Sequence[Part] | None]

_MOST_UNLIKE = 8
"""Programs that components which are not alike are compiled to: if there would be more, one program does for all."""
_TOGETHER = 8
"""Devices that components of one process share programs up to; larger groups of NCCL, for one, are slower."""


def groups_of(copies: Copies, whole: Exchange, room: int, process: Ints) -> list[Group]:
    """What has to be done so that target shards are filled.

    Args:
        copies: between devices; none is relayed. Their elements are those of the shards.
        whole: says what the shards are.
        room: bytes that a device may need beside the shards.
        process: of each device.

    Raises:
        LayoutError: a shard has more chunks than programs can name.
    """
    known: dict[object, tuple[Part, ...] | None] = {}
    # No cut makes a shard smaller that becomes another type.
    room = max(room - retyped(whole), room // 8)

    def parts(rows: Ints, *ways: _Way) -> tuple[Ints, tuple[Part, ...] | None]:
        """The devices of some copies, and what they do by the first way that they are fit for, if there is one."""
        devices, mine = _numbered(copies, rows)
        key = ways, *(np.ascontiguousarray(getattr(mine, f.name)).tobytes() for f in fields(Copies))
        if key not in known:
            found = (way(mine, replace(whole, devices=len(devices)), room) for way in ways)
            known[key] = next((tuple(some) for some in found if some is not None), None)
        return devices, known[key]

    made: list[Group] = []
    rest: list[Ints] = []
    for rows in _components(copies):
        devices, done = parts(rows, _by_collective)
        if done is None:
            rest.append(rows)
        else:
            made.append(Group(devices, done))
    together = [(some, *parts(np.concatenate(some), _by_box)) for some in _together(copies, rest, process)]
    if len({id(done) for *_, done in together}) > _MOST_UNLIKE:
        devices, done = parts(np.concatenate(rest), _by_box)
        together = [(rest, devices, done)] if done else together
    for some, devices, done in together:
        alone = [(devices, done)] if done else [parts(rows, _by_box, _by_chunk) for rows in some]
        made += [Group(devices, done) for devices, done in alone if done is not None]
    return made


def _together(copies: Copies, components: Sequence[Ints], process: Ints) -> list[list[Ints]]:
    """Components that share programs: small ones of one process, since every call of a program takes its time."""
    made: list[list[Ints]] = []
    latest: dict[int, tuple[list[Ints], int]] = {}
    for rows in components:
        devices = np.union1d(copies.source[rows], copies.target[rows])
        of = np.unique(process[devices])
        some, count = latest.get(int(of[0]), ([], _TOGETHER)) if len(of) == 1 else ([], _TOGETHER)
        if count + len(devices) <= _TOGETHER:
            some.append(rows)
        else:
            some, count = [rows], 0
            made.append(some)
        if len(of) == 1:
            latest[int(of[0])] = some, count + len(devices)
    return made


def taken(copies: Copies, rows: Ints | np.ndarray[Any, Any]) -> Copies:
    """Some rows of copies."""
    return Copies(*(getattr(copies, f.name)[rows] for f in fields(Copies)))


def _components(copies: Copies) -> list[Ints]:
    """The copies of each set of devices that talk, directly or through others; those that talk to nobody are one."""
    if not len(copies.source):
        return []
    size = 1 + int(max(copies.source.max(), copies.target.max()))
    graph = coo_array((np.ones(len(copies.source)), (copies.source, copies.target)), shape=(size, size))
    label = connected_components(graph, directed=False)[1]
    label[np.bincount(label)[label] == 1] = -1
    of_row = label[copies.source]
    order = np.argsort(of_row, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(of_row[order])) + 1)


def _numbered(copies: Copies, rows: Ints) -> tuple[Ints, Copies]:
    """The devices of some copies, and the copies between devices as numbered there."""
    rows = np.sort(rows)
    devices = np.union1d(copies.source[rows], copies.target[rows])
    mine = taken(copies, rows)
    return devices, replace(
        mine, source=np.searchsorted(devices, mine.source), target=np.searchsorted(devices, mine.target)
    )


def _slices(copies: Copies, whole: Exchange) -> tuple[Slices, Slices] | None:
    """The slices of source and target shards that copies are; None if some are none."""
    read = Slices.of(whole.source, copies.source_offset, copies.source_stride, copies.extent)
    filled = Slices.of(whole.target, copies.target_offset, copies.target_stride, copies.extent)
    return None if read is None or filled is None else (read, filled)


def _of_slices(way: _SlicesWay) -> _Way:
    """A way to exchange slices of shards, fit for no copies that are none."""

    def exchanged(copies: Copies, whole: Exchange, room: int) -> Sequence[Part] | None:
        slices = _slices(copies, whole)
        return None if slices is None else way(copies, *slices, whole, room)

    return exchanged


_by_collective, _by_box = _of_slices(by_collective), _of_slices(by_box)


def _by_chunk(copies: Copies, whole: Exchange, room: int) -> list[Part]:
    return by_chunk(copies, whole, room, wire_dtype(whole.dtype).itemsize)
