"""Flat arrays that know no model axes: every tensor by itself, padded and cut equally over all devices of a job.

It is how optimizer state lies that unlike pipelines side by side share: each element on one device, whatever the
pipelines do (Hydraulis, 2024). Of a stack of layers each layer is cut by itself, so that all devices have a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from dynajax.types import Ints
from dynajax.vps.parts import Run, parts_tiling
from dynajax.vps.space import Space
from dynajax.vps.spec import mesh_tiling
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
        is_stack = bool(axes) and axes[0] == "layers"
        key = tensor.shape, is_stack
        if key not in tilings:
            array, runs = flat_parts(tensor.path, tensor.shape, len(devices), is_stack)
            cut = mesh_tiling(array, {"all": len(devices)}, PartitionSpec(*[None] * is_stack, "all"), devices)
            tilings[key] = parts_tiling(cut, tensor.shape, runs)
        chosen.append(tilings[key])
    return Layout(space, tuple(chosen))


def flat_parts(
    path: str, shape: tuple[int, ...], devices: int, is_stack: bool, first_layer: int = 0, layers: int | None = None
) -> tuple[tuple[int, ...], tuple[Run, ...]]:
    """Shape of the array that stores a tensor flat, and the runs that it stores.

    The last dim is cut over the devices; a stack has a row for each layer.

    Args:
        path, shape: of the tensor.
        devices: how many there are.
        is_stack: whether the first dim is that of layers.
        first_layer: row of the first layer, where the array has more ``layers`` than the tensor.
        layers: of the array; default: those of the tensor.
    """
    size = math.prod(shape[1:] if is_stack else shape)
    if not is_stack:
        return (padded(size, devices),), (Run(path, shape, 0, size, 0),)
    runs = tuple(Run(path, shape, k * size, size, 0, (first_layer + k,)) for k in range(shape[0]))
    return (shape[0] if layers is None else layers, padded(size, devices)), runs


def padded(size: int, parts: int) -> int:
    """The least multiple of ``parts`` that has room for ``size`` elements."""
    return -(-size // parts) * parts
