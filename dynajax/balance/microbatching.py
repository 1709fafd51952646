"""One pipeline's share of a batch as micro-batches: how many, which sequences, in which order.

A pipeline with one stage wants as few micro-batches as hold its share, since each costs ``c``. One with
more stages wants enough of them to keep bubbles short: the number is chosen by simulating it, around
the number that suits equal micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import sqrt

from dynajax.balance.cost import PipelineCost
from dynajax.balance.pack import Packs, balanced, fewest, neighbours, order
from dynajax.balance.shapes import UNLIMITED, Shapes, alignment
from dynajax.balance.simulate import published_ms, simulated_ms
from dynajax.errors import BalanceError
from dynajax.meshes import Pipeline


class Packing(Enum):
    """Which sequences may share a micro-batch."""

    BALANCED = "balanced"
    """Any: micro-batches of like time."""
    NEIGHBOURS = "neighbours"
    """Only neighbours in length, the best cut into intervals."""


@dataclass(frozen=True)
class MicrobatchOptions:
    """How a pipeline's share is packed.

    Attributes:
        shapes: row lengths and segments that are compiled; None for rows as long as their sequences.
        packing: which sequences may share a micro-batch.
        microbatches: their number on every pipeline; None to choose it.
    """

    shapes: Shapes | None = None
    packing: Packing = Packing.BALANCED
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.microbatches is not None and self.microbatches < 1:
            raise BalanceError(f"microbatches={self.microbatches}: give 1 or more, or None to choose")

    @property
    def max_segments(self) -> int:
        """Most sequences of a micro-batch."""
        return self.shapes.max_segments if self.shapes else UNLIMITED


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that one pipeline computes in one row.

    Attributes:
        sequences: their positions in the batch; empty marks a row of padding that carries no weight.
        tokens: tokens of the sequences.
        padded: tokens of the row.
        ms: time on one pipeline stage.
    """

    sequences: tuple[int, ...]
    tokens: int
    padded: int
    ms: float


@dataclass(frozen=True)
class PipelinePlan:
    """What one pipeline does in an iteration.

    Attributes:
        pipeline: the pipeline.
        microbatches: in the order in which they enter; none if the pipeline is idle.
        ms: simulated time.
        published_ms: time by the published form.
    """

    pipeline: Pipeline
    microbatches: tuple[MicroBatch, ...]
    ms: float
    published_ms: float


def form_microbatches(
    sequences: Sequence[int], tokens: Sequence[int], cost: PipelineCost, options: MicrobatchOptions
) -> PipelinePlan:
    """Pack ``sequences`` (positions in the batch) of ``tokens`` tokens for one pipeline.

    Raises:
        BalanceError: a sequence does not fit, or the number of micro-batches asked for cannot be made.
    """
    share = _Share(tokens, cost, options)
    packs = share.packed(search=True)
    if packs is None:
        raise BalanceError(
            f"{cost.pipeline}: {len(tokens)} sequences of {sum(tokens)} tokens do not make {options.microbatches} "
            f"micro-batches of 1 to {options.max_segments} sequences and at most {cost.max_len} tokens"
        )
    times = [share.ms(pack) for pack in packs]
    turns = order(times) if cost.pp > 1 else range(len(packs))
    microbatches = tuple(
        MicroBatch(tuple(sequences[i] for i in packs[at]), share.held(packs[at]), share.row(packs[at]), times[at])
        for at in turns
    )
    entering = [microbatch.ms for microbatch in microbatches]
    return PipelinePlan(cost.pipeline, microbatches, simulated_ms(entering, cost.pp), published_ms(entering, cost.pp))


def microbatches_ms(tokens: Sequence[int], cost: PipelineCost, options: MicrobatchOptions) -> float:
    """Simulated ms of what ``form_microbatches`` makes without its last search: what planning compares.

    Infinite where no micro-batches can be made.
    """
    share = _Share(tokens, cost, options)
    packs = share.packed(search=False)
    return float("inf") if packs is None else share.end(packs)


