"""Read a state tree and its targets: one leaf for each array, refused by path if they do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Sharding

from dynajax.errors import TargetError
from dynajax.vps import Pieces, Tensor
from dynajax.vps.space import tensor
from dynajax.vps.stored import whole

_SHOWN = 4


@dataclass(frozen=True)
class Stored:
    """A sharding of an array that stores a tensor of another shape or order: with padding, or in permuted runs.

    Attributes:
        sharding: of the array.
        array_shape: shape of the array.
        shape: shape of the tensor.
        pieces: for each dim the runs ``(first in the array, first in the tensor, length)``; the rest is padding, which
            holds zeros and is never moved.
    """

    sharding: Sharding
    array_shape: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Pieces, ...]

    @staticmethod
    def plain(sharding: Sharding, shape: Sequence[int]) -> Stored:
        """An array that is its tensor."""
        return Stored(sharding, tuple(shape), tuple(shape), whole(shape))

    @property
    def is_plain(self) -> bool:
        """True if the array is the tensor."""
        return self.array_shape == self.shape and self.pieces == whole(self.shape)


@dataclass(frozen=True, eq=False)
class Leaf:
    """An array of the state and where it goes.

    Attributes:
        index: its place among the leaves of the tree.
        tensor: its name, logical shape and dtype.
        array: the array, or the ``ShapeDtypeStruct`` that stands for it.
        source: how the array stores the tensor.
        target: how the moved array is to.
    """

    index: int
    tensor: Tensor
    array: Any
    source: Stored
    target: Stored


def read_tree(tree: Any, targets: Any, stored: Any = None) -> tuple[list[Leaf], list[Any], jtu.PyTreeDef]:
    """Array leaves ordered by path, all leaves in tree order, and the tree's structure.

    Leaves that are not jax arrays (python and numpy scalars and arrays, strings) have no devices: they are in the
    list of all leaves and have no ``Leaf``.

    Args:
        tree: any pytree; ``jax.ShapeDtypeStruct`` leaves with shardings may stand for arrays.
        targets: a tree of shardings, ``Stored`` or ``ShapeDtypeStruct`` with shardings, a prefix, or one for all.
        stored: a tree of ``Stored`` (or of shardings, for arrays that are their tensors) that says how ``tree`` stores
            its tensors; None if every array is its tensor.

    Raises:
        TargetError: leaves without target, targets without leaf, another shape or dtype, an array without sharding.
    """
    with_paths, treedef = jtu.tree_flatten_with_path(tree)
    paths = [jtu.keystr(p) for p, _ in with_paths]
    leaves = [leaf for _, leaf in with_paths]
    found: list[Leaf] = []
    goals = _broadcast(targets, tree, paths)
    says = [None] * len(paths) if stored is None else _broadcast(stored, tree, paths)
    for index, (path, leaf, said, goal) in enumerate(zip(paths, leaves, says, goals, strict=True)):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            source = _source(path, leaf, said)
            named = dataclasses.replace(tensor(path, leaf), shape=source.shape)
            found.append(Leaf(index, named, leaf, source, _target(path, named.shape, leaf.dtype, goal)))
    return sorted(found, key=lambda f: f.tensor.path), leaves, treedef


def is_target(x: Any) -> bool:
    """True for what a target tree has as leaves."""
    return isinstance(x, Sharding | Stored | jax.ShapeDtypeStruct | jax.Array)


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


def _source(path: str, leaf: Any, said: Any) -> Stored:
    if getattr(leaf, "sharding", None) is None:
        raise TargetError(f"{path}: the leaf has no sharding; give jax.ShapeDtypeStruct(…, sharding=…) or an array")
    shape = tuple(int(n) for n in leaf.shape)
    if not isinstance(said, Stored):
        return Stored.plain(leaf.sharding, shape)
    if said.array_shape != shape:
        raise TargetError(f"{path}: the array has shape {shape} and is said to be stored as {said.array_shape}")
    return dataclasses.replace(said, sharding=leaf.sharding)


def _target(path: str, shape: tuple[int, ...], dtype: Any, target: Any) -> Stored:
    if isinstance(target, Sharding):
        return Stored.plain(target, shape)
    if not is_target(target):
        raise TargetError(f"{path}: the target is a {type(target).__name__}; give a sharding or a ShapeDtypeStruct")
    if target.sharding is None:
        raise TargetError(f"{path}: the target has no sharding")
    if tuple(target.shape) != shape or getattr(target, "dtype", dtype) != dtype:
        raise TargetError(
            f"{path}: the target is {getattr(target, 'dtype', dtype)}{list(target.shape)} and the state has {dtype}"
            f"{list(shape)}; a move changes neither, convert before or after it"
        )
    return target if isinstance(target, Stored) else Stored.plain(target.sharding, shape)
