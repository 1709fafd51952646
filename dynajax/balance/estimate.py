"""What a pipeline will take for its load, before the load is packed.

The load of a pipeline is known while sequences are shared out; its micro-batches are not. With V of
them and a work of W on each pipeline stage the end is near

    W + V·c + (pp − 1)·(share·slowest + (1 − share)·W/V + c)

where the slowest is at least the longest sequence, and V is the number that suits best. Unequal
micro-batches, small ones at both ends, make half of a bubble as long as the slowest and half as long
as the mean: with ``share`` = ½ the estimate is within a few percent of ``simulate``. Hydraulis
dispatches by Σ T + (pp − 1)·max T, which is ``share`` = 1 without constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.balance.cost import PipelineCost
from dynajax.balance.local_search import Finish
from dynajax.balance.shapes import UNLIMITED, Shapes
from dynajax.types import Floats, Ints


@dataclass(frozen=True)
class Estimate:
    """How loads are priced.

    Attributes:
        share: part of a bubble that is as long as the slowest micro-batch.
        constants: whether ``c`` of each micro-batch is charged.
    """

    share: float
    constants: bool

    def constant(self, cost: PipelineCost) -> float:
        """The ``c`` that is charged, in ms."""
        return cost.c if self.constants else 0.0

    def work(self, costs: Sequence[PipelineCost], tokens: Ints) -> Floats:
        """Work of each sequence, (costs, sequences), in ms: T and its part of a full micro-batch's ``c``."""
        part = np.array([[self.constant(cost) / cost.max_len] for cost in costs])
        return np.stack([cost.times(tokens) for cost in costs]) + part * tokens

    def bubble(self, cost: PipelineCost, work: float, longest: float) -> float:
        """What bubbles, and more micro-batches to make them short, add to ``work``; in ms."""
        deep = cost.pp - 1
        mean = (self.constant(cost) * work / deep) ** 0.5 if deep else 0.0
        return deep * (self.share * max(longest, mean) + (1 - self.share) * mean)

    def finish(self, kinds: Sequence[PipelineCost], kind: Ints, shapes: Shapes | None = None) -> Finish:
        """The price that local search steers by.

        Args:
            kinds: the different pipelines.
            kind: int64 (pipelines,), which of them each pipeline is.
            shapes: rows that micro-batches are padded to; None for rows as long as their sequences.
        """
        c = np.array([self.constant(cost) for cost in kinds])[kind]
        deep = np.array([cost.pp - 1 for cost in kinds])[kind]
        room = np.array([cost.max_len for cost in kinds])[kind]
        rows = [shapes.rows(cost) if shapes else () for cost in kinds]
        step = np.array([row[0] if row else 1 for row in rows])[kind]
        padding = np.array([cost.b if shapes else 0.0 for cost in kinds])[kind]
        max_segments = shapes.max_segments if shapes else UNLIMITED

        def done(bins: Ints, load: Floats, longest: Floats, tokens: Ints, items: Ints) -> Floats:
            fewest = np.maximum(-(-tokens // room[bins]), -(-items // max_segments))
            if not deep.any():  # all rows but one are full
                return load + c[bins] * fewest + padding[bins] * (-tokens % step[bins])
            wanted = np.sqrt(deep[bins] * load / np.maximum(c[bins], 1e-9))
            count = np.maximum(np.maximum(fewest, np.minimum(wanted, items)), 1)
            load = load + padding[bins] * count * (step[bins] / 2)
            mean = load / count
            slowest = np.maximum(longest, mean)
            bubble = deep[bins] * (self.share * slowest + (1 - self.share) * mean + c[bins])
            passing = (deep[bins] + 1) * (longest + c[bins])
            return np.where(items > 0, np.maximum(load + count * c[bins] + bubble, passing), 0.0)

        return done


PLANNED = Estimate(share=0.5, constants=True)
"""What plans are made by."""
PUBLISHED = Estimate(share=1.0, constants=False)
"""What Hydraulis dispatches by."""
