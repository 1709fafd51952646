"""Read a state tree and its targets: one leaf for each array, refused by path if they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Sharding

from dynajax.errors import TargetError
from dynajax.vps import Tensor
from dynajax.vps.space import tensor

_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Leaf:
    """An array of the state and where it goes.

    Attributes:
        index: its place among the leaves of the tree.
        tensor: its name, shape and dtype.
        array: the array, or the ``ShapeDtypeStruct`` that stands for it.
        target: the sharding it is to have.
    """

    index: int
    tensor: Tensor
    array: Any
    target: Sharding


def read_tree(tree: Any, targets: Any) -> tuple[list[Leaf], list[Any], jtu.PyTreeDef]:
    """Array leaves ordered by path, all leaves in tree order, and the tree's structure.

    Leaves that are not jax arrays (python and numpy scalars and arrays, strings) have no devices: they are in the
    list of all leaves and have no ``Leaf``.

    Args:
        tree: any pytree; ``jax.ShapeDtypeStruct`` leaves with shardings may stand for arrays.
        targets: a tree of shardings or of ``ShapeDtypeStruct`` with shardings, a prefix of one, or one for all.

    Raises:
        TargetError: leaves without target, targets without leaf, another shape or dtype, an array without sharding.
    """
    with_paths, treedef = jtu.tree_flatten_with_path(tree)
    paths = [jtu.keystr(p) for p, _ in with_paths]
    leaves = [leaf for _, leaf in with_paths]
    found: list[Leaf] = []
    for index, (path, leaf, target) in enumerate(zip(paths, leaves, _broadcast(targets, tree, paths), strict=True)):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            found.append(Leaf(index, tensor(path, leaf), leaf, _target_sharding(path, leaf, target)))
    return sorted(found, key=lambda f: f.tensor.path), leaves, treedef


def is_target(x: Any) -> bool:
    """True for what a target tree has as leaves."""
    return isinstance(x, Sharding | jax.ShapeDtypeStruct | jax.Array)


def _broadcast(targets: Any, tree: Any, paths: Sequence[str]) -> list[Any]:
    if is_target(targets):
        return [targets] * len(paths)
    try:
        return jtu.tree_leaves(jax.tree.broadcast(targets, tree, is_leaf=is_target), is_leaf=is_target)
    except ValueError as error:
        given = [jtu.keystr(p) for p, _ in jtu.tree_leaves_with_path(targets, is_leaf=is_target)]
        missing = [p for p in paths if not any(p.startswith(g) for g in given)]
        extra = [g for g in given if not any(p.startswith(g) for p in paths)]
        told = [f"{word}: {_some(names)}" for word, names in (("missing", missing), ("extra", extra)) if names]
        raise TargetError(f"the target tree does not fit the state; {'; '.join(told) or error}") from None


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _target_sharding(path: str, leaf: Any, target: Any) -> Sharding:
    if getattr(leaf, "sharding", None) is None:
        raise TargetError(f"{path}: the leaf has no sharding; give jax.ShapeDtypeStruct(…, sharding=…) or an array")
    if isinstance(target, Sharding):
        return target
    if not is_target(target):
        raise TargetError(f"{path}: the target is a {type(target).__name__}; give a sharding or a ShapeDtypeStruct")
    if target.sharding is None:
        raise TargetError(f"{path}: the target has no sharding")
    if (target.shape, target.dtype) != (leaf.shape, leaf.dtype):
        raise TargetError(
            f"{path}: the target is {target.dtype}{list(target.shape)} and the state has {leaf.dtype}"
            f"{list(leaf.shape)}; a move changes neither, convert before or after it"
        )
    return target.sharding
