"""Slow and sure: exact dispatch and packing, and what no packing can beat, to judge the fast ones by.

``milp_*`` hand the problem to HiGHS (scipy) with a time limit and return its proven bound with its
best solution; ``exact_*`` try everything and are for a handful of sequences. ``benchmarks/balance.py`` uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from dynajax.balance.cost import PipelineCost
from dynajax.balance.local_search import NEVER
from dynajax.errors import BalanceError
from dynajax.types import Floats, Ints

_ENUMERABLE = 2_000_000


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the referee found.

    Attributes:
        ms: price of the best solution; infinite if none was found in time.
        bound: no solution is cheaper than this.
        bins: int64 (items,), the bin of each item in that solution; empty if there is none.
    """

    ms: float
    bound: float
    bins: Ints


def milp_dispatch(tokens: Ints, costs: Sequence[PipelineCost], seconds: float) -> Verdict:
    """The dispatch that minimises the last of ``Σ T + (pp − 1)·max T`` over pipelines (Hydraulis' programme).

    Args:
        tokens: int64 (sequences,).
        costs: one for each pipeline.
        seconds: time limit of the solver.
    """
    times = np.stack([cost.times(tokens) for cost in costs])
    bubbles = np.array([cost.pp - 1.0 for cost in costs])
    return _min_max(times, bubbles, np.full(len(costs), np.inf), tokens, seconds)


def milp_packing(times: Floats, tokens: Ints, count: int, room: int, seconds: float) -> Verdict:
    """``count`` packs of at most ``room`` tokens whose heaviest is as light as possible."""
    alike = np.tile(times, (count, 1))
    return _min_max(alike, np.zeros(count), np.full(count, float(room)), tokens, seconds)


def exact_dispatch(tokens: Ints, costs: Sequence[PipelineCost], may_idle: bool = False) -> Verdict:
    """``milp_dispatch`` by trying every assignment; ``NEVER`` or more if the sequences do not fit.

    Args:
        tokens: int64 (sequences,).
        costs: one for each pipeline.
        may_idle: whether a pipeline may stay without work although there are sequences enough.
    """
    times = np.minimum(np.stack([cost.times(tokens) for cost in costs]), NEVER)
    every = _every_assignment(tokens.size, len(costs))
    if not may_idle and tokens.size >= len(costs):
        every = every[np.all([(every == index).any(axis=1) for index in range(len(costs))], axis=0)]
    done = np.zeros(len(every))
    for index, cost in enumerate(costs):
        held = np.where(every == index, times[index], 0.0)
        done = np.maximum(done, held.sum(axis=1) + (cost.pp - 1) * held.max(axis=1))
    best = int(done.argmin())
    return Verdict(float(done[best]), float(done[best]), every[best])


def exact_packing(times: Floats, tokens: Ints, count: int, room: int) -> Verdict:
    """``milp_packing`` by trying every assignment; infinite if the sequences do not fit."""
    every = _every_assignment(tokens.size, count)
    heaviest = np.zeros(len(every))
    for index in range(count):
        held = every == index
        heaviest = np.maximum(heaviest, np.where(held @ tokens <= room, held @ times, np.inf))
    best = int(heaviest.argmin())
    return Verdict(float(heaviest[best]), float(heaviest[best]), every[best])


def lightest_ms(times: Floats, count: int) -> float:
    """No way to make ``count`` packs has a heaviest pack cheaper than this.

    It is at least the mean, the most expensive sequence, and, where i + 1 sequences share ``count``
    packs, the cheapest ⌈(i + 1) / count⌉ of the i + 1 most expensive.
    """
    ranked = np.sort(np.asarray(times, np.float64))[::-1]
    if not ranked.size:
        return 0.0
    sums = np.concatenate([[0.0], ranked.cumsum()])
    end = np.arange(1, ranked.size + 1)
    together = sums[end] - sums[end + (-end // count)]
    return float(max(sums[-1] / count, together.max()))


def _every_assignment(items: int, bins: int) -> Ints:
    """All ways to put items in bins, (bins ** items, items)."""
    if bins**items > _ENUMERABLE:
        raise BalanceError(f"{items} sequences on {bins} bins are too many to try them all: use the MILP")
    return np.indices((bins,) * items).reshape(items, -1).T


def _min_max(times: Floats, bubbles: Floats, room: Floats, tokens: Ints, seconds: float) -> Verdict:
    """Minimise the last bin; variables are assignments (bins × items), longest (bins) and the end."""
    bins, items = times.shape
    x = bins * items
    variables = x + bins + 1
    index, item = np.nonzero(np.isfinite(times))
    flat = index * items + item
    known = np.where(np.isfinite(times), times, 0.0)[index, item]
    rows = np.arange(flat.size)
    once = coo_array((np.ones(flat.size), (item, flat)), (items, variables))
    end = coo_array(
        (
            np.concatenate([known, bubbles, -np.ones(bins)]),
            (
                np.concatenate([index, np.arange(bins), np.arange(bins)]),
                np.concatenate([flat, x + np.arange(bins), np.full(bins, variables - 1)]),
            ),
        ),
        (bins, variables),
    )
    longest = coo_array(
        (np.concatenate([known, -np.ones(flat.size)]), (np.tile(rows, 2), np.concatenate([flat, x + index]))),
        (flat.size, variables),
    )
    constraints = [
        LinearConstraint(once, 1, 1),
        LinearConstraint(end, -np.inf, 0),
        LinearConstraint(longest, -np.inf, 0),
    ]
    if np.isfinite(room).all():
        held = coo_array((tokens[item].astype(np.float64), (index, flat)), (bins, variables))
        constraints.append(LinearConstraint(held, -np.inf, room))  # pyright: ignore[reportArgumentType]
    upper = np.append(np.isfinite(times).astype(np.float64).ravel(), np.full(bins + 1, np.inf))
    goal = np.zeros(variables)
    goal[-1] = 1
    integral = np.append(np.ones(x), np.zeros(bins + 1))
    within = Bounds(0, upper)  # pyright: ignore[reportArgumentType]
    solved: OptimizeResult = milp(
        goal, integrality=integral, bounds=within, constraints=constraints, options={"time_limit": seconds}
    )
    bound = float(solved.mip_dual_bound) if solved.mip_dual_bound is not None else 0.0
    if solved.x is None:
        return Verdict(np.inf, bound, np.empty(0, np.int64))
    chosen = solved.x[:x].reshape(bins, items).argmax(axis=0)
    return Verdict(float(solved.fun), bound, chosen)
