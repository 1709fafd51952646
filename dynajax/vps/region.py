"""Regions: which part of a tensor a holder has, and where each part lies in its buffer.

A region is a list of disjoint boxes. A shard of a mesh is one box; an interval of the row-major
flattened tensor (a flat ZeRO bucket) is at most ``2·rank − 1`` boxes; a fused or permuted block is
a list of them. Every box carries an affine address: element ``i`` of the tensor, inside the box,
lies at ``offset + (i − lo) · stride`` of the holder's buffer, counted in elements. Boxes and
addresses are all that planning and copying need, so no kind of region is a special case.

All arrays are int64, one row a box: sizes past 2**32 elements are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.types import Bools, Ints
from dynajax.vps import algebra
from dynajax.vps.cells import Cells


@dataclass(frozen=True, eq=False)
class Region:
    """Boxes ``lo ≤ i < hi`` of a tensor and their addresses in a buffer.

    Attributes:
        lo: first index of each box, shape (boxes, rank).
        hi: index past the last, shape (boxes, rank).
        offset: buffer element that holds ``lo``, shape (boxes,).
        stride: buffer elements between neighbours along each dim, shape (boxes, rank).
    """

    lo: Ints
    hi: Ints
    offset: Ints
    stride: Ints

    @cached_property
    def volumes(self) -> Ints:
        """Elements of each box, shape (boxes,)."""
        return algebra.volumes(self.lo, self.hi)

    @cached_property
    def distinct(self) -> Cells:
        """The distinct boxes, overlapping or not."""
        return Cells.distinct(self.lo, self.hi)

    @cached_property
    def cells(self) -> Cells:
        """The distinct boxes, cut where they overlap."""
        return self.distinct.refined(self.lo, self.hi)

    @property
    def volume(self) -> int:
        """Elements of all boxes."""
        return int(self.volumes.sum())

    @property
    def count(self) -> int:
        """Number of boxes."""
        return len(self.lo)

    @property
    def rank(self) -> int:
        """Dims of the tensor."""
        return self.lo.shape[1]

    def take(self, rows: Ints | Bools) -> Region:
        """The boxes at ``rows``."""
        return Region(self.lo[rows], self.hi[rows], self.offset[rows], self.stride[rows])

    def address(self, rows: Ints, at: Ints) -> Ints:
        """Buffer element of index ``at[k]`` inside box ``rows[k]``."""
        return self.offset[rows] + np.einsum("ij,ij->i", at - self.lo[rows], self.stride[rows])

    def __repr__(self) -> str:
        boxes = [
            "[" + ", ".join(f"{a}:{b}" for a, b in zip(lo, hi, strict=True)) + "]"
            for lo, hi in zip(self.lo.tolist(), self.hi.tolist(), strict=True)
        ]
        return f"Region({' + '.join(boxes) or 'empty'})"


def dense_strides(shape: Sequence[int]) -> Ints:
    """Row-major element strides of an array of ``shape``."""
    strides = np.ones(len(shape), np.int64)
    if len(shape) > 1:
        strides[:-1] = np.cumprod(np.asarray(shape[:0:-1], np.int64))[::-1]
    return strides


def dense_boxes(lo: Ints, hi: Ints) -> Region:
    """Boxes each alone and dense in a buffer of its own; empty boxes stay as rows of volume 0.

    Args:
        lo, hi: shape (boxes, rank).
    """
    extent = hi - lo
    stride = np.ones_like(extent)
    if extent.shape[1] > 1:
        stride[:, :-1] = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
    return Region(lo, hi, np.zeros(len(lo), np.int64), stride)


def box(lo: Sequence[int], hi: Sequence[int]) -> Region:
    """One box, dense in its buffer."""
    return dense_boxes(np.asarray([lo], np.int64).reshape(1, -1), np.asarray([hi], np.int64).reshape(1, -1))


def interval(shape: Sequence[int], start: int, stop: int) -> Region:
    """Elements ``start`` to ``stop`` of the row-major flattened tensor, dense in a flat buffer.

    Example:
        >>> interval((3, 4), 2, 9)
        Region([0:1, 2:4] + [1:2, 0:4] + [2:3, 0:1])
    """
    _, region = intervals(shape, np.asarray([start], np.int64), np.asarray([stop], np.int64))
    return region


def intervals(shape: Sequence[int], start: Ints, stop: Ints) -> tuple[Ints, Region]:
    """Many intervals of one flattened tensor: ``(owner, region)``, box k being of interval ``owner[k]``.

    Addresses count from the start of each interval. Boxes of one interval come in row-major order.
    """
    rank = len(shape)
    strides = dense_strides(shape)
    live = np.flatnonzero(stop > start)
    if rank == 0:
        empty = np.zeros((len(live), 0), np.int64)
        return live, Region(empty, empty, np.zeros(len(live), np.int64), empty)
    found: list[tuple[Ints, Ints, Ints]] = []
    prefix, begin, end, owner = np.zeros((len(live), 0), np.int64), start[live], stop[live], live
    for dim in range(rank):
        inner = int(strides[dim])
        first, last = -(-begin // inner), end // inner
        rows = first < last
        found.append((owner[rows], *_rows_as_boxes(prefix[rows], first[rows], last[rows], shape, dim)))
        prefix, begin, end, owner = _partial_rows(prefix, begin, end, owner, inner)
    owners = np.concatenate([f[0] for f in found])
    lo, hi = (np.concatenate([f[k] for f in found]) for k in (1, 2))
    flat = lo @ strides
    order = np.lexsort((flat, owners))
    owners, flat = owners[order], flat[order]
    region = Region(lo[order], hi[order], flat - start[owners], np.broadcast_to(strides, (len(flat), rank)))
    return owners, region


def _rows_as_boxes(prefix: Ints, first: Ints, last: Ints, shape: Sequence[int], dim: int) -> tuple[Ints, Ints]:
    """Boxes of the complete rows ``first`` to ``last`` of dim ``dim`` below the index ``prefix``."""
    n, rest = len(prefix), np.asarray(shape[dim + 1 :], np.int64)
    lo = np.concatenate([prefix, first[:, None], np.zeros((n, len(rest)), np.int64)], axis=1)
    hi = np.concatenate([prefix + 1, last[:, None], np.broadcast_to(rest, (n, len(rest)))], axis=1)
    return lo, hi


def _partial_rows(prefix: Ints, begin: Ints, end: Ints, owner: Ints, inner: int) -> tuple[Ints, Ints, Ints, Ints]:
    """What the complete rows leave over: at most one incomplete row at either end, as intervals inside that row."""
    first, last = begin // inner, end // inner
    together = first == last
    head = (begin % inner > 0) | together
    tail = (end % inner > 0) & ~together
    row = np.concatenate([first[head], last[tail]])
    b = np.concatenate([begin[head] % inner, np.zeros(int(tail.sum()), np.int64)])
    e = np.concatenate([np.where(together, end % inner, inner)[head], end[tail] % inner])
    keep = e > b
    pre = np.concatenate([np.concatenate([prefix[head], prefix[tail]]), row[:, None]], axis=1)
    return pre[keep], b[keep], e[keep], np.concatenate([owner[head], owner[tail]])[keep]


def blocks(parts: Sequence[tuple[Sequence[int], Sequence[int]]], dim: int = 0) -> Region:
    """Boxes laid side by side along ``dim`` of one dense buffer: a rank's share of a fused tensor.

    Args:
        parts: ``(lo, hi)`` of each box; their extents agree in every dim but ``dim``.
    """
    lo, hi = (np.asarray([p[k] for p in parts], np.int64) for k in (0, 1))
    extent = hi - lo
    total = extent[0].copy()
    total[dim] = extent[:, dim].sum()
    strides = dense_strides(total.tolist())
    start = np.cumsum(extent[:, dim]) - extent[:, dim]
    return Region(lo, hi, start * strides[dim], np.broadcast_to(strides, lo.shape))


def concatenate(regions: Sequence[Region]) -> Region:
    """All boxes of ``regions``, in order, addresses kept."""
    return Region(*(np.concatenate([getattr(r, f) for r in regions]) for f in ("lo", "hi", "offset", "stride")))
