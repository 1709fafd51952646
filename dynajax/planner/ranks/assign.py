"""Roles: which device plays which part of the target, where the caller leaves that free.

A device that already holds what its new role needs is sent nothing. Roles that the caller's order puts on
one node stay together, so groups that talk much stay on fast links: inside a node, roles are assigned to
devices so that most bytes stay (the assignment problem; Kuhn 1955, Jonker and Volgenant 1987), then groups
of roles to nodes by what that makes possible. Equal assignments are decided in favour of the caller's order.

If only smaller units have to stay together, such as tensor-parallel groups of four on nodes of eight, units of two
nodes then change places while that keeps more (``planner.ranks.local_search``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from dynajax.errors import LayoutError
from dynajax.meshes import Strategy, Topology
from dynajax.planner.diff import Demand, diff
from dynajax.planner.ranks.local_search import HOME, Common, exchange, positions
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.tiling import Layout, Tiling, segment_sum


def assign_roles(
    source: Layout,
    target: Layout,
    topology: Topology | None = None,
    pool: Ints | None = None,
    together: int | None = None,
) -> Ints:
    """The device that plays each role of the target so that few bytes move.

    Args:
        source: who holds what before.
        target: who shall hold what; its device numbers are roles.
        topology: nodes; None if all devices are in one.
        pool: devices to choose from; default: those of the source and the target.
        together: roles that have to stay on one node, in runs of so many; default: all that the numbers of the roles
            put on one.

    Returns:
        The device of each role, shape (target.num_devices,); a number that is no role stands for itself or −1.

    Raises:
        LayoutError: the pool has no room for the roles.
        TopologyError: the topology lacks a device.
    """
    roles, held = devices_of(target), devices_of(source)
    pool = np.union1d(held, roles) if pool is None else np.unique(pool)
    devices = max(source.num_devices, target.num_devices, int(pool.max(initial=-1)) + 1)
    if topology is not None:
        topology.require_devices(devices)
    node = np.zeros(devices, np.int64) if topology is None else topology.node
    common = _common(source, target, devices, len(np.union1d(held, pool)))
    groups = [roles[node[roles] == n] for n in np.unique(node[roles])]
    nodes = [pool[node[pool] == n] for n in np.unique(node[pool])]
    places = _places(common, groups, nodes)
    if together is not None:
        units = [(unit, k) for k, group in enumerate(groups) for unit in _runs(group, together)]
        start = np.searchsorted(np.unique(node[pool]), [node[places[k][0]] for _, k in units])
        groups = [unit for unit, _ in units]
        places = exchange(common, groups, start.tolist(), nodes)
    chosen = np.full(target.num_devices, -1)
    for group, place in zip(groups, places, strict=True):
        chosen[group] = place
    return chosen


def close_roles(strategy: Strategy, topology: Topology) -> int:
    """How many consecutive roles of a strategy of one pipeline talk in every layer, and so should stay on one node.

    They are the groups of experts if these fit a node, else those that share a sequence, else tensor-parallel ones.
    """
    sizes, own = strategy.mesh_shape(), strategy.pipelines[0].experts
    sequence = sizes["cp"] * sizes["tp"]
    widths = (own[0] * own[1] if own else sizes["ep"] * sequence, sequence)
    node = int(np.bincount(topology.node).max())
    return max((w for w in widths if w <= node), default=sizes["tp"])


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


def _common(source: Layout, target: Layout, devices: int, everyone: int) -> Common:
    """Count what the layouts have in common; what ``everyone`` holds, so many devices, tells none from another."""
    itemsize: dict[tuple[bytes, bytes], int] = {}
    pairs: dict[tuple[bytes, bytes], tuple[Tiling, Tiling]] = {}
    for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True):
        key = (before.key, after.key)
        pairs[key] = before, after
        itemsize[key] = itemsize.get(key, 0) + tensor.itemsize
    keys, nbytes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for key, pair in pairs.items():
        device, role, volume = _meetings(diff(*pair), everyone)
        keys.append(device * devices + role)
        nbytes.append(volume * itemsize[key])
    key, at = np.unique(np.concatenate(keys), return_inverse=True)
    return Common(*np.divmod(key, devices), segment_sum(at.ravel(), np.concatenate(nbytes), len(key)))


def _meetings(demand: Demand, everyone: int) -> tuple[Ints, Ints, Ints]:
    """Every need with every holder of its piece, but for pieces that ``everyone`` holds."""
    cells = demand.cells
    cell = demand.cell[demand.piece]
    needs = np.flatnonzero(np.diff(cells.first)[cell] < everyone)
    need, at = algebra.expand(cells.first[cell[needs]], cells.first[cell[needs] + 1])
    need = needs[need]
    device = demand.source.holder[cells.row[at]]
    return device, demand.target.holder[demand.target_row[need]], demand.volumes[demand.piece[need]]


def _runs(group: Ints, length: int) -> list[Ints]:
    """The roles of a group in runs that begin at multiples of ``length``."""
    return np.split(group, np.flatnonzero(np.diff(group // length)) + 1)


def _places(common: Common, groups: Sequence[Ints], nodes: Sequence[Ints]) -> list[Ints]:
    """Devices for every group of roles, all of a group in one node.

    The value of a group in a node is bounded by what its roles, or the node's devices, could keep at best. Groups
    are assigned by these bounds; the pairs that come out are solved exactly and take their true value, until an
    assignment of true values is no worse than any by bounds: it is the optimum.
    """
    sizes, rooms = (sorted((len(m) for m in members), reverse=True) for members in (groups, nodes))
    if len(sizes) > len(rooms) or any(size > room for size, room in zip(sizes, rooms, strict=False)):
        raise LayoutError(
            f"{len(sizes)} groups of up to {max(sizes)} roles that share a node do not fit on the pool's {len(rooms)} "
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
    """What the devices of each node have in common with the roles of each group."""

    def __init__(self, common: Common, groups: Sequence[Ints], nodes: Sequence[Ints]) -> None:
        self.groups, self.nodes = groups, nodes
        size = 1 + max((int(a.max()) for a in (*groups, *nodes)), default=0)
        self._group, self._role = positions(groups, size)
        self._node, self._device = positions(nodes, size)
        known = (common.device < size) & (common.role < size)
        device, role = common.device[known], common.role[known]
        inside = (self._node[device] >= 0) & (self._group[role] >= 0)
        self._at_device, self._at_role = device[inside], role[inside]
        self._nbytes = common.nbytes[known][inside].astype(float)
        block = self._group[self._at_role] * len(nodes) + self._node[self._at_device]
        order = np.argsort(block, kind="stable")
        self._at_device, self._at_role, self._nbytes = (
            a[order] for a in (self._at_device, self._at_role, self._nbytes)
        )
        self._border = np.searchsorted(block[order], np.arange(len(groups) * len(nodes) + 1))
        self.bounds = self._bounds()

    def _bounds(self) -> np.ndarray:
        """The most that each group could keep in each node, shape (groups, nodes); −inf where it does not fit."""
        shape = len(self.groups), len(self.nodes)
        group, node = self._group[self._at_role], self._node[self._at_device]
        best = np.full(shape, np.inf)
        for item in (self._at_role, self._at_device):
            order = np.lexsort((node, group, item))
            i, g, n = item[order], group[order], node[order]
            first = np.flatnonzero(np.diff(i, prepend=-1) | np.diff(g, prepend=-1) | np.diff(n, prepend=-1))
            most = np.maximum.reduceat(self._nbytes[order], first) if len(first) else np.zeros(0)
            total = np.zeros(shape)
            np.add.at(total, (g[first], n[first]), most)
            best = np.minimum(best, total)
        at_home = np.flatnonzero((self._group >= 0) & (self._node >= 0))
        np.add.at(best, (self._group[at_home], self._node[at_home]), HOME)
        roles, devices = (np.array([len(m) for m in members]) for members in (self.groups, self.nodes))
        best[roles[:, None] > devices] = -np.inf
        return best

    def solve(self, group: int, node: int) -> tuple[float, Ints]:
        """Bytes kept by the best assignment of a group's roles to a node's devices, and the device of each role."""
        roles, devices = self.groups[group], self.nodes[node]
        table = np.where(roles[:, None] == devices[None], HOME, 0.0)
        rows = slice(*self._border[group * len(self.nodes) + node :][:2].tolist())
        table[self._role[self._at_role[rows]], self._device[self._at_device[rows]]] += self._nbytes[rows]
        row, column = linear_sum_assignment(table, maximize=True)
        return float(table[row, column].sum()), devices[column]
