"""Memory of a move whose shards are freed whole: bytes of each device over the stages, and an order that fits a budget.

In a stage the targets of its tensors are allocated, filled, and then their sources are freed. A
buffer that stays as it is counts once. The base that a budget lies above is max(source, target) of
a device if the source is given up, source + target if it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.errors import BudgetError
from dynajax.planner.stages.footprint import Footprint
from dynajax.types import Ints


@dataclass(frozen=True, eq=False)
class Shards:
    """Shards of the arrays of one layout.

    Attributes:
        nbytes: bytes of each on each device, shape (arrays, devices).
        kept: bytes of those whose buffer serves before and after, same shape.
        tensors: what each array stores parts of; None if array k stores tensor k and nothing else.
    """

    nbytes: Ints
    kept: Ints
    tensors: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def changed(self) -> Ints:
        """Bytes that are allocated or freed."""
        return self.nbytes - self.kept

    def in_order(self, order: Ints, last: bool) -> Ints:
        """Bytes that come or go with each tensor of an order: with the first, or the last, that an array stores."""
        if self.tensors is None:
            return self.changed[order]
        place = np.argsort(order)
        turn = [place[list(rows)].max() if last else place[list(rows)].min() for rows in self.tensors]
        out = np.zeros((len(order), self.nbytes.shape[1]), np.int64)
        np.add.at(out, np.asarray(turn, np.int64), self.changed)
        return out


@dataclass(frozen=True, eq=False)
class Buffers:
    """Shards of all arrays before and after. An array is made for its first tensor and freed after its last.

    Attributes:
        source, target: of the layouts; their tensors are the same.
        count: tensors.
    """

    source: Shards
    target: Shards
    count: int

    def allocated(self, order: Ints) -> Ints:
        """Bytes that each tensor of an order allocates, shape (tensors, devices)."""
        return self.target.in_order(order, last=False)

    def freed(self, order: Ints) -> Ints:
        """Bytes that each tensor of an order frees, shape (tensors, devices)."""
        return self.source.in_order(order, last=True)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """Tensors that arrays tie together, group by group; None if each stands alone."""
        if self.source.tensors is None and self.target.tensors is None:
            return None
        label = list(range(self.count))
        members = {k: [k] for k in label}
        for rows in (*(self.source.tensors or ()), *(self.target.tensors or ())):
            for row in rows[1:]:
                keep, gone = label[rows[0]], label[row]
                if keep != gone:
                    for k in members[gone]:
                        label[k] = keep
                    members[keep] += members.pop(gone)
        return tuple(tuple(rows) for rows in members.values())

    def footprint(self, stages: Sequence[Sequence[int]], donate: bool) -> Footprint:
        """Bytes over the stages; without donation nothing is freed."""
        source, target = self.source.nbytes.sum(axis=0), self.target.nbytes.sum(axis=0)
        order = np.asarray([k for stage in stages for k in stage], np.int64)
        allocated, freed = self.allocated(order), self.freed(order)
        live, start = source, 0
        peak = live.copy()
        for stage in stages:
            rows = slice(start, start + len(stage))
            live = live + allocated[rows].sum(axis=0)
            peak = np.maximum(peak, live)
            if donate:
                live = live - freed[rows].sum(axis=0)
            start += len(stage)
        return Footprint(source, target, peak)


def plan_stages(
    buffers: Buffers, budget: int, donate: bool, names: Sequence[str], at_once: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Stages as large as the budget and ``at_once`` allow, in an order that frees memory early.

    Args:
        buffers: bytes of every tensor.
        budget: bytes allowed above the base.
        donate: whether sources are freed.
        names: paths of the tensors, for the error.
        at_once: bytes that a stage of several tensors may allocate on all devices together; None for any.

    Raises:
        BudgetError: no order was found that fits; names the leaf and the smallest budget that would do.
    """
    if not len(names):
        return ()
    if not donate:
        return (tuple(range(len(names))),)
    base = np.maximum(buffers.source.nbytes.sum(axis=0), buffers.target.nbytes.sum(axis=0))
    best: tuple[int, int] | None = None
    for order in _orders(buffers):
        needed, worst = _needed(buffers, order, base)
        if needed <= budget:
            return _grouped(buffers, order, base + budget, at_once)
        best = min(best or (needed, worst), (needed, worst))
    assert best is not None
    raise BudgetError(
        f"a budget of {format_bytes(budget)} ({budget} bytes) is too small: {names[best[1]]} is freed only after its "
        f"target is whole; the smallest budget that does is {best[0]} bytes ({format_bytes(best[0])})"
    )


