"""Stages that cut tensors (``Granularity.PACKED``): within a budget, sources freed piece by piece, with a flat peak.

Every piece is cut in slices, at the same places for all its holders and readers, and its slices are spread evenly over
the stages. So after each stage every device has sent and received the same share of all that it will: arriving bytes
take the place of bytes that left, whoever talks to whom, and no order of stages can wait for itself. What a device does
within a stage is in ``planner.stages.live_ranges``. With n stages a device needs about an n-th of what it sends above
its base; there are as few as the live ranges allow.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.errors import BudgetError
from dynajax.planner.route import Route
from dynajax.planner.stages.footprint import Footprint
from dynajax.planner.stages.live_ranges import PieceTable, Routes, packed_peak
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.tiling import segment_sum

_TRIES = 16
"""Numbers of stages to try. Each is larger than the one before: the peak does not fall steadily with the stages."""
_FINENESS = 8
"""A slice has at most this share of the bytes that a device may send in a stage. Doubled after each try."""
_MOST = 400_000
"""A plan is refused as too fine if slices, less one a piece, and stages times devices are together more than this."""
_LIKE = 8
"""A dim is long enough for slices of like size if each slice gets at least this many of its rows."""
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
    """A sufficient budget. One that is smaller by a hundredth of it, or by a byte, is not sufficient."""
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
    load, pieces = _largest_load(PieceTable.of(routes), len(source)), sum(len(r.lo) for r, _ in routes)
    element = math.gcd(*(itemsize for _, itemsize in routes)) or 1
    budget -= budget % element
    stages, fineness = max(-(-load // max(budget, 1)), 1), _FINENESS
    for tries in range(_TRIES):
        grain = max(load // (stages * fineness), 1)
        if _slices(routes, stages, grain) - pieces + (stages - 1) * len(source) > _MOST:
            return None
        staged = tuple(_staged(route, itemsize, stages, grain) for route, itemsize in routes)
        peak = packed_peak([(r, itemsize) for r, (_, itemsize) in zip(staged, routes, strict=True)], source, donate)
        footprint = Footprint(source, target, peak, np.zeros_like(source) if donate else source)
        extra = footprint.extra
        if extra <= budget:
            return staged, footprint
        if grain == 1 and stages > 2 * load:
            return None
        more = stages + 1 + stages * tries // _TRIES
        stages, fineness = max(more, min(-(-stages * extra // max(budget, 1)), 2 * stages)), 2 * fineness
    return None


def _largest_load(pieces: PieceTable, devices: int) -> int:
    """The most bytes that a device sends, or receives and copies."""
    sent = pieces.nbytes * (pieces.sender != pieces.receiver)
    loads = segment_sum(pieces.sender, sent, devices), segment_sum(pieces.receiver, pieces.nbytes, devices)
    return int(max(load.max(initial=0) for load in loads))


def _slices(routes: Routes, stages: int, grain: int) -> int:
    """About how many slices there would be."""
    return sum(int(np.clip(-(-r.volumes * itemsize // grain), 1, stages).sum()) for r, itemsize in routes)


def _staged(route: Route, itemsize: int, stages: int, grain: int) -> Route:
    """The route with pieces cut in up to ``stages`` slices of ``grain`` bytes or more, each in its stage."""
    slices = np.clip(-(-route.volumes * itemsize // grain), 1, stages)
    row, part, count, lo, hi = _cut(route.lo, route.hi, slices)
    _, piece = np.unique(route.flat_index, return_inverse=True)
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
    """Cut box k in ``slices[k]`` boxes of like size, along the outermost dim that is long enough for that.

    A box without such a dim is cut along its outermost dims, one after the other, in somewhat more boxes.

    Args:
        lo, hi: shape (boxes, rank).
        slices: shape (boxes,).

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
