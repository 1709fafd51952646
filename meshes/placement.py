"""A placement: a strategy put on device numbers, as a value and as text.

Text form: a strategy, then ``@`` and the device numbers in mesh order::

    tp4 · tp4@4-7 · tp4@0,2,4,6 · dp2.tp4@7-0 (the reverse order)

Without ``@`` a strategy takes the first devices. Equal placements are the same layout of the same
model, so a placement is the key under which compiled steps and plans are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynajax.errors import StrategyError
from dynajax.meshes.strategy import Strategy

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Placement:
    """A strategy and the numbers of the devices it runs on.

    Attributes:
        strategy: what runs.
        devices: one device number for each place of the strategy's mesh, the last axis running fastest.

    Example:
        >>> str(Placement.parse("tp4@4-7")), Placement.parse("tp4@4-7").devices
        ('tp4@4-7', (4, 5, 6, 7))
    """

    strategy: Strategy
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.strategy.num_devices:
            raise StrategyError(
                f"{self.strategy} needs {self.strategy.num_devices} devices and is put on {len(self.devices)} "
                f"({_written(self.devices)}); name as many as its axes multiply to"
            )
        if len(set(self.devices)) < len(self.devices):
            raise StrategyError(f"{self.strategy}@{_written(self.devices)} names a device twice; name each once")

    @staticmethod
    def parse(text: str | Strategy | Placement) -> Placement:
        """Read the text form; a strategy alone takes the first devices.

        Raises:
            StrategyError: the strategy or the device list cannot be read, or their numbers of devices differ.
        """
        if isinstance(text, Placement):
            return text
        if isinstance(text, Strategy):
            return Placement(text, tuple(range(text.num_devices)))
        written, at, numbers = text.partition("@")
        strategy = Strategy.parse(written)
        return Placement(strategy, read_devices(numbers, text) if at else tuple(range(strategy.num_devices)))

    @property
    def num_devices(self) -> int:
        """How many devices it runs on."""
        return len(self.devices)

    def mesh(self, devices: Sequence[Any]) -> Any:
        """The ``jax.sharding.Mesh`` of the strategy over its places in ``devices``.

        Raises:
            StrategyError: a device number is out of range.
        """
        if max(self.devices) >= len(devices):
            raise StrategyError(
                f"{self} uses device {max(self.devices)}, but there are {len(devices)}, numbered from 0; "
                f"name devices up to {len(devices) - 1}"
            )
        return self.strategy.mesh([devices[number] for number in self.devices])

    def __str__(self) -> str:
        if self.devices == tuple(range(self.num_devices)):
            return str(self.strategy)
        return f"{self.strategy}@{_written(self.devices)}"


def read_devices(text: str, whole: str) -> tuple[int, ...]:
    """Device numbers in their text form.

    Args:
        text: the numbers.
        whole: the text that they are part of, for the message.

    Raises:
        StrategyError: they cannot be read.
    """
    numbers: list[int] = []
    for part in re.sub(r"\s", "", text).split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise StrategyError(f"{whole!r}: {part!r} names no devices; write them like 4-7, 7-0 or 0,2,4,6")
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += range(first, last + 1) if last >= first else range(first, last - 1, -1)
    return tuple(numbers)


def _written(devices: Sequence[int]) -> str:
    """Device numbers with runs of neighbours joined: ``(0, 1, 2, 5)`` becomes ``0-2,5``."""
    runs: list[list[int]] = []
    for number in devices:
        run = runs[-1] if runs else []
        follows = run and abs(number - run[-1]) == 1 and (len(run) == 1 or number - run[-1] == run[1] - run[0])
        if follows:
            run.append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
