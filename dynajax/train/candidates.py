"""Where a job on documents runs: some devices, and the strategies of which each step takes the one that suits it."""

from __future__ import annotations

from dataclasses import dataclass

from dynajax.balance import pipelines_of
from dynajax.meshes import Placement, Strategy


@dataclass(frozen=True)
class Candidates:
    """Strategies on the same devices.

    Attributes:
        name: for people: ``auto``, or the text of the one strategy.
        strategies: one or more; every pipeline counted by itself, so that dp2.tp4 is two pipelines tp4.
        devices: numbers of the devices, which the pipelines take in turn.
    """

    name: str
    strategies: tuple[Strategy, ...]
    devices: tuple[int, ...]

    @staticmethod
    def one(placement: Placement) -> Candidates:
        """A strategy that runs in every step."""
        return Candidates(str(placement), (Strategy(pipelines_of(placement.strategy)),), placement.devices)

    def pipelines(self, index: int) -> tuple[Placement, ...]:
        """Where each pipeline of strategy number ``index`` runs."""
        placed: list[Placement] = []
        begin = 0
        for pipeline in self.strategies[index].pipelines:
            end = begin + pipeline.num_devices
            placed.append(Placement(Strategy((pipeline,)), self.devices[begin:end]))
            begin = end
        return tuple(placed)

    def __str__(self) -> str:
        return self.name
