"""Arrays that store parts of tensors: flat buckets, fused matrices, stacks of layers, tensors in several arrays.

The idea: *an array stores regions of one or more tensors, and a tensor may be stored in several arrays.* A flat bucket
stores runs of many flattened tensors; a fused matrix stores blocks of three; an array of one layer stores a slice of
a stack; of a stack whose halves live on two meshes, each array stores half. All of it is a list of parts for each
array, and a part is one of two things: a box of the tensor that is a box of the array (``Block``), or a run of the
flattened tensor in a flat array or in a row of one (``Run``).

A holder then has several buffers of one tensor. They are numbered as if they lay end to end, in the order of the
arrays, so that a tiling addresses them like one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynajax.errors import LayoutError
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.region import Region, concatenate, intervals
from dynajax.vps.tiling import Tiling

HeldBoxes = tuple[Ints, Region]
"""Shard of each box, and the boxes, addressed in their shards."""


@dataclass(frozen=True)
class Block:
    """A box of a tensor that is a box of an array.

    Attributes:
        tensor: path of the tensor.
        shape: of the whole tensor.
        first: corner of the box in the tensor.
        extent: of the box, in the tensor's dims.
        at: corner of the box in the array.
        dims: the array's dim along which each dim of the tensor runs; None for a dim of extent 1 that the array lacks.
            The array's other dims are passed at one index, that of ``at``.
    """

    tensor: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]
    dims: tuple[int | None, ...]

    @staticmethod
    def whole(tensor: str, shape: Sequence[int]) -> Block:
        """All of a tensor, in an array of its shape."""
        rank = len(shape)
        return Block(tensor, tuple(shape), (0,) * rank, tuple(shape), (0,) * rank, tuple(range(rank)))

    def rows(self, lo: Ints, hi: Ints) -> HeldBoxes:
        """What shards with these bounds, shape (shards, rank), hold of the part."""
        along = np.ones(lo.shape[1], np.int64)
        for dim, run in zip(self.dims, self.extent, strict=True):
            if dim is not None:
                along[dim] = run
        at = np.asarray(self.at, np.int64).reshape(1, -1)
        a, b = np.maximum(lo, at), np.minimum(hi, at + along)
        shard = np.flatnonzero((a < b).all(axis=1))
        lo, a, b, inner = lo[shard], a[shard], b[shard], _strides(hi[shard] - lo[shard])
        rank = len(self.shape)
        first = np.broadcast_to(np.asarray(self.first, np.int64), (len(shard), rank)).copy()
        last, stride = first + 1, np.zeros((len(shard), rank), np.int64)
        for d, dim in enumerate(self.dims):
            if dim is not None:
                last[:, d] = first[:, d] + b[:, dim] - self.at[dim]
                first[:, d] += a[:, dim] - self.at[dim]
                stride[:, d] = inner[:, dim]
        return shard, Region(first, last, ((a - lo) * inner).sum(axis=1), stride)

    def require_fits(self, array: Sequence[int]) -> None:
        """Raises LayoutError if the box lies outside its tensor or the array, or its dims do not."""
        ranks = len(self.shape) == len(self.first) == len(self.extent) == len(self.dims) and len(self.at) == len(array)
        used = [d for d in self.dims if d is not None]
        if not ranks or len(set(used)) != len(used) or not set(used) <= set(range(len(array))):
            raise LayoutError(f"{self.tensor}: {self} does not name dims of {self.shape} and {tuple(array)} once each")
        along = dict(zip(self.dims, self.extent, strict=True))
        spans = [*zip(self.first, self.extent, self.shape, strict=True)]
        spans += [(at, along.get(d, 1), n) for d, (at, n) in enumerate(zip(self.at, array, strict=True))]
        inside = all(start >= 0 and n >= 0 and start + n <= size for start, n, size in spans)
        if not inside or any(n != 1 for d, n in zip(self.dims, self.extent, strict=True) if d is None):
            raise LayoutError(f"{self.tensor}: {self} lies outside of {self.shape} or of the array {tuple(array)}")


@dataclass(frozen=True)
class Run:
    """A run of the flattened tensor in a flat array, or in a row of an array of rows.

    Attributes:
        tensor: path of the tensor.
        shape: of the whole tensor.
        first: first element of the run, in row-major order of the tensor.
        length: elements.
        at: where the run starts in the array's last dim.
        row: index in the array's other dims.
    """

    tensor: str
    shape: tuple[int, ...]
    first: int
    length: int
    at: int
    row: tuple[int, ...] = ()

    def rows(self, lo: Ints, hi: Ints) -> HeldBoxes:
        """What shards with these bounds, shape (shards, rank), hold of the part."""
        row = np.asarray(self.row, np.int64)
        has_row = ((lo[:, :-1] <= row) & (row < hi[:, :-1])).all(axis=1)
        a, b = np.maximum(lo[:, -1], self.at), np.minimum(hi[:, -1], self.at + self.length)
        b = np.where(has_row, b, a)
        shard, region = intervals(self.shape, self.first + a - self.at, self.first + b - self.at)
        start = ((np.c_[np.broadcast_to(row, (len(a), len(row))), a] - lo) * _strides(hi - lo)).sum(axis=1)
        return shard, replace(region, offset=region.offset + start[shard])

    def require_fits(self, array: Sequence[int]) -> None:
        """Raises LayoutError if the run lies outside its tensor or the array, or the array has other dims."""
        inside = min(self.first, self.length, self.at) >= 0 and self.first + self.length <= math.prod(self.shape)
        inside &= len(array) == len(self.row) + 1 and all(0 <= k < n for k, n in zip(self.row, array, strict=False))
        if not inside or self.at + self.length > array[-1]:
            raise LayoutError(f"{self.tensor}: {self} lies outside of the tensor or of the array {tuple(array)}")


Part = Block | Run


def parts_tiling(array: Tiling, shape: Sequence[int], parts: Iterable[Part]) -> Tiling:
    """Who holds what of one tensor, from who holds what of an array that stores parts of it.

    Args:
        array: tiling of the array, one dense box a device.
        shape: of the tensor.
        parts: those of this tensor.
    """
    found = [part.rows(array.region.lo, array.region.hi) for part in parts]
    shard = np.concatenate([s for s, _ in found])
    region, holder = concatenate([r for _, r in found]), array.holder[shard]
    room, padded = int(array.region.volumes.max(initial=0)), np.setdiff1d(array.holder, holder).tolist()
    return Tiling(tuple(shape), holder, region, array.partial, room, tuple(padded))


def joined(tilings: Sequence[Tiling], rooms: Sequence[int], spare_copies: bool) -> Tiling:
    """The tiling of a tensor that several arrays store, its buffers numbered end to end.

    Args:
        tilings: one for each array.
        rooms: elements of a shard of each array.
        spare_copies: leave out what a device holds already in an earlier array.
    """
    starts = np.cumsum([0, *rooms])
    holder = np.concatenate([t.holder for t in tilings])
    region = concatenate(
        [replace(t.region, offset=t.region.offset + start) for t, start in zip(tilings, starts[:-1], strict=True)]
    )
    if spare_copies:
        holder, region = _once(holder, region)
    padded = np.setdiff1d(np.concatenate([t.devices for t in tilings]), holder).tolist()
    return Tiling(tilings[0].shape, holder, region, tilings[0].partial, int(starts[-1]), tuple(padded))


def _once(holder: Ints, region: Region) -> tuple[Ints, Region]:
    """The rows, without what an earlier row of the same holder has."""
    lo, hi = np.c_[holder, region.lo], np.c_[holder + 1, region.hi]
    late, early = algebra.overlaps(lo, hi, lo, hi)
    late, early = late[early < late], early[early < late]
    if not len(late):
        return holder, region
    rows, los, his = [], [], []
    for row in range(len(holder)):
        cut = early[late == row]
        for a, b in zip(*algebra.subtract(region.lo[row], region.hi[row], region.lo[cut], region.hi[cut]), strict=True):
            rows.append(row)
            los.append(a)
            his.append(b)
    kept, left = np.asarray(rows, np.int64), np.asarray(los, np.int64).reshape(len(rows), region.rank)
    right = np.asarray(his, np.int64).reshape(left.shape)
    return holder[kept], Region(left, right, region.address(kept, left), region.stride[kept])


def _strides(extent: Ints) -> Ints:
    """Row-major strides of boxes, shape (boxes, rank)."""
    stride = np.ones_like(extent)
    if extent.shape[1] > 1:
        stride[:, :-1] = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
    return stride


# Ways to make parts ---------------------------------------------------------------------------------------------------


def bucket_parts(shapes: Mapping[str, Sequence[int]], sizes: Sequence[int]) -> list[tuple[Run, ...]]:
    """Tensors flattened, laid end to end, and cut into buckets that ignore their borders.

    Args:
        shapes: shape of each tensor, by path, in the order in which they lie.
        sizes: elements of each bucket; all but the last are full, and what the tensors leave of that is padding.

    Raises:
        LayoutError: the buckets are too small.
    """
    ends = list(itertools.accumulate(math.prod(s) for s in shapes.values()))
    if ends and sum(sizes) < ends[-1]:
        raise LayoutError(f"buckets of {sum(sizes)} elements are too small for {ends[-1]}")
    buckets: list[tuple[Run, ...]] = []
    for begin, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        runs = []
        for (path, shape), end in zip(shapes.items(), ends, strict=True):
            start = end - math.prod(shape)
            a, b = max(start, begin), min(end, begin + size)
            if a < b:
                runs.append(Run(path, tuple(shape), a - start, b - a, a - begin))
        buckets.append(tuple(runs))
    return buckets


def fused_parts(shapes: Mapping[str, Sequence[int]], ranks: int, dim: int = 0) -> tuple[Block, ...]:
    """Tensors fused along a dim, in the order in which ``ranks`` shards hold equal shares of each: [q₀|k₀|v₀|q₁|…].

    Args:
        shapes: shape of each tensor, by path, in the order in which they are fused.
        ranks: shards; 1 for tensors side by side.
        dim: along which they are fused and cut.

    Raises:
        LayoutError: a tensor has no equal share for every rank.
    """
    blocks: list[Block] = []
    at = 0
    for rank in range(ranks):
        for path, shape in shapes.items():
            share, rest = divmod(shape[dim], ranks)
            if rest:
                raise LayoutError(f"{path}: {ranks} ranks have no equal shares of dim {dim} of {tuple(shape)}")
            first, extent, place = [0] * len(shape), list(shape), [0] * len(shape)
            first[dim], extent[dim], place[dim] = rank * share, share, at
            dims = tuple(range(len(shape)))
            blocks.append(Block(path, tuple(shape), tuple(first), tuple(extent), tuple(place), dims))
            at += share
    return tuple(blocks)


def slice_part(tensor: str, shape: Sequence[int], start: int, stop: int) -> Block:
    """Rows ``start`` to ``stop`` of a tensor's first dim, in an array of just these rows."""
    rank, rows = len(shape), stop - start
    first, extent = (start, *[0] * (rank - 1)), (rows, *shape[1:])
    return Block(tensor, tuple(shape), first, extent, (0,) * rank, tuple(range(rank)))


def layer_part(tensor: str, shape: Sequence[int], layer: int) -> Block:
    """One layer of a stack of layers, in an array of its own that lacks the dim of layers."""
    rank = len(shape)
    first, extent = (layer, *[0] * (rank - 1)), (1, *shape[1:])
    return Block(tensor, tuple(shape), first, extent, (0,) * (rank - 1), (None, *range(rank - 1)))
