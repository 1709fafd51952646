"""The state of a training job that does not run: its tensors from a model's shape, its layout from a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.tree_util as jtu
import numpy as np

from dynajax.errors import DynajaxError, StrategyError
from dynajax.meshes import Pipeline, Placement, Strategy
from dynajax.models.functional import ParameterSpec, parameter_specs
from dynajax.models.presets import preset
from dynajax.vps import Layout, Space, Tensor, Tiling, flat_layout, strategy_layout, zero1_layout
from dynajax.vps.tiling import side_by_side


@dataclass(frozen=True)
class StateParts:
    """What is moved.

    Attributes:
        master: float32 master weights, "flat" over the data ranks (ZeRO-1), or "none".
        moments: the two Adam moments, float32: "flat" like the master, "replicated" over the data ranks, or "none".
        weights: True to move the bfloat16 weights too, which can be recast from the master.
        gradients: True to move float32 gradients, replicated over the data ranks.
    """

    master: Literal["flat", "none"] = "flat"
    moments: Literal["flat", "replicated", "none"] = "flat"
    weights: bool = False
    gradients: bool = False


@dataclass(frozen=True, eq=False)
class JobState:
    """Tensors of a job, with what places them.

    Attributes:
        space: all of them, under paths such as ``master['blocks']['mlp']['up']``.
        parameters: those of the model alone.
        axes: logical axes of each parameter.
        last: parameters without layers on the last pipeline stage.
        tied: parameters of the first pipeline stage that the last one computes with too.
        layers: how many there are.
        experts: how many there are, 0 for a dense model.
        heads: query heads.
        parts: what is moved.
    """

    space: Space
    parameters: Space
    axes: dict[str, tuple[str | None, ...]]
    last: frozenset[str]
    tied: frozenset[str]
    layers: int
    experts: int
    heads: int
    parts: StateParts

    @staticmethod
    def of(model: str, parts: StateParts) -> JobState:
        """The state of a job that trains the model preset ``model``.

        Raises:
            ModelError: no preset has that name.
        """
        config: Any = preset(model)
        specs = jtu.tree_leaves_with_path(parameter_specs(config), is_leaf=lambda x: isinstance(x, ParameterSpec))
        shapes = {jtu.keystr(path): spec for path, spec in specs}
        parameters = Space(tuple(Tensor(p, s.shape, "float32", 4) for p, s in shapes.items()))
        space = Space(
            tuple(
                Tensor(part + t.path, t.shape, dtype, size) for part, dtype, size in _stored(parts) for t in parameters
            )
        )
        last = frozenset(p for p in shapes if p.startswith("['head']"))
        tied = frozenset(p for p in shapes if config.tied and p == "['embed']['tokens']")
        axes = {p: tuple(s.axes) for p, s in shapes.items()}
        experts = getattr(config, "experts", 0)
        return JobState(space, parameters, axes, last, tied, config.layers, experts, config.heads, parts)

    def layout(self, placement: Placement | Strategy) -> Layout:
        """Who holds what at a placement; a strategy alone takes the devices 0, 1, ….

        Pipelines side by side have replicas of what is not flat; what is flat they share, cut over all their devices.

        Raises:
            StrategyError: the strategy does not fit the model.
        """
        placement = Placement.parse(placement)
        for pipeline in placement.strategy.pipelines:
            self._require_fit(pipeline)
        kinds = {part: self._kind(part) for part, _, _ in _stored(self.parts)}
        of_path: dict[str, dict[str, Tiling]] = {}
        for kind in sorted(set(kinds.values())):
            layout = self._flat(placement) if kind == "flat" else self._replicated(placement)
            of_path[kind] = dict(zip((t.path for t in self.parameters), layout.tilings, strict=True))
        tilings: list[Tiling] = []
        for tensor in self.space:
            part, bracket, rest = tensor.path.partition("[")
            tilings.append(of_path[kinds[part]][bracket + rest])
        return Layout(self.space, tuple(tilings))

    def _flat(self, placement: Placement) -> Layout:
        devices, strategy = np.asarray(placement.devices, np.int64), placement.strategy
        if strategy.is_homogeneous:
            return zero1_layout(self.parameters, self.axes, strategy, devices=devices, last=self.last)
        return flat_layout(self.parameters, self.axes, devices)

    def _replicated(self, placement: Placement) -> Layout:
        layouts: list[Layout] = []
        ends = np.cumsum([pipeline.num_devices for pipeline in placement.strategy.pipelines])
        numbers = np.split(np.asarray(placement.devices, np.int64), ends[:-1])
        for pipeline, devices in zip(placement.strategy.pipelines, numbers, strict=True):
            alone = Strategy((pipeline,))
            layouts.append(
                strategy_layout(self.parameters, self.axes, alone, devices=devices, last=self.last, tied=self.tied)
            )
        return side_by_side(layouts)

    def _kind(self, part: str) -> str:
        if part in ("mu", "nu"):
            return self.parts.moments
        return "flat" if part == "master" else "replicated"

    def _require_fit(self, pipeline: Pipeline) -> None:
        limits = [("pp", pipeline.size("pp"), self.layers, "layers"), ("tp", pipeline.size("tp"), self.heads, "heads")]
        if self.experts:
            limits.append(
                ("ep", pipeline.experts[0] if pipeline.experts else pipeline.size("ep"), self.experts, "experts")
            )
        elif pipeline.experts:
            raise StrategyError(f"{pipeline}: the model has no experts; leave out the part after the slash")
        for axis, size, most, what in limits:
            if size > most:
                raise StrategyError(f"{pipeline}: {axis}{size} for {most} {what}; choose {axis}{most} or less")


def _stored(parts: StateParts) -> list[tuple[str, str, int]]:
    """Name, dtype and bytes of an element of what is stored for each parameter."""
    stored = [("master", "float32", 4)] if parts.master != "none" else []
    if parts.moments != "none":
        stored += [("mu", "float32", 4), ("nu", "float32", 4)]
    if parts.weights:
        stored.append(("weights", "bfloat16", 2))
    if parts.gradients:
        stored.append(("gradients", "float32", 4))
    if not stored:
        raise DynajaxError("nothing is left to move: keep the master, the moments, the weights or the gradients")
    return stored
