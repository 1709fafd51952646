"""Exchanges that are one native collective: every device of a group has a box of one size for every other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dynajax.planner.exchanges.exchange import Collective, Exchange, Grid, Shape
from dynajax.planner.exchanges.part import Part, need
from dynajax.planner.exchanges.slices import Slices
from dynajax.planner.route import Copies
from dynajax.types import Ints

_FEWEST = 4
"""Devices for which that is worth while."""


def by_collective(copies: Copies, read: Slices, filled: Slices, whole: Exchange, room: int) -> list[Part] | None:
    """What a group does by an all-to-all or an all-gather; None if it is neither.

    Args:
        copies: between the devices of the group.
        read, filled: the slices that they are.
        whole: says what the shards are.
        room: bytes that a device may need beside them.
    """
    devices = whole.devices
    if len(whole.source) != len(whole.target):
        return None
    pairs = np.unique(copies.source * devices + copies.target)
    sizes = np.concatenate([read.size, filled.size])
    complete = len(pairs) == len(copies.source) == devices**2
    if devices < _FEWEST or not complete or copies.added.any() or (sizes != sizes[0]).any():
        return None
    size, source = tuple(sizes[0].tolist()), None
    target = _grid(whole.target, size, filled.start, copies.target, copies.source, devices)
    if size != whole.source:
        source = _grid(whole.source, size, read.start, copies.source, copies.target, devices)
    if target is None or (source is None and size != whole.source):
        return None
    return _parts(replace(whole, collective=Collective(source, target)), size, room)


def _grid(shape: Shape, size: Shape, start: Ints, owner: Ints, peer: Ints, devices: int) -> Grid | None:
    """The grid of boxes of ``size`` that the shard of each device is; None if it is none, or has other boxes."""
    counts = tuple(n // max(m, 1) for n, m in zip(shape, size, strict=True))
    whole = all(n == m * k for n, m, k in zip(shape, size, counts, strict=True))
    if not whole or math.prod(counts) != devices or (start % np.asarray(size)).any():
        return None
    order = np.full((devices, devices), -1)
    order[owner, np.ravel_multi_index(tuple((start // np.asarray(size)).T), counts)] = peer
    return None if (order < 0).any() else Grid(counts, tuple(map(tuple, order.tolist())))


def _parts(exchange: Exchange, size: Shape, room: int) -> list[Part]:
    """The exchange, in as many parts of its boxes as fit the room."""
    if need(exchange) <= room or max(size, default=1) == 1:
        return [Part(exchange)]
    dim = int(np.argmax(size))
    count = min(-(-need(exchange) // max(room, 1)), size[dim])
    while count < size[dim] and need(_part(exchange, dim, -(-size[dim] // count))) > room:
        count += 1
    return list(_cut(exchange, dim, size[dim], count))


def _cut(exchange: Exchange, dim: int, length: int, count: int) -> Iterator[Part]:
    for a, b in itertools.pairwise(length * k // count for k in range(count + 1)):
        yield Part(_part(exchange, dim, b - a), (a,))


def _part(exchange: Exchange, dim: int, length: int) -> Exchange:
    assert exchange.collective is not None
    return replace(exchange, collective=replace(exchange.collective, part=(dim, length)))
