"""Local search: swap units of ranks between nodes while that keeps more bytes where they are.

What a unit keeps on a node depends on the other units there, since a device plays one rank. So no assignment of units
to nodes is exact. The search begins with a good one. In a step two units of two nodes change places, or one unit takes
a free place, if the ranks of both nodes, assigned to devices anew, then keep more. The sum of what is kept grows with
each step, so the search ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from dynajax.types import Ints
from dynajax.vps.algebra import expand

HOME = 0.25
"""Bytes that it is worth to give a rank the device of its own number: decides between equals only."""
_LEAST_GAIN = 0.5


@dataclass(frozen=True, eq=False)
class CommonBytes:
    """Bytes that a device holds and a rank needs, one row for each such pair.

    Attributes:
        device, rank: numbers, shape (pairs,).
        nbytes: shape (pairs,).
    """

    device: Ints
    rank: Ints
    nbytes: Ints


def swap_units(common: CommonBytes, units: Sequence[Ints], start: Sequence[int], nodes: Sequence[Ints]) -> list[Ints]:
    """Place units on nodes and ranks on devices by local search.

    Args:
        common: what may be kept.
        units: ranks that have to be on one node.
        start: row of ``nodes`` where each unit begins.
        nodes: devices of each node.

    Returns:
        For each unit the device of each of its ranks, all on one node.
    """
    placement = _Placement(common, units, start, nodes)
    moving = True
    while moving:
        moving = sum(placement.improve(unit) for unit in range(len(units))) > 0
    return placement.devices()


class _Placement:
    """The state of the search: the node of each unit, and the bytes that the best assignment in each node keeps."""

    def __init__(self, common: CommonBytes, units: Sequence[Ints], start: Sequence[int], nodes: Sequence[Ints]) -> None:
        self._units, self._nodes = units, nodes
        size = 1 + max(int(a.max(initial=0)) for a in (common.device, common.rank, *units, *nodes))
        self._node, self._column = positions(nodes, size)
        order = np.argsort(common.rank, kind="stable")
        self._device, self._nbytes = common.device[order], common.nbytes[order]
        self._first = np.searchsorted(common.rank[order], np.arange(size + 1))
        self._blocks: dict[tuple[int, int], np.ndarray] = {}
        self._at = list(start)
        self._members = [[u for u, n in enumerate(start) if n == node] for node in range(len(nodes))]
        self._kept = [self._best(node, members) for node, members in enumerate(self._members)]
        self._bound = self._bounds(common)

    def _bounds(self, common: CommonBytes) -> np.ndarray:
        """The most that each unit could keep on each node if it were alone there, shape (units, nodes)."""
        most = np.zeros((len(self._first) - 1, len(self._nodes)))
        node = self._node[common.device]
        inside = node >= 0
        np.maximum.at(most, (common.rank[inside], node[inside]), common.nbytes[inside])
        bounds = [most[unit].sum(axis=0) + HOME * len(unit) for unit in self._units]
        return np.asarray(bounds).reshape(len(self._units), len(self._nodes))

    def improve(self, unit: int) -> bool:
        """Take the first step that moves this unit and keeps more; True if there is one."""
        here, bound = self._at[unit], self._bound[unit]
        better = np.flatnonzero(bound > bound[here])
        for there in better[np.argsort(-bound[better], kind="stable")].tolist():
            for other in [*self._members[there], None]:
                if self._swap(unit, other, here, there):
                    return True
        return False

    def _swap(self, unit: int, other: int | None, here: int, there: int) -> bool:
        stay = [u for u in self._members[here] if u != unit] + ([] if other is None else [other])
        come = [u for u in self._members[there] if u != other] + [unit]
        now = self._kept[here][0] + self._kept[there][0] + _LEAST_GAIN
        fits = all(self._fits(members, node) for members, node in ((stay, here), (come, there)))
        if not fits or self._bound[stay, here].sum() + self._bound[come, there].sum() <= now:
            return False
        kept = self._best(here, stay), self._best(there, come)
        if kept[0][0] + kept[1][0] <= now:
            return False
        for node, members, best in ((here, stay, kept[0]), (there, come, kept[1])):
            self._members[node], self._kept[node] = members, best
            for u in members:
                self._at[u] = node
        return True

    def _fits(self, members: Sequence[int], node: int) -> bool:
        return sum(len(self._units[u]) for u in members) <= len(self._nodes[node])

    def _block(self, unit: int, node: int) -> np.ndarray:
        """What each rank of a unit keeps on each device of a node."""
        if (unit, node) not in self._blocks:
            ranks, devices = self._units[unit], self._nodes[node]
            table = np.where(ranks[:, None] == devices, HOME, 0.0)
            row, at = expand(self._first[ranks], self._first[ranks + 1])
            there = self._node[self._device[at]] == node
            row, at = row[there], at[there]
            table[row, self._column[self._device[at]]] += self._nbytes[at]
            self._blocks[unit, node] = table
        return self._blocks[unit, node]

    def _best(self, node: int, members: Sequence[int]) -> tuple[float, Ints]:
        """What units keep on a node at best, and the device of each of their ranks."""
        if not members:
            return 0.0, np.zeros(0, np.int64)
        table = np.concatenate([self._block(u, node) for u in members])
        row, column = linear_sum_assignment(table, maximize=True)
        return float(table[row, column].sum()), self._nodes[node][column]

    def devices(self) -> list[Ints]:
        """The device of each rank of each unit."""
        placed: dict[int, Ints] = {}
        for node, members in enumerate(self._members):
            borders = np.cumsum([len(self._units[u]) for u in members])[:-1]
            placed |= zip(members, np.split(self._kept[node][1], borders), strict=False)
        return [placed[u] for u in range(len(self._units))]


def positions(members: Sequence[Ints], size: int) -> tuple[Ints, Ints]:
    """Set of each number below ``size``, −1 if it is in none, and its place in the set."""
    which, place = np.full(size, -1), np.zeros(size, np.int64)
    for k, numbers in enumerate(members):
        which[numbers], place[numbers] = k, np.arange(len(numbers))
    return which, place
