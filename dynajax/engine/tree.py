"""Read a state tree and its targets: one leaf for each array, refused by path if they do not fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Sharding

from dynajax.errors import TargetError
from dynajax.types import Ints
from dynajax.vps import DimRuns, Part, Tensor
from dynajax.vps.space import tensor
from dynajax.vps.stored import whole_runs

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
    pieces: tuple[DimRuns, ...]

    @staticmethod
    def plain(sharding: Sharding, shape: Sequence[int]) -> Stored:
        """An array that is its tensor."""
        return Stored(sharding, tuple(shape), tuple(shape), whole_runs(shape))

    @property
    def is_plain(self) -> bool:
        """True if the array is the tensor."""
        return self.array_shape == self.shape and self.pieces == whole_runs(self.shape)


@dataclass(frozen=True)
class Bundle:
    """A sharding of an array that stores parts of one or more tensors; a tensor may have parts in several arrays.

    Flat buckets, fused matrices, layers one by one: see ``dynajax.vps.parts``, which also makes the parts. The array's
    elements that no part names are padding, which holds zeros and is never moved.

    Attributes:
        sharding: of the array.
        array_shape: shape of the array.
        parts: what of which tensors lies where in the array.
    """

    sharding: Sharding
    array_shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Held:
    """An array of the state, before or after the move.

    Attributes:
        index: its place among the leaves of its tree.
        stored: what it stores and where.
        array: the array, or the ``ShapeDtypeStruct`` that stands for it; None for one that is to be made.
        tensors: of how many tensors it stores parts.
    """

    index: int
    stored: Stored | Bundle
    array: Any = None
    tensors: int = 1

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return self.stored.sharding.shard_shape(self.stored.array_shape)

    @property
    def room(self) -> int:
        """Elements of a shard."""
        return math.prod(self.shard_shape)


def located(arrays: Sequence[Held], offset: Ints) -> tuple[Ints, Ints]:
    """Which of a tensor's arrays each offset is in, and where in its shard; the shards are numbered end to end."""
    starts = np.cumsum([0, *(array.room for array in arrays)])
    k = np.searchsorted(starts, offset, side="right") - 1
    return k, offset - starts[k]


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of the state and the arrays that it moves between: nearly always one, which stores nothing else.

    Attributes:
        tensor: its name, logical shape and dtype.
        sources, targets: the arrays that store it before and after, in tree order.
    """

    tensor: Tensor
    sources: tuple[Held, ...]
    targets: tuple[Held, ...]

    @staticmethod
    def of(index: int, tensor: Tensor, array: Any, source: Stored, target: Stored) -> Leaf:
        """A tensor with an array of its own, at one place of the tree before and after."""
        return Leaf(tensor, (Held(index, source, array),), (Held(index, target),))

    @property
    def is_alone(self) -> bool:
        """True if one array stores the tensor as one whole and nothing else, before and after."""
        return all(len(ends) == 1 and isinstance(ends[0].stored, Stored) for ends in (self.sources, self.targets))

    @property
    def has_own_arrays(self) -> bool:
        """True if one array stores the tensor and nothing else, before and after, whole or in parts."""
        return all(len(ends) == 1 and ends[0].tensors == 1 for ends in (self.sources, self.targets))

    @property
    def index(self) -> int:
        """Place of the target among the leaves of its tree, for a tensor that is alone."""
        return self.targets[0].index

    @property
    def array(self) -> Any:
        """The array, or what stands for it, of a tensor that is alone."""
        return self.sources[0].array

    @property
    def source(self) -> Stored:
        """How the array stores a tensor that is alone."""
        return self._only(self.sources)

    @property
    def target(self) -> Stored:
        """How the moved array is to store a tensor that is alone."""
        return self._only(self.targets)

    @staticmethod
    def _only(ends: tuple[Held, ...]) -> Stored:
        (end,) = ends
        assert isinstance(end.stored, Stored)
        return end.stored


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
    goals = broadcast(targets, tree, paths)
    says = [None] * len(paths) if stored is None else broadcast(stored, tree, paths)
    for index, (path, leaf, said, goal) in enumerate(zip(paths, leaves, says, goals, strict=True)):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            source = read_source(path, leaf, said)
            named = dataclasses.replace(tensor(path, leaf), shape=source.shape)
            found.append(Leaf.of(index, named, leaf, source, read_target(path, named.shape, leaf.dtype, goal)))
    return sorted(found, key=lambda f: f.tensor.path), leaves, treedef


def is_target(x: Any) -> bool:
    """True for what a target tree has as leaves."""
    return isinstance(x, Sharding | Stored | Bundle | jax.ShapeDtypeStruct | jax.Array)


def broadcast(targets: Any, tree: Any, paths: Sequence[str]) -> list[Any]:
    """The target of every leaf of a tree, from a tree of targets, a prefix of one, or one for all."""
    if is_target(targets):
        return [targets] * len(paths)
    try:
        return jtu.tree_leaves(jax.tree.broadcast(targets, tree, is_leaf=is_target), is_leaf=is_target)
    except ValueError as error:
        given = [jtu.keystr(p) for p, _ in jtu.tree_leaves_with_path(targets, is_leaf=is_target)]
        missing = [p for p in paths if not any(p.startswith(g) for g in given)]
        extra = [g for g in given if not any(p.startswith(g) for p in paths)]
        told = [f"{word}: {some(names)}" for word, names in (("missing", missing), ("extra", extra)) if names]
        raise TargetError(f"the target tree does not fit the state; {'; '.join(told) or error}") from None


def some(names: list[str]) -> str:
    """A few names, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def read_source(path: str, leaf: Any, said: Any) -> Any:
    """How an array stores its tensor, or tensors: what was said of it, with the sharding that it has."""
    if getattr(leaf, "sharding", None) is None:
        raise TargetError(f"{path}: the leaf has no sharding; give jax.ShapeDtypeStruct(…, sharding=…) or an array")
    shape = tuple(int(n) for n in leaf.shape)
    if not isinstance(said, Stored | Bundle):
        return Stored.plain(leaf.sharding, shape)
    if said.array_shape != shape:
        raise TargetError(f"{path}: the array has shape {shape} and is said to be stored as {said.array_shape}")
    return dataclasses.replace(said, sharding=leaf.sharding)


def read_target(path: str, shape: tuple[int, ...], dtype: Any, target: Any) -> Stored:
    """How an array of a tensor's own is to store it."""
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
