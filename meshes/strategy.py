"""A strategy: how a job runs on its devices, as a value and as text.

Text form: axes joined by ``.``, pipelines joined by ``|``, copies written ``2*``::

    dp2.tp4 · fsdp8 · pp2.tp2.cp2 · dp2.ep4 · tp8|pp2.tp4|tp4 · 2*tp2|cp4 · tp4.pp8.dp4/ep16

The product of a pipeline's axes is its number of devices. A slash gives the experts of a
pipeline a layout of their own, folded over the devices of one pipeline stage.

Mesh axes always come in one order, the slowest first: ``pp, dp, fsdp, ep, cp, tp``. Neighbouring
devices are thus peers in tensor parallelism, which talks the most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dynajax.errors import StrategyError

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
EXPERT_AXES = ("ep", "tp")
_AXIS = re.compile(r"([a-z]+)(\d+)")
_COPIES = re.compile(r"(\d+)\*(.+)")


@dataclass(frozen=True)
class Pipeline:
    """One instance of a parallel strategy that runs whole sequences.

    Attributes:
        sizes: size of each axis, in the order of ``AXES``; 1 where an axis is not used.
        experts: ``(ep, tp)`` of the experts' own layout (the part after the slash), or None.
        text: the pipeline as it was written; two pipelines with the same axes are equal.
    """

    sizes: tuple[int, ...]
    experts: tuple[int, int] | None = None
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text or self._written())
        stage = self.num_devices // self.size("pp")
        if self.experts and stage % math.prod(self.experts):
            raise StrategyError(
                f"{self.text}: experts take ep·tp = {math.prod(self.experts)} devices, which does not divide "
                f"the {stage} devices of a pipeline stage; choose a divisor of {stage}"
            )

    def _written(self) -> str:
        axes = ".".join(f"{a}{n}" for a, n in zip(AXES, self.sizes, strict=True) if n > 1) or "dp1"
        inner = ".".join(f"{a}{n}" for a, n in zip(EXPERT_AXES, self.experts or (), strict=False) if n > 1)
        return f"{axes}/{inner or 'ep1'}" if self.experts else axes

    @cached_property
    def num_devices(self) -> int:
        """The product of all axes."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Size of ``axis``, 1 if the pipeline does not use it."""
        return self.sizes[AXES.index(axis)]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Strategy:
    """Pipelines that together cover the devices of a job; usually just one.

    Example:
        >>> strategy = Strategy.parse("dp2.tp4")
        >>> strategy.num_devices, strategy.size("tp")
        (8, 4)
    """

    pipelines: tuple[Pipeline, ...]

    @staticmethod
    def parse(text: str | Strategy) -> Strategy:
        """Read the text form.

        Raises:
            StrategyError: an axis is unknown, written twice or has no size.
        """
        if isinstance(text, Strategy):
            return text
        pipelines: list[Pipeline] = []
        for part in re.sub(r"\s", "", text).lower().split("|"):
            copies = _COPIES.fullmatch(part)
            pipelines += (
                [_parse_pipeline(copies[2], text)] * int(copies[1]) if copies else [_parse_pipeline(part, text)]
            )
        if not pipelines:
            raise StrategyError(f"strategy {text!r} has no pipeline: 0 copies of something are nothing")
        return Strategy(tuple(pipelines))

    @cached_property
    def num_devices(self) -> int:
        """Devices of all pipelines."""
        return sum(p.num_devices for p in self.pipelines)

    @property
    def is_homogeneous(self) -> bool:
        """True for one pipeline, which is one mesh."""
        return len(self.pipelines) == 1

    def size(self, axis: str) -> int:
        """Size of a mesh axis of a strategy with one pipeline."""
        return self._only().size(axis)

    def mesh_shape(self) -> dict[str, int]:
        """Axis sizes of the one pipeline, in mesh order, all axes present."""
        return dict(zip(AXES, self._only().sizes, strict=True))

    def mesh(self, devices: Sequence[Any]) -> Any:
        """A ``jax.sharding.Mesh`` with Auto axes over ``devices``, in the order given.

        Args:
            devices: exactly ``num_devices`` devices, the tensor parallel axis running fastest.
        """
        from jax.sharding import Mesh

        if len(devices) != self.num_devices:
            raise StrategyError(f"{self} needs {self.num_devices} devices and got {len(devices)}")
        return Mesh(np.asarray(devices, dtype=object).reshape(self._only().sizes), AXES)

    def _only(self) -> Pipeline:
        if not self.is_homogeneous:
            raise StrategyError(
                f"{self} has {len(self.pipelines)} pipelines: ask one of .pipelines, each has its own mesh"
            )
        return self.pipelines[0]

    def __str__(self) -> str:
        return "|".join(str(p) for p in self.pipelines)


def _parse_pipeline(text: str, whole: str) -> Pipeline:
    axes, slash, experts = text.partition("/")
    sizes = _parse_axes(axes, AXES, whole)
    inner = _parse_axes(experts, EXPERT_AXES, whole) if slash else None
    return Pipeline(
        tuple(sizes.get(a, 1) for a in AXES),
        tuple(inner.get(a, 1) for a in EXPERT_AXES) if inner is not None else None,  # pyright: ignore[reportArgumentType]
        text,
    )


def _parse_axes(text: str, known: tuple[str, ...], whole: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split("."):
        match = _AXIS.fullmatch(part)
        if match is None or match[1] not in known or int(match[2]) < 1:
            raise StrategyError(
                f"strategy {whole!r}: {part!r} is not an axis with its size; "
                f"axes are {', '.join(known)}, written like dp2.tp4"
            )
        if match[1] in sizes:
            raise StrategyError(f"strategy {whole!r} names the axis {match[1]} twice; write it once")
        sizes[match[1]] = int(match[2])
    return sizes
