"""Flat layouts: optimizer state as ZeRO-1 cuts it, over data-parallel ranks and across tensor borders.

Each model-parallel rank lays its shards end to end in a bucket, layer by layer, and the ranks that
would otherwise hold copies of the bucket take equal slices of it. A slice is a run of whole layers
and an incomplete one at either end, so it is a few boxes of each tensor (Rajbhandari et al., 2020).
Experts fold over the devices of a pipeline stage in their own way and have a bucket of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.errors import LayoutError
from dynajax.meshes import PARAMETER_RULES, Rules, Strategy
from dynajax.vps import algebra
from dynajax.vps.region import Ints, Region, concatenate, dense_strides, intervals
from dynajax.vps.space import Space
from dynajax.vps.spec import Fold, cut_boxes, fold, is_expert
from dynajax.vps.tiling import Layout, Tiling


def flat_layout(
    space: Space,
    logical_axes: Mapping[str, Sequence[str | None]],
    strategy: Strategy,
    rules: Rules = PARAMETER_RULES,
    devices: Ints | None = None,
    last: frozenset[str] = frozenset(),
) -> Layout:
    """The layout of optimizer state under a strategy of one pipeline: every element on one data-parallel rank.

    Within a bucket come tensors without layers that belong to the first pipeline stage, then the layers in order
    with the tensors of each in path order, then tensors without layers that belong to the last stage.

    Args:
        space: tensors to place.
        logical_axes: logical axes of each tensor, by path; a tensor without an entry is not cut by model axes.
        strategy: one pipeline.
        rules: logical axes to mesh axes.
        devices: device number at each mesh position; default 0, 1, ….
        last: paths of tensors without layers that live on the last pipeline stage; the others live on the first.

    Raises:
        LayoutError: tensors with unlike numbers of layers.
    """
    axes = {t.path: tuple(logical_axes.get(t.path, ())) for t in space}
    tilings: dict[str, Tiling] = {}
    for experts in (False, True):
        tensors = [t for t in space if is_expert(axes[t.path]) == experts]
        if tensors:
            place = fold(strategy, experts, devices)
            shards = [_shards(place, t.shape, axes[t.path], rules, t.path in last) for t in tensors]
            tilings |= zip((t.path for t in tensors), _tilings(place, shards), strict=True)
    return Layout(space, tuple(tilings[t.path] for t in space))


@dataclass(frozen=True, eq=False)
class _Shards:
    """One tensor cut over model-parallel ranks; of each layer alone if it has layers.

    Attributes:
        shape: of the whole tensor.
        layer_dim: dim that counts layers, −1 if there is none.
        last: a tensor without layers is on the last pipeline stage, not the first.
        lo, hi: box on each model-parallel rank, without the layer dim, shape (ranks, dims).
    """

    shape: tuple[int, ...]
    layer_dim: int
    last: bool
    lo: Ints
    hi: Ints

    @property
    def volumes(self) -> Ints:
        """Elements on each rank, of one layer if there are layers."""
        return algebra.volumes(self.lo, self.hi)


def _shards(place: Fold, shape: tuple[int, ...], axes: Sequence[str | None], rules: Rules, last: bool) -> _Shards:
    layer_dim = axes.index("layers") if "layers" in axes else -1
    lo, hi = cut_boxes(place.model, shape, axes, rules)
    if layer_dim >= 0:
        lo, hi = (np.delete(a, layer_dim, axis=1) for a in (lo, hi))
    return _Shards(shape, layer_dim, last, lo, hi)


def _tilings(place: Fold, shards: Sequence[_Shards]) -> list[Tiling]:
    """Lay the shards end to end on each (pipeline stage, model rank) and cut the buckets over the data ranks."""
    stages, ranks = place.devices.shape[0], place.devices.shape[2]
    layers = {s.shape[s.layer_dim] for s in shards if s.layer_dim >= 0}
    if len(layers) > 1:
        raise LayoutError(f"a bucket of stacks of {sorted(layers)} layers has no order; give stacks of one height")
    first_layer = np.arange(stages + 1) * max(layers, default=0) // stages
    start, total = _positions(shards, stages, ranks, first_layer)
    slices = place.devices.shape[1]
    cuts = np.arange(slices + 1) * total[..., None] // slices
    return [_slices(place, s, a, cuts) for s, a in zip(shards, start, strict=True)]


def _positions(shards: Sequence[_Shards], stages: int, ranks: int, first_layer: Ints) -> tuple[list[Ints], Ints]:
    """Where each shard begins in its bucket, shape (copies, ranks) with one copy a layer, and the bucket sizes.

    A tensor without layers has one copy. Sizes have the shape (stages, ranks).
    """
    zero = np.zeros(ranks, np.int64)
    head = sum((s.volumes for s in shards if s.layer_dim < 0 and not s.last), zero)
    tail = sum((s.volumes for s in shards if s.layer_dim < 0 and s.last), zero)
    layer = sum((s.volumes for s in shards if s.layer_dim >= 0), zero)
    count = np.diff(first_layer)[:, None]
    total = count * layer
    total[0] += head
    before_tail = total[-1].copy()
    total[-1] += tail
    stage = np.repeat(np.arange(stages), np.diff(first_layer))
    at = {
        "head": zero[None],
        "layer": (np.arange(len(stage)) - first_layer[stage])[:, None] * layer,
        "tail": before_tail[None],
    }
    at["layer"] = at["layer"] + (stage == 0)[:, None] * head
    start: list[Ints] = []
    for s in shards:
        kind = "layer" if s.layer_dim >= 0 else "tail" if s.last else "head"
        start.append(at[kind])
        at[kind] = at[kind] + s.volumes
    return start, total


def _slices(place: Fold, shards: _Shards, start: Ints, cuts: Ints) -> Tiling:
    """The tiling of one tensor: each device has what its slice of the bucket shares with the tensor's shards.

    Args:
        place: devices.
        shards: the tensor.
        start: where its shards begin, shape (copies, ranks).
        cuts: borders of the slices of each bucket, shape (stages, ranks, slices + 1).
    """
    stages, slices, ranks = place.devices.shape
    copies = len(start)
    copy, rank = np.divmod(np.arange(copies * ranks), ranks)
    stage = _stage_of_copy(shards, copies, stages)[copy]
    bucket, begin = stage * ranks + rank, start.reshape(-1)
    span = int(cuts[..., -1].max()) + 1
    ends = (np.arange(stages * ranks)[:, None] * span + cuts[..., 1:].reshape(stages * ranks, slices)).reshape(-1)
    volume = shards.volumes[rank]
    first = np.searchsorted(ends, bucket * span + begin, side="right")
    last = np.searchsorted(ends, bucket * span + begin + volume, side="left") + 1
    shard, at = algebra.expand(first, np.where(volume > 0, last, first))
    part = at % slices
    row = cuts.reshape(stages * ranks, -1)[bucket[shard]]
    low, high = (np.take_along_axis(row, (part + k)[:, None], 1)[:, 0] - begin[shard] for k in (0, 1))
    low, high = np.maximum(low, 0), np.minimum(high, volume[shard])
    solid = low < high
    shard, part, low, high = shard[solid], part[solid], low[solid], high[solid]
    holder = place.devices[stage[shard], part, rank[shard]]
    return _boxes(shards, holder, rank[shard], copy[shard], low, high)


def _stage_of_copy(shards: _Shards, copies: int, stages: int) -> Ints:
    if shards.layer_dim < 0:
        return np.full(1, stages - 1 if shards.last else 0)
    return np.repeat(np.arange(stages), np.diff(np.arange(stages + 1) * copies // stages))


def _boxes(shards: _Shards, holder: Ints, rank: Ints, layer: Ints, low: Ints, high: Ints) -> Tiling:
    """Boxes of intervals ``low … high`` of shards, a device's pieces of the tensor lying end to end in its buffer."""
    order = np.lexsort((layer, holder))
    holder, rank, layer, low, high = (a[order] for a in (holder, rank, layer, low, high))
    offset, layers = _end_to_end(holder, high - low), np.ones(len(holder), np.int64)
    if shards.layer_dim >= 0:
        chosen, layers = _runs_of_whole_layers(holder, layer, low, high, shards.volumes[rank])
        holder, rank, layer, low, high, offset = (a[chosen] for a in (holder, rank, layer, low, high, offset))
    extents = shards.hi - shards.lo
    pieces: list[Region] = []
    holders: list[Ints] = []
    for shape in np.unique(extents[np.unique(rank)], axis=0):
        mine = np.flatnonzero((extents[rank] == shape).all(axis=1))
        owner, region = intervals(shape.tolist(), low[mine], high[mine])
        at = mine[owner]
        lo, hi = region.lo + shards.lo[rank[at]], region.hi + shards.lo[rank[at]]
        stride = np.broadcast_to(dense_strides(shape.tolist()), lo.shape)
        if shards.layer_dim >= 0:
            lo, hi, stride = (
                np.insert(a, shards.layer_dim, column, axis=1)
                for a, column in ((lo, layer[at]), (hi, layer[at] + layers[at]), (stride, math.prod(shape.tolist())))
            )
        holders.append(holder[at])
        pieces.append(Region(lo, hi, region.offset + offset[at], stride))
    if not pieces:
        rank_of_tensor = len(shards.shape)
        empty = np.zeros((0, rank_of_tensor), np.int64)
        return Tiling(shards.shape, np.zeros(0, np.int64), Region(empty, empty, empty[:, 0], empty))
    return Tiling(shards.shape, np.concatenate(holders), concatenate(pieces))


def _end_to_end(holder: Ints, length: Ints) -> Ints:
    """Offset of each piece when the pieces of a holder, which are neighbours, lie end to end."""
    end = np.cumsum(length)
    first = np.searchsorted(holder, holder)
    return end - length - (end - length)[first]


def _runs_of_whole_layers(holder: Ints, layer: Ints, low: Ints, high: Ints, volume: Ints) -> tuple[Ints, Ints]:
    """Neighbouring whole layers of a device are one box: the first of each run, and the layers in it."""
    whole = (low == 0) & (high == volume)
    joins = whole[1:] & whole[:-1] & (holder[1:] == holder[:-1]) & (layer[1:] == layer[:-1] + 1)
    chosen = np.flatnonzero(np.concatenate([[True], ~joins]))[: len(holder)]
    return chosen, np.diff(np.append(chosen, len(holder)))
