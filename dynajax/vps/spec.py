"""From mesh, PartitionSpec and shape to a tiling, with integer arithmetic and no devices.

A dim of ``n`` elements over ``p`` parts is cut at ``k·n // p``: equal parts where p divides n, else
parts that differ by one. A jax array can only be cut equally, so ``named_tiling`` refuses the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dynajax.errors import LayoutError
from dynajax.meshes import PARAMETER_RULES, Rules, Strategy, spec
from dynajax.types import Ints
from dynajax.vps.space import Space
from dynajax.vps.tiling import Layout, Tiling

SHARED = frozenset({"kv_heads"})
"""Logical axes whose parts may be held by more than one rank where tp does not divide them."""


def mesh_tiling(shape: Sequence[int], mesh_shape: Mapping[str, int], partition: PartitionSpec, devices: Ints) -> Tiling:
    """The tiling of a tensor over a mesh.

    Args:
        shape: logical shape of the tensor.
        mesh_shape: size of each mesh axis, in mesh order.
        partition: mesh axes of each dim; trailing dims may be left out.
        devices: device number at each mesh position, in row-major order; any array of that size.
    """
    shape = tuple(int(n) for n in shape)
    lo, hi = mesh_boxes(shape, mesh_shape, dim_axes(partition, shape, mesh_shape))
    return Tiling.of_boxes(shape, np.asarray(devices, np.int64).reshape(-1), lo, hi)


def mesh_boxes(
    shape: Sequence[int], mesh_shape: Mapping[str, int], cut_by: Sequence[tuple[str, ...]], shared: Sequence[int] = ()
) -> tuple[Ints, Ints]:
    """The box ``lo, hi`` of each mesh position, in row-major order of the mesh; shape (positions, rank).

    Args:
        shape: logical shape.
        mesh_shape: size of each mesh axis, in mesh order.
        cut_by: mesh axes that cut each dim.
        shared: dims of which a part that does not come out even is held by all positions that touch it.
    """
    sizes = tuple(mesh_shape.values())
    position = dict(zip(mesh_shape, np.indices(sizes).reshape(len(sizes), -1), strict=True))
    lo = np.zeros((math.prod(sizes), len(shape)), np.int64)
    hi = np.broadcast_to(np.asarray(shape, np.int64), lo.shape).copy()
    for dim, axes in enumerate(cut_by):
        parts = math.prod(mesh_shape[a] for a in axes)
        part = np.zeros(len(lo), np.int64)
        for a in axes:
            part = part * mesh_shape[a] + position[a]
        lo[:, dim] = part * shape[dim] // parts
        hi[:, dim] = -(-(part + 1) * shape[dim] // parts) if dim in shared else (part + 1) * shape[dim] // parts
    return lo, hi


def dim_axes(partition: PartitionSpec, shape: Sequence[int], mesh_shape: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Mesh axes that cut each dim of ``shape``.

    Raises:
        LayoutError: the spec is longer than the shape or names an axis that the mesh lacks.
    """
    if len(partition) > len(shape):
        raise LayoutError(f"{partition} names {len(partition)} dims and the shape {tuple(shape)} has {len(shape)}")
    axes: list[tuple[str, ...]] = []
    for entry in (*partition.partitions, *[None] * (len(shape) - len(partition))):
        names = () if entry is None else ((entry,) if isinstance(entry, str) else entry)
        if not isinstance(names, tuple) or any(a not in mesh_shape for a in names):
            raise LayoutError(f"{partition} does not fit a mesh with the axes {tuple(mesh_shape)}")
        axes.append(names)
    return axes


def named_tiling(sharding: NamedSharding, shape: Sequence[int], devices: Ints | None = None) -> Tiling:
    """The tiling that a ``NamedSharding`` gives a jax array; partial if the spec has unreduced axes.

    Args:
        sharding: over a ``Mesh`` or an ``AbstractMesh``.
        shape: logical shape.
        devices: device number at each mesh position; default: the devices' ids, or 0, 1, … for an abstract mesh.

    Raises:
        LayoutError: an axis does not divide its dim, or the spec does not fit.
    """
    require_fits(sharding, shape)
    mesh: Any = sharding.mesh
    mesh_shape = dict(mesh.shape)
    devices = _device_ids(mesh) if devices is None else np.asarray(devices, np.int64).reshape(-1)
    tiling = mesh_tiling(shape, mesh_shape, sharding.spec, devices)
    summed = frozenset(sharding.spec.unreduced)
    return _partial(tiling, mesh_shape, sharding.spec, summed, devices) if summed else tiling


def require_fits(sharding: NamedSharding, shape: Sequence[int]) -> None:
    """Raises LayoutError if an axis does not divide its dim, or the spec does not fit the shape or the mesh."""
    mesh_shape = dict(sharding.mesh.shape)
    for dim, axes in enumerate(dim_axes(sharding.spec, shape, mesh_shape)):
        parts = math.prod(mesh_shape[a] for a in axes)
        if shape[dim] % parts:
            raise LayoutError(
                f"dim {dim} of size {shape[dim]} (shape {tuple(shape)}) is cut in {parts} by the mesh axes {axes}, "
                f"which does not divide it; pad the dim to {-(-shape[dim] // parts) * parts} or choose other axes"
            )


def _partial(
    tiling: Tiling, mesh_shape: Mapping[str, int], partition: PartitionSpec, summed: frozenset[str], devices: Ints
) -> Tiling:
    """The tiling whose holders along the axes ``summed`` are parts of a sum.

    Along axes that neither cut the tensor nor are summed lie copies of one part, of which the first counts.
    """
    cut = {a for axes in dim_axes(partition, tiling.shape, mesh_shape) for a in axes}
    rest = [k for k, a in enumerate(mesh_shape) if a not in cut | summed]
    spare = np.indices(tuple(mesh_shape.values())).reshape(len(mesh_shape), -1)[rest].any(axis=0)
    counted = ~np.isin(tiling.holder, devices[spare])
    return replace(
        tiling,
        holder=tiling.holder[counted],
        region=tiling.region.take(counted),
        partial=True,
        room=int(tiling.region.volumes.max(initial=0)),
        padded=tuple(devices[spare].tolist()),
    )


