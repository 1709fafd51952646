"""What a move is asked for, as a value: the tensors of a state, and the arrays that store them before and after.

Tensors meet by name. An array that is a tensor is named by its path in the tree; a ``Bundle`` names the tensors of its
parts. Without bundles the result has the tree of the state; with them the target tree is written out whole, since five
buckets may become twelve parameters, and the result has its tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from dynajax.arrays import _jax_private as private
from dynajax.arrays.dtypes import is_key
from dynajax.engine.stored import ArraySpec, Bundle, Endpoint, Stored
from dynajax.engine.targets import broadcast, checked_sharding, is_target, some, target_of
from dynajax.errors import LayoutError, TargetError
from dynajax.vps import Part, Tensor
from dynajax.vps.space import tensor


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of the state and the arrays that it moves between: nearly always one, which stores nothing else.

    Attributes:
        tensor: its name, logical shape and dtype.
        sources, targets: the arrays that store it before and after, in tree order.
    """

    tensor: Tensor
    sources: tuple[Endpoint, ...]
    targets: tuple[Endpoint, ...]

    @property
    def has_own_target(self) -> bool:
        """True if one array stores the tensor before the move, and one that stores nothing else after it."""
        return len(self.sources) == len(self.targets) == self.targets[0].tensors == 1

    @property
    def is_turned(self) -> bool:
        """True if an array that stores the tensor before the move is not row-major in memory."""
        return any(end.layout is not None for end in self.sources)


@dataclass(frozen=True, eq=False)
class Request:
    """A move that is asked for.

    Attributes:
        leaves: the tensors to move, ordered by name.
        before, after: structure of the tree of the state, and of the result.
        like: spec of each leaf of the state that is an array; None for others.
        paths: of the leaves of the state.
        stays: leaves of the result that are leaves of the state: index after and before.
        told: arrays of the result that every process makes of a value of its own, by the index of that.
        donated: whether the caller gives up each leaf of the state.
    """

    leaves: tuple[Leaf, ...]
    before: jtu.PyTreeDef
    after: jtu.PyTreeDef
    like: tuple[ArraySpec | None, ...]
    paths: tuple[str, ...]
    stays: dict[int, int]
    told: dict[int, Endpoint]
    donated: tuple[bool, ...]

    @cached_property
    def sources(self) -> tuple[Endpoint, ...]:
        """The arrays before the move, each once, in tree order."""
        return _once(end for leaf in self.leaves for end in leaf.sources)

    @property
    def rows(self) -> tuple[Endpoint, ...]:
        """The source arrays in the order in which plans number them."""
        alone = all(len(leaf.sources) == leaf.sources[0].tensors == 1 for leaf in self.leaves)
        return tuple(leaf.sources[0] for leaf in self.leaves) if alone else self.sources

    def gives(self, end: Endpoint) -> bool:
        """Whether the caller gives up a source array, at all places where it is."""
        return all(self.donated[k] for k in (end.index, *end.repeats))

    @cached_property
    def targets(self) -> tuple[Endpoint, ...]:
        """The arrays after the move, each once, in tree order."""
        return _once(end for leaf in self.leaves for end in leaf.targets)


