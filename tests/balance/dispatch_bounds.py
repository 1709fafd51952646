"""What no dispatch can beat, by linear programmes that cut sequences over pipelines.

``lp_dispatch_ms`` has no bubbles: pipelines of one kind are then one machine. A pipeline with pp stages ends no
earlier than its work and pp − 1 times its longest sequence, and a programme that cuts sequences must be kept from
cutting bubbles too. ``lp_staged_ms`` therefore lets every pipeline say how long its longest sequence is.

Sequences are put in classes by length, the longest first. A pipeline of kind k *is of class g* if its longest
sequence is in g, and b(k, g) is pp − 1 times the least time of a sequence of g. For an end E, with x(i, k, g) the part
of sequence i on pipelines of kind k and class g, and y(k, g) the number of these:

    Σ x(i, ·, ·) = 1                                   every sequence is somewhere
    x(i, k, g) = 0 if i is of a longer class than g     g is the longest
    x(i, k, g) ≤ y(k, g)                                a sequence is not on more pipelines than there are
    y(k, g) ≤ Σ x(i, k, g) over i of class g            each of them has a sequence of that class
    Σ x(i, k, g)·T(i, k) ≤ (E − b(k, g))·y(k, g)        each ends by E
    Σ y(k, ·) ≤ copies of k

Any dispatch that ends by E fulfils all of it: set x and y to what it does; where several pipelines are of one kind and
class, add up their ends. So if nothing fulfils it, no dispatch ends by E. Classes of more than one length make b less
than the bubble, never more. With one stage there are no bubbles, and all pipelines of a kind are of one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from dynajax.balance.cost import PipelineCost
from dynajax.types import Floats, Ints

_TOLERANCE = 1e-3  # relative, to which the least feasible end is found
_CLASS = 5e-3  # of an end: bubbles of a class differ by no more
_SHORT = 1e-6  # pipelines that may be missing by rounding


def lp_dispatch_ms(tokens: Ints, costs: Sequence[PipelineCost]) -> float:
    """A lower bound of any dispatch: sequences may be cut over pipelines, pipelines have no bubbles.

    A whole sequence must still pass all stages of some pipeline.

    Args:
        tokens: int64 (sequences,).
        costs: one for each pipeline.
    """
    kinds = list(dict.fromkeys(costs))
    copies = np.array([costs.count(cost) for cost in kinds], np.float64)
    times = np.stack([cost.times(tokens) for cost in kinds])
    kind, item = np.nonzero(np.isfinite(times))
    parts = np.arange(kind.size)
    capacity = coo_array(
        (
            np.append(times[kind, item], -copies),
            (np.append(kind, np.arange(len(kinds))), np.append(parts, np.full(len(kinds), kind.size))),
        ),
        (len(kinds), kind.size + 1),
    )
    whole = coo_array((np.ones(kind.size), (item, parts)), (tokens.size, kind.size + 1))
    goal = np.append(np.zeros(kind.size), 1.0)
    solved = linprog(goal, capacity, np.zeros(len(kinds)), whole, np.ones(tokens.size), method="highs")
    passing = (times * np.array([[cost.pp] for cost in kinds])).min(axis=0)
    return max(float(solved.fun), float(passing.max(initial=0.0)))


def lp_staged_ms(tokens: Ints, costs: Sequence[PipelineCost], end: float) -> float:
    """A lower bound, at most ``end``, of any dispatch by ``Σ T + (pp − 1)·max T``: bubbles are not cut.

    Args:
        tokens: int64 (sequences,).
        costs: one for each pipeline.
        end: ms; what the bound is wanted for, such as the end of a dispatch.
    """
    low, high = lp_dispatch_ms(tokens, costs), end
    if all(cost.pp == 1 for cost in costs):
        return low
    classes = _classes(-np.sort(-tokens), costs, low * _CLASS)
    while high - low > _TOLERANCE * low:
        middle = (low + high) / 2
        low, high = (low, middle) if classes.can_end(middle) else (middle, high)
    return low


@dataclass(frozen=True, eq=False)
class _Classes:
    """Sequences in classes, and what pipelines can be: a column for each (kind, class).

    Attributes:
        times: float64 (kinds, sequences), infinite where a sequence does not fit.
        of: int64 (sequences,), the class of each, 0 the longest.
        copies: float64 (kinds,).
        kind: int64 (columns,).
        longest: int64 (columns,), the class; -1 for kinds without bubbles, which have one column.
        bubble: float64 (columns,), b in ms.
    """

    times: Floats
    of: Ints
    copies: Floats
    kind: Ints
    longest: Ints
    bubble: Floats

    def can_end(self, by: float) -> bool:
        """Whether the programme says that all is done ``by`` (ms): as few pipelines as there are, or fewer, suffice."""
        column, item = np.nonzero(
            (self.times[self.kind] + self.bubble[:, None] <= by) & (self.of >= self.longest[:, None])
        )
        columns, parts = np.arange(self.kind.size), np.arange(item.size)
        if np.unique(item).size < self.of.size:
            return False
        y, missing = item.size + columns, item.size + columns.size
        staged = np.flatnonzero(self.longest[column] >= 0)
        deep = np.flatnonzero(self.longest >= 0)
        own = np.flatnonzero(self.of[item] == self.longest[column])
        limits = _Rows(missing + 1)
        limits.add(column, parts, self.times[self.kind[column], item] / by)
        limits.add(columns, y, self.bubble / by - 1)
        limits.end(np.zeros(columns.size))
        limits.add(np.arange(staged.size), staged, 1.0)
        limits.add(np.arange(staged.size), y[column[staged]], -1.0)
        limits.end(np.zeros(staged.size))
        limits.add(np.searchsorted(deep, column[own]), own, -1.0)
        limits.add(np.arange(deep.size), y[deep], 1.0)
        limits.end(np.zeros(deep.size))
        limits.add(self.kind, y, 1.0)
        limits.add(np.arange(self.copies.size), np.full(self.copies.size, missing), -1.0)
        limits.end(self.copies)
        whole = coo_array((np.ones(item.size), (item, parts)), (self.of.size, missing + 1))
        goal = np.append(np.zeros(missing), 1.0)
        solved = linprog(goal, limits.matrix, limits.most, whole, np.ones(self.of.size), method="highs")
        return solved.status != 0 or float(solved.fun) <= _SHORT  # what is not solved proves nothing


def _classes(ranked: Ints, costs: Sequence[PipelineCost], step: float) -> _Classes:
    """Classes of ``ranked``, the longest first, in each of which bubbles differ by ``step`` ms at most."""
    kinds = list(dict.fromkeys(costs))
    bubbles = np.max([(cost.pp - 1) * (cost.a * ranked + cost.b) * ranked for cost in kinds], axis=0)
    starts = [0]
    for item in range(ranked.size):
        if bubbles[starts[-1]] - bubbles[item] > step:
            starts.append(item)
    of = np.searchsorted(starts, np.arange(ranked.size), "right") - 1
    times = np.stack([cost.times(ranked) for cost in kinds])
    columns: list[tuple[int, int, float]] = []
    for k, cost in enumerate(kinds):
        least = np.minimum.reduceat(times[k], starts)
        columns += (
            [(k, g, (cost.pp - 1) * b) for g, b in enumerate(least) if np.isfinite(b)]
            if cost.pp > 1
            else [(k, -1, 0.0)]
        )
    kind, longest, bubble = (np.array(values) for values in zip(*columns, strict=True))
    copies = np.array([costs.count(cost) for cost in kinds], np.float64)
    return _Classes(times, of, copies, kind, longest, bubble)


class _Rows:
    """Rows ``A·x ≤ most``, written block by block."""

    def __init__(self, columns: int) -> None:
        self._columns, self._height = columns, 0
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._most: list[Floats] = []

    def add(self, row: Ints, column: Ints, value: Floats | float) -> None:
        """Entries of the block that is being written."""
        self._entries.append((self._height + row, column, np.broadcast_to(value, row.shape)))

    def end(self, most: Floats) -> None:
        """Finish a block of as many rows as ``most`` has."""
        self._most.append(most)
        self._height += most.size

    @property
    def matrix(self) -> coo_array:
        """A."""
        row, column, value = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        return coo_array((value, (row, column)), (self._height, self._columns))

    @property
    def most(self) -> Floats:
        """The right-hand side."""
        return np.concatenate(self._most)
