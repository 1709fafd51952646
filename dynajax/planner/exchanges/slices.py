"""Boxes of flat buffers as slices of the shards that they lie in.

A plan speaks of offsets and strides. Nearly always a box is a slice of the shard, with its dims in their order; then
programs cut it out as such, which every backend does without tables of places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.types import Ints
from dynajax.vps.region import dense_strides


@dataclass(frozen=True, eq=False)
class Slices:
    """Slices of a shard, one row each.

    Attributes:
        start, size: in the dims of the shard, shape (rows, dims).
    """

    start: Ints
    size: Ints

    @staticmethod
    def of(shape: Sequence[int], offset: Ints, stride: Ints, extent: Ints) -> Slices | None:
        """The slices that boxes are; None if one is not, or turns its dims.

        Args:
            shape: of the shard.
            offset: first element of each box, shape (rows,).
            stride, extent: of each box, shape (rows, rank).
        """
        strides, sizes = dense_strides(shape), np.asarray(shape, np.int64)
        start = offset[:, None] // strides % np.maximum(sizes, 1)
        size, last = np.ones_like(start), np.full(len(offset), -1)
        for dim in range(extent.shape[1]):
            rows = np.flatnonzero(extent[:, dim] > 1)
            runs = (stride[rows, dim, None] == strides) & (sizes > 1)
            if not runs.any(axis=1).all() or (runs.argmax(axis=1) <= last[rows]).any():
                return None
            last[rows] = runs.argmax(axis=1)
            size[rows, last[rows]] = extent[rows, dim]
        return Slices(start, size) if (start + size <= sizes).all() else None