def pad_microbatches(plan: PipelinePlan, count: int, cost: PipelineCost, options: MicrobatchOptions) -> PipelinePlan:
    """``plan`` with micro-batches that hold nothing at its end, until there are ``count``.

    They are as short as rows can be, and marked by having no sequences: what they compute has no weight.
    """
    row = options.shapes.padded(1, cost) if options.shapes else alignment(cost)
    empty = MicroBatch((), 0, row, cost.microbatch_ms([], row))
    microbatches = plan.microbatches + (empty,) * (count - len(plan.microbatches))
    times = [microbatch.ms for microbatch in microbatches]
    return PipelinePlan(cost.pipeline, microbatches, simulated_ms(times, cost.pp), published_ms(times, cost.pp))


class _Share:
    """Sequences of one pipeline, to be packed in several ways."""

    def __init__(self, tokens: Sequence[int], cost: PipelineCost, options: MicrobatchOptions) -> None:
        self._tokens, self._cost, self._options = tokens, cost, options
        self._times = [(cost.a * size + cost.b) * size for size in tokens]

    def held(self, pack: Sequence[int]) -> int:
        """Tokens of the sequences."""
        return sum([self._tokens[i] for i in pack])

    def row(self, pack: Sequence[int]) -> int:
        """Tokens of the row."""
        shapes = self._options.shapes
        return shapes.padded(self.held(pack), self._cost) if shapes else self.held(pack)

    def ms(self, pack: Sequence[int]) -> float:
        """Time on one pipeline stage, as ``PipelineCost.microbatch_ms`` has it."""
        padding = self.row(pack) - self.held(pack) if self._options.shapes else 0
        return sum([self._times[i] for i in pack]) + self._cost.b * padding + self._cost.c

    def end(self, packs: Packs) -> float:
        """When the pipeline is done, its packs in the best order."""
        times = [self.ms(pack) for pack in packs]
        return simulated_ms([times[at] for at in order(times)] if self._cost.pp > 1 else times, self._cost.pp)

    def heaviest(self, packs: Packs) -> float:
        """Time of the slowest pack on one pipeline stage."""
        return max(self.ms(pack) for pack in packs)

    def packed(self, *, search: bool) -> Packs | None:
        """Packs in the number that is asked for, None if it cannot be made, or else in the best."""
        options, cost = self._options, self._cost
        if not self._tokens:
            return []
        if options.microbatches is not None:
            return self._packs(options.microbatches, search)
        few = fewest(self._tokens, cost.max_len, options.max_segments)
        if options.packing is Packing.NEIGHBOURS:
            least = next(count for count in range(len(few), len(self._tokens) + 1) if self._packs(count, False))
            return self._packs(least if cost.pp == 1 else self._best_count(least), search)
        if cost.pp == 1 and not search:
            return few  # of pipelines without bubbles only the sum matters
        count = len(few) if cost.pp == 1 else self._best_count(len(few))
        tried = (self._packs(count, searched) for searched in {False, search})
        return min(
            (few, *(packs for packs in tried if packs)),
            key=lambda packs: (round(self.end(packs), 6), self.heaviest(packs)),
        )

    def _best_count(self, least: int) -> int:
        """The number of packs with the earliest end: downhill from the one that suits equal packs."""
        most = len(self._tokens)
        wanted = round(sqrt((self._cost.pp - 1) * sum(self._times) / max(self._cost.c, 1e-9)))
        ends: dict[int, float] = {}

        def end(count: int) -> float:
            if count not in ends:
                packs = self._packs(count, False) if least <= count <= most else None
                ends[count] = self.end(packs) if packs else float("inf")
            return ends[count]

        at = min(max(wanted, least), most)
        step = 1 if end(at + 1) < end(at) else -1
        while end(at + step) < end(at):
            at += step
        return at

    def _packs(self, count: int, search: bool) -> Packs | None:
        room, segments = self._cost.max_len, self._options.max_segments
        if self._options.packing is Packing.NEIGHBOURS:
            return neighbours(self._times, self._tokens, count, room, segments)
        return balanced(self._times, self._tokens, count, room, segments, search=search)
