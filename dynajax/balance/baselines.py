"""What people do without a planner, priced like the plans: one homogeneous layout, three ways to fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynajax.balance.cost import PipelineCost, data_parallel
from dynajax.balance.simulate import simulated_ms
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy
from dynajax.types import Ints


@dataclass(frozen=True)
class Homogeneous:
    """Copies of one pipeline on all devices.

    Attributes:
        cost: the pipeline.
        devices: devices of all copies.
    """

    cost: PipelineCost
    devices: int

    def __post_init__(self) -> None:
        data_parallel(self.cost.pipeline, self.devices)  # refuses what does not divide

    @property
    def copies(self) -> int:
        """Pipelines."""
        return self.devices // self.cost.devices

    @property
    def strategy(self) -> Strategy:
        """The layout, one pipeline a copy."""
        return Strategy((self.cost.pipeline,) * self.copies)

    def padding_ms(self, tokens: Ints) -> float:
        """Every sequence padded to the longest of the batch, as many rows a micro-batch as fit, in turn."""
        if not tokens.size:
            return 0.0
        longest = int(tokens.max())
        rows = self.cost.max_len // longest
        if rows < 1:
            raise BalanceError(f"{self.cost.pipeline} holds {self.cost.max_len} tokens, not {longest}")
        full, left = divmod(tokens.size, rows)
        counts = [rows] * full + [left] * (left > 0)
        return self._in_turn([self.cost.microbatch_ms([longest] * count) for count in counts])

    def fixed_ms(self, tokens: Ints, length: int) -> float:
        """First-fit in the order given into packs of ``length`` tokens, the packs in turn.

        The unused end of a pack is not charged, so this flatters the baseline.
        """
        return self._in_turn([self.cost.microbatch_ms(pack) for pack in first_fit(tokens.tolist(), length)])

    def _in_turn(self, times: Sequence[float]) -> float:
        """When the last pipeline is done if micro-batch i goes to pipeline i modulo their number."""
        return max(simulated_ms(times[start :: self.copies], self.cost.pp) for start in range(self.copies))


def first_fit(tokens: Sequence[int], room: int) -> list[list[int]]:
    """Lengths in packs of at most ``room`` tokens, each in the first pack that has room.

    Raises:
        BalanceError: a sequence is longer than ``room``.
    """
    packs: list[list[int]] = []
    left: list[int] = []
    for size in tokens:
        if size > room:
            raise BalanceError(f"a sequence of {size} tokens does not fit into packs of {room}")
        at = next((index for index, space in enumerate(left) if space >= size), len(packs))
        if at == len(packs):
            packs.append([])
            left.append(room)
        packs[at].append(size)
        left[at] -= size
    return packs
