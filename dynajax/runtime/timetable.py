"""Who works on what in a pipeline: integer arithmetic, no arrays.

The layers are cut in pp · chunks runs, run k from layer k·L // (pp·chunks) on, so that runs differ by one
layer at most. Pipeline stage s runs the runs s, s + pp, s + 2·pp, …: one run each in a plain pipeline,
``chunks`` in an interleaved one, whose bubble is that much shorter (Narayanan et al., 2021).

In each tick every pipeline stage runs one of its runs on one micro-batch and hands the result to the next stage,
the last one to the first. Micro-batches go in groups of pp: a group passes run 0 of every stage, then
run 1, and so on. What a stage hands on is then always what the next one needs in the next tick, so
that nothing is kept between ticks. V micro-batches take V + pp − 1 ticks in a plain pipeline and
V·chunks + pp − 1 in an interleaved one when pp divides V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dynajax.errors import StrategyError
from dynajax.types import Ints


def layer_order(layers: int, pp: int, chunks: int = 1) -> Ints:
    """The layer at each place of the stored stack, −1 for places without one.

    Pipeline stage s holds the s-th of pp equal parts of the result, its runs one after the other. A run that has
    one layer less than the longest ends with a place without a layer.

    Returns:
        int64 (pp · chunks · ceil(layers / (pp · chunks)),).

    Raises:
        StrategyError: a size is below 1.

    Example:
        >>> layer_order(10, 4).reshape(4, -1).tolist()
        [[0, 1, -1], [2, 3, 4], [5, 6, -1], [7, 8, 9]]
    """
    if min(layers, pp, chunks) < 1:
        raise StrategyError(f"{layers} layers, pp = {pp} and {chunks} chunks: all must be 1 or more")
    runs = pp * chunks
    order = np.full((runs, -(-layers // runs)), -1, np.int64)
    for run, places in enumerate(order):
        first, last = run * layers // runs, (run + 1) * layers // runs
        places[: last - first] = np.arange(first, last)
    return order.reshape(chunks, pp, -1).swapaxes(0, 1).reshape(-1)


class Work(NamedTuple):
    """What a pipeline stage does in a tick; all fields have the type of the tick, an int or an array.

    Attributes:
        microbatch: number of the micro-batch; of some micro-batch where the work does not count.
        chunk: which of its runs of layers the stage runs.
        counts: False in a bubble: what is computed then must reach no result.
    """

    microbatch: Any
    chunk: Any
    counts: Any


@dataclass(frozen=True)
class Timetable:
    """The ticks of one pass of a pipeline.

    Attributes:
        pp: pipeline stages.
        chunks: runs of layers a stage has.
        microbatches: V.
    """

    pp: int
    chunks: int
    microbatches: int

    @property
    def ticks(self) -> int:
        """How many ticks until the last micro-batch is through."""
        groups, place = divmod(self.microbatches - 1, self.pp)
        return groups * self.pp * self.chunks + (self.chunks - 1) * self.pp + place + self.pp

    def work(self, tick: Any, stage: Any) -> Work:
        """The work of ``stage`` in ``tick``; plain ints, numpy and traced integers alike."""
        begun = tick - stage
        group, rest = begun // (self.pp * self.chunks), begun % (self.pp * self.chunks)
        microbatch = group * self.pp + rest % self.pp
        counts = (begun >= 0) & (microbatch < self.microbatches)
        return Work(microbatch * counts, rest // self.pp, counts)
