"""Bounded shapes: packed rows come in a few lengths, so that a job compiles a bounded number of programs.

A micro-batch is padded to the smallest bucket that holds it, and holds a bounded number of segments.
A program is compiled for a pipeline, a bucket and that bound, hence at most buckets × kinds of
pipelines of them, however the data vary.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from dynajax.balance.cost import PipelineCost
from dynajax.errors import BalanceError
from dynajax.meshes import Pipeline


def alignment(pipeline: Pipeline) -> int:
    """A packed row is a multiple of this, so that tp and cp cut it into equal parts."""
    return pipeline.size("tp") * pipeline.size("cp")


@dataclass(frozen=True)
class Shapes:
    """The row lengths that are compiled.

    Attributes:
        buckets: tokens of a row, increasing.
        max_segments: most sequences of a row.
    """

    buckets: tuple[int, ...]
    max_segments: int

    def __post_init__(self) -> None:
        if not self.buckets or min(self.buckets) < 1 or list(self.buckets) != sorted(set(self.buckets)):
            raise BalanceError(f"buckets {self.buckets}: give increasing numbers of tokens, at least one")
        if self.max_segments < 1:
            raise BalanceError(f"max_segments={self.max_segments}: a row holds at least one sequence")

    @staticmethod
    def geometric(longest: int, count: int, max_segments: int, align: int = 128) -> Shapes:
        """At most ``count`` buckets, each √2 or more times the one before, that end at ``longest`` rounded up.

        Buckets closer than that save little; without enough lengths between ``align`` and ``longest``
        there are fewer.
        """
        if longest < 1 or count < 1 or align < 1:
            raise BalanceError(f"buckets up to {longest} tokens, {count} of them, aligned to {align}: give 1 or more")
        largest = -(-longest // align) * align
        steps = largest / np.sqrt(2) ** np.arange(count)
        rounded = {int(-(-step // align)) * align for step in steps}
        return Shapes(tuple(sorted(rounded)), max_segments)

    def padded(self, tokens: int, pipeline: Pipeline) -> int:
        """Tokens of the row that holds ``tokens``, a multiple of the pipeline's ``alignment``.

        Raises:
            BalanceError: no bucket holds them.
        """
        at = bisect_left(self.buckets, tokens)
        if at == len(self.buckets):
            raise BalanceError(f"{tokens} tokens are more than the largest bucket, {self.buckets[-1]}: add a bucket")
        return _up(self.buckets[at], pipeline)

    def room(self, cost: PipelineCost) -> int:
        """Most tokens of a micro-batch: the largest bucket that, aligned, is within MaxLen; 0 if there is none."""
        fitting = [bucket for bucket in self.buckets if _up(bucket, cost.pipeline) <= cost.max_len]
        return fitting[-1] if fitting else 0


def _up(bucket: int, pipeline: Pipeline) -> int:
    unit = alignment(pipeline)
    return -(-bucket // unit) * unit
