"""Flat layouts that know no model axes: every tensor by itself, cut equally over all devices of a job.

It is how optimizer state lies that unlike pipelines side by side share: each element on one device, whatever the
pipelines do (Hydraulis, 2024). Of a stack of layers each layer is cut by itself, so that all devices have a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dynajax.types import Ints
from dynajax.vps.region import intervals
from dynajax.vps.space import Space
from dynajax.vps.tiling import Layout, Tiling


def flat_layout(space: Space, logical_axes: Mapping[str, Sequence[str | None]], devices: Ints) -> Layout:
    """The layout of tensors of which each device has an equal part.

    Args:
        space: tensors to place.
        logical_axes: logical axes of each tensor, by path; of one whose first is "layers" each layer is cut by itself.
        devices: device numbers in the order of the parts, shape (devices,).
    """
    tilings: dict[tuple[object, ...], Tiling] = {}
    chosen: list[Tiling] = []
    for tensor in space:
        axes = logical_axes.get(tensor.path, ())
        layers = tensor.shape[0] if axes and axes[0] == "layers" else 1
        key = tensor.shape, layers
        if key not in tilings:
            tilings[key] = _tiling(tensor.shape, layers, devices)
        chosen.append(tilings[key])
    return Layout(space, tuple(chosen))


def _tiling(shape: tuple[int, ...], layers: int, devices: Ints) -> Tiling:
    """One tensor, cut so. A device has its parts of all layers end to end, each padded to the largest."""
    size = int(np.prod(shape, dtype=np.int64)) // layers
    room = -(-size // len(devices))
    layer, part = (index.ravel() for index in np.indices((layers, len(devices))))
    start, stop = (layer * size + np.minimum((part + k) * room, size) for k in (0, 1))
    owner, region = intervals(shape, start, stop)
    region = replace(region, offset=region.offset + layer[owner] * room)
    holder = devices[part[owner]]
    return Tiling(shape, holder, region, room=layers * room, padded=tuple(np.setdiff1d(devices, holder).tolist()))
