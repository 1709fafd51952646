"""The state of a training job that does not run: its tensors from a model's shape, its layout from a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.tree_util as jtu

from dynajax.errors import DynajaxError, StrategyError
from dynajax.meshes import Strategy
from dynajax.models.functional import ParameterSpec, parameter_specs
from dynajax.models.presets import preset
from dynajax.vps import Layout, Space, Tensor, Tiling, strategy_layout, zero1_layout


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

    def layout(self, strategy: Strategy) -> Layout:
        """Who holds what under a strategy, on the devices 0, 1, ….

        Raises:
            StrategyError: the strategy has several pipelines, or does not fit the model.
        """
        self._require_fit(strategy)
        kinds = {part: self._kind(part) for part, _, _ in _stored(self.parts)}
        of_path: dict[str, dict[str, Tiling]] = {}
        for kind in sorted(set(kinds.values())):
            place = zero1_layout if kind == "flat" else partial(strategy_layout, tied=self.tied)
            layout = place(self.parameters, self.axes, strategy, last=self.last)
            of_path[kind] = dict(zip((t.path for t in self.parameters), layout.tilings, strict=True))
        tilings: list[Tiling] = []
        for tensor in self.space:
            part, bracket, rest = tensor.path.partition("[")
            tilings.append(of_path[kinds[part]][bracket + rest])
        return Layout(self.space, tuple(tilings))

    def _kind(self, part: str) -> str:
        if part in ("mu", "nu"):
            return self.parts.moments
        return "flat" if part == "master" else "replicated"

    def _require_fit(self, strategy: Strategy) -> None:
        if not strategy.is_homogeneous:
            raise StrategyError(
                f"{strategy} has {len(strategy.pipelines)} pipelines; a model is planned for one, such as "
                f"{strategy.pipelines[0]}"
            )
        pipeline = strategy.pipelines[0]
        limits = [("pp", strategy.size("pp"), self.layers, "layers"), ("tp", strategy.size("tp"), self.heads, "heads")]
        if self.experts:
            limits.append(
                ("ep", pipeline.experts[0] if pipeline.experts else strategy.size("ep"), self.experts, "experts")
            )
        elif pipeline.experts:
            raise StrategyError(f"{strategy}: the model has no experts; leave out the part after the slash")
        for axis, size, most, what in limits:
            if size > most:
                raise StrategyError(f"{strategy}: {axis}{size} for {most} {what}; choose {axis}{most} or less")


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
