"""Stages of whole shards: an order of the tensors that fits a budget, and the bytes of each device over it.

A stage allocates the target shards of its tensors, fills them, and then frees their source shards. A buffer that stays
as it is counts once. The base of a device, above which the budget lies, is the larger of its source and its target if
the source is given up, and their sum if it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.errors import BudgetError
from dynajax.planner.stages.footprint import Footprint
from dynajax.types import Bools, Ints


@dataclass(frozen=True, eq=False)
class Shards:
    """Bytes of the shards of all arrays of one layout.

    Attributes:
        nbytes: bytes of each array on each device, shape (arrays, devices).
        kept: bytes of those shards whose buffer serves before and after, shape (arrays, devices).
        tensors: rows of the tensors that each array stores parts of; None if array k stores tensor k and nothing else.
    """

    nbytes: Ints
    kept: Ints
    tensors: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def changed(self) -> Ints:
        """Bytes that are allocated or freed."""
        return self.nbytes - self.kept

    def in_order(self, order: Ints, last: bool) -> Ints:
        """Bytes of arrays by the tensor that they are allocated or freed with.

        Args:
            order: rows of the tensors in the order in which they are moved, shape (tensors,).
            last: count an array with the last of its tensors, as it is freed, not with the first.

        Returns:
            Bytes for each place in the order, shape (tensors, devices).
        """
        if self.tensors is None:
            return self.changed[order]
        position = np.argsort(order)
        when = [position[list(rows)].max() if last else position[list(rows)].min() for rows in self.tensors]
        out = np.zeros((len(order), self.nbytes.shape[1]), np.int64)
        np.add.at(out, np.asarray(when, np.int64), self.changed)
        return out


@dataclass(frozen=True, eq=False)
class Allocations:
    """What the tensors of a move allocate and free. An array is allocated for its first tensor, freed after its last.

    Attributes:
        source, target: shards of the arrays before and after.
        count: how many tensors there are.
        given: True for source arrays that are given up, shape (arrays,).
    """

    source: Shards
    target: Shards
    count: int
    given: Bools

    def allocated(self, order: Ints) -> Ints:
        """Bytes that each tensor of an order allocates, shape (tensors, devices)."""
        return self.target.in_order(order, last=False)

    def freed(self, order: Ints) -> Ints:
        """Bytes that each tensor of an order frees, shape (tensors, devices)."""
        return replace(self.source, nbytes=self.source.nbytes * self.given[:, None]).in_order(order, last=True)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """Tensors that share arrays, directly or through others, group by group; None if no array has two tensors."""
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

    @property
    def base(self) -> Ints:
        """What a device holds before or after the move, whichever is more, shape (devices,)."""
        return self.footprint(()).base

    def footprint(self, stages: Sequence[Sequence[int]]) -> Footprint:
        """Bytes of each device over stages of tensors."""
        source, target = self.source.nbytes.sum(axis=0), self.target.nbytes.sum(axis=0)
        order = np.asarray([k for stage in stages for k in stage], np.int64)
        allocated, freed = (self.allocated(order), self.freed(order)) if len(order) else (order, order)
        live, start = source, 0
        peak = live.copy()
        for stage in stages:
            rows = slice(start, start + len(stage))
            live = live + allocated[rows].sum(axis=0)
            peak = np.maximum(peak, live)
            live = live - freed[rows].sum(axis=0)
            start += len(stage)
        return Footprint(source, target, peak, self.source.nbytes[~self.given].sum(axis=0))


def plan_stages(
    allocations: Allocations, budget: int, names: Sequence[str], at_once: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Stages as large as the budget and ``at_once`` allow, in an order that frees memory early.

    Args:
        allocations: bytes of every tensor.
        budget: bytes allowed above the base.
        names: paths of the tensors, for the error.
        at_once: bytes that a stage of several tensors may allocate on all devices together; None for any.

    Raises:
        BudgetError: no order was found that fits; names the leaf and the smallest budget that would do.
    """
    if not len(names):
        return ()
    if not allocations.given.any():
        return (tuple(range(len(names))),)
    base = allocations.base
    best: tuple[int, int] | None = None
    for order in _orders(allocations):
        needed, worst = _needed(allocations, order, base)
        if needed <= budget:
            return _grouped(allocations, order, base + budget, at_once)
        best = min(best or (needed, worst), (needed, worst))
    assert best is not None
    raise BudgetError(
        f"a budget of {format_bytes(budget)} ({budget} bytes) is too small: {names[best[1]]} is freed only after its "
        f"target is whole; the smallest budget that does is {best[0]} bytes ({format_bytes(best[0])})"
    )


def _orders(allocations: Allocations) -> Iterator[Ints]:
    """Orders worth trying, the one that is cheap to compute first.

    The first sorts tensors by the bytes that they add on all devices together. The second takes step by step the tensor
    that is best for the worst device. The third takes such steps from the end backwards, as for the move back: a device
    holds as much on the way back as on the way there.
    """
    alone = np.arange(allocations.count)
    allocated, freed = allocations.allocated(alone), allocations.freed(alone)
    groups = allocations.groups
    if groups is not None:
        allocated, freed = (np.stack([x[list(rows)].sum(axis=0) for rows in groups]) for x in (allocated, freed))
    base = allocations.source.nbytes.sum(axis=0) - allocations.target.nbytes.sum(axis=0)
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
        for inside in _inside(allocations):
            yield np.asarray([k for g in order() for k in sorted(groups[g], key=inside.__getitem__)], np.int64)


def _inside(allocations: Allocations) -> Iterator[list[tuple[int, int, int]]]:
    """Sort keys of all tensors: first by the last source array that each lies in, then by the last target array."""
    spans = []
    for shards in (allocations.source, allocations.target):
        span = [(shards.nbytes.shape[0], -1)] * allocations.count
        for array, rows in enumerate(shards.tensors or [(k,) for k in range(allocations.count)]):
            for row in rows:
                span[row] = (min(span[row][0], array), max(span[row][1], array))
        spans.append([(last, first, row) for row, (first, last) in enumerate(span)])
    yield from spans


def _greedy(allocated: Ints, freed: Ints, live: Ints) -> Ints:
    """An order in which each step is the row whose allocation lifts the worst device least above its base.

    Rows that allocate and free the same bytes are tried once.

    Args:
        allocated, freed: bytes of each row on each device, shape (rows, devices).
        live: bytes that each device holds at the start, counted from its base, shape (devices,).
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


def _needed(allocations: Allocations, order: Ints, base: Ints) -> tuple[int, int]:
    """The budget that an order needs with one tensor a stage, and the row of the tensor that needs it."""
    allocated = allocations.allocated(order)
    net = allocated - allocations.freed(order)
    before = np.cumsum(net, axis=0) - net + allocations.source.nbytes.sum(axis=0) - base
    extra = (before + allocated).max(axis=1)
    return max(int(extra.max()), 0), int(order[int(extra.argmax())])


def _grouped(allocations: Allocations, order: Ints, limit: Ints, at_once: int | None) -> tuple[tuple[int, ...], ...]:
    """Stages of an order: neighbours share one while each device, and all of them together, stay below their limits."""
    allocated, freed = np.cumsum(allocations.allocated(order), axis=0), np.cumsum(allocations.freed(order), axis=0)
    live = allocations.source.nbytes.sum(axis=0)
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
