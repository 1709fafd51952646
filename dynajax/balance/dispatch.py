"""Dispatch: which pipeline runs which sequence.

A first assignment is made greedily and then evened out by local search (``exchange``), with any pairing
of long and short. A sequence only goes where it fits (MaxLen), and no pipeline stays without work if
there is a sequence for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import ArrayLike

from dynajax.balance.cost import Floats, Ints, PipelineCost
from dynajax.balance.estimate import PLANNED, Estimate
from dynajax.balance.exchange import NEVER, Assignment, Problem
from dynajax.balance.shapes import Shapes
from dynajax.errors import BalanceError

STEPS_PER_PIPELINE = 12
"""Exchanges allowed for each pipeline: the search nearly always ends before, because nothing helps."""


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
) -> Assignment:
    """``dispatch`` as an assignment that can be searched further.

    Args:
        tokens: int64 (sequences,).
        kinds: the different pipelines.
        kind: int64 (pipelines,), which of them each pipeline is.
        estimate: how loads are priced.
        shapes: rows that micro-batches will be padded to; None for rows as long as their sequences.
        may_idle: whether a pipeline may stay without work although there are sequences enough.
    """
    times = np.minimum(np.stack([cost.times(tokens) for cost in kinds]), NEVER)
    if tokens.size and times.min(axis=0).max() >= NEVER:
        raise BalanceError(
            f"a sequence has {tokens.max()} tokens and the roomiest pipeline holds {max(c.max_len for c in kinds)}: "
            "truncate or split it, or add a strategy with a larger pipeline"
        )
    problem = Problem(times, kind, tokens, estimate.finish(kinds, kind, shapes), may_idle)
    work = np.minimum(estimate.work(kinds, tokens), NEVER)
    starts = [_earliest_first(tokens, work, kinds, kind, estimate)]
    if any(cost.pp > 1 for cost in kinds):
        starts += _alike_together(tokens, work, kinds, kind, estimate)
    found: list[Assignment] = []
    for bins in starts:
        if not may_idle:
            _give_everyone_work(bins, tokens, times, kind)
        found.append(Assignment(problem, bins))
        found[-1].improve(STEPS_PER_PIPELINE * kind.size)
    return min(found, key=lambda assignment: assignment.done.max(initial=0.0))


def _earliest_first(tokens: Ints, work: Floats, kinds: Sequence[PipelineCost], kind: Ints, estimate: Estimate) -> Ints:
    """Longest first, each to the pipeline that would finish it earliest; ties go to the first kind."""
    rows = work.T.tolist()
    longest = [0.0] * len(kinds)
    heaps = [[(0.0, int(j)) for j in np.flatnonzero(kind == k)] for k in range(len(kinds))]
    for heap in heaps:
        heapify(heap)
    deep = [cost.pp > 1 for cost in kinds]
    bins = np.empty(tokens.size, np.int64)
    for item in np.argsort(-tokens, kind="stable").tolist():
        row, best, chosen = rows[item], np.inf, 0
        for k, heap in enumerate(heaps):
            end = heap[0][0] + row[k]
            if deep[k]:
                end += estimate.bubble(kinds[k], end, max(longest[k], row[k]))
            if end < best:
                best, chosen = end, k
        load, pipeline = heaps[chosen][0]
        heapreplace(heaps[chosen], (load + row[chosen], pipeline))
        longest[chosen] = max(longest[chosen], row[chosen])
        bins[item] = pipeline
    return bins


def _alike_together(
    tokens: Ints, work: Floats, kinds: Sequence[PipelineCost], kind: Ints, estimate: Estimate
) -> list[Ints]:
    """Sequences of like length together: once the longest on the roomiest pipelines, once on the shallowest.

    A bubble is as long as the longest sequence, so a pipeline with stages that takes one long sequence
    may as well take several. Each pipeline in turn takes the longest that are left and that it holds, as
    many as let it end by a common time, which is found by bisection.
    """
    order = np.argsort(-tokens, kind="stable")
    roomiest = sorted(range(kind.size), key=lambda j: (-kinds[kind[j]].max_len, j))
    shallowest = sorted(roomiest, key=lambda j: kinds[kind[j]].pp)
    found: list[Ints] = []
    for turns in (roomiest, shallowest) if roomiest != shallowest else (roomiest,):
        low, high, best = 0.0, float(work.min(axis=0).sum() / kind.size), None
        while best is None or high - low > 0.01 * high:
            by = 2 * high if best is None else (low + high) / 2
            bins = _fill_by(by, turns, order, work, kinds, kind, estimate)
            if bins is not None:
                high, best = by, bins
            else:
                low, high = by, max(by, high)
        found.append(best)
    return found


def _fill_by(
    by: float,
    turns: Sequence[int],
    order: Ints,
    work: Floats,
    kinds: Sequence[PipelineCost],
    kind: Ints,
    estimate: Estimate,
) -> Ints | None:
    """Pipelines in ``turns`` filled with the longest sequences left until ``by``; None if some are left over."""
    bins = np.empty(order.size, np.int64)
    left = order
    for pipeline in turns:
        if not left.size:
            break
        k = int(kind[pipeline])
        held = work[k, left]
        first = int(np.searchsorted(-held, -NEVER, "right"))  # sequences come longest first
        if first == left.size:
            continue
        longest = float(held[first])
        loads = held[first:].cumsum()
        taken = bisect_right(loads, by, key=lambda load: load + estimate.bubble(kinds[k], load, longest))
        bins[left[first : first + taken]] = pipeline
        left = np.concatenate([left[:first], left[first + taken :]])
    return None if left.size else bins


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
