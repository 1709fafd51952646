"""Layouts of pipelines with stages of any height and width: each copy of the model is cut as it likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.errors import LayoutError
from dynajax.meshes import PARAMETER_RULES, Rules
from dynajax.vps.region import Ints
from dynajax.vps.space import Space
from dynajax.vps.spec import cut_boxes, end_stages
from dynajax.vps.tiling import Layout, Tiling


@dataclass(frozen=True)
class Stage:
    """A pipeline stage.

    Attributes:
        devices: device numbers, which cut the stage's tensors by tensor parallelism, in this order.
        layers: its first layer and the one past its last.
    """

    devices: tuple[int, ...]
    layers: tuple[int, int]


def staged_layout(
    space: Space,
    logical_axes: Mapping[str, Sequence[str | None]],
    pipelines: Sequence[Sequence[Stage]],
    rules: Rules = PARAMETER_RULES,
    last: frozenset[str] = frozenset(),
    tied: frozenset[str] = frozenset(),
) -> Layout:
    """The layout of a space of which every pipeline holds a copy.

    Args:
        space: tensors to place.
        logical_axes: logical axes of each tensor, by path.
        pipelines: the stages of each; they may differ in every way.
        rules: logical axes to mesh axes; only tp cuts.
        last: paths of tensors without layers that live on the last stage of each pipeline; the others on the first.
        tied: paths of those of the first stage that the last stage has a copy of.

    Raises:
        LayoutError: the stages of a pipeline do not follow one another, or do not hold all layers.
    """
    tilings: list[Tiling] = []
    for tensor in space:
        axes = tuple(logical_axes.get(tensor.path, ()))
        holders: list[Ints] = []
        boxes: list[tuple[Ints, Ints]] = []
        for pipeline in pipelines:
            ends = end_stages(tensor.path, len(pipeline), last, tied)
            for stage in pipeline if "layers" in axes else pipeline[ends]:
                lo, hi = cut_boxes({"tp": len(stage.devices)}, tensor.shape, axes, rules)
                if "layers" in axes:
                    _require_follows(pipeline, tensor.shape[axes.index("layers")])
                    lo[:, axes.index("layers")], hi[:, axes.index("layers")] = stage.layers
                holders.append(np.asarray(stage.devices, np.int64))
                boxes.append((lo, hi))
        lo, hi = (np.concatenate([b[k] for b in boxes]) for k in (0, 1))
        tilings.append(Tiling.of_boxes(tensor.shape, np.concatenate(holders), lo, hi))
    return Layout(space, tuple(tilings))


def _require_follows(pipeline: Sequence[Stage], layers: int) -> None:
    borders = [b for stage in pipeline for b in stage.layers]
    if borders[0] != 0 or borders[-1] != layers or borders[1:-1:2] != borders[2::2]:
        raise LayoutError(f"stages of the layers {borders} do not cut {layers} layers end to end; mend their borders")
