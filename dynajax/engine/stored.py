"""How an array stores tensors: as it is, padded or permuted, or parts of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import Sharding

from dynajax.arrays import _jax_private as private
from dynajax.vps import Block, Part, Pieces
from dynajax.vps.stored import piece_parts, whole_runs


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
        return Stored(sharding, tuple(shape), tuple(shape), whole_runs(shape))

    @property
    def is_plain(self) -> bool:
        """True if the array is the tensor."""
        return self.array_shape == self.shape and self.pieces == whole_runs(self.shape)

    def parts_of(self, path: str) -> tuple[Part, ...]:
        """The parts of the tensor ``path`` that the array stores."""
        return (Block.whole(path, self.shape),) if self.is_plain else piece_parts(path, self.shape, self.pieces)


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

    def parts_of(self, path: str) -> tuple[Part, ...]:
        """All parts; they name their tensors, whatever the path of the array is."""
        return self.parts


def memory_kind(sharding: Sharding) -> str | None:
    """The memory that a sharding means; the device's default memory by its name."""
    return sharding.memory_kind or next(iter(sharding.device_set)).default_memory().kind


@dataclass(frozen=True)
class ArraySpec:
    """What an array is like, whatever ``jax.ShapeDtypeStruct`` makes of its sharding.

    Attributes:
        shape, dtype, sharding: of the array.
        weak_type: whether its dtype gives way to others.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    weak_type: bool

    @staticmethod
    def of(array: Any) -> ArraySpec:
        """The spec of an array, or of what stands for one."""
        return ArraySpec(tuple(array.shape), array.dtype, array.sharding, private.is_weak(array))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} in {self.sharding}"


@dataclass(frozen=True, eq=False)
class Endpoint:
    """An array at one end of a move.

    Attributes:
        index: its place among the leaves of its tree.
        stored: what it stores and where.
        like: spec of the array; of one that is to be made, of an array that it is made of.
        tensors: of how many tensors it stores parts.
        layout: order of its dims in memory, the slowest first; None if row-major.
        repeats: other places among the leaves at which the same array is.
    """

    index: int
    stored: Stored | Bundle
    like: ArraySpec
    tensors: int = 1
    layout: tuple[int, ...] | None = None
    repeats: tuple[int, ...] = ()

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return self.stored.sharding.shard_shape(self.stored.array_shape)

    @cached_property
    def physical(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and shape of a shard as the machine has it: keys are words, in a dim more."""
        dtype, inner = private.physical_element(self.like.dtype)
        return dtype, (*self.shard_shape, *inner)

    @cached_property
    def memory_kind(self) -> str | None:
        """The memory that it lies in."""
        return memory_kind(self.stored.sharding)

    @cached_property
    def room(self) -> int:
        """Elements of a shard."""
        return math.prod(self.shard_shape)
