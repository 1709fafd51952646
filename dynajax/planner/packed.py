"""Stages that cut tensors: packed buffers within a budget, sources freed piece by piece, a flat peak.

In a stage every device packs what it sends, frees the sources whose last reader that was, exchanges
buffers, allocates its targets, unpacks, copies what moves within it, and frees the rest. Pieces larger
than a third of the budget are cut, and a device sends at most a third, receives (with its own copies)
at most a third and ends at most a third above its base, so no moment of a stage exceeds the budget:
live + sent + received, and live − freed + 2 · received + copied, stay below base + budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.errors import BudgetError
from dynajax.planner.ledger import Routes, Rows, alike, kept_bytes
from dynajax.planner.route import Route
from dynajax.vps import algebra
from dynajax.vps.region import Ints
from dynajax.vps.tiling import sums


def pack_stages(routes: Routes, source: Ints, target: Ints, budget: int, donate: bool) -> tuple[Route, ...]:
    """The routes with pieces cut and each piece put in a stage.

    Args:
        routes: what to stage.
        source, target: bytes of the layouts on each device, shape (devices,).
        budget: bytes that a device may hold above its base.
        donate: whether sources are freed.

    Raises:
        BudgetError: a device would have to hold more; names a budget that does.
    """
    staged = _try(routes, source, target, budget, donate)
    if staged is None:
        least = _least_budget(routes, source, target, budget, donate)
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for packed stages, a third of which has "
            f"to hold an element of all tensors that move alike; the smallest budget that does is {least} bytes "
            f"({format_bytes(least)})"
        )
    return staged


def _least_budget(routes: Routes, source: Ints, target: Ints, budget: int, donate: bool) -> int:
    """A budget that does, where one byte less does not."""
    low, high = budget, max(2 * budget, 3)
    while _try(routes, source, target, high, donate) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _try(routes, source, target, middle, donate) else (middle, high)
    return high


def _try(routes: Routes, source: Ints, target: Ints, budget: int, donate: bool) -> tuple[Route, ...] | None:
    """The staged routes, or None if the budget is too small."""
    cap = budget // 3
    if any(itemsize > cap and len(route.lo) for route, itemsize in routes):
        return None
    cut = [(_cut(route, cap // itemsize), itemsize) for route, itemsize in routes]
    rows = _in_order(Rows.of(cut), len(source))
    kept = kept_bytes(routes, len(source))
    stage = _Scheduler(rows, source, target, kept, cap, donate).run()
    if stage is None:
        return None
    staged: list[Route] = []
    for k, (route, _) in enumerate(cut):
        mine = np.flatnonzero(rows.route == k)
        of_row = np.empty(len(mine), np.int64)
        of_row[rows.row[mine]] = stage[mine]
        staged.append(replace(route, stage=of_row))
    return tuple(staged)


def _cut(route: Route, limit: int) -> Route:
    """Cut pieces of more than ``limit`` elements along their outermost dims."""
    while (large := np.flatnonzero(route.volumes > limit)).size:
        extent = route.hi[large] - route.lo[large]
        dim = (extent > 1).argmax(axis=1)
        parts = np.ones(len(route.lo), np.int64)
        parts[large] = np.minimum(-(-route.volumes[large] // limit), extent[np.arange(len(large)), dim])
        along = np.full(len(route.lo), -1)
        along[large] = dim
        row, part = algebra.expand(np.zeros_like(parts), parts)
        route = route.take(row)
        cut = np.flatnonzero(along[row] >= 0)
        d, k, n = along[row[cut]], part[cut], parts[row[cut]]
        low, size = route.lo[cut, d], (route.hi - route.lo)[cut, d]
        route.lo[cut, d], route.hi[cut, d] = low + k * size // n, low + (k + 1) * size // n
    return route


def _in_order(rows: Rows, devices: int) -> Rows:
    """Rows that their receiver takes early before those that another takes late.

    A receiver goes through its partners in XOR order, so that two that exchange do so at the same time, and what
    one receives takes the place of what it has sent.
    """
    by_receiver = np.lexsort((rows.sender ^ rows.receiver, rows.receiver))
    size = rows.nbytes[by_receiver]
    before = np.cumsum(size) - size
    start = before[np.searchsorted(rows.receiver[by_receiver], rows.receiver[by_receiver])]
    total = np.maximum(sums(rows.receiver, rows.nbytes, devices), 1)
    progress = np.empty(len(by_receiver))
    progress[by_receiver] = (before - start + size / 2) / total[rows.receiver[by_receiver]]
    return rows.take(np.argsort(progress, kind="stable"))


def _feeds(rows: Rows) -> Ints:
    """For each relayed row the row that brings what it passes on; −1 for the others."""
    direct, passed = np.flatnonzero(~rows.relayed), np.flatnonzero(rows.relayed)
    feed = np.full(len(rows.row), -1)
    if len(passed):
        both = np.concatenate([direct, passed])
        holder = np.concatenate([rows.receiver[direct], rows.sender[passed]])
        kind = alike(rows.route[both], rows.place[both], holder)
        giver = np.full(int(kind.max()) + 1, -1)
        giver[kind[: len(direct)]] = direct
        feed[passed] = giver[kind[len(direct) :]]
    return feed


class _Scheduler:
    """Puts every row in the earliest stage that has room for it, in order.

    Args:
        rows: all pieces.
        source, target: bytes of the layouts on each device.
        kept: bytes of the buffers that stay as they are.
        cap: bytes a device may send, and receive, in a stage, and may be above its base after it.
        donate: whether sources are freed.
    """

    def __init__(self, rows: Rows, source: Ints, target: Ints, kept: Ints, cap: int, donate: bool) -> None:
        self.rows, self.feed, self.cap, self.devices = rows, _feeds(rows), cap, len(source)
        self.donate = donate
        self.limit = (np.maximum(source, target) if donate else source + target) + cap
        self.stage = np.full(len(rows.row), -1)
        direct = rows.unit >= 0
        self.readers = np.bincount(rows.unit[direct], minlength=1)
        self.unit_bytes = np.zeros(len(self.readers), np.int64)
        self.unit_bytes[rows.unit[direct]] = rows.nbytes[direct]
        self.unit_holder = np.zeros(len(self.readers), np.int64)
        self.unit_holder[rows.unit[direct]] = rows.sender[direct]
        read = sums(self.unit_holder, self.unit_bytes, self.devices)
        self.live = kept + read if donate else source.copy()

    def run(self) -> Ints | None:
        """Stage of each row, or None if some row never finds room."""
        left = np.arange(len(self.rows.row))
        stage = 0
        while len(left):
            taken = self._fitting(self._window(left))
            if not len(taken):
                return None
            self.stage[taken] = stage
            freed = self._freed(taken) if self.donate else 0
            self.live += sums(self.rows.receiver[taken], self.rows.nbytes[taken], self.devices) - freed
            np.subtract.at(self.readers, self.rows.unit[taken[self.rows.unit[taken] >= 0]], 1)
            left = left[self.stage[left] < 0]
            stage += 1
        return self.stage

    def _window(self, left: Ints) -> Ints:
        """The next rows of every receiver, a few times what it can take; those that wait for a feed are left out."""
        rows = self.rows
        feed = self.feed[left]
        left = left[(feed < 0) | (self.stage[feed] >= 0)]
        return left[_running(rows.receiver[left], rows.nbytes[left]) <= 4 * self.cap]

    def _fitting(self, rows: Ints) -> Ints:
        """Those of ``rows`` that fit in one stage."""
        r, taken = self.rows, np.zeros(0, np.int64)
        for _ in range(3):
            rest = np.setdiff1d(rows, taken, assume_unique=True)
            sent = sums(r.sender[taken], self._sent(taken), self.devices)
            got = sums(r.receiver[taken], r.nbytes[taken], self.devices)
            fits = (sent[r.sender[rest]] + _running(r.sender[rest], self._sent(rest)) <= self.cap) & (
                got[r.receiver[rest]] + _running(r.receiver[rest], r.nbytes[rest]) <= self.cap
            )
            if not fits.any():
                break
            taken = np.sort(np.concatenate([taken, rest[fits]]))
        return self._bounded(taken)

    def _sent(self, rows: Ints) -> Ints:
        """Bytes that each row takes of its sender's send buffer."""
        return np.where(self.rows.sender[rows] == self.rows.receiver[rows], 0, self.rows.nbytes[rows])

    def _bounded(self, taken: Ints) -> Ints:
        """``taken`` without the last rows of receivers that would end too far above their base."""
        r = self.rows
        while len(taken):
            grown = sums(r.receiver[taken], r.nbytes[taken], self.devices)
            over = self.live + grown - (self._freed(taken) if self.donate else 0) - self.limit
            if not ((over > 0) & (grown > 0)).any():
                break
            backwards = taken[::-1]
            done = _running(r.receiver[backwards], r.nbytes[backwards]) - r.nbytes[backwards]
            taken = backwards[done >= over[r.receiver[backwards]]][::-1]
        return taken

    def _freed(self, taken: Ints) -> Ints:
        """Bytes of each device whose last readers are among ``taken``."""
        unit = self.rows.unit[taken]
        unit, reads = np.unique(unit[unit >= 0], return_counts=True)
        last = unit[self.readers[unit] == reads]
        return sums(self.unit_holder[last], self.unit_bytes[last], self.devices)


def _running(device: Ints, nbytes: Ints) -> Ints:
    """Bytes up to and with each row, of the rows of its device, in order."""
    order = np.argsort(device, kind="stable")
    total = np.cumsum(nbytes[order])
    first = np.searchsorted(device[order], device[order])
    running = np.empty_like(total)
    running[order] = total - (total - nbytes[order])[first]
    return running