def _orders(buffers: Buffers) -> Iterator[Ints]:
    """Orders worth trying, the cheap one first: by bytes freed on the whole, then step by step on the worst device.

    Steps are taken from the start, and from the end backwards: a way back holds as much as the way there.
    """
    alone = np.arange(buffers.count)
    allocated, freed = buffers.allocated(alone), buffers.freed(alone)
    groups = buffers.groups
    if groups is not None:
        allocated, freed = (np.stack([x[list(rows)].sum(axis=0) for rows in groups]) for x in (allocated, freed))
    base = buffers.source.nbytes.sum(axis=0) - buffers.target.nbytes.sum(axis=0)
    net = allocated - freed
    cheap = np.lexsort((np.arange(len(net)), allocated.max(axis=1), net.sum(axis=1)))
    orders = (
        lambda: cheap,
        lambda: _greedy(allocated, freed, np.minimum(base, 0)),
        lambda: _greedy(freed, allocated, np.minimum(-base, 0))[::-1],
    )
    for order in orders:
        if groups is None:
            yield order()
            continue
        for inside in _inside(buffers):
            yield np.asarray([k for g in order() for k in sorted(groups[g], key=inside.__getitem__)], np.int64)


def _inside(buffers: Buffers) -> Iterator[list[tuple[int, int, int]]]:
    """Keys that sort the tensors of a group along the source arrays, and along the target arrays."""
    spans = []
    for shards in (buffers.source, buffers.target):
        span = [(shards.nbytes.shape[0], -1)] * buffers.count
        for array, rows in enumerate(shards.tensors or [(k,) for k in range(buffers.count)]):
            for row in rows:
                span[row] = (min(span[row][0], array), max(span[row][1], array))
        spans.append([(last, first, row) for row, (first, last) in enumerate(span)])
    yield from spans


def _greedy(allocated: Ints, freed: Ints, live: Ints) -> Ints:
    """Always next what takes the worst device least above its base; equal ones share a try.

    Args:
        allocated, freed: bytes of each on each device.
        live: bytes that each device holds at the start, counted from its base.
    """
    kinds, kind = np.unique(np.concatenate([allocated, freed], axis=1), axis=0, return_inverse=True)
    allocated, freed = np.split(kinds, 2, axis=1)
    members = [np.flatnonzero(kind.ravel() == k)[::-1].tolist() for k in range(len(kinds))]
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
    allocated = buffers.allocated(order)
    net = allocated - buffers.freed(order)
    before = np.cumsum(net, axis=0) - net + buffers.source.nbytes.sum(axis=0) - base
    extra = (before + allocated).max(axis=1)
    return max(int(extra.max()), 0), int(order[int(extra.argmax())])


def _grouped(buffers: Buffers, order: Ints, limit: Ints, at_once: int | None) -> tuple[tuple[int, ...], ...]:
    """Neighbours in the order share a stage while every device, and all together, stay below their limits."""
    allocated, freed = np.cumsum(buffers.allocated(order), axis=0), np.cumsum(buffers.freed(order), axis=0)
    live = buffers.source.nbytes.sum(axis=0)
    if at_once is not None:  # as one device more, that starts each stage with nothing
        allocated, freed = (np.column_stack([x, allocated.sum(axis=1)]) for x in (allocated, freed))
        live, limit = np.append(live, 0), np.append(limit, at_once)
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
