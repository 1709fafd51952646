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

from dynajax.balance.compose import Mix, compose, group, prefixes
from dynajax.balance.cost import Floats, Ints, PipelineCost
from dynajax.balance.iteration import Planner, PlanOptions
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy

_GROUPS = 24
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
    """Sample batches to propose from: ten million tokens of data, from 6 to 32 batches of ``tokens``."""
    return min(max(10_000_000 // tokens, 6), 32)


def propose(
    samples: Sequence[Ints],
    costs: Sequence[PipelineCost],
    devices: int,
    longest: int,
    *,
    most: int = 12,
    options: PlanOptions | None = None,
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
    kinds = [cost for cost in costs if cost.devices <= devices]
    if not kinds or longest > max(cost.max_len for cost in kinds):
        raise BalanceError(
            f"no pipeline of at most {devices} devices holds {longest} tokens; "
            f"the roomiest holds {max((cost.max_len for cost in kinds), default=0)}: cut sequences or add devices"
        )
    mixes = _mixes(filled, kinds, devices, longest)
    planner = Planner([strategy(mix, kinds) for mix in mixes], kinds, options)
    prices = [planner.prices(tokens, _NEAR) for tokens in filled]
    ends, work = np.stack([p.ms for p in prices]), np.stack([p.work_ms for p in prices])
    roomy = np.array([candidate.room >= longest for candidate in planner.candidates])
    chosen = _choose(ends, work.mean(axis=0), roomy, most)
    return Proposal(
        tuple(planner.candidates[index].strategy for index in chosen),
        len(mixes),
        float(ends[:, chosen].min(axis=1).mean()),
    )


def strategy(mix: Mix, kinds: Sequence[PipelineCost]) -> Strategy:
    """The strategy of a mix, the largest pipelines first."""
    ranked = sorted(range(len(kinds)), key=lambda k: (-kinds[k].devices, kinds[k].pp, k))
    return Strategy(tuple(kinds[k].pipeline for k in ranked for _ in range(mix.copies[k])))


def _mixes(samples: Sequence[Ints], kinds: Sequence[PipelineCost], devices: int, longest: int) -> list[Mix]:
    """Different mixes, one at least with room for ``longest``."""
    rooms = [cost.max_len for cost in kinds]
    every = np.concatenate(samples)
    pooled = np.append(every, longest) if every.max() < longest else every
    found = [compose(group(tokens, _GROUPS, rooms), kinds, devices) for tokens in samples]
    found += prefixes(group(pooled, _GROUPS, rooms, len(samples)), kinds, devices)
    return list({mix.copies: mix for mix in found}.values())


def _choose(ends: Floats, work: Floats, roomy: np.ndarray, most: int) -> list[int]:
    """Columns of ``ends`` (samples, mixes), one after the other those that lower the mean of the row minima most.

    Of equally good ones it is that with the least ``work``: it has slack for batches unlike the samples.
    The first is one that ``roomy`` allows.
    """
    chosen: list[int] = []
    now = np.full(len(ends), np.inf)
    while len(chosen) < most:
        means = np.minimum(now[:, None], ends).mean(axis=0)
        means = means if chosen else np.where(roomy, means, np.inf)
        if chosen and means.min() > now.mean() * (1 - _WORTH):
            break
        equal = means <= means.min() * (1 + 1e-9)
        chosen.append(int(np.flatnonzero(equal)[work[equal].argmin()]))
        now = np.minimum(now, ends[:, chosen[-1]])
    return chosen