def _device_ids(mesh: Any) -> Ints:
    return np.arange(mesh.size) if isinstance(mesh, AbstractMesh) else np.asarray(mesh.device_ids).reshape(-1)


@dataclass(frozen=True, eq=False)
class Fold:
    """The devices of a strategy as a dense tensor, or an expert, sees them.

    Attributes:
        devices: device numbers, shape (pipeline stages, data ranks, model ranks). Data ranks hold copies of what a
            model rank holds; model ranks cut tensors.
        model: mesh axes that the model ranks are made of, the last running fastest.
    """

    devices: Ints
    model: dict[str, int]


def fold(strategy: Strategy, experts: bool, devices: Ints | None = None) -> Fold:
    """Fold a strategy of one pipeline for its dense tensors or for its experts.

    Outside the experts ep carries data. Inside them it cuts experts; with a layout of their own (``/ep4.tp2``) they
    are folded over the devices of a pipeline stage, tp fastest, then ep, and the rest of the stage holds copies.
    """
    sizes = strategy.mesh_shape()
    numbers = np.arange(strategy.num_devices) if devices is None else np.asarray(devices, np.int64)
    grid = numbers.reshape(tuple(sizes.values()))
    own = strategy.pipelines[0].experts
    if not experts:
        return Fold(grid.reshape(sizes["pp"], -1, sizes["tp"]), {"tp": sizes["tp"]})
    if own:
        return Fold(grid.reshape(sizes["pp"], -1, own[0] * own[1]), {"ep": own[0], "tp": own[1]})
    ranks = sizes["ep"] * sizes["tp"]
    return Fold(np.moveaxis(grid, 3, 4).reshape(sizes["pp"], -1, ranks), {"ep": sizes["ep"], "tp": sizes["tp"]})


def is_expert(axes: Sequence[str | None]) -> bool:
    """True for a tensor that has a dim of experts."""
    return "expert" in axes


def cut_dims(
    mesh: Mapping[str, int], shape: Sequence[int], axes: Sequence[str | None], rules: Rules
) -> list[tuple[str, ...]]:
    """Those mesh axes that the rules cut each dim with, and that ``mesh`` has."""
    entries = dim_axes(spec(axes, rules), shape, {a: 1 for names in rules.values() for a in names})
    return [tuple(a for a in names if a in mesh) for names in entries]


def cut_boxes(
    mesh: Mapping[str, int], shape: Sequence[int], axes: Sequence[str | None], rules: Rules
) -> tuple[Ints, Ints]:
    """The box of each position of ``mesh``, cut by those axes of the rules that the mesh has; see ``mesh_boxes``.

    A kv head that two positions need, because tp does not divide the kv heads, is held by both.
    """
    shared = [d for d, name in enumerate(axes) if name in SHARED]
    return mesh_boxes(shape, mesh, cut_dims(mesh, shape, axes, rules), shared)


def end_stages(path: str, stages: int, last: frozenset[str], tied: frozenset[str]) -> slice:
    """Which of a pipeline's stages hold a tensor without layers; see ``strategy_layout``."""
    if path in tied:
        return slice(0, None, max(stages - 1, 1))
    return slice(-1, None) if path in last else slice(0, 1)


def strategy_layout(
    space: Space,
    logical_axes: Mapping[str, Sequence[str | None]],
    strategy: Strategy,
    rules: Rules = PARAMETER_RULES,
    devices: Ints | None = None,
    last: frozenset[str] | None = None,
    tied: frozenset[str] = frozenset(),
) -> Layout:
    """The layout of a space under a strategy of one pipeline; dims that an axis does not divide are cut unevenly.

    Args:
        space: tensors to place.
        logical_axes: logical axes of each tensor, by path; a tensor without an entry is replicated.
        strategy: one pipeline.
        rules: logical axes to mesh axes.
        devices: device number at each mesh position; default 0, 1, ….
        last: paths of tensors without layers that live on the last pipeline stage; the others live on the first.
            Default: a tensor without layers is on all stages.
        tied: paths of those of the first stage that the last stage has a copy of.
    """
    sizes = strategy.mesh_shape()
    numbers = np.arange(strategy.num_devices) if devices is None else np.asarray(devices, np.int64)
    own = strategy.pipelines[0].experts
    expert_mesh = {"pp": sizes["pp"], "dp": 0, "ep": own[0], "tp": own[1]} if own else sizes
    if own:
        expert_mesh["dp"] = len(numbers) // (sizes["pp"] * own[0] * own[1])
    tilings: dict[tuple[object, ...], Tiling] = {}
    chosen: list[Tiling] = []
    for tensor in space:
        axes = tuple(logical_axes.get(tensor.path, ()))
        stages = slice(None)
        if last is not None and "layers" not in axes:
            stages = end_stages(tensor.path, sizes["pp"], last, tied)
        key = (tensor.shape, axes, stages.start, stages.step)
        if key not in tilings:
            mesh = expert_mesh if is_expert(axes) else sizes
            lo, hi = cut_boxes(mesh, tensor.shape, axes, rules)
            there = np.arange(len(numbers)).reshape(sizes["pp"], -1)[stages].reshape(-1)
            tilings[key] = Tiling.of_boxes(tensor.shape, numbers[there], lo[there], hi[there])
        chosen.append(tilings[key])
    return Layout(space, tuple(chosen))
