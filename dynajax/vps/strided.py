"""Strided copies between buffers: offsets and strides in bytes, as few copies as there can be.

A copy costs about a microsecond before its first byte. So copies that are alike, at regular distances in the same two
buffers, become one copy with a dim more: a rank's share of a flat array that is cut over twenty devices, or one piece
for each of eight shards that lie side by side, is one copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynajax.types import Ints

_PASSES = 3
"""How many dims are looked for: layers, ranks and replicas may each be one."""


class StridedCopy(NamedTuple):
    """One box to copy.

    Attributes:
        filled, read: numbers of the buffers.
        dtype: of its elements, or words of their size.
        extent: its shape.
        to, to_stride: where it lies in the buffer that is filled.
        origin, origin_stride: where it lies in the buffer that is read.
        added: whether to add to what is there.
    """

    filled: int
    read: int
    dtype: np.dtype[Any]
    extent: tuple[int, ...]
    to: int
    to_stride: tuple[int, ...]
    origin: int
    origin_stride: tuple[int, ...]
    added: int

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return math.prod(self.extent) * self.dtype.itemsize

    def views(self, buffers: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
        """What to fill, and from what."""
        filled, read, dtype, extent, to, to_stride, origin, origin_stride, _ = self
        return (
            np.ndarray(extent, dtype, buffers[filled], to, to_stride),
            np.ndarray(extent, dtype, buffers[read], origin, origin_stride),
        )

    def cut(self, most: int) -> Iterable[StridedCopy]:
        """The box in parts of about ``most`` bytes, cut along its longest dim."""
        parts = min(-(-self.nbytes // most), max(self.extent, default=1))
        if parts <= 1:
            yield self
            return
        dim = self.extent.index(max(self.extent))
        for a, b in itertools.pairwise(self.extent[dim] * k // parts for k in range(parts + 1)):
            extent = (*self.extent[:dim], b - a, *self.extent[dim + 1 :])
            to, origin = self.to + a * self.to_stride[dim], self.origin + a * self.origin_stride[dim]
            yield self._replace(extent=extent, to=to, origin=origin)


@dataclass(frozen=True, eq=False)
class StridedCopies:
    """Strided copies, one row each.

    Attributes:
        fixed: phase, added, filled and read: only copies with the same four can become one; shape (copies, 4). Those of
            a phase may be made at once, when those of all phases before are; for the others see ``StridedCopy``.
        extent, to_stride, origin_stride: shape (copies, rank).
        to, origin: shape (copies,).
    """

    fixed: Ints
    extent: Ints
    to: Ints
    to_stride: Ints
    origin: Ints
    origin_stride: Ints

    def merged(self) -> StridedCopies:
        """The same bytes in fewer copies."""
        long = self.extent > 1
        copies = replace(self, to_stride=self.to_stride * long, origin_stride=self.origin_stride * long)
        for _ in range(_PASSES):
            count = len(copies.to)
            copies = copies._joined() if count > 1 else copies
            if len(copies.to) == count:
                break
        return copies

    def _joined(self) -> StridedCopies:
        """Runs of copies that are alike, at equal distances, as one copy each, whose first dim is the run."""
        alike = np.concatenate([self.fixed, self.extent, self.to_stride, self.origin_stride], axis=1)
        kind = np.unique(alike, axis=0, return_inverse=True)[1].ravel()
        order = np.lexsort((self.origin, self.to, kind))
        step = np.diff(np.stack([kind, self.to, self.origin], axis=1)[order], axis=0)
        begin = _runs(step)
        first, count = order[begin], np.diff(np.append(begin, len(order)))
        by = np.where(count[:, None] > 1, np.append(step, np.zeros((1, 3), np.int64), axis=0)[begin], 0)
        return StridedCopies(
            self.fixed[first],
            np.column_stack([count, self.extent[first]]),
            self.to[first],
            np.column_stack([by[:, 1], self.to_stride[first]]),
            self.origin[first],
            np.column_stack([by[:, 2], self.origin_stride[first]]),
        )

    def listed(self, word: np.dtype[Any], element: np.dtype[Any]) -> list[tuple[int, StridedCopy]]:
        """Each copy with its phase.

        Args:
            word: to copy elements as.
            element: to add them as.
        """
        columns = (self.fixed, self.extent, self.to, self.to_stride, self.origin, self.origin_stride)
        return [
            (
                phase,
                StridedCopy(
                    filled, read, element if added else word, tuple(extent), to, tuple(ts), origin, tuple(os), added
                ),
            )
            for (phase, added, filled, read), extent, to, ts, origin, os in zip(
                *(c.tolist() for c in columns), strict=True
            )
        ]


def _runs(step: Ints) -> Ints:
    """Where runs of rows begin that have equal steps.

    Args:
        step: from each row to the next; those whose first column is not 0 lead to another kind of row.
    """
    begin, by = [0], None
    for k, (other, *now) in enumerate(step.tolist()):
        if other or (k > begin[-1] and now != by):
            begin.append(k + 1)
        by = now
    return np.asarray(begin, np.int64)
