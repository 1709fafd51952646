"""From mesh, PartitionSpec and shape to a tiling, with integer arithmetic and no devices.

A dim of ``n`` elements over ``p`` parts is cut at ``k·n // p``: equal parts where p divides n, else
parts that differ by one. A jax array can only be cut equally, so ``named_tiling`` refuses the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dynajax.errors import LayoutError
from dynajax.meshes import PARAMETER_RULES, Rules, Strategy, spec
from dynajax.vps.region import Ints
from dynajax.vps.space import Space
from dynajax.vps.tiling import Layout, Tiling


def mesh_tiling(shape: Sequence[int], mesh_shape: Mapping[str, int], partition: PartitionSpec, devices: Ints) -> Tiling:
    """The tiling of a tensor over a mesh.

    Args:
        shape: logical shape of the tensor.
        mesh_shape: size of each mesh axis, in mesh order.
        partition: mesh axes of each dim; trailing dims may be left out.
        devices: device number at each mesh position, in row-major order; any array of that size.
    """
    shape = tuple(int(n) for n in shape)
    devices = np.asarray(devices, np.int64).reshape(-1)
    position = dict(zip(mesh_shape, np.indices(tuple(mesh_shape.values())).reshape(len(mesh_shape), -1), strict=True))
    lo = np.zeros((len(devices), len(shape)), np.int64)
    hi = np.broadcast_to(np.asarray(shape, np.int64), lo.shape).copy()
    for dim, axes in enumerate(dim_axes(partition, shape, mesh_shape)):
        parts = math.prod(mesh_shape[a] for a in axes)
        part = np.zeros(len(devices), np.int64)
        for a in axes:
            part = part * mesh_shape[a] + position[a]
        lo[:, dim], hi[:, dim] = part * shape[dim] // parts, (part + 1) * shape[dim] // parts
    return Tiling.of_boxes(shape, devices, lo, hi)


def dim_axes(partition: PartitionSpec, shape: Sequence[int], mesh_shape: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Mesh axes that cut each dim of ``shape``.

    Raises:
        LayoutError: the spec is longer than the shape or names an axis that the mesh lacks.
    """
    if len(partition) > len(shape):
        raise LayoutError(f"{partition} names {len(partition)} dims and the shape {tuple(shape)} has {len(shape)}")
    axes: list[tuple[str, ...]] = []
    for entry in (*partition, *[None] * (len(shape) - len(partition))):
        names = () if entry is None else ((entry,) if isinstance(entry, str) else entry)
        if not isinstance(names, tuple) or any(a not in mesh_shape for a in names):
            raise LayoutError(f"{partition} does not fit a mesh with the axes {tuple(mesh_shape)}")
        axes.append(names)
    return axes


def named_tiling(sharding: NamedSharding, shape: Sequence[int], devices: Ints | None = None) -> Tiling:
    """The tiling that a ``NamedSharding`` gives a jax array.

    Args:
        sharding: over a ``Mesh`` or an ``AbstractMesh``.
        shape: logical shape.
        devices: device number at each mesh position; default: the devices' ids, or 0, 1, … for an abstract mesh.

    Raises:
        LayoutError: an axis does not divide its dim, or the spec does not fit.
    """
    mesh: Any = sharding.mesh
    mesh_shape = dict(mesh.shape)
    for dim, axes in enumerate(dim_axes(sharding.spec, shape, mesh_shape)):
        parts = math.prod(mesh_shape[a] for a in axes)
        if shape[dim] % parts:
            raise LayoutError(
                f"dim {dim} of size {shape[dim]} (shape {tuple(shape)}) is cut in {parts} by the mesh axes {axes}, "
                f"which does not divide it; pad the dim to {-(-shape[dim] // parts) * parts} or choose other axes"
            )
    if devices is None:
        devices = _device_ids(mesh)
    return mesh_tiling(shape, mesh_shape, sharding.spec, devices)


def _device_ids(mesh: Any) -> Ints:
    return np.arange(mesh.size) if isinstance(mesh, AbstractMesh) else np.asarray(mesh.device_ids).reshape(-1)


def strategy_layout(
    space: Space,
    logical_axes: Mapping[str, Sequence[str | None]],
    strategy: Strategy,
    rules: Rules = PARAMETER_RULES,
    devices: Ints | None = None,
) -> Layout:
    """The layout of a space under a strategy of one pipeline; dims that an axis does not divide are cut unevenly.

    Args:
        space: tensors to place.
        logical_axes: logical axes of each tensor, by path; a tensor without an entry is replicated.
        strategy: one pipeline.
        rules: logical axes to mesh axes.
        devices: device number at each mesh position; default 0, 1, ….
    """
    numbers = np.arange(strategy.num_devices) if devices is None else devices
    mesh_shape = strategy.mesh_shape()
    tilings: dict[tuple[tuple[int, ...], PartitionSpec], Tiling] = {}
    chosen: list[Tiling] = []
    for tensor in space:
        key = (tensor.shape, spec(logical_axes.get(tensor.path, ()), rules))
        if key not in tilings:
            tilings[key] = mesh_tiling(*key[:1], mesh_shape, key[1], numbers)
        chosen.append(tilings[key])
    return Layout(space, tuple(chosen))
