"""Bounded shapes: packed rows come in a few lengths, so that a job compiles a bounded number of programs.

A pipeline has a number of row lengths, evenly up to what it holds. A micro-batch is padded to the
smallest that holds it, and has a bounded number of segments. A program is compiled for a kind of
pipeline, a row length and that bound, hence at most buckets × kinds of them, however the data vary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from dynajax.balance.cost import PipelineCost
from dynajax.errors import BalanceError

UNLIMITED = 1 << 60
"""Sequences of a row without a bound."""


def alignment(cost: PipelineCost) -> int:
    """A row is a multiple of this, so that tp and cp cut it into equal parts."""
    return cost.pipeline.size("tp") * cost.pipeline.size("cp")


@dataclass(frozen=True)
class Shapes:
    """The rows that are compiled.

    Attributes:
        buckets: row lengths of a kind of pipeline, at most.
        max_segments: most sequences of a row.
        align: row lengths are multiples of this, and of what tp and cp need.
    """

    buckets: int
    max_segments: int
    align: int = 128

    def __post_init__(self) -> None:
        if min(self.buckets, self.max_segments, self.align) < 1:
            raise BalanceError(
                f"buckets={self.buckets}, max_segments={self.max_segments}, align={self.align}: all must be 1 or more"
            )

    def rows(self, cost: PipelineCost) -> tuple[int, ...]:
        """Row lengths in tokens, increasing; none if the pipeline does not hold the shortest possible row."""
        unit = lcm(self.align, alignment(cost))
        units = cost.max_len // unit
        return tuple(sorted({-(-units * i // self.buckets) * unit for i in range(1, self.buckets + 1)} - {0}))

    def padded(self, tokens: int, cost: PipelineCost) -> int:
        """Tokens of the row that holds ``tokens``.

        Raises:
            BalanceError: no row does.
        """
        rows = self.rows(cost)
        at = bisect_left(rows, tokens)
        if at == len(rows):
            raise BalanceError(
                f"{tokens} tokens do not fit into a row of {cost.pipeline}, which has "
                f"{', '.join(map(str, rows)) or 'none'} tokens of {cost.max_len} aligned to {self.align}: "
                "split the sequence or choose a larger pipeline"
            )
        return rows[at]

    def limit(self, costs: Sequence[PipelineCost]) -> tuple[PipelineCost, ...]:
        """``costs`` with ``max_len`` the longest row, without the pipelines that have none."""
        listed = ((cost, self.rows(cost)) for cost in costs)
        return tuple(replace(cost, max_len=rows[-1]) for cost, rows in listed if rows)
