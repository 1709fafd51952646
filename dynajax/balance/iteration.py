"""The plan of an iteration: which strategy, which sequences on which pipeline, in which micro-batches.

For each candidate strategy that holds the longest sequence: dispatch, pack, simulate, and swap
sequences between the last pipeline and the others while that ends it earlier. The candidate that ends
first wins. Candidates are tried in the order of a lower bound (``bound``), and one whose bound is not
below the best end so far is not tried: it cannot win.

A plan depends on its arguments alone, so every process computes the same one. ``digest`` lets them check, for
unlike processors may round a sum differently and settle a tie the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import ArrayLike

from dynajax.balance.bound import CandidateBound, candidate_bound
from dynajax.balance.cost import PipelineCost, costs_of, short_text
from dynajax.balance.dispatch import assign
from dynajax.balance.local_search import Assignment, apply_swap
from dynajax.balance.microbatching import (
    MicrobatchOptions,
    PipelinePlan,
    form_microbatches,
    microbatches_ms,
    pad_microbatches,
)
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy
from dynajax.types import Floats, Ints

_ROUNDS = 40
_TRIES = 8  # swaps that are packed and simulated in a round
_ESTIMATED = 1.1  # a candidate whose estimated end is so far behind is not packed
_HOPE = 1.03  # a candidate that is so far behind after dispatch is not searched further


@dataclass(frozen=True)
class Considered:
    """What became of a candidate.

    Attributes:
        bound_ms: it cannot end before this; infinite if it does not hold the longest sequence.
        ms: when its plan ends; infinite if none was made, because its bound was not below the best.
    """

    bound_ms: float
    ms: float = float("inf")


@dataclass(frozen=True)
class IterationPlan:
    """What all devices do in an iteration.

    Attributes:
        candidate: position of the chosen strategy among the candidates.
        strategy: the chosen strategy, one pipeline for each of ``pipelines``.
        pipelines: their micro-batches.
        ms: simulated time of the last pipeline.
        considered: all candidates, in the order in which they were given.
    """

    candidate: int
    strategy: Strategy
    pipelines: tuple[PipelinePlan, ...]
    ms: float
    considered: tuple[Considered, ...] = field(repr=False)

    @property
    def published_ms(self) -> float:
        """Time of the last pipeline by the published form."""
        return max((pipeline.published_ms for pipeline in self.pipelines), default=0.0)

    @property
    def idle_share(self) -> float:
        """Share of all device time, until the last pipeline ends, in which a device does nothing."""
        busy = sum(mb.ms * p.pipeline.num_devices for p in self.pipelines for mb in p.microbatches)
        return 1 - busy / (self.ms * self.strategy.num_devices) if self.ms else 0.0

    @cached_property
    def digest(self) -> str:
        """The same for the same plan on every process: what to compare before running it."""
        packs = [[(mb.sequences, mb.padded) for mb in p.microbatches] for p in self.pipelines]
        return sha256(repr((self.candidate, short_text(self.strategy), packs)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class IterationOptions:
    """How iterations are planned.

    Attributes:
        microbatching: how a pipeline's share is packed.
        may_idle: whether a pipeline may stay without work although there are sequences enough.
        even: whether all pipelines get as many micro-batches, as one program for all of them needs; those
            that are missing are empty and marked.
    """

    microbatching: MicrobatchOptions = field(default_factory=MicrobatchOptions)
    may_idle: bool = False
    even: bool = False


@dataclass(frozen=True)
class Candidate:
    """A strategy with the prices of its pipelines.

    Attributes:
        strategy: the strategy.
        kinds: its different pipelines, ``max_len`` being what their rows hold.
        kind: which of them each pipeline is.
    """

    strategy: Strategy
    kinds: tuple[PipelineCost, ...]
    kind: tuple[int, ...]

    @property
    def room(self) -> int:
        """Most tokens of a sequence."""
        return max(cost.max_len for cost in self.kinds)

    @property
    def stages(self) -> int:
        """Pipeline stages of the deepest pipeline."""
        return max(cost.pp for cost in self.kinds)


@dataclass(frozen=True, eq=False)
class Prices:
    """What every candidate would make of a batch; infinite where it does not hold a sequence.

    Attributes:
        ms: float64 (candidates,), when it ends.
        work_ms: float64 (candidates,), the lower bound of all work: below ``ms``, there is slack.
    """

    ms: Floats
    work_ms: Floats


class Planner:
    """Plans iterations over a fixed set of candidates.

    Example:
        >>> planner = Planner([Strategy.parse("tp16|12*tp4")], profile.costs(optimizer))
        >>> planner.plan([30_000, 512, 80]).strategy
    """

    def __init__(
        self, candidates: Iterable[Strategy], costs: Sequence[PipelineCost], options: IterationOptions | None = None
    ) -> None:
        """Look the candidates up in the price list.

        Args:
            candidates: strategies of which each iteration takes one.
            costs: price lists of their pipelines.
            options: how to plan.

        Raises:
            BalanceError: there is no candidate, or one has a pipeline that is not in ``costs`` or that no
                bucket fits.
        """
        self.options = options or IterationOptions()
        shapes = self.options.microbatching.shapes
        fitting = shapes.limit(costs) if shapes else costs
        self.candidates = tuple(_candidate(strategy, fitting) for strategy in candidates)
        if not self.candidates:
            raise BalanceError("no candidate strategies: give at least one")

    def plan(self, lengths: ArrayLike, only: int | None = None) -> IterationPlan:
        """The best plan for sequences of ``lengths`` tokens.

        Args:
            lengths: tokens of each sequence, 1 or more, in any order; there may be none.
            only: consider this candidate alone.

        Raises:
            BalanceError: no candidate holds the longest sequence or can make the number of micro-batches asked
                for, or a length is below 1.
        """
        tokens = np.asarray(lengths, np.int64).reshape(-1)
        self._check(tokens, only)
        bounds = self._bounds(tokens, only)
        considered = [Considered(bounds[i].ms if i in bounds else np.inf) for i in range(len(self.candidates))]
        best, chosen = _Shared(np.inf, np.empty(0, np.int64)), -1
        for index in sorted(bounds, key=lambda i: (bounds[i].ms, self.candidates[i].stages, bounds[i].work_ms)):
            if bounds[index].ms >= best.ms:
                break
            shared = _share_out(tokens, self.candidates[index], self.options, best.ms * _HOPE)
            considered[index] = replace(considered[index], ms=shared.ms)
            best, chosen = (shared, index) if shared.ms < best.ms else (best, chosen)
        if chosen < 0:
            raise BalanceError(
                f"no candidate can make {self.options.microbatching.microbatches} micro-batches on each pipeline "
                f"out of {tokens.size} sequences of {tokens.sum()} tokens: ask for another number, or for none"
            )
        return _written(tokens, self.candidates[chosen], chosen, best.bins, considered, self.options)

    def prices(self, lengths: ArrayLike, near: float) -> Prices:
        """What every candidate would make of sequences of ``lengths`` tokens, by dispatch without packing.

        Candidates whose bound is above (1 + near) times the best end are priced by their bound.
        """
        tokens = np.asarray(lengths, np.int64).reshape(-1)
        bounds = self._bounds(tokens, None)
        ends = np.array([bounds[index].ms for index in range(len(self.candidates))])
        best = np.inf
        for index in np.argsort(ends, kind="stable").tolist():
            if bounds[index].ms > best * (1 + near):
                break
            ends[index] = float(_dispatched(tokens, self.candidates[index], self.options, best).done.max())
            best = min(best, float(ends[index]))
        return Prices(ends, np.array([bounds[index].work_ms for index in range(len(self.candidates))]))

    def _bounds(self, tokens: Ints, only: int | None) -> dict[int, CandidateBound]:
        ranked = -np.sort(-tokens)
        return {
            index: candidate_bound(ranked, c.kinds, np.bincount(c.kind))
            for index, c in enumerate(self.candidates)
            if only in (None, index)
        }

    def _check(self, tokens: Ints, only: int | None) -> None:
        if tokens.size and tokens.min() < 1:
            raise BalanceError(f"sequence {tokens.argmin()} has {tokens.min()} tokens: leave out empty sequences")
        room = max(c.room for index, c in enumerate(self.candidates) if only in (None, index))
        if tokens.size and tokens.max() > room:
            raise BalanceError(
                f"sequence {tokens.argmax()} has {tokens.max()} tokens and the roomiest candidate holds {room}: "
                "truncate or split it, or add a strategy with a larger pipeline"
            )


def _candidate(strategy: Strategy, costs: Sequence[PipelineCost]) -> Candidate:
    each = costs_of(strategy, costs)
    kinds = tuple(dict.fromkeys(each))
    position = {cost.pipeline: k for k, cost in enumerate(kinds)}
    kind = tuple(position[cost.pipeline] for cost in each)
    pipelines = tuple(cost.pipeline for cost in each)
    return Candidate(Strategy(pipelines), kinds, kind)


@dataclass(frozen=True, eq=False)
class _Shared:
    """When a plan ends, and the pipeline of each sequence in it."""

    ms: float
    bins: Ints


def _dispatched(tokens: Ints, candidate: Candidate, options: IterationOptions, limit: float) -> Assignment:
    kind, shapes = np.array(candidate.kind), options.microbatching.shapes
    return assign(tokens, candidate.kinds, kind, shapes=shapes, may_idle=options.may_idle, limit=limit)


def _share_out(tokens: Ints, candidate: Candidate, options: IterationOptions, limit: float) -> _Shared:
    """A good plan of ``candidate``, given up (infinite) or not searched further if it does not end by ``limit``."""
    found = _dispatched(tokens, candidate, options, limit)
    if found.done.max() > limit * _ESTIMATED:
        return _Shared(np.inf, found.bins)

    def end(index: int, items: Ints) -> float:
        return microbatches_ms(tokens[items].tolist(), candidate.kinds[candidate.kind[index]], options.microbatching)

    ms = np.array([end(index, items) for index, items in enumerate(found.members())])
    for _ in range(_ROUNDS):
        if ms.max() > limit or not _relieve(found, ms, end):
            break
    return _Shared(float(ms.max()), found.bins)


def _relieve(found: Assignment, ms: Floats, end: Callable[[int, Ints], float]) -> bool:
    """Make the first of the most promising swaps that does end the last pipeline earlier."""
    source = int(ms.argmax())
    for swap in found.swaps(source, _TRIES):
        bins = found.bins.copy()
        apply_swap(bins, swap)
        after = [end(index, np.flatnonzero(bins == index)) for index in (source, swap.target)]
        if max(after) < ms[source] * (1 - 1e-6):
            found.apply(swap)
            ms[[source, swap.target]] = after
            return True
    return False


def _written(
    tokens: Ints,
    candidate: Candidate,
    index: int,
    bins: Ints,
    considered: list[Considered],
    options: IterationOptions,
) -> IterationPlan:
    pipelines: list[PipelinePlan] = []
    for pipeline, kind in enumerate(candidate.kind):
        items = np.flatnonzero(bins == pipeline)
        pipelines.append(
            form_microbatches(items.tolist(), tokens[items].tolist(), candidate.kinds[kind], options.microbatching)
        )
    if options.even:
        count = max(len(pipeline.microbatches) for pipeline in pipelines)
        costs = [candidate.kinds[kind] for kind in candidate.kind]
        pipelines = [
            pad_microbatches(p, count, cost, options.microbatching) for p, cost in zip(pipelines, costs, strict=True)
        ]
    ms = max(pipeline.ms for pipeline in pipelines)
    considered[index] = replace(considered[index], ms=ms)
    return IterationPlan(index, candidate.strategy, tuple(pipelines), ms, tuple(considered))
