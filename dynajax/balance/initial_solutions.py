"""First assignments of sequences to pipelines, from which local search goes on.

Without bubbles, taking the longest sequence first and giving it to the pipeline that finishes it earliest (longest
processing time first; Graham, 1969) is nearly best. A bubble is as long as the longest sequence of its pipeline, so
with stages it matters which sequences are together, and no single swap changes that: further assignments give long
sequences to as few pipelines as possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

import numpy as np

from dynajax.balance.cost import PipelineCost
from dynajax.balance.estimate import Estimate
from dynajax.types import Floats, Ints

_FEW = 64  # with more pipelines than these, which of them has a bubble matters little


@dataclass(frozen=True, eq=False)
class DispatchProblem:
    """Sequences and the pipelines that share them.

    Attributes:
        tokens: int64 (sequences,).
        work: float64 (kinds, sequences), ms of a sequence with its part of ``c``; ``NEVER`` where it does not fit.
        kinds: the different pipelines.
        kind: int64 (pipelines,), which of them each pipeline is.
        estimate: how loads are priced.
    """

    tokens: Ints
    work: Floats
    kinds: tuple[PipelineCost, ...]
    kind: Ints
    estimate: Estimate

    @cached_property
    def longest_first(self) -> list[int]:
        """The sequences by length, the longest first."""
        return np.argsort(-self.tokens, kind="stable").tolist()

    @cached_property
    def rows(self) -> list[list[float]]:
        """``work`` of each sequence on all kinds, for loops."""
        return self.work.T.tolist()


def initial_solutions(problem: DispatchProblem) -> Iterator[Ints]:
    """Assignments, int64 (sequences,) each: several if a pipeline has stages, else one."""
    yield longest_processing_time_first(problem)
    if any(cost.pp > 1 for cost in problem.kinds) and problem.kind.size <= _FEW:
        roomiest = sorted(range(problem.kind.size), key=lambda j: (-problem.kinds[problem.kind[j]].max_len, j))
        shallowest = sorted(roomiest, key=lambda j: problem.kinds[problem.kind[j]].pp)
        for turns in (roomiest, shallowest) if roomiest != shallowest else (roomiest,):
            yield _lazily_opened(problem, turns)


def longest_processing_time_first(problem: DispatchProblem) -> Ints:
    """Longest first, each to the pipeline that would finish it earliest; ties go to the first kind."""
    kinds = problem.kinds
    rows = problem.rows
    longest = [0.0] * len(kinds)
    heaps = [[(0.0, int(j)) for j in np.flatnonzero(problem.kind == k)] for k in range(len(kinds))]
    for heap in heaps:
        heapify(heap)
    deep = [cost.pp > 1 for cost in kinds]
    bins = np.empty(problem.tokens.size, np.int64)
    for item in problem.longest_first:
        row, best, chosen = rows[item], np.inf, 0
        for k, heap in enumerate(heaps):
            end = heap[0][0] + row[k]
            if deep[k]:
                end += problem.estimate.bubble(kinds[k], end, max(longest[k], row[k]))
            if end < best:
                best, chosen = end, k
        load, pipeline = heaps[chosen][0]
        heapreplace(heaps[chosen], (load + row[chosen], pipeline))
        longest[chosen] = max(longest[chosen], row[chosen])
        bins[item] = pipeline
    return bins


def _lazily_opened(problem: DispatchProblem, turns: list[int]) -> Ints:
    """First fit, longest first, where a pipeline of ``turns`` is only begun if those begun before have no room.

    The later a pipeline is begun the shorter its longest sequence, so bubbles are paid on few pipelines.
    Room is what lets a pipeline end by a common time, which is found by bisection.
    """
    low, high, best = 0.0, float(problem.work.min(axis=0).sum() / problem.kind.size), None
    while best is None or high - low > 0.01 * high:
        by = 2 * high if best is None else (low + high) / 2
        bins = _first_fit(problem, by, turns)
        if bins is not None:
            high, best = by, bins
        else:
            low, high = by, max(by, high)
    return best


def _first_fit(problem: DispatchProblem, by: float, turns: list[int]) -> Ints | None:
    """Each sequence in the first pipeline that still ends ``by``; None if there is none for some."""
    rows, kind, bubble = problem.rows, problem.kind.tolist(), problem.estimate.bubble
    bins = np.empty(problem.tokens.size, np.int64)
    begun: dict[int, tuple[float, float]] = {}  # load and longest
    line = list(turns)  # those begun first
    for item in problem.longest_first:
        for pipeline in line:
            work = rows[item][kind[pipeline]]
            load, longest = begun.get(pipeline, (0.0, work))
            end = load + work
            if end <= by and end + bubble(problem.kinds[kind[pipeline]], end, longest) <= by:
                break
        else:
            return None
        if pipeline not in begun:
            line.remove(pipeline)
            line.insert(len(begun), pipeline)
        begun[pipeline] = (end, longest)
        bins[item] = pipeline
    return bins
