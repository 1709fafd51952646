"""Stages that cut tensors: packed buffers within a budget, sources freed piece by piece, a flat peak.

Every piece is cut in slices, the same for all its holders and readers, and slice after slice is spread
evenly over the stages. So each device has, after each stage, given away and received the same share of
all that it will: what comes in takes the place of what went out, whatever the pattern of who talks to
whom, and no order of stages can wait for itself. Within a stage a device packs what it sends, frees what
was read for the last time, exchanges, allocates, unpacks (see ``planner.stages.live_ranges``). Stages are as few as
the ledger allows: with n of them a device needs about an n-th of what it sends above its base.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.errors import BudgetError
from dynajax.planner.route import Route
from dynajax.planner.stages.footprint import Footprint
from dynajax.planner.stages.live_ranges import Routes, Rows, packed_peak
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.tiling import segment_sum

_TRIES = 16
"""Each adds more stages than the one before: what a device needs above its base does not fall steadily with them."""
_FINENESS = 8
"""A slice is cut again until it is below this share of what a device takes in a stage; twice as fine after each try."""
_MOST = 400_000
"""Slices, beyond one a piece, and stages of devices, beyond which a plan is refused as too fine."""
_LIKE = 8
"""Rows of a slice from which on slices of one more or less are called like."""
_GOLDEN = 0.6180339887498949


def pack_stages(
    routes: Routes, source: Ints, target: Ints, budget: int, donate: bool
) -> tuple[tuple[Route, ...], Footprint]:
    """The routes with each piece cut and put in stages, and the bytes of each device over them.

    Args:
        routes: what to stage; pieces of a route are equal or disjoint.
        source, target: bytes of the layouts on each device, shape (devices,).
        budget: bytes that a device may hold above its base.
        donate: whether sources are freed.

    Raises:
        BudgetError: a device would have to hold more; names a budget that does.
    """
    fitting = _fit(routes, source, target, budget, donate)
    if fitting is None:
        least = _least_budget(routes, source, target, budget, donate)
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for packed stages of this move; the "
            f"smallest budget that does is {least} bytes ({format_bytes(least)})"
        )
    return fitting


def _least_budget(routes: Routes, source: Ints, target: Ints, budget: int, donate: bool) -> int:
    """A budget that does, where one that is smaller by a byte, or by a hundredth, does not."""
    low, high = budget, 2 * budget + 1
    while _fit(routes, source, target, high, donate) is None:
        low, high = high, 2 * high
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if _fit(routes, source, target, middle, donate) else (middle, high)
    return high


def _fit(
    routes: Routes, source: Ints, target: Ints, budget: int, donate: bool
) -> tuple[tuple[Route, ...], Footprint] | None:
    """The fewest stages, found by a few tries, that stay within the budget; None if none does."""
    load, pieces = _largest_load(Rows.of(routes), len(source)), sum(len(r.lo) for r, _ in routes)
    element = math.gcd(*(itemsize for _, itemsize in routes)) or 1
    budget -= budget % element
    stages, fineness = max(-(-load // max(budget, 1)), 1), _FINENESS
    for tries in range(_TRIES):
        grain = max(load // (stages * fineness), 1)
        if _slices(routes, stages, grain) - pieces + (stages - 1) * len(source) > _MOST:
            return None
        staged = tuple(_staged(route, itemsize, stages, grain) for route, itemsize in routes)
        peak = packed_peak([(r, itemsize) for r, (_, itemsize) in zip(staged, routes, strict=True)], source, donate)
        footprint = Footprint(source, target, peak)
        extra = footprint.extra(donate)
        if extra <= budget:
            return staged, footprint
        if grain == 1 and stages > 2 * load:
            return None
        more = stages + 1 + stages * tries // _TRIES
        stages, fineness = max(more, min(-(-stages * extra // max(budget, 1)), 2 * stages)), 2 * fineness
    return None


def _largest_load(rows: Rows, devices: int) -> int:
    """The most bytes that a device sends, or receives and copies."""
    sent = rows.nbytes * (rows.sender != rows.receiver)
    loads = segment_sum(rows.sender, sent, devices), segment_sum(rows.receiver, rows.nbytes, devices)
    return int(max(load.max(initial=0) for load in loads))


def _slices(routes: Routes, stages: int, grain: int) -> int:
    """About how many slices there would be."""
    return sum(int(np.clip(-(-r.volumes * itemsize // grain), 1, stages).sum()) for r, itemsize in routes)


def _staged(route: Route, itemsize: int, stages: int, grain: int) -> Route:
    """The route with pieces cut in up to ``stages`` slices of ``grain`` bytes or more, each in its stage."""
    slices = np.clip(-(-route.volumes * itemsize // grain), 1, stages)
    row, part, count, lo, hi = _cut(route.lo, route.hi, slices)
    _, piece = np.unique(route.place, return_inverse=True)
    phase = (piece.ravel() * _GOLDEN) % 1.0
    relayed = route.relayed[row]
    stage = ((part + phase[row]) / count * stages).astype(np.int64) + relayed
    return replace(
        route,
        lo=lo,
        hi=hi,
        target_row=route.target_row[row],
        source_row=route.source_row[row],
        relayed=relayed,
        added=route.added[row],
        stage=stage,
    )


def _cut(lo: Ints, hi: Ints, slices: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut box k in ``slices[k]`` like boxes: along the outermost dim that is long enough to make them of like size.

    If no dim is, it is cut along the outermost dims first, in somewhat more boxes.

    Returns:
        ``row, part, count, lo, hi``: slice ``part`` of ``count`` of the box ``row``, in row-major order.
    """
    extent = hi - lo
    parts = np.ones_like(extent)
    count = np.ones(len(lo), np.int64)
    enough = extent >= _LIKE * slices[:, None]
    for dim in range(extent.shape[1]):
        waits = enough[:, dim + 1 :].any(axis=1) & ~enough[:, dim]
        parts[:, dim] = np.where(waits, 1, np.minimum(extent[:, dim], -(-slices // count)))
        count = count * parts[:, dim]
    row, part = algebra.expand(np.zeros_like(count), count)
    left, low, high = part.copy(), lo[row], hi[row]
    for dim in reversed(range(extent.shape[1])):
        n, size = parts[row, dim], extent[row, dim]
        left, k = np.divmod(left, n)
        high[:, dim] = low[:, dim] + (k + 1) * size // n
        low[:, dim] += k * size // n
    return row, part, count[row], low, high
