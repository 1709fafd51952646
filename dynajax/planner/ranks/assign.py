"""Rank mapping: which device plays which rank of the target, where the caller leaves that free.

A device that already holds what its new rank needs is sent nothing. All ranks that the caller's numbers put on one node
stay on one node, so that groups that talk much keep fast links. Inside a node, ranks are assigned to devices so that
most bytes stay where they are (the assignment problem; Kuhn 1955, Jonker and Volgenant 1987). Then groups of ranks are
assigned to nodes, where the worth of a group on a node is what the assignment inside it keeps. Between equals the
caller's numbers win.

If only smaller units have to stay together, such as tensor-parallel groups of four on nodes of eight, a local search
then swaps units of two nodes while that keeps more (``planner.ranks.local_search``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from dynajax.errors import LayoutError
from dynajax.meshes import Pipeline, Strategy, Topology
from dynajax.planner.diff import Demand, diff
from dynajax.planner.ranks.local_search import HOME, CommonBytes, positions, swap_units
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.tiling import Layout, Tiling, segment_sum


def assign_ranks(
    source: Layout,
    target: Layout,
    topology: Topology | None = None,
    pool: Ints | None = None,
    together: int | None = None,
) -> Ints:
    """The device that plays each rank of the target so that few bytes move.

    Args:
        source: who holds what before.
        target: who shall hold what; its device numbers are ranks.
        topology: nodes; None if all devices are in one.
        pool: devices to choose from; default: those of the source and the target.
        together: keep each run of this many ranks on one node; default: keep together all ranks whose devices would be
            on one node if rank k were device k.

    Returns:
        The device of each rank, shape (target.num_devices,); a number that is no rank stands for itself or −1.

    Raises:
        LayoutError: the pool has no room for the ranks.
        TopologyError: the topology lacks a device.
    """
    ranks, held = devices_of(target), devices_of(source)
    pool = np.union1d(held, ranks) if pool is None else np.unique(pool)
    devices = max(source.num_devices, target.num_devices, int(pool.max(initial=-1)) + 1)
    if topology is not None:
        topology.require_devices(devices)
    node = np.zeros(devices, np.int64) if topology is None else topology.node
    common = _common_bytes(source, target, devices, len(np.union1d(held, pool)))
    groups = [ranks[node[ranks] == n] for n in np.unique(node[ranks])]
    nodes = [pool[node[pool] == n] for n in np.unique(node[pool])]
    places = _places(common, groups, nodes)
    if together is not None:
        units = [(unit, k) for k, group in enumerate(groups) for unit in _runs(group, together)]
        start = np.searchsorted(np.unique(node[pool]), [node[places[k][0]] for _, k in units])
        groups = [unit for unit, _ in units]
        places = swap_units(common, groups, start.tolist(), nodes)
    chosen = np.full(target.num_devices, -1)
    for group, place in zip(groups, places, strict=True):
        chosen[group] = place
    return chosen


def coupled_ranks(strategy: Strategy, topology: Topology) -> int | None:
    """How many consecutive ranks of a strategy talk in every layer, and so should stay on one node.

    They are the groups of experts if these fit a node, else those that share a sequence, else tensor-parallel ones. Of
    several pipelines it is the least number that keeps the groups of all together; None if only whole nodes do.
    """
    node = int(np.bincount(topology.node).max())
    widths = [_coupled(pipeline, node) for pipeline in strategy.pipelines]
    first = np.cumsum([0, *(pipeline.num_devices for pipeline in strategy.pipelines)])[:-1]
    together = math.lcm(*widths)
    return together if together <= max(node, *widths) and not (first % widths).any() else None


def _coupled(pipeline: Pipeline, node: int) -> int:
    sequence = pipeline.size("cp") * pipeline.size("tp")
    own = pipeline.experts
    widths = (own[0] * own[1] if own else pipeline.size("ep") * sequence, sequence)
    return max((w for w in widths if w <= node), default=pipeline.size("tp"))


def renumbered(layout: Layout, devices: Ints) -> Layout:
    """The layout with device ``devices[k]`` in the place of ``k``; tensors that shared a tiling still do."""
    made: dict[int, Tiling] = {}
    tilings: list[Tiling] = []
    for tiling in layout.tilings:
        if id(tiling) not in made:
            padded = tuple(sorted(devices[list(tiling.padded)].tolist()))
            made[id(tiling)] = replace(tiling, holder=devices[tiling.holder], padded=padded)
        tilings.append(made[id(tiling)])
    arrays = layout.arrays
    if arrays is not None:
        used = np.flatnonzero(arrays.nbytes.any(axis=0))
        nbytes = np.zeros((len(arrays.tensors), int(devices.max(initial=-1)) + 1), np.int64)
        nbytes[:, devices[used]] = arrays.nbytes[:, used]
        arrays = replace(arrays, nbytes=nbytes)
    return Layout(layout.space, tuple(tilings), arrays)


def devices_of(layout: Layout) -> Ints:
    """Sorted numbers of the devices that hold something."""
    distinct = {id(t): t for t in layout.tilings}.values()
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(t.devices for t in distinct)]))


def _common_bytes(source: Layout, target: Layout, devices: int, everyone: int) -> CommonBytes:
    """Bytes that each device holds and each rank needs.

    What as many devices as ``everyone`` hold is left out: it is kept under any mapping.
    """
    itemsize: dict[tuple[bytes, bytes], int] = {}
    pairs: dict[tuple[bytes, bytes], tuple[Tiling, Tiling]] = {}
    for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True):
        key = (before.key, after.key)
        pairs[key] = before, after
        itemsize[key] = itemsize.get(key, 0) + tensor.itemsize
    keys, nbytes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for key, pair in pairs.items():
        device, rank, volume = _meetings(diff(*pair), everyone)
        keys.append(device * devices + rank)
        nbytes.append(volume * itemsize[key])
    key, at = np.unique(np.concatenate(keys), return_inverse=True)
    return CommonBytes(*np.divmod(key, devices), segment_sum(at.ravel(), np.concatenate(nbytes), len(key)))


def _meetings(demand: Demand, everyone: int) -> tuple[Ints, Ints, Ints]:
    """Device, rank and elements of every holder of a piece with every need of it, but for pieces that all devices hold.

    Args:
        demand: what the ranks need.
        everyone: how many devices there are.
    """
    cells = demand.cells
    cell = demand.cell[demand.piece]
    needs = np.flatnonzero(np.diff(cells.first)[cell] < everyone)
    need, at = algebra.expand(cells.first[cell[needs]], cells.first[cell[needs] + 1])
    need = needs[need]
    device = demand.source.holder[cells.row[at]]
    return device, demand.target.holder[demand.target_row[need]], demand.volumes[demand.piece[need]]


def _runs(group: Ints, length: int) -> list[Ints]:
    """The ranks of a group in runs that begin at multiples of ``length``."""
    return np.split(group, np.flatnonzero(np.diff(group // length)) + 1)


def _places(common: CommonBytes, groups: Sequence[Ints], nodes: Sequence[Ints]) -> list[Ints]:
    """Devices for every group of ranks, all of a group in one node.

    The value of a group in a node is bounded by what its ranks, or the node's devices, could keep at best. Groups
    are assigned by these bounds; the pairs that come out are solved exactly and take their true value, until an
    assignment of true values is no worse than any by bounds: it is the optimum.
    """
    sizes, rooms = (sorted((len(m) for m in members), reverse=True) for members in (groups, nodes))
    if len(sizes) > len(rooms) or any(size > room for size, room in zip(sizes, rooms, strict=False)):
        raise LayoutError(
            f"{len(sizes)} groups of up to {max(sizes)} ranks that share a node do not fit on the pool's {len(rooms)} "
            f"nodes of up to {max(rooms, default=0)} devices; give a larger pool, or a smaller target"
        )
    blocks = _Blocks(common, groups, nodes)
    worth = blocks.bounds.copy()
    exact = np.zeros(worth.shape, bool)
    while True:
        group, place = linear_sum_assignment(worth, maximize=True)
        fresh = [(g, n) for g, n in zip(group.tolist(), place.tolist(), strict=True) if not exact[g, n]]
        if not fresh:
            return [blocks.solve(g, n)[1] for g, n in zip(group.tolist(), place.tolist(), strict=True)]
        for g, n in fresh:
            worth[g, n], exact[g, n] = blocks.solve(g, n)[0], True


class _Blocks:
    """What the devices of each node have in common with the ranks of each group."""

    def __init__(self, common: CommonBytes, groups: Sequence[Ints], nodes: Sequence[Ints]) -> None:
        self.groups, self.nodes = groups, nodes
        size = 1 + max((int(a.max()) for a in (*groups, *nodes)), default=0)
        self._group, self._rank = positions(groups, size)
        self._node, self._device = positions(nodes, size)
        known = (common.device < size) & (common.rank < size)
        device, rank = common.device[known], common.rank[known]
        inside = (self._node[device] >= 0) & (self._group[rank] >= 0)
        self._at_device, self._at_rank = device[inside], rank[inside]
        self._nbytes = common.nbytes[known][inside].astype(float)
        block = self._group[self._at_rank] * len(nodes) + self._node[self._at_device]
        order = np.argsort(block, kind="stable")
        self._at_device, self._at_rank, self._nbytes = (
            a[order] for a in (self._at_device, self._at_rank, self._nbytes)
        )
        self._border = np.searchsorted(block[order], np.arange(len(groups) * len(nodes) + 1))
        self.bounds = self._bounds()

    def _bounds(self) -> np.ndarray:
        """The most that each group could keep in each node, shape (groups, nodes); −inf where it does not fit."""
        shape = len(self.groups), len(self.nodes)
        group, node = self._group[self._at_rank], self._node[self._at_device]
        best = np.full(shape, np.inf)
        for item in (self._at_rank, self._at_device):
            order = np.lexsort((node, group, item))
            i, g, n = item[order], group[order], node[order]
            first = np.flatnonzero(np.diff(i, prepend=-1) | np.diff(g, prepend=-1) | np.diff(n, prepend=-1))
            most = np.maximum.reduceat(self._nbytes[order], first) if len(first) else np.zeros(0)
            total = np.zeros(shape)
            np.add.at(total, (g[first], n[first]), most)
            best = np.minimum(best, total)
        at_home = np.flatnonzero((self._group >= 0) & (self._node >= 0))
        np.add.at(best, (self._group[at_home], self._node[at_home]), HOME)
        ranks, devices = (np.array([len(m) for m in members]) for members in (self.groups, self.nodes))
        best[ranks[:, None] > devices] = -np.inf
        return best

    def solve(self, group: int, node: int) -> tuple[float, Ints]:
        """Bytes kept by the best assignment of a group's ranks to a node's devices, and the device of each rank."""
        ranks, devices = self.groups[group], self.nodes[node]
        table = np.where(ranks[:, None] == devices[None], HOME, 0.0)
        rows = slice(*self._border[group * len(self.nodes) + node :][:2].tolist())
        table[self._rank[self._at_rank[rows]], self._device[self._at_device[rows]]] += self._nbytes[rows]
        row, column = linear_sum_assignment(table, maximize=True)
        return float(table[row, column].sum()), devices[column]
