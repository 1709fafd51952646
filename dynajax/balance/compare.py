"""One batch, planned and by the baselines, all priced by the same simulation."""

from __future__ import annotations

from dataclasses import dataclass

from dynajax.balance.baselines import Homogeneous
from dynajax.balance.bound import any_strategy_ms
from dynajax.balance.cost import PipelineCost, Profile, data_parallel
from dynajax.balance.iteration import Planner
from dynajax.types import Ints


@dataclass(frozen=True)
class Setting:
    """What plans and baselines share.

    Attributes:
        devices: devices of every strategy.
        longest: the longest sequence that may come.
        homogeneous: the baseline's layout, the first that holds ``longest``; also the optimizer layout.
        costs: price lists of all pipelines that fit in memory beside that optimizer layout.
    """

    devices: int
    longest: int
    homogeneous: Homogeneous
    costs: tuple[PipelineCost, ...]


def setting(profile: Profile, devices: int, longest: int) -> Setting:
    """The setting of ``profile`` on ``devices`` for sequences of at most ``longest`` tokens.

    Raises:
        BalanceError: no homogeneous layout holds them.
    """
    first = profile.homogeneous(devices, longest)
    costs = profile.costs(data_parallel(first.pipeline, devices))
    return Setting(devices, longest, Homogeneous(first, devices), costs)


@dataclass(frozen=True)
class Baselines:
    """What a batch takes without a choice of strategies, in ms.

    Attributes:
        padding: homogeneous, every sequence padded to the longest.
        fixed: homogeneous, packed first-fit to the longest sequence that may come, round robin.
        balanced: homogeneous, dispatched and packed by the planner.
        bound: no strategy can be below this (``any_strategy_ms``).
    """

    padding: float
    fixed: float
    balanced: float
    bound: float


def baselines(tokens: Ints, shared: Setting) -> Baselines:
    """The baselines for sequences of ``tokens`` tokens."""
    same = shared.homogeneous
    return Baselines(
        padding=same.padding_ms(tokens),
        fixed=same.fixed_ms(tokens, shared.longest),
        balanced=Planner([same.strategy], [same.cost]).plan(tokens).ms,
        bound=any_strategy_ms(tokens, shared.costs, shared.devices),
    )
