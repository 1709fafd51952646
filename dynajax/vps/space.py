"""The space: the named tensors of a training state, with logical shapes and no placement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu

from dynajax.errors import LayoutError


@dataclass(frozen=True)
class Tensor:
    """A named tensor of the space.

    Attributes:
        path: its place in the state tree as ``jax.tree_util.keystr`` writes it, unique in a space.
        shape: logical shape.
        dtype: name of the dtype, such as ``"bfloat16"`` or ``"key<fry>"``.
        itemsize: bytes that one element takes where it is stored.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Space:
    """All tensors of a state, ordered by path, so that the order in which a dict was filled does not matter."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        paths = [t.path for t in self.tensors]
        if len(set(paths)) != len(paths):
            twice = next(p for p in paths if paths.count(p) > 1)
            raise LayoutError(f"the space names {twice} twice; every tensor has one path")
        object.__setattr__(self, "tensors", tuple(sorted(self.tensors, key=lambda t: t.path)))

    @staticmethod
    def of(tree: Any) -> Space:
        """The space of a pytree whose leaves have ``shape`` and ``dtype`` (arrays or ``jax.ShapeDtypeStruct``)."""
        return Space(tuple(tensor(jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(tree)))

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy of the state."""
        return sum(t.nbytes for t in self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def tensor(path: str, leaf: Any) -> Tensor:
    """The tensor that a leaf with ``shape`` and ``dtype`` stands for."""
    return Tensor(path, tuple(int(n) for n in leaf.shape), str(leaf.dtype), int(leaf.dtype.itemsize))
