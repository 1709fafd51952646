"""Flat layouts: optimizer state as ZeRO-1 cuts it, over data-parallel ranks and across tensor borders.

Each model-parallel rank lays its shards end to end in a bucket, layer by layer, and the ranks that would otherwise hold
copies of the bucket take equal slices of it (Rajbhandari et al., 2020). What a slice has of a tensor is one run of that
tensor's elements, so it is a few boxes. Experts fold over the devices of a pipeline stage in their own way and have a
bucket of their own, in which a layer is laid out expert by expert.

The order inside a layer, or inside an expert of a layer, is that of published systems (Shoeybi et al., Megatron-LM,
2019): kernels as they run, each with its output dim slowest; kernels that are alike (gate and up, k and v) are
interleaved in blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.errors import LayoutError
from dynajax.meshes import PARAMETER_RULES, Rules, Strategy
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.region import Region, concatenate, dense_strides, intervals
from dynajax.vps.space import Space, Tensor
from dynajax.vps.spec import Fold, cut_boxes, fold, is_expert
from dynajax.vps.tiling import Layout, Tiling

BLOCKS = 8
"""Blocks of each tensor when tensors of a layer that are alike are interleaved, so that every slice has some of all."""


def zero1_layout(
    space: Space,
    logical_axes: Mapping[str, Sequence[str | None]],
    strategy: Strategy,
    rules: Rules = PARAMETER_RULES,
    devices: Ints | None = None,
    last: frozenset[str] = frozenset(),
) -> Layout:
    """The layout of optimizer state under a strategy of one pipeline: every element on one data-parallel rank.

    Within a bucket come tensors without layers that belong to the first pipeline stage, then the layers in order,
    then tensors without layers that belong to the last stage. Within each of these come modules in path order, and in
    a module the kernels that read the residual stream before those that write to it.

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
        tensors = sorted(
            (t for t in space if is_expert(axes[t.path]) == experts), key=lambda t: _running_order(t.path, axes[t.path])
        )
        if tensors:
            folded = fold(strategy, experts, devices)
            shards = [_shards(folded, t, axes[t.path], rules, t.path in last) for t in tensors]
            tilings |= zip((t.path for t in tensors), _tilings(folded, shards), strict=True)
    return Layout(space, tuple(tilings[t.path] for t in space))


def _running_order(path: str, axes: Sequence[str | None]) -> tuple[str, bool, str]:
    """A sort key: the order in which tensors run."""
    return path.rpartition("[")[0], _writes(axes), path


def _writes(axes: Sequence[str | None]) -> bool:
    """True for a kernel whose output is the residual stream."""
    return len(axes) > 1 and axes[-1] == "embed" and axes[-2] not in (None, "layers", "vocab")


def _storage_order(axes: Sequence[str | None], rank: int) -> tuple[int, ...]:
    """Dims, the slowest first: layers, experts, outputs, inputs."""
    outer = [d for name in ("layers", "expert") for d, axis in enumerate(axes) if axis == name]
    embed = [d for d, axis in enumerate(axes) if axis == "embed"]
    rest = [d for d in range(rank) if d not in outer and d not in embed]
    return (*outer, *embed, *rest) if _writes(axes) else (*outer, *rest, *embed)