def _once(ends: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    return tuple(sorted(dict.fromkeys(ends), key=lambda end: end.index))


def read(tree: Any, targets: Any, stored: Any = None, donate: Any = False) -> Request:
    """Read a state, its targets, and what is said of both.

    Leaves that are not jax arrays (python and numpy scalars and arrays, strings) have no devices and stay as they are.

    Args:
        tree: any pytree; ``jax.ShapeDtypeStruct`` leaves with shardings may stand for arrays.
        targets: a tree of what ``dynajax.engine.targets`` lists, a prefix, or one for all; a whole tree of any
            structure if it or ``stored`` has a ``Bundle``.
        stored: a tree of ``Stored`` or ``Bundle`` that says how the arrays of ``tree`` store their tensors, alike; None
            if every array is its tensor.
        donate: a bool, or a tree of bools, alike.

    Raises:
        TargetError: what is given does not fit together; names the path.
    """
    with_paths, before = jtu.tree_flatten_with_path(tree)
    paths, leaves = tuple(jtu.keystr(p) for p, _ in with_paths), [leaf for _, leaf in with_paths]
    says = [None] * len(paths) if stored is None else broadcast(stored, tree, paths, "tree of what is stored")
    mesh, after = private.mesh_that_is_set(), before
    is_regrouped = any(isinstance(x, Bundle) for x in jtu.tree_leaves((targets, stored), is_leaf=is_target))
    place = {path: k for k, path in enumerate(paths)}
    if is_regrouped:
        goals, after = _whole(targets, place)
    else:
        goals = list(zip(paths, broadcast(targets, tree, paths), strict=True))
    stays = {
        k: place[path] for k, (path, goal) in enumerate(goals) if path in place and _stays(leaves[place[path]], goal)
    }
    left = set(stays.values())
    sources = [
        _Array.of(path, _source(k, path, leaves[k], says[k], mesh))
        for k, path in enumerate(paths)
        if is_array(leaves[k]) and k not in left
    ]
    tensors = _tensors(sources)
    made = [_to_make(path, k, goal, tensors, mesh) for k, (path, goal) in enumerate(goals) if k not in stays]
    _require_places(tensors, made)
    told = {} if is_regrouped else _told(sources, made, leaves)
    sources, made = ([array for array in side if array.end.index not in told] for side in (sources, made))
    sources = _repeated(sources, made, leaves, is_regrouped)
    sources, made, found = _unchanged(sources, made)
    found += _leaves(sources, made, tensors)
    like = tuple(ArraySpec.of(leaf) if is_array(leaf) else None for leaf in leaves)
    ordered = tuple(sorted(found, key=lambda leaf: leaf.tensor.path))
    return Request(ordered, before, after, like, paths, stays, told, _bools(donate, tree, paths))


def is_array(leaf: Any) -> bool:
    """True for what has devices: arrays, what stands for them, and references, which are refused later."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | jax.Ref)


def require_data(request: Request, leaves: Sequence[Any]) -> None:
    """Raise if there is no data in a leaf of which this process has a part.

    Args:
        request: the move.
        leaves: of the state.
    """
    for k in (*(end.index for end in request.sources), *request.told):
        path, array = request.paths[k], leaves[k]
        if not array.sharding.addressable_devices:
            continue
        if not isinstance(array, jax.Array) or isinstance(array, Tracer):
            raise TargetError(f"{path}: the leaf is a {type(array).__name__} without data; give the array itself")
        if array.is_deleted():
            raise TargetError(f"{path}: the array was deleted or donated; give the state that the last step returned")


def _whole(targets: Any, known: Collection[str]) -> tuple[list[tuple[str, Any]], jtu.PyTreeDef]:
    """The leaves of a target tree by path, and its structure; a None where the state has no leaf is part of that."""
    named, structure = jtu.tree_flatten_with_path(targets, is_leaf=is_target)
    goals = [(jtu.keystr(path), goal) for path, goal in named]
    is_leaf = [goal is not None or path in known for path, goal in goals]
    after = jtu.tree_structure(jtu.tree_unflatten(structure, [0 if leaf else None for leaf in is_leaf]))
    return list(compress(goals, is_leaf)), after


@dataclass(frozen=True)
class _Known:
    """A tensor of the state, and what an array of it is like."""

    tensor: Tensor
    like: ArraySpec


@dataclass(frozen=True, eq=False)
class _Array:
    """An array of a tree: its path and what it stores."""

    path: str
    end: Endpoint
    parts: tuple[Part, ...]

    @staticmethod
    def of(path: str, end: Endpoint) -> _Array:
        """An array, checked.

        Raises:
            TargetError: its parts do not fit it.
        """
        parts = end.stored.parts_of(path)
        try:
            for part in parts:
                part.require_fits(end.stored.array_shape)
        except LayoutError as error:
            raise TargetError(f"{path}: {error}") from None
        if not parts:
            raise TargetError(f"{path}: the array stores no part of any tensor; leave it out")
        return _Array(path, replace(end, tensors=len({p.tensor for p in parts})), parts)

    @property
    def tensors(self) -> frozenset[str]:
        """Paths of the tensors that it stores parts of."""
        return frozenset(part.tensor for part in self.parts)


def _stays(leaf: Any, goal: Any) -> bool:
    """Whether a leaf of the state is a leaf of the result as it is."""
    return goal is None or not is_array(leaf)


def _bools(donate: Any, tree: Any, paths: Sequence[str]) -> tuple[bool, ...]:
    """Whether each leaf is given up."""
    if isinstance(donate, bool | np.bool_):
        return (bool(donate),) * len(paths)
    said = broadcast(donate, tree, paths, "tree of donate")
    for path, one in zip(paths, said, strict=True):
        if not isinstance(one, bool | np.bool_ | None):
            raise TargetError(f"{path}: donate is a {type(one).__name__}; give True or False")
    return tuple(bool(one) for one in said)


def _source(k: int, path: str, leaf: Any, said: Any, mesh: Mesh | None) -> Endpoint:
    """Leaf ``k`` as it is said to be stored, with the sharding that it has."""
    _require_movable(path, leaf)
    shape = tuple(int(n) for n in leaf.shape)
    sharding = checked_sharding(path, leaf.sharding, shape, mesh)
    stored = replace(said, sharding=sharding) if isinstance(said, Stored | Bundle) else Stored.plain(sharding, shape)
    if stored.array_shape != shape:
        raise TargetError(f"{path}: the array has shape {shape} and is said to be stored as {stored.array_shape}")
    return Endpoint(k, stored, ArraySpec.of(leaf), layout=private.layout_of(leaf))


def _require_movable(path: str, leaf: Any) -> None:
    """Raise if a leaf is none that a move could carry exactly."""
    if isinstance(leaf, jax.Ref):
        raise TargetError(f"{path}: the leaf is a reference, which a move cannot make anew; give the array, ref[...]")
    if getattr(leaf, "sharding", None) is None:
        raise TargetError(f"{path}: the leaf has no sharding; give jax.ShapeDtypeStruct(…, sharding=…) or an array")
    if not (is_key(leaf) or jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_):
        raise TargetError(f"{path}: a move carries numbers and keys, not {leaf.dtype}; take the leaf out of the state")


def _tensors(arrays: Sequence[_Array]) -> dict[str, _Known]:
    """The tensors that the source arrays store."""
    found: dict[str, _Known] = {}
    for array, part in ((a, part) for a in arrays for part in a.parts):
        new = replace(tensor(part.tensor, array.end.like), shape=part.shape)
        known = found.setdefault(part.tensor, _Known(new, array.end.like)).tensor
        if known != new:
            raise TargetError(f"{array.path}: stores {new}, and another array {known}; name them apart")
    return found


def _to_make(path: str, index: int, goal: Any, tensors: dict[str, _Known], mesh: Mesh | None) -> _Array:
    """An array of the result."""
    if isinstance(goal, Bundle):
        sharding = checked_sharding(path, goal.sharding, goal.array_shape, mesh)
        for part in goal.parts:
            _require_known(path, part, tensors)
        like = tensors[goal.parts[0].tensor].like if goal.parts else ArraySpec((), None, sharding, False)
        return _Array.of(path, Endpoint(index, replace(goal, sharding=sharding), like))
    if path not in tensors:
        raise TargetError(f"{path}: the state has no tensor of this name; it has {some(sorted(tensors))}")
    known = tensors[path]
    return _Array.of(
        path, Endpoint(index, target_of(path, goal, known.tensor.shape, known.like.dtype, mesh), known.like)
    )


def _require_known(path: str, part: Part, tensors: dict[str, _Known]) -> None:
    """Raise unless the state has the tensor that an array is to store a part of."""
    known = tensors.get(part.tensor)
    if known is None or known.tensor.shape != part.shape:
        has = f"only {some(sorted(tensors))}" if known is None else known.tensor
        raise TargetError(f"{path}: is to store {part.tensor} of shape {part.shape}; the state has {has}")


def _require_places(tensors: dict[str, _Known], made: Sequence[_Array]) -> None:
    """Raise unless every tensor of the state has a place in the result, and no array is of two dtypes."""
    for array in made:
        for part in array.parts:
            _require_known(array.path, part, tensors)
        kinds = {tensors[path].tensor.dtype for path in array.tensors}
        if len(kinds) > 1:
            raise TargetError(f"{array.path}: one array cannot store tensors of {' and '.join(sorted(kinds))}")
    lost = tensors.keys() - {path for array in made for path in array.tensors}
    if lost:
        raise TargetError(f"the targets have no place for {some(sorted(lost))}")


def _devices(arrays: Iterable[_Array]) -> set[jax.Device]:
    return {device for array in arrays for device in array.end.stored.sharding.device_set}


def _told(sources: Sequence[_Array], made: Sequence[_Array], leaves: Sequence[Any]) -> dict[int, Endpoint]:
    """What every process has for itself, such as ``jnp.int32(0)``, in a job of several processes."""
    several = len({device.process_index for device in _devices((*sources, *made))}) > 1
    local = {s.end.index for s in sources if several and not getattr(leaves[s.end.index], "committed", True)}
    return {array.end.index: array.end for array in made if array.end.index in local}


def _repeated(
    sources: Sequence[_Array], made: Sequence[_Array], leaves: Sequence[Any], is_regrouped: bool
) -> list[_Array]:
    """The source arrays, with one end for an array that is at several places.

    Several processes have to find the same, so between them only one object at two places counts, not arrays that share
    buffers here.
    """
    alone = all(d.process_index == d.client.process_index() for d in _devices((*sources, *made)))
    known: dict[object, list[_Array]] = {}
    first: dict[int, _Array] = {}
    for array in sources:
        leaf = leaves[array.end.index]
        alike = known.setdefault(_identity(leaf) if alone else id(leaf), [])
        same = [a for a in alike if _shares_all(leaves[a.end.index], leaf)]
        if same and (is_regrouped or same[0].end.stored != array.end.stored):
            raise TargetError(f"{array.path}: one array is at two places of the state; give each its own copy")
        first[array.end.index] = same[0] if same else array
        alike += [] if same else [array]
    readers: dict[int, list[int]] = {}
    for k, array in first.items():
        readers.setdefault(array.end.index, []).append(k)
    ends = {
        k: replace(first[k].end, tensors=max(len(of), first[k].end.tensors), repeats=tuple(of[1:]))
        for k, of in readers.items()
    }
    return [replace(array, end=ends[first[array.end.index].end.index]) for array in sources]


def _identity(array: Any) -> object:
    """Equal for arrays that may share all their buffers."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.is_deleted() or not array.size:
        return id(array)
    pointers = private.pointers(array, 1)
    return (pointers[0], array.shape, array.dtype) if pointers else id(array)


def _shares_all(a: Any, b: Any) -> bool:
    """True for one array, and for two with the same buffers in the same places."""
    return a is b or (private.pointers(a) == private.pointers(b) and a.sharding == b.sharding)


def _unchanged(before: list[_Array], after: list[_Array]) -> tuple[list[_Array], list[_Array], list[Leaf]]:
    """Bundles that store the same before and after move as they are: the array is the tensor."""
    goals: dict[object, list[_Array]] = {}
    for array in after:
        if isinstance(array.end.stored, Bundle):
            goals.setdefault((array.end.stored.array_shape, array.parts), []).append(array)
    pairs: list[tuple[_Array, _Array]] = []
    for array in before:
        same = goals.get((array.end.stored.array_shape, array.parts))
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
    """Two arrays that store the same, as one tensor that is the array."""
    ends = [
        replace(end, stored=Stored.plain(end.stored.sharding, end.stored.array_shape), tensors=1)
        for end in (source.end, target.end)
    ]
    return Leaf(tensor(target.path, source.end.like), (ends[0],), (ends[1],))


def _leaves(before: Sequence[_Array], after: Sequence[_Array], tensors: dict[str, _Known]) -> Iterator[Leaf]:
    """Every tensor that is left, with its arrays."""
    ends: list[dict[str, list[Endpoint]]] = [{}, {}]
    for side, arrays in zip(ends, (before, after), strict=True):
        for array in arrays:
            for path in array.tensors:
                side.setdefault(path, []).append(array.end)
    for path, sources in ends[0].items():
        yield Leaf(tensors[path].tensor, tuple(sources), tuple(ends[1][path]))
