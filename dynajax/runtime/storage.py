"""How a tensor is stored so that a mesh cuts it equally, whatever its size.

A jax array is cut in equal parts or not at all. A dim that its axes do not divide is therefore stored longer
than it is, and a stored dim may have an order of its own. Three rules say how:

- A dim is padded with zeros at its end up to the next multiple of parts · granule. The granule keeps
  together what belongs together: query heads are cut in whole groups that share a key and value head.
- The dim "layers" is stored in the order of ``layer_order``, with a place for each layer of the longest run.
- No dim is replicated because it does not divide. Where a dim is replicated on purpose, its cut says why.

Padding holds zeros and gets zero gradients, so that moments stay zeros and norms over all elements
count nothing twice. (An optimizer that takes means over dims, such as Adafactor, would count it: a job refuses that.)

The maps are pure values. ``pieces`` say which runs of a stored dim are which runs of the logical dim, from
which a layout follows that moves logical elements alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.engine import Stored
from dynajax.errors import LayoutError
from dynajax.runtime.timetable import layer_order
from dynajax.types import Ints

A = TypeVar("A", np.ndarray, jax.Array)


class Piece(NamedTuple):
    """``length`` elements of a dim, from ``stored`` on in storage and from ``logical`` on in the tensor."""

    stored: int
    logical: int
    length: int


@dataclass(frozen=True)
class DimStorage:
    """How one dim is stored.

    Attributes:
        logical: size of the dim.
        stored: size in storage.
        axes: mesh axes that cut it.
        pieces: which elements are where, in the order of storage; the rest is padding.
        gathered: a step gathers the dim and trims its padding before it computes, as fsdp does; else it
            computes with the stored dim, in which zeros do no harm.
    """

    logical: int
    stored: int
    axes: tuple[str, ...]
    pieces: tuple[Piece, ...]
    gathered: bool = False

    @cached_property
    def index(self) -> Ints:
        """The logical index at each place of storage, −1 for padding."""
        index = np.full(self.stored, -1, np.int64)
        for piece in self.pieces:
            index[piece.stored : piece.stored + piece.length] = np.arange(piece.logical, piece.logical + piece.length)
        return index

    @property
    def is_identity(self) -> bool:
        """True if the stored dim is the dim."""
        return self.pieces == (Piece(0, 0, self.stored),)

    def to_storage(self, x: A, dim: int) -> A:
        """Store dim number ``dim`` of ``x``, with zeros in padding; a numpy array stays one."""
        if self.is_identity:
            return x
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        pads = [(0, self.stored - self.logical if d == dim else 0) for d in range(x.ndim)]
        if self.pieces == (Piece(0, 0, self.logical),):
            return xp.pad(x, pads)
        zero = [(0, int(d == dim)) for d in range(x.ndim)]
        return xp.take(xp.pad(x, zero), np.where(self.index < 0, self.logical, self.index), axis=dim)

    def to_logical(self, x: A, dim: int) -> A:
        """Undo ``to_storage``."""
        if self.is_identity:
            return x
        if self.pieces == (Piece(0, 0, self.logical),):
            return x[(slice(None),) * dim + (slice(self.logical),)]
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        places = np.argsort(np.where(self.index < 0, self.logical, self.index), kind="stable")
        return xp.take(x, places[: self.logical], axis=dim)


class DimRule(Protocol):
    """How dims with one logical axis are stored."""

    @property
    def replicated_because(self) -> str:
        """Why the dim is whole on every device though an axis could cut it; empty if it is not so."""
        ...

    def store(self, size: int, mesh_shape: Mapping[str, int]) -> DimStorage:
        """The storage of a dim of ``size``."""
        ...


@dataclass(frozen=True)
class Cut:
    """Cut a dim in equal parts, padded at its end.

    Attributes:
        axes: mesh axes, the slowest first.
        granule: elements that stay together.
        gathered: as in ``DimStorage``.
        replicated_because: why ``axes`` is empty, if there is something to say.
    """

    axes: tuple[str, ...] = ()
    granule: int = 1
    gathered: bool = False
    replicated_because: str = ""

    def store(self, size: int, mesh_shape: Mapping[str, int]) -> DimStorage:
        """The storage of a dim of ``size``; not padded where no axis cuts it."""
        parts = math.prod(mesh_shape[a] for a in self.axes)
        unit = parts * self.granule if parts > 1 else 1
        return DimStorage(size, -(-size // unit) * unit, self.axes, (Piece(0, 0, size),), self.gathered)


@dataclass(frozen=True)
class CutLayers:
    """Cut the layers over pipeline stages, each with ``chunks`` runs of layers."""

    axis: str = "pp"
    chunks: int = 1
    replicated_because: str = ""

    def store(self, size: int, mesh_shape: Mapping[str, int]) -> DimStorage:
        """The storage of a dim of ``size`` layers."""
        order = layer_order(size, mesh_shape[self.axis], self.chunks)
        return DimStorage(size, len(order), (self.axis,), _pieces(order))


StorageRules = Mapping[str, DimRule]
"""Rules by logical axis."""


@dataclass(frozen=True)
class Storage:
    """How a tensor is stored: one ``DimStorage`` for each dim."""

    dims: tuple[DimStorage, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Storage:
        """A tensor that is stored as it is, whole on every device."""
        return Storage(tuple(Cut().store(size, {}) for size in shape))

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(d.logical for d in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored array."""
        return tuple(d.stored for d in self.dims)

    @property
    def spec(self) -> PartitionSpec:
        """How the stored array is cut."""
        return _spec(d.axes for d in self.dims)

    @property
    def computed_spec(self) -> PartitionSpec:
        """How the array is cut while a step computes with it: as stored, less the dims that are gathered."""
        return _spec(() if d.gathered else d.axes for d in self.dims)

    @property
    def is_identity(self) -> bool:
        """True if the stored array is the tensor."""
        return all(d.is_identity for d in self.dims)

    def to_storage(self, x: A) -> A:
        """The stored form of a whole tensor, zeros in padding; of a numpy array, or a jax array inside jit and out."""
        self._require(x.shape, self.logical_shape)
        for number, dim in enumerate(self.dims):
            x = dim.to_storage(x, number)
        return x

    def to_logical(self, x: A) -> A:
        """The tensor of its stored form."""
        self._require(x.shape, self.shape)
        for number, dim in enumerate(self.dims):
            x = dim.to_logical(x, number)
        return x

    def trim(self, x: jax.Array) -> jax.Array:
        """A stored array without the padding of dims that are gathered."""
        for number, dim in enumerate(self.dims):
            x = dim.to_logical(x, number) if dim.gathered else x
        return x

    def without(self, dim: int) -> Storage:
        """The storage of one slice along ``dim``, or of a sum over it."""
        return Storage(self.dims[:dim] + self.dims[dim + 1 :])

    def on(self, mesh: Mesh) -> Stored:
        """The storage bound to ``mesh``, as a source or target of the engine."""
        pieces = tuple(dim.pieces for dim in self.dims)
        return Stored(NamedSharding(mesh, self.spec), self.shape, self.logical_shape, pieces)

    def _require(self, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise LayoutError(
                f"got shape {shape} where {wanted} was expected ({self.logical_shape} stored as {self.shape})"
            )


def storage_of(
    shape: Sequence[int], axes: Sequence[str | None], rules: StorageRules, mesh_shape: Mapping[str, int]
) -> Storage:
    """How a tensor is stored on a mesh.

    Args:
        shape: logical shape.
        axes: logical axis of each dim.
        rules: a rule for each logical axis that occurs.
        mesh_shape: size of each mesh axis.

    Raises:
        LayoutError: an axis has no rule, or a mesh axis would cut two dims.
    """
    unknown = [a for a in axes if a is not None and a not in rules]
    if unknown:
        raise LayoutError(f"no rule for the logical axes {unknown}; the rules know {', '.join(sorted(rules))}")
    named = [Cut() if a is None else rules[a] for a in axes]
    dims = tuple(rule.store(size, mesh_shape) for rule, size in zip(named, shape, strict=True))
    used = [axis for dim in dims for axis in dim.axes]
    if len(set(used)) < len(used):
        raise LayoutError(f"logical axes {tuple(axes)} cut two dims along one mesh axis: {used}")
    return Storage(dims)


def _pieces(order: Ints) -> tuple[Piece, ...]:
    """The runs of an index map."""
    pieces: list[Piece] = []
    for place, index in enumerate(order.tolist()):
        last = pieces[-1] if pieces else Piece(0, 0, 0)
        if index < 0:
            continue
        if pieces and last.stored + last.length == place and last.logical + last.length == index:
            pieces[-1] = last._replace(length=last.length + 1)
        else:
            pieces.append(Piece(place, index, 1))
    return tuple(pieces)


def _spec(entries: Any) -> PartitionSpec:
    return PartitionSpec(*(axes[0] if len(axes) == 1 else (axes or None) for axes in map(tuple, entries)))