@dataclass(frozen=True, eq=False)
class _Shards:
    """One tensor cut over model-parallel ranks.

    Attributes:
        shape: of the whole tensor.
        order: its dims in the order in which a bucket stores them, the slowest first.
        kind: equal for neighbours that are interleaved in blocks.
        layers: how many layers there are; 0 for a tensor without.
        experts: how many experts of a layer each rank has, shape (ranks,); 1 for a tensor that has none.
        last: a tensor without layers is on the last pipeline stage, not the first.
        lo, hi: box on each model-parallel rank, shape (ranks, dims).
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    kind: object
    layers: int
    experts: Ints
    last: bool
    lo: Ints
    hi: Ints

    @property
    def volumes(self) -> Ints:
        """Elements on each rank, of one layer if there are layers, and in it of one expert if there are experts."""
        return algebra.volumes(self.lo, self.hi) // max(self.layers, 1) // np.maximum(self.experts, 1)


def _shards(folded: Fold, tensor: Tensor, axes: Sequence[str | None], rules: Rules, last: bool) -> _Shards:
    order = _storage_order(axes, len(tensor.shape))
    layers = tensor.shape[order[0]] if "layers" in axes else 0
    kind = (tensor.path.rpartition("[")[0], tensor.shape, tuple(axes))
    lo, hi = cut_boxes(folded.model, tensor.shape, axes, rules)
    experts = (hi - lo)[:, axes.index("expert")] if layers and is_expert(axes) else np.ones(len(lo), np.int64)
    return _Shards(tensor.shape, order, kind, layers, experts, last, lo, hi)


def _tilings(folded: Fold, shards: Sequence[_Shards]) -> list[Tiling]:
    """Lay the shards end to end on each (pipeline stage, model rank) and cut the buckets over the data ranks."""
    stages, slices, _ = folded.devices.shape
    heights = {(s.layers, int(s.experts.sum())) for s in shards if s.layers}
    if len(heights) > 1:
        raise LayoutError(
            f"a bucket of stacks of unlike (layers, experts), {sorted(heights)}, has no order; make them alike"
        )
    first_layer = np.arange(stages + 1) * max((s.layers for s in shards), default=0) // stages
    parts = _Parts.of(shards, first_layer, stages)
    cuts = np.arange(slices + 1) * parts.total[..., None] // slices
    return [_tiling(folded, s, first_layer, parts.before(k, cuts)) for k, s in enumerate(shards)]


@dataclass(frozen=True, eq=False)
class _Parts:
    """What lies where in the buckets: tensors without layers at the head, the layers, the others at the tail.

    Attributes:
        shards: all tensors.
        volumes: elements on each rank, as ``_Shards`` counts them, shape (tensors, ranks).
        head, layers, tail: elements of the three parts, shape (stages, ranks).
    """

    shards: Sequence[_Shards]
    volumes: Ints
    head: Ints
    layers: Ints
    tail: Ints

    @staticmethod
    def of(shards: Sequence[_Shards], first_layer: Ints, stages: int) -> _Parts:
        """Measure the parts."""
        volumes = np.stack([s.volumes for s in shards])
        layered, last = (np.array([bool(getattr(s, f)) for s in shards]) for f in ("layers", "last"))
        head, tail = np.zeros((stages, volumes.shape[1]), np.int64), np.zeros((stages, volumes.shape[1]), np.int64)
        head[0] = volumes[~layered & ~last].sum(axis=0)
        tail[-1] = volumes[~layered & last].sum(axis=0)
        units = np.diff(first_layer)[:, None] * np.max([s.experts for s in shards], axis=0)
        return _Parts(shards, volumes, head, units * volumes[layered].sum(axis=0), tail)

    @property
    def total(self) -> Ints:
        """Elements of each bucket, shape (stages, ranks)."""
        return self.head + self.layers + self.tail

    def before(self, tensor: int, cuts: Ints) -> Ints:
        """Elements of a tensor that lie before each cut of each bucket, shape (stages, ranks, cuts)."""
        mine = self.shards[tensor]
        peers = [k for k, s in enumerate(self.shards) if (s.layers > 0, s.last) == (mine.layers > 0, mine.last)]
        if mine.layers:
            at = np.clip(cuts - self.head[..., None], 0, self.layers[..., None])
            return self._in_layers(tensor, peers, at)
        part, start = (self.tail, self.head + self.layers) if mine.last else (self.head, np.zeros_like(self.head))
        start = start + self.volumes[[k for k in peers if k < tensor]].sum(axis=0)
        return np.clip(cuts - start[..., None], 0, np.where(part > 0, self.volumes[tensor], 0)[..., None])

    def _in_layers(self, tensor: int, peers: Sequence[int], at: Ints) -> Ints:
        """Elements of a layered tensor before position ``at`` of the layers, or of the experts of all layers."""
        unit = self.volumes[peers].sum(axis=0)
        whole, rest = np.divmod(at, np.maximum(unit, 1)[:, None])
        kind = self.shards[tensor].kind
        alike = [k for k in peers if self.shards[k].kind == kind]
        start = self.volumes[[k for k in peers if k < alike[0]]].sum(axis=0)
        borders = np.arange(BLOCKS + 1)[:, None] * self.volumes[tensor] // BLOCKS
        before = whole * self.volumes[tensor][:, None]
        index = alike.index(tensor)
        for block in range(BLOCKS):
            size = borders[block + 1] - borders[block]
            begin = start + len(alike) * borders[block] + index * size
            before += np.clip(rest - begin[:, None], 0, size[:, None])
        return before


def _tiling(folded: Fold, shards: _Shards, first_layer: Ints, before: Ints) -> Tiling:
    """Each device's run of the tensor's elements as boxes, dense in a buffer of its own.

    Args:
        folded: the devices, as the tensor sees them.
        shards: the tensor.
        first_layer: first layer of each pipeline stage, and one past the last.
        before: elements before each slice border, shape (stages, ranks, slices + 1), counted in the stage.
    """
    order = list(shards.order)
    lo = np.broadcast_to(shards.lo, (len(first_layer) - 1, *shards.lo.shape)).copy()
    hi = np.broadcast_to(shards.hi, lo.shape).copy()
    if shards.layers:
        lo[..., order[0]], hi[..., order[0]] = first_layer[:-1, None], first_layer[1:, None]
    stage, rank, part = np.nonzero(before[..., :-1] < before[..., 1:])
    start, stop = before[stage, rank, part], before[stage, rank, part + 1]
    corner, shape = lo[stage, rank][:, order], (hi - lo)[stage, rank][:, order]
    holder = folded.devices[stage, part, rank]
    holders: list[Ints] = [np.zeros(0, np.int64)]
    none = np.zeros((0, len(order)), np.int64)
    pieces = [Region(none, none, np.zeros(0, np.int64), none)]
    back = np.argsort(order)
    by_shape, first = algebra.grouped(shape)
    for span in itertools.pairwise(first.tolist()):
        mine = by_shape[slice(*span)]
        extent = shape[mine[0]].tolist()
        owner, run = intervals(extent, start[mine], stop[mine])
        at = mine[owner]
        stride = np.broadcast_to(dense_strides(extent), run.lo.shape)
        box_lo, box_hi = run.lo + corner[at], run.hi + corner[at]
        pieces.append(Region(box_lo[:, back], box_hi[:, back], run.offset, stride[:, back]))
        holders.append(holder[at])
    return Tiling(shards.shape, np.concatenate(holders), concatenate(pieces))
