"""Read states whose trees differ before and after: tensors meet by name, whichever arrays store them.

Where arrays store parts of tensors, the tree before the move and the tree after it have leaves of their own: five
buckets here, twelve parameters there. So a ``Bundle`` names the tensors of its parts, and an array without one is a
tensor named by its path. The target tree is then written out whole, and the result has its structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.tree_util as jtu

from dynajax.engine.tree import (
    Bundle,
    Held,
    Leaf,
    Stored,
    broadcast,
    is_target,
    read_source,
    read_target,
    read_tree,
    some,
)
from dynajax.errors import LayoutError, TargetError
from dynajax.vps import BoxPart, Part, Tensor
from dynajax.vps.space import tensor
from dynajax.vps.stored import piece_parts


def read(tree: Any, targets: Any, stored: Any = None) -> tuple[list[Leaf], list[Any], jtu.PyTreeDef]:
    """Tensors ordered by name, all leaves of the result in tree order, and the result's structure.

    Args:
        tree: any pytree; see ``read_tree``.
        targets: as for ``read_tree``; if it or ``stored`` has a ``Bundle``, a whole tree of any structure.
        stored: as for ``read_tree``; may have ``Bundle`` as leaves.

    Raises:
        TargetError: as ``read_tree``; or a tensor is on one side only, has two shapes, or a part does not fit.
    """
    if not any(isinstance(x, Bundle) for x in jtu.tree_leaves((targets, stored), is_leaf=is_target)):
        return read_tree(tree, targets, stored)
    before, others = _arrays_before(tree, stored)
    tensors = _tensors(before)
    after, leaves, treedef = _arrays_after(targets, tensors, others)
    _require_places(tensors, after)
    before, after, found = _unchanged(before, after)
    found += _leaves(before, after, tensors)
    return sorted(found, key=lambda leaf: leaf.tensor.path), leaves, treedef


@dataclass(frozen=True, eq=False)
class _Array:
    """An array of a tree: its path and what it stores."""

    path: str
    held: Held
    parts: tuple[Part, ...]

    @staticmethod
    def of(path: str, index: int, stored: Stored | Bundle, array: Any = None) -> _Array:
        """An array, checked.

        Raises:
            TargetError: its parts do not fit it.
        """
        if isinstance(stored, Bundle):
            parts = stored.parts
        elif stored.is_plain:
            parts = (BoxPart.whole(path, stored.shape),)
        else:
            parts = piece_parts(path, stored.shape, stored.pieces)
        try:
            for part in parts:
                part.require_fits(stored.array_shape)
        except LayoutError as error:
            raise TargetError(f"{path}: {error}") from None
        if not parts:
            raise TargetError(f"{path}: the array stores no part of any tensor; leave it out")
        return _Array(path, Held(index, stored, array, len({p.tensor for p in parts})), parts)

    @property
    def tensors(self) -> frozenset[str]:
        """Paths of the tensors that it stores parts of."""
        return frozenset(part.tensor for part in self.parts)


def _arrays_before(tree: Any, stored: Any) -> tuple[list[_Array], dict[str, Any]]:
    """The arrays of the source, and what else there is, by path."""
    with_paths = [(jtu.keystr(p), leaf) for p, leaf in jtu.tree_leaves_with_path(tree)]
    paths = [path for path, _ in with_paths]
    says = [None] * len(paths) if stored is None else broadcast(stored, tree, paths)
    arrays, others = [], {}
    for index, ((path, leaf), said) in enumerate(zip(with_paths, says, strict=True)):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            arrays.append(_Array.of(path, index, read_source(path, leaf, said), leaf))
        else:
            others[path] = leaf
    return arrays, others


def _tensors(arrays: Sequence[_Array]) -> dict[str, Tensor]:
    """The tensors that the source arrays store."""
    found: dict[str, Tensor] = {}
    for array, part in ((a, part) for a in arrays for part in a.parts):
        new = replace(tensor(part.tensor, array.held.array), shape=part.shape)
        if found.setdefault(part.tensor, new) != new:
            raise TargetError(f"{array.path}: stores {new}, and another array {found[part.tensor]}; name them apart")
    return found


def _arrays_after(
    targets: Any, tensors: dict[str, Tensor], others: dict[str, Any]
) -> tuple[list[_Array], list[Any], jtu.PyTreeDef]:
    """The arrays to make, the leaves of the result with None for them, and its structure."""
    with_paths, treedef = jtu.tree_flatten_with_path(targets, is_leaf=is_target)
    arrays: list[_Array] = []
    leaves: list[Any] = [None] * len(with_paths)
    for index, (key, goal) in enumerate(with_paths):
        path = jtu.keystr(key)
        if isinstance(goal, Bundle):
            arrays.append(_Array.of(path, index, goal))
        elif path in others:
            leaves[index] = others[path]
        elif path not in tensors:
            raise TargetError(f"{path}: the state has no tensor of this name; it has {some(sorted(tensors))}")
        else:
            known = tensors[path]
            arrays.append(_Array.of(path, index, read_target(path, known.shape, known.dtype, goal)))
    return arrays, leaves, treedef


def _require_places(tensors: dict[str, Tensor], after: Sequence[_Array]) -> None:
    for array, part in ((a, part) for a in after for part in a.parts):
        if part.tensor not in tensors or tensors[part.tensor].shape != part.shape:
            known = tensors.get(part.tensor, f"only {some(sorted(tensors))}")
            raise TargetError(f"{array.path}: is to store {part.tensor} of shape {part.shape}; the state has {known}")
    for array in after:
        kinds = {tensors[path].dtype for path in array.tensors}
        if len(kinds) > 1:
            raise TargetError(f"{array.path}: one array cannot store tensors of {' and '.join(sorted(kinds))}")
    lost = tensors.keys() - {path for array in after for path in array.tensors}
    if lost:
        raise TargetError(f"the targets have no place for {some(sorted(lost))}")


def _unchanged(before: list[_Array], after: list[_Array]) -> tuple[list[_Array], list[_Array], list[Leaf]]:
    """Bundles that store the same before and after move as they are: the array is the tensor."""
    goals: dict[object, list[_Array]] = {}
    for array in after:
        if isinstance(array.held.stored, Bundle):
            goals.setdefault((array.held.stored.array_shape, array.parts), []).append(array)
    pairs: list[tuple[_Array, _Array]] = []
    for array in before:
        same = goals.get((array.held.stored.array_shape, array.parts))
        if same:
            pairs.append((array, same.pop(0)))
    while True:
        paired = {array for pair in pairs for array in pair}
        rest = {path for array in (*before, *after) if array not in paired for path in array.tensors}
        apart = [pair for pair in pairs if not pair[0].tensors & rest]
        if len(apart) == len(pairs):
            break
        pairs = apart
    left_before, left_after = ([a for a in side if a not in paired] for side in (before, after))
    return left_before, left_after, [_as_it_is(*pair) for pair in pairs]


def _as_it_is(source: _Array, target: _Array) -> Leaf:
    ends = [
        replace(end, stored=Stored.plain(end.stored.sharding, end.stored.array_shape), tensors=1)
        for end in (source.held, target.held)
    ]
    return Leaf(tensor(target.path, source.held.array), (ends[0],), (ends[1],))


def _leaves(before: Sequence[_Array], after: Sequence[_Array], tensors: dict[str, Tensor]) -> Iterator[Leaf]:
    """Every tensor that is left, with its arrays."""
    ends: list[dict[str, list[Held]]] = []
    for side in (before, after):
        ends.append({})
        for array in side:
            for path in array.tensors:
                ends[-1].setdefault(path, []).append(array.held)
    for path, sources in ends[0].items():
        yield Leaf(tensors[path], tuple(sources), tuple(ends[1][path]))
