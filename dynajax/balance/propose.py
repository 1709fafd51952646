"""Candidate strategies for a data distribution, found once before training.

From sample batches of the data: the best mix for each sample (``compose``), and the mixes that are best
for all shorter sequences of all samples together, one for each longest sequence, as Hydraulis takes
them. Of these, the few are kept whose best, batch by batch, ends earliest on the samples. One holds the
longest sequence that may come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.balance.compose import Mix, compose, length_groups, prefixes
from dynajax.balance.cost import PipelineCost
from dynajax.balance.iteration import IterationOptions, Planner
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy
from dynajax.types import Bools, Floats, Ints

_GROUPS = 24
_TOKENS = 10_000_000  # of data that mixes are made for, in 4 to 32 batches
_NEAR = 0.05  # on a sample, mixes that cannot end within this of the best are not planned
_WORTH = 1e-3  # relative gain on the samples below which one more candidate is not worth compiling


@dataclass(frozen=True)
class Proposal:
    """Candidate strategies.

    Attributes:
        candidates: the strategies, the most useful first.
        considered: how many different mixes were compared.
        sample_ms: mean end over the samples when each takes its best candidate.
    """

    candidates: tuple[Strategy, ...]
    considered: int
    sample_ms: float


def enough_samples(tokens: int) -> int:
    """Sample batches of ``tokens`` to draw, so that rare long sequences are among them: 48 to 256."""
    return min(max(80_000_000 // tokens, 48), 256)


def propose(
    samples: Sequence[Ints],
    costs: Sequence[PipelineCost],
    devices: int,
    longest: int,
    *,
    most: int = 12,
    options: IterationOptions | None = None,
) -> Proposal:
    """At most ``most`` strategies of exactly ``devices`` devices that suit batches like ``samples``.

    Args:
        samples: lengths of the sequences of each sample batch.
        costs: price lists of the pipelines that may be used.
        devices: devices of every strategy.
        longest: the longest sequence that may come; one strategy at least holds it.
        most: strategies wanted, 1 or more.
        options: how iterations will be planned.

    Raises:
        BalanceError: there are no samples, or no mix holds ``longest`` on ``devices``.
    """
    filled = [np.asarray(tokens, np.int64) for tokens in samples if len(tokens)]
    if not filled or most < 1:
        raise BalanceError(f"{len(filled)} sample batches with sequences and most={most}: give at least one of each")
    shapes = (options or IterationOptions()).microbatching.shapes
    kinds = [cost for cost in (shapes.limit(costs) if shapes else costs) if cost.devices <= devices]
    if not kinds or longest > max(cost.max_len for cost in kinds):
        raise BalanceError(
            f"no pipeline of at most {devices} devices holds {longest} tokens; "
            f"the roomiest holds {max((cost.max_len for cost in kinds), default=0)}: cut sequences or add devices"
        )
    drawn = _representative(filled)
    mixes = _mixes(drawn, kinds, devices, longest)
    planner = Planner([strategy(mix, kinds) for mix in mixes], costs, options)
    prices = [planner.prices(sample.tokens, _NEAR) for sample in drawn]
    ends, work = np.stack([p.ms for p in prices]), np.stack([p.work_ms for p in prices])
    weights = np.array([sample.weight for sample in drawn])
    roomy = np.array([candidate.room >= longest for candidate in planner.candidates])
    chosen = _with_homogeneous(_choose(ends, work, weights / weights.sum(), roomy, most), mixes, kinds, longest, most)
    sample_ms = float(np.average(ends[:, chosen].min(axis=1), weights=weights))
    return Proposal(tuple(planner.candidates[index].strategy for index in chosen), len(mixes), sample_ms)


def strategy(mix: Mix, kinds: Sequence[PipelineCost]) -> Strategy:
    """The strategy of a mix, the largest pipelines first."""
    ranked = sorted(range(len(kinds)), key=lambda k: (-kinds[k].devices, kinds[k].pp, k))
    return Strategy(tuple(kinds[k].pipeline for k in ranked for _ in range(mix.copies[k])))


@dataclass(frozen=True, eq=False)
class _Sample:
    """A batch that stands for ``weight`` batches."""

    tokens: Ints
    weight: int


def _representative(samples: Sequence[Ints]) -> list[_Sample]:
    """A few samples for all: each of those with the most attention work, and one for every so many others.

    Long sequences decide the mix and are rare, so an even draw of a few batches would miss them.
    """
    ranked = sorted(samples, key=lambda tokens: -float(tokens @ tokens))
    mean = sum(int(tokens.sum()) for tokens in samples) / len(samples)
    count = int(min(max(_TOKENS / mean, 4), 32, len(samples)))
    alone = count // 4
    others = np.array_split(np.arange(alone, len(ranked)), count - alone)
    return [_Sample(tokens, 1) for tokens in ranked[:alone]] + [
        _Sample(ranked[part[part.size // 2]], part.size) for part in others
    ]


def _mixes(samples: Sequence[_Sample], kinds: Sequence[PipelineCost], devices: int, longest: int) -> list[Mix]:
    """Different mixes: the best of each sample, of all shorter sequences of all, and a homogeneous one."""
    rooms = [cost.max_len for cost in kinds]
    every = np.append(np.concatenate([sample.tokens for sample in samples]), longest)
    found = [compose(length_groups(sample.tokens, _GROUPS, rooms), kinds, devices) for sample in samples]
    found += prefixes(length_groups(every, _GROUPS, rooms, len(samples)), kinds, devices)
    for k, cost in enumerate(kinds):
        if cost.max_len >= longest and devices % cost.devices == 0:
            found.append(Mix(tuple(devices // cost.devices * (i == k) for i in range(len(kinds))), float("inf")))
    return list({mix.copies: mix for mix in found}.values())


def _choose(ends: Floats, work: Floats, weights: Floats, roomy: Bools, most: int) -> list[int]:
    """Columns of ``ends`` (samples, mixes), one after the other those that lower the mean of the row minima most.

    Of equally good ones it is that with the least ``work``: it has slack for batches unlike the samples.
    The first is one that ``roomy`` allows.
    """
    chosen: list[int] = []
    now = np.full(len(ends), np.inf)
    while len(chosen) < most:
        means = weights @ np.minimum(now[:, None], ends)
        means = means if chosen else np.where(roomy, means, np.inf)
        if chosen and means.min() > weights @ now * (1 - _WORTH):
            break
        equal = np.flatnonzero(means <= means.min() * (1 + 1e-9))
        chosen.append(int(equal[(weights @ work[:, equal]).argmin()]))
        now = np.minimum(now, ends[:, chosen[-1]])
    return chosen


def _with_homogeneous(
    chosen: list[int], mixes: Sequence[Mix], kinds: Sequence[PipelineCost], longest: int, most: int
) -> list[int]:
    """``chosen`` with the homogeneous layout of the smallest pipeline that holds ``longest``, if there is room.

    It is for batches that are unlike every sample: no plan is then worse than the homogeneous one.
    """
    same = [
        (kinds[used[0]].devices, kinds[used[0]].pp, index)
        for index, used in enumerate([k for k, copies in enumerate(mix.copies) if copies] for mix in mixes)
        if len(used) == 1 and kinds[used[0]].max_len >= longest
    ]
    if not same or most == 1 or min(same)[2] in chosen:
        return chosen
    return [*chosen[: most - 1], min(same)[2]]
