"""From measured times to the coefficients of T, with the error of the fit.

``a·Σl² + b·Σl + c`` is fitted by least squares of the relative errors, none of the coefficients below
zero: a long sequence must not drown the short ones, and a negative price would mislead the planner.

Rows of one sequence do not tell ``a`` from whatever else grows faster than a row does. Each row is therefore measured
twice, as one sequence and shared by equal ones: what differs between the two is attention alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from dynajax.balance.cost import Profile, Timing
from dynajax.errors import BalanceError
from dynajax.meshes import Pipeline


@dataclass(frozen=True)
class Point:
    """One measured micro-batch.

    Attributes:
        lengths: tokens of each sequence in it.
        ms: time on one pipeline stage, forward and backward.
    """

    lengths: tuple[int, ...]
    ms: float


@dataclass(frozen=True)
class CostFit:
    """Coefficients of ``a·Σl² + b·Σl + c`` in ms.

    Attributes:
        a: ms per token².
        b: ms per token.
        c: ms per micro-batch.
        worst_error: largest |fitted − measured| / measured over the points.
        mean_error: mean of the same.
    """

    a: float
    b: float
    c: float
    worst_error: float
    mean_error: float


def fit_cost(points: Sequence[Point]) -> CostFit:
    """The coefficients that suit ``points`` best.

    Raises:
        BalanceError: fewer than three different points, or a time or length that is not above zero.
    """
    distinct = {(sum(p.lengths), sum(size * size for size in p.lengths)) for p in points}
    if len(distinct) < 3:
        raise BalanceError(
            f"{len(distinct)} different micro-batches were measured, three coefficients need at least three: "
            "measure more lengths"
        )
    wrong = [p for p in points if not (np.isfinite(p.ms) and p.ms > 0 and p.lengths and min(p.lengths) > 0)]
    if wrong:
        raise BalanceError(f"{wrong[0]}: times and lengths must be above 0")
    measured = np.array([p.ms for p in points])
    terms = np.array([[sum(size**2 for size in p.lengths), sum(p.lengths), 1.0] for p in points])
    scale = terms.max(axis=0)
    solved, _ = nnls(terms / scale / measured[:, None], np.ones(len(points)))
    a, b, c = (solved / scale).tolist()
    errors = np.abs(terms @ [a, b, c] / measured - 1)
    return CostFit(a, b, c, float(errors.max()), float(errors.mean()))


SHARED_BY = 8
"""Equal sequences of a row that is shared."""

Row = tuple[int, ...]
"""Tokens of each sequence of a row."""

Measure = Callable[[Pipeline, Row], float]
"""``measure(pipeline, row)``: ms of a micro-batch on one pipeline stage.

Forward and backward, after a warm-up, the median of a few runs.
"""


def rows_to_measure(tokens: int) -> tuple[Row, Row]:
    """A row of ``tokens`` as one sequence, and shared by ``SHARED_BY``."""
    part, left = divmod(tokens, SHARED_BY)
    return (tokens,), (part + left, *(part,) * (SHARED_BY - 1))


def measure_profile(
    name: str,
    device: str,
    pipelines: Sequence[Pipeline],
    lengths: Sequence[int],
    measure: Measure,
    max_len: Callable[[Pipeline], int],
) -> Profile:
    """Measure and fit every pipeline; rows beyond what a pipeline holds are not measured on it.

    Args:
        name: of the profile.
        device: what it is measured on.
        pipelines: what to measure.
        lengths: tokens of rows at which to measure, ``SHARED_BY`` or more.
        measure: runs one micro-batch.
        max_len: MaxLen of a pipeline, measured or computed.

    Returns:
        The profile; each timing holds the largest relative error of its fit.
    """
    timings: list[Timing] = []
    for pipeline in pipelines:
        longest = max_len(pipeline)
        rows = [row for tokens in lengths if tokens <= longest for row in rows_to_measure(tokens)]
        points = [Point(row, measure(pipeline, row)) for row in rows]
        found = fit_cost(points)
        timings.append(Timing(pipeline, found.a, found.b, found.c, longest, found.worst_error))
    return Profile(name, device, tuple(timings))
