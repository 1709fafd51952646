"""What may be asked for by text, and where a job on documents runs: devices, and strategies to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from dynajax.balance import pipelines_of
from dynajax.meshes import Placement, Strategy, read_devices

AUTO = "auto"


@dataclass(frozen=True)
class Auto:
    """Strategies that are proposed for the data, on all devices or some.

    Attributes:
        devices: their numbers; None for all.
        text: as it was written.
    """

    devices: tuple[int, ...] | None = None
    text: str = AUTO

    def __str__(self) -> str:
        return self.text


Asked = Placement | Auto
"""What a text asks for."""


def read_asked(text: str | Strategy | Asked) -> Asked:
    """Read ``auto``, ``auto@0-7``, or a placement.

    Raises:
        StrategyError: it is none of these.
    """
    if isinstance(text, Auto):
        return text
    word, at, numbers = str(text).strip().partition("@")
    if word == AUTO:
        return Auto(read_devices(numbers, str(text)) if at else None, str(text).strip())
    return Placement.parse(text)


def takes_documents(asked: Asked) -> bool:
    """True if it can only run on documents: several pipelines side by side, or any."""
    return isinstance(asked, Auto) or not asked.strategy.is_homogeneous


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
