"""Memory of a move whose shards are freed whole: bytes of each device over the stages, and an order that fits a budget.

In a stage the targets of its tensors are allocated, filled, and then their sources are freed. A
buffer that stays as it is counts once. The base that a budget lies above is max(source, target) of
a device if the source is given up, source + target if it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.errors import BudgetError
from dynajax.vps.region import Ints


class Memory(Enum):
    """What can be freed, and when."""

    SHARDS = "shards"
    """A shard is one buffer, freed whole: arrays of jax. A stage holds whole tensors."""
    PACKED = "packed"
    """State lies in pieces, without padding, each freed when its last reader has it; see ``planner.packed``."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """Bytes of each device.

    Attributes:
        source, target: bytes of the layouts, shape (devices,).
        peak: the most bytes alive at once, shape (devices,).
    """

    source: Ints
    target: Ints
    peak: Ints

    def extra(self, donate: bool) -> int:
        """The most that a device's peak lies above its base, at least 0."""
        base = np.maximum(self.source, self.target) if donate else self.source + self.target
        return int(np.maximum(self.peak - base, 0).max(initial=0))


@dataclass(frozen=True, eq=False)
class Buffers:
    """Bytes of every tensor on every device, each of shape (tensors, devices).

    Attributes:
        source, target: bytes of the layouts.
        kept: bytes whose buffer serves both.
    """

    source: Ints
    target: Ints
    kept: Ints

    @cached_property
    def allocated(self) -> Ints:
        """Bytes that each tensor allocates."""
        return self.target - self.kept

    @cached_property
    def freed(self) -> Ints:
        """Bytes that each tensor frees."""
        return self.source - self.kept

    def footprint(self, stages: Sequence[Sequence[int]], donate: bool) -> Footprint:
        """Bytes over the stages; without donation nothing is freed."""
        live = self.source.sum(axis=0)
        peak = live.copy()
        for stage in stages:
            rows = list(stage)
            live = live + self.allocated[rows].sum(axis=0)
            peak = np.maximum(peak, live)
            if donate:
                live = live - self.freed[rows].sum(axis=0)
        return Footprint(self.source.sum(axis=0), self.target.sum(axis=0), peak)


def plan_stages(buffers: Buffers, budget: int, donate: bool, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Stages as large as the budget allows, in an order that frees memory early.

    Args:
        buffers: bytes of every tensor.
        budget: bytes allowed above the base.
        donate: whether sources are freed.
        names: paths of the tensors, for the error.

    Raises:
        BudgetError: no order was found that fits; names the leaf and the smallest budget that would do.
    """
    if not len(names):
        return ()
    if not donate:
        return (tuple(range(len(names))),)
    base = np.maximum(buffers.source.sum(axis=0), buffers.target.sum(axis=0))
    best: tuple[int, int] | None = None
    for order in _orders(buffers):
        needed, worst = _needed(buffers, order, base)
        if needed <= budget:
            return _grouped(buffers, order, base + budget)
        best = min(best or (needed, worst), (needed, worst))
    assert best is not None
    raise BudgetError(
        f"a budget of {format_bytes(budget)} ({budget} bytes) is too small: {names[best[1]]} is freed only after its "
        f"target is whole; the smallest budget that does is {best[0]} bytes ({format_bytes(best[0])})"
    )


def _orders(buffers: Buffers) -> Iterator[Ints]:
    """Orders worth trying, the cheap one first: by bytes freed on the whole, then step by step on the worst device."""
    net = buffers.allocated - buffers.freed
    yield np.lexsort((np.arange(len(net)), buffers.allocated.max(axis=1), net.sum(axis=1)))
    yield _greedy(buffers)


def _greedy(buffers: Buffers) -> Ints:
    """Always next the tensor that takes the worst device least above its base; equal tensors share a try."""
    both = np.concatenate([buffers.allocated, buffers.freed], axis=1)
    kinds, kind = np.unique(both, axis=0, return_inverse=True)
    allocated, freed = np.split(kinds, 2, axis=1)
    members = [np.flatnonzero(kind.ravel() == k)[::-1].tolist() for k in range(len(kinds))]
    live = buffers.source.sum(axis=0) - np.maximum(buffers.source.sum(axis=0), buffers.target.sum(axis=0))
    left = np.arange(len(kinds))
    order: list[int] = []
    while len(left):
        worst = np.maximum((live + allocated[left]).max(axis=1), 0)
        growth = np.maximum(live + allocated[left] - freed[left], 0).sum(axis=1)
        k = int(left[int(np.lexsort((left, growth, worst))[0])])
        order.append(members[k].pop())
        live = live + allocated[k] - freed[k]
        if not members[k]:
            left = left[left != k]
    return np.asarray(order)


def _needed(buffers: Buffers, order: Ints, base: Ints) -> tuple[int, int]:
    """The budget that stages of one tensor each need in this order, and the tensor that needs it."""
    net = buffers.allocated[order] - buffers.freed[order]
    before = np.cumsum(net, axis=0) - net + buffers.source.sum(axis=0) - base
    extra = (before + buffers.allocated[order]).max(axis=1)
    return max(int(extra.max()), 0), int(order[int(extra.argmax())])


def _grouped(buffers: Buffers, order: Ints, limit: Ints) -> tuple[tuple[int, ...], ...]:
    """Neighbours in the order share a stage while every device stays below its limit."""
    allocated, freed = np.cumsum(buffers.allocated[order], axis=0), np.cumsum(buffers.freed[order], axis=0)
    live = buffers.source.sum(axis=0)
    stages: list[tuple[int, ...]] = []
    start = 0
    while start < len(order):
        stop = start + _fitting(allocated[start:], limit - live)
        stages.append(tuple(order[start:stop].tolist()))
        step = allocated[stop - 1] - freed[stop - 1]
        live = live + step
        allocated, freed = allocated - allocated[stop - 1], freed - freed[stop - 1]
        start = stop
    return tuple(stages)


def _fitting(allocated: Ints, room: Ints) -> int:
    """How many rows of cumulative bytes fit in the room; at least one."""
    count, window = 0, 16
    while count < len(allocated):
        rows = allocated[count : count + window]
        over = (rows > room).any(axis=1)
        if over.any():
            return max(count + int(over.argmax()), 1)
        count, window = count + len(rows), 2 * window
    return max(count, 1)
