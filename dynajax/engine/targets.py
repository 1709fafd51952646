"""What a leaf of a target tree may be, and the sharding that it means.

Everything that ``jax.device_put`` takes, and what this engine adds: a sharding, a ``Device``, a ``PartitionSpec`` under
the mesh that is set, an array or a ``jax.ShapeDtypeStruct`` whose sharding is meant, a ``Format``, ``Stored``,
``Bundle``; None leaves an array as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dynajax.arrays import _jax_private as private
from dynajax.engine.stored import Bundle, Stored
from dynajax.errors import TargetError
from dynajax.vps.spec import require_fits

_SHOWN = 4


def is_target(x: Any) -> bool:
    """True for what a target tree has as leaves."""
    kinds = Sharding | Stored | Bundle | jax.ShapeDtypeStruct | jax.Array | Format | PartitionSpec | jax.Device
    return x is None or isinstance(x, kinds)


def broadcast(given: Any, tree: Any, paths: Sequence[str], what: str = "target tree") -> list[Any]:
    """What is given for every leaf of a tree: as a tree, as a prefix of one, or as one for all.

    Args:
        given: with leaves of which ``is_target`` is true.
        tree: whose leaves they are for.
        paths: of these leaves.
        what: is given, for the error.

    Raises:
        TargetError: it does not fit the tree; names the paths.
    """
    if given is not None and is_target(given):
        return [given] * len(paths)
    try:
        spread = jax.tree.broadcast(given, tree, is_leaf=is_target)
    except ValueError as error:
        named = [jtu.keystr(p) for p, _ in jtu.tree_leaves_with_path(given, is_leaf=is_target)]
        missing = [p for p in paths if not any(p.startswith(g) for g in named)]
        extra = [g for g in named if not any(p.startswith(g) for p in paths)]
        told = [f"{word}: {some(names)}" for word, names in (("missing", missing), ("extra", extra)) if names]
        reason = "; ".join(told) or str(error).splitlines()[0]
        raise TargetError(f"the {what} does not fit the state; {reason}") from None
    leaves, goals = (jtu.tree_leaves(x, is_leaf=is_target) for x in (tree, spread))
    return [goal for leaf, goal in zip(leaves, goals, strict=True) if leaf is not None]


def devices_named(*trees: Any) -> set[jax.Device]:
    """All devices that states and targets speak of, whether they fit each other or not.

    Where an array that was never put anywhere happens to lie says nothing: every process has one of its own.
    """
    found: set[jax.Device] = set()
    for x in jtu.tree_leaves(trees, is_leaf=is_target):
        if isinstance(x, jax.Device):
            found.add(x)
        elif isinstance(x, PartitionSpec):
            mesh = private.mesh_that_is_set()
            found.update(() if mesh is None else mesh.devices.flat)
        elif getattr(x, "committed", True):
            sharding = x if isinstance(x, Sharding) else getattr(x, "sharding", None)
            if isinstance(sharding, Sharding) and not isinstance(getattr(sharding, "mesh", None), AbstractMesh):
                found.update(sharding.device_set)
    return found


def some(names: list[str]) -> str:
    """A few names, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def target_of(path: str, goal: Any, shape: tuple[int, ...], dtype: Any, mesh: Mesh | None) -> Stored:
    """How an array of a tensor's own is to store it.

    Args:
        path: of the leaf, for errors.
        goal: a leaf of a target tree, no ``Bundle`` and not None.
        shape, dtype: of the tensor.
        mesh: that is set, if there is one.

    Raises:
        TargetError: the goal is none, or does not fit.
    """
    if isinstance(goal, Stored | jax.ShapeDtypeStruct | jax.Array):
        wanted = getattr(goal, "dtype", dtype)
        if tuple(goal.shape) != shape or wanted != dtype:
            raise TargetError(
                f"{path}: the target is {wanted}{list(goal.shape)} and the state has {dtype}{list(shape)}; a move "
                "changes neither, convert before or after it"
            )
    if isinstance(goal, Stored):
        sharding = checked_sharding(path, goal.sharding, goal.array_shape, mesh)
        return Stored(sharding, goal.array_shape, goal.shape, goal.pieces)
    return Stored.plain(checked_sharding(path, _sharding(path, goal, shape, mesh), shape, mesh), shape)


def _sharding(path: str, goal: Any, shape: tuple[int, ...], mesh: Mesh | None) -> Any:
    """The sharding that a goal means."""
    if isinstance(goal, jax.ShapeDtypeStruct):
        goal = goal.format if goal.sharding is not None and goal.format is not None else goal.sharding
        if goal is None:
            raise TargetError(f"{path}: the target has no sharding")
    if isinstance(goal, jax.Array):
        return goal.sharding
    if isinstance(goal, Format):
        _require_plain_layout(path, goal.layout, len(shape))
        goal = goal.sharding
    if isinstance(goal, jax.Device):
        return SingleDeviceSharding(goal)
    if isinstance(goal, PartitionSpec):
        if mesh is None:
            raise TargetError(f"{path}: the target is {goal} and no mesh is set; give a NamedSharding, or jax.set_mesh")
        return NamedSharding(mesh, goal)
    if not isinstance(goal, Sharding):
        raise TargetError(f"{path}: the target is a {type(goal).__name__}; give a sharding or a ShapeDtypeStruct")
    return goal


def _require_plain_layout(path: str, layout: Any, rank: int) -> None:
    """Raise unless a layout is the one in which arrays lie by themselves."""
    if layout is None or layout is Layout.AUTO:
        return
    if tuple(layout.major_to_minor) != tuple(range(rank)) or layout.tiling:
        raise TargetError(
            f"{path}: the target asks for the memory layout {layout}; a move makes row-major arrays, so give its "
            "sharding here and call jax.device_put with the Format on the result"
        )


def checked_sharding(path: str, sharding: Any, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    """A sharding on devices that fits the shape of its array.

    Args:
        path: of the leaf, for errors.
        sharding: a ``Sharding``, possibly over an ``AbstractMesh`` that the set mesh is one of.
        shape: of the array.
        mesh: that is set, if there is one.

    Raises:
        TargetError: it has no devices, or does not fit.
    """
    if isinstance(sharding, NamedSharding):
        if isinstance(sharding.mesh, AbstractMesh):
            if mesh is None or mesh.abstract_mesh.shape_tuple != sharding.mesh.shape_tuple:
                raise TargetError(
                    f"{path}: the sharding {sharding.spec} is over an abstract mesh {sharding.mesh.shape_tuple}, which "
                    "has no devices; give one over a jax.sharding.Mesh, or set the mesh"
                )
            sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        spec = sharding.spec
        if len(spec) > len(shape) and all(entry is None for entry in spec[len(shape) :]):
            # Keys that are wrapped on one device count the dim of the words below them.
            cut = PartitionSpec(*spec[: len(shape)], unreduced=spec.unreduced, reduced=spec.reduced)
            sharding = NamedSharding(sharding.mesh, cut, memory_kind=sharding.memory_kind)
    try:
        if isinstance(sharding, NamedSharding):
            require_fits(sharding, shape)
        sharding.shard_shape(shape)
    except ValueError as error:
        raise TargetError(f"{path}: {str(error).splitlines()[0]}") from None
    return sharding
