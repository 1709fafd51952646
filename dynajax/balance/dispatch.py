"""Dispatch: which pipeline runs which sequence.

First assignments (``initial_solutions``) are evened out by local search (``local_search``), with any
pairing of long and short. A sequence only goes where it fits (MaxLen), and no pipeline stays without work if
there is a sequence for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dynajax.balance.cost import PipelineCost
from dynajax.balance.estimate import PLANNED, Estimate
from dynajax.balance.initial_solutions import DispatchProblem, initial_solutions
from dynajax.balance.local_search import NEVER, Assignment, SearchProblem
from dynajax.balance.shapes import Shapes
from dynajax.errors import BalanceError
from dynajax.types import Floats, Ints

STEPS_PER_PIPELINE = 12
"""Exchanges allowed for each pipeline: the search nearly always ends before, because nothing helps."""

FAR = 1.25
"""Other first assignments do not make good what the first is behind by this factor."""


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Which pipeline runs which sequence.

    Attributes:
        pipeline: int64 (sequences,), the pipeline of each sequence.
        ms: float64 (pipelines,), when each pipeline is done by the estimate that steered the search.
    """

    pipeline: Ints
    ms: Floats


def dispatch(lengths: ArrayLike, costs: Sequence[PipelineCost], *, estimate: Estimate = PLANNED) -> Dispatch:
    """Share sequences of ``lengths`` tokens out to pipelines so that the last one is done early.

    Args:
        lengths: tokens of each sequence, in any order.
        costs: one for each pipeline.
        estimate: how loads are priced.

    Raises:
        BalanceError: a sequence that no pipeline holds.
    """
    kinds = tuple(dict.fromkeys(costs))
    kind = np.array([kinds.index(cost) for cost in costs], np.int64)
    found = assign(np.asarray(lengths, np.int64).reshape(-1), kinds, kind, estimate)
    return Dispatch(found.bins, found.done)


def assign(
    tokens: Ints,
    kinds: Sequence[PipelineCost],
    kind: Ints,
    estimate: Estimate = PLANNED,
    *,
    shapes: Shapes | None = None,
    may_idle: bool = False,
    limit: float = np.inf,
) -> Assignment:
    """``dispatch`` as an assignment that can be searched further.

    Args:
        tokens: int64 (sequences,).
        kinds: the different pipelines.
        kind: int64 (pipelines,), which of them each pipeline is.
        estimate: how loads are priced.
        shapes: rows that micro-batches will be padded to; None for rows as long as their sequences.
        may_idle: whether a pipeline may stay without work although there are sequences enough.
        limit: ms; an end far behind this is not worth improving on.
    """
    times = np.minimum(np.stack([cost.times(tokens) for cost in kinds]), NEVER)
    if tokens.size and times.min(axis=0).max() >= NEVER:
        raise BalanceError(
            f"a sequence has {tokens.max()} tokens and the roomiest pipeline holds {max(c.max_len for c in kinds)}: "
            "truncate or split it, or add a strategy with a larger pipeline"
        )
    problem = SearchProblem(times, kind, tokens, estimate.finish(kinds, kind, shapes), may_idle)
    work = np.minimum(estimate.work(kinds, tokens), NEVER)
    found: list[Assignment] = []
    for bins in initial_solutions(DispatchProblem(tokens, work, tuple(kinds), kind, estimate)):
        if not may_idle:
            _give_everyone_work(bins, tokens, times, kind)
        found.append(Assignment(problem, bins))
        found[-1].improve(STEPS_PER_PIPELINE * kind.size)
        if found[-1].done.max(initial=0.0) > limit * FAR:
            break
    return min(found, key=lambda assignment: assignment.done.max(initial=0.0))


def _give_everyone_work(bins: Ints, tokens: Ints, times: Floats, kind: Ints) -> None:
    """Hand each pipeline without a sequence one that it holds, if there are enough, by way of others if need be."""
    count = np.bincount(bins, minlength=kind.size)
    shortest = np.argsort(tokens, kind="stable")

    def supply(pipeline: int, asked: set[int]) -> bool:
        """Give ``pipeline`` the shortest sequence that its owner can spare, or can once supplied itself."""
        asked.add(pipeline)
        fitting = shortest[times[kind[pipeline], shortest] < NEVER]
        spare = fitting[count[bins[fitting]] > 1]
        for item in spare[:1].tolist() or fitting.tolist():
            owner = int(bins[item])
            if count[owner] > 1 or (owner not in asked and supply(owner, asked)):
                count[owner] -= 1
                count[pipeline] += 1
                bins[item] = pipeline
                return True
        return False

    for empty in np.flatnonzero(count == 0).tolist():
        supply(empty, set())
