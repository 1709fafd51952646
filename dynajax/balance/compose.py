"""The mix of pipelines for given sequences: a dynamic programme over devices and length intervals.

Sorted by length, sequences are cut into intervals, and each interval goes to d copies of one kind of
pipeline. Relaxation: inside an interval work is fluid, so its end is work / d, but not before its
longest sequence has passed. Rounding: d is whole, and the copies fit the devices. With best(n, j) the
earliest end of the j shortest groups on n devices,

    best(n, j) = min over kind k, copies d, group i < j of max(best(n − d·g_k, i), end_k(d, i, j))

This is the programme of Hydraulis (papers' notation: best(n, s)), with the constant of micro-batches
and the longest sequence charged. All n, i are computed at once for each j, k, d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

import numpy as np

from dynajax.balance.cost import PipelineCost
from dynajax.balance.estimate import PLANNED
from dynajax.errors import BalanceError
from dynajax.types import Bools, Floats, Ints

_EVERY = 8  # more copies than these are tried in steps of about a tenth
_UNITS = 128  # on more devices than these, copies come in twos, fours, …


@dataclass(frozen=True, eq=False)
class Groups:
    """Sequences in groups of like length, the shortest first; a group is not cut.

    Attributes:
        longest: int64 (groups,), tokens of the longest sequence of each.
        tokens: float64 (groups,), sum of the lengths.
        squares: float64 (groups,), sum of their squares.
    """

    longest: Ints
    tokens: Floats
    squares: Floats


@dataclass(frozen=True)
class Mix:
    """How many pipelines of each kind.

    Attributes:
        copies: one number for each kind.
        ms: when they are done by the relaxation.
    """

    copies: tuple[int, ...]
    ms: float


def length_groups(tokens: Ints, count: int, rooms: Sequence[int], batches: int = 1) -> Groups:
    """About ``count`` groups of equal tokens; the longest sequences alone; cut where a pipeline's room ends.

    Args:
        tokens: int64 (sequences,), at least one.
        count: groups wanted.
        rooms: the most tokens that each kind of pipeline holds.
        batches: how many batches ``tokens`` come from; sums are of the mean batch.
    """
    ranked = np.sort(tokens)
    sums = ranked.cumsum()
    even = np.searchsorted(sums, np.linspace(0, sums[-1], count + 1)[1:-1])
    alone = np.arange(max(ranked.size - count // 3, 0), ranked.size)
    ends = np.unique(np.concatenate([even, alone, np.searchsorted(ranked, rooms, "right"), [ranked.size]]))
    ends = ends[ends > 0]
    starts = np.concatenate([[0], ends[:-1]])
    sizes = ranked.astype(np.float64)
    parts = [np.add.reduceat(values, starts) / batches for values in (sizes, sizes**2)]
    return Groups(ranked[ends - 1], *parts)


def compose(groups: Groups, kinds: Sequence[PipelineCost], devices: int) -> Mix:
    """The mix of pipelines on exactly ``devices`` that ends earliest by the relaxation.

    Raises:
        BalanceError: no mix holds the longest sequence on so many devices.
    """
    programme = _solve(groups, kinds, devices)
    mix = _traced(programme, kinds, devices, groups.longest.size)
    if mix is None:
        raise BalanceError(
            f"{devices} devices cannot be filled with {', '.join(str(c.pipeline) for c in kinds)} so that "
            f"sequences of {groups.longest[-1]} tokens fit"
        )
    return mix


def prefixes(groups: Groups, kinds: Sequence[PipelineCost], devices: int) -> tuple[Mix, ...]:
    """The mixes that are best when no sequence is longer than those of the first 1, 2, … groups; each once."""
    programme = _solve(groups, kinds, devices)
    mixes = (_traced(programme, kinds, devices, j) for j in range(1, groups.longest.size + 1))
    return tuple({mix.copies: mix for mix in mixes if mix is not None}.values())


def _traced(programme: _Programme, kinds: Sequence[PipelineCost], devices: int, j: int) -> Mix | None:
    """The mix behind ``best`` of the first ``j`` groups, all devices used; None if there is none."""
    n = devices // programme.unit
    ms = float(programme.best[n, j])
    if not np.isfinite(ms):
        return None
    copies = np.zeros(len(kinds), np.int64)
    while j:
        k, d, j_before = programme.choice[n, j].tolist()
        copies[k] += d
        n, j = n - d * kinds[k].devices // programme.unit, j_before
    _use_up(copies, kinds, n * programme.unit)
    return Mix(tuple(copies.tolist()), ms)


@dataclass(frozen=True, eq=False)
class _Programme:
    """``best`` (units + 1, groups + 1) in ms, and the (kind, copies, first group) that gives it.

    ``unit`` is the devices that are counted as one.
    """

    best: Floats
    choice: Ints
    unit: int


def _solve(groups: Groups, kinds: Sequence[PipelineCost], devices: int) -> _Programme:
    unit = _unit(kinds, devices)
    units = devices // unit
    count = groups.longest.size
    best = np.full((units + 1, count + 1), np.inf)
    best[:, 0] = np.where(_fillable(kinds, devices)[::unit], 0.0, np.inf)  # what is left over is filled at the end
    choice = np.full((units + 1, count + 1, 3), -1, np.int64)
    sums = [np.concatenate([[0.0], part.cumsum()]) for part in (groups.tokens, groups.squares)]
    for j in range(1, count + 1):
        tokens, squares = (part[j] - part[:j] for part in sums)
        for k, cost in enumerate(kinds):
            if cost.max_len < groups.longest[j - 1]:
                continue
            whole = lcm(cost.devices, unit)
            copies = _numbers(devices // whole) * (whole // cost.devices)
            ends = _ends(cost, tokens, squares, int(groups.longest[j - 1]), copies)
            for d, end in zip(copies.tolist(), ends, strict=True):
                size = d * cost.devices // unit
                later = np.maximum(best[: units + 1 - size, :j], end)
                start = later.argmin(axis=1)
                value = later[np.arange(start.size), start]
                better = (value < best[size:, j]).nonzero()[0]
                if better.size:
                    best[size + better, j] = value[better]
                    choice[size + better, j, :2] = k, d
                    choice[size + better, j, 2] = start[better]
    return _Programme(best, choice, unit)


def _unit(kinds: Sequence[PipelineCost], devices: int) -> int:
    """The devices that all kinds take multiples of, doubled until at most ``_UNITS`` of them are left."""
    unit = gcd(devices, *(cost.devices for cost in kinds))
    while devices // unit > _UNITS and devices % (2 * unit) == 0:
        unit *= 2
    return unit


def _ends(cost: PipelineCost, tokens: Floats, squares: Floats, longest: int, copies: Ints) -> Floats:
    """When ``copies`` of a pipeline are done with intervals, (copies, intervals) in ms."""
    work = (cost.a * squares + (cost.b + cost.c / cost.max_len) * tokens) / copies[:, None]
    slowest = (cost.a * longest + cost.b) * longest
    deep = cost.pp - 1
    mean = np.sqrt(cost.c * work / deep) if deep else 0.0
    bubble = deep * (PLANNED.share * np.maximum(slowest, mean) + (1 - PLANNED.share) * mean + cost.c)
    return np.maximum(work + bubble, cost.pp * (slowest + cost.c))


def _numbers(most: int) -> Ints:
    """1, 2, … ``_EVERY``, then in growing steps, to ``most``."""
    grown = [*range(1, min(most, _EVERY) + 1)]
    while grown and grown[-1] < most:
        grown.append(min(grown[-1] + max(grown[-1] // _EVERY, 1), most))
    return np.array(grown, np.int64)


def _fillable(kinds: Sequence[PipelineCost], devices: int) -> Bools:
    """Which numbers of devices, 0 to ``devices``, pipelines of ``kinds`` can fill."""
    able = np.zeros(devices + 1, bool)
    able[0] = True
    for count in range(1, devices + 1):
        able[count] = any(cost.devices <= count and able[count - cost.devices] for cost in kinds)
    return able


def _use_up(copies: Ints, kinds: Sequence[PipelineCost], left: int) -> None:
    """Add pipelines to ``copies`` until none of ``left`` devices is left: kinds there already first, then large."""
    able = _fillable(kinds, left)
    while left:
        fitting = [k for k, cost in enumerate(kinds) if cost.devices <= left and able[left - cost.devices]]
        k = max(fitting, key=lambda k: (copies[k] > 0, kinds[k].devices, -k))
        copies[k] += 1
        left -= kinds[k].devices
