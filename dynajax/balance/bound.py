"""What no plan can beat.

``any_strategy_ms`` allows every sequence its cheapest pipeline and cuts work evenly over all devices;
bubbles and the constants of micro-batches are free. ``candidate_bound`` holds for one strategy and is
sharper: it lets the planner skip strategies that cannot win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.balance.cost import PipelineCost
from dynajax.balance.estimate import PLANNED
from dynajax.types import Floats, Ints

_DUAL_STEPS = 24


def any_strategy_ms(tokens: Ints, costs: Sequence[PipelineCost], devices: int) -> float:
    """Lower bound over all strategies that pipelines in ``costs`` can make on ``devices``, in ms.

    The work of the sequences, each at its least device-milliseconds, spread over the devices; and the
    longest way of one sequence through all stages of its fastest pipeline.
    """
    if not tokens.size:
        return 0.0
    times = np.stack([cost.times(tokens) for cost in costs])
    size, stages = (np.array([[getattr(cost, name)] for cost in costs]) for name in ("devices", "pp"))
    work = (times * size).min(axis=0).sum() / devices
    return float(max(work, (times * stages).min(axis=0).max()))


@dataclass(frozen=True)
class CandidateBound:
    """Lower bounds of any plan of a strategy.

    Attributes:
        ms: the larger of the bound of all work and the bounds of single sequences.
        work_ms: the bound of all work alone, which ranks strategies that the longest sequence makes equal.
    """

    ms: float
    work_ms: float


def candidate_bound(tokens: Ints, kinds: Sequence[PipelineCost], copies: Ints) -> CandidateBound:
    """Lower bounds of any plan with ``copies`` pipelines of each kind, infinite if they do not hold a sequence.

    The bound of all work is that of the linear programme that cuts sequences over pipelines (a dual
    solution, which is never above it). Single sequences must pass all stages of some pipeline, and of
    the i longest some pipeline that holds sequences so long takes ⌈i / pipelines⌉ or more.

    Args:
        tokens: int64 (sequences,), longest first.
        kinds: the different pipelines.
        copies: int64 (kinds,), how many there are of each.
    """
    if not tokens.size:
        return CandidateBound(0.0, 0.0)
    if tokens[0] > max(cost.max_len for cost in kinds):
        return CandidateBound(np.inf, np.inf)
    work = PLANNED.work(kinds, tokens)
    constants, stages = (np.array([[getattr(cost, name)] for cost in kinds]) for name in ("c", "pp"))
    passing = ((np.stack([cost.times(tokens) for cost in kinds]) + constants) * stages).min(axis=0).max()
    all_work = _dual(work, copies, ((stages - 1) * constants)[:, 0])
    return CandidateBound(max(all_work, float(passing), _pigeonhole(tokens, work.min(axis=0), kinds, copies)), all_work)


def _dual(work: Floats, copies: Ints, drained: Floats) -> float:
    """max over prices λ ≥ 0 with Σ copies·λ = 1 of Σ over sequences of the least λ·work, by subgradient steps.

    Every λ gives a lower bound, so the best one seen is as good as its luck and never wrong.
    """
    prices = np.full(copies.size, 1 / copies.sum())
    items = np.arange(work.shape[1])
    best = 0.0
    for step in range(_DUAL_STEPS if copies.size > 1 else 1):
        priced = prices[:, None] * work
        chosen = priced.argmin(axis=0)
        best = max(best, float(priced[chosen, items].sum() + prices * copies @ drained))
        load = np.bincount(chosen, work[chosen, items], minlength=copies.size) / copies + drained
        prices = prices * np.clip(load / load.mean(), 0.25, 4.0) ** (1 / (1 + step / 3))
        prices = np.maximum(prices, 1e-12) / (np.maximum(prices, 1e-12) @ copies)
    return best


def _pigeonhole(tokens: Ints, least: Floats, kinds: Sequence[PipelineCost], copies: Ints) -> float:
    room = np.array([cost.max_len for cost in kinds])
    able = ((room[:, None] >= tokens) * copies[:, None]).sum(axis=0)
    end = np.arange(1, tokens.size + 1)
    sums = np.concatenate([[0.0], least.cumsum()])
    return float((sums[end] - sums[end + (-end // np.maximum(able, 1))]).max())
