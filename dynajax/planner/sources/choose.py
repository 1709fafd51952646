"""Sources: one for every needed piece, near and not busy.

The device itself comes first, then a holder in the same node, then the nearest tier of links. A piece
that several devices of a node need and none there holds crosses to the node once, to one of them, and
is passed on inside. Where there is a choice, loads are levelled: all needs with the same candidates
share them out like water over uneven ground, and a few sweeps over the sets of candidates bring the
busiest sender near the least that any choice allows (see ``planner.sources.load_balance``). Parts that are to be summed
leave no such choice: all their holders send (see ``planner.sources.reduce``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.errors import TopologyError
from dynajax.meshes import Topology
from dynajax.planner.diff import Demand
from dynajax.planner.route import Route
from dynajax.planner.sources.load_balance import Items, level
from dynajax.planner.sources.reduce import Summed, by_node
from dynajax.types import Bools, Ints
from dynajax.vps.tiling import segment_sum

_MAX_LANES = 8


@dataclass(frozen=True, eq=False)
class Geometry:
    """A demand that some tensors share.

    Attributes:
        demand: what is needed.
        kept: devices that need no copy.
        itemsizes: bytes of an element of each tensor.
    """

    demand: Demand
    kept: Ints
    itemsizes: Sequence[int]


def choose_sources(geometries: Sequence[Geometry], devices: int, topology: Topology | None) -> list[list[Route]]:
    """Routes for the tensors of every geometry, in the order of their itemsizes; shared where levelling allows it.

    Args:
        geometries: what is needed, by tensors of how many bytes an element.
        devices: one more than the largest device number.
        topology: the links; None if all devices are alike and in one node.

    Raises:
        TopologyError: the topology lacks a device, or a link that the move needs.
    """
    domains = _domains(topology, devices)
    choices = [Summed(g.demand, domains) if g.demand.source.partial else _Choices(g, domains) for g in geometries]
    lanes = [_lanes(c.items, g.itemsizes) for c, g in zip(choices, geometries, strict=True)]
    weights = [
        segment_sum(lane, np.asarray(g.itemsizes), int(lane.max()) + 1)
        for lane, g in zip(lanes, geometries, strict=True)
    ]
    routes: list[list[Route]] = []
    for chosen, lane, picks in zip(choices, lanes, level([c.items for c in choices], weights, devices), strict=True):
        made = [chosen.route(pick) for pick in picks]
        routes.append([made[k] for k in lane.tolist()])
    return routes


def _domains(topology: Topology | None, devices: int) -> Ints:
    """Domains beyond the device itself, the node first, shape (tiers, devices)."""
    if topology is None:
        return np.zeros((1, devices), np.int64)
    topology.require_devices(devices)
    return topology.domains[min(1, len(topology.domains) - 1) :, :devices]


def _lanes(items: Items, itemsizes: Sequence[int]) -> Ints:
    """Lane of each tensor. Tensors of a lane share a route; a few lanes let a set of many holders share few needs."""
    open_items = items.count > 1
    lanes = 1
    if open_items.any():
        _, first, needs = np.unique(items.group[open_items], return_index=True, return_counts=True)
        lanes = min(int(np.ceil(items.count[open_items][first] / needs).max()), len(itemsizes), _MAX_LANES)
    order = np.argsort(-np.asarray(itemsizes), kind="stable")
    lane = np.empty(len(order), np.int64)
    lane[order] = np.arange(len(order)) % lanes
    return lane


class _Choices:
    """The needs of a geometry, each answered or with its candidates.

    Needs that are not held by their device ask the holders in their node, or, if there are none, one need of each
    piece and node asks the holders in the nearest tier and the others are relayed.
    """

    def __init__(self, geometry: Geometry, domains: Ints) -> None:
        demand = geometry.demand
        self.demand, self.kept = demand, geometry.kept
        needs = np.flatnonzero(~_is_in(demand.target.holder[demand.target_row], geometry.kept, domains.shape[1]))
        self.piece, self.target_row = demand.piece[needs], demand.target_row[needs]
        self.row = demand.own_row[needs].copy()
        self.device = demand.target.holder[self.target_row]
        self._table_rows: list[Ints] = []
        self._table_devices: list[Ints] = []
        self._asked: list[tuple[Ints, Ints, Ints, int]] = []
        waiting = self._ask(np.flatnonzero(self.row < 0), domains[0], duty=0)
        self.members, self.first = by_node(waiting, self.piece[waiting], self.device[waiting], domains[0])
        askers = self.members[self.first[:-1]]
        for tier in domains[1:]:
            askers = self._ask(askers, tier, duty=1)
        if len(askers):
            raise TopologyError(
                f"the topology has no link to device {int(self.device[askers[0]])} from any device that holds what it "
                "needs; add a tier that joins them"
            )
        self.items = self._items()

    def _ask(self, askers: Ints, domain: Ints, duty: int) -> Ints:
        """Find candidates in the domains of the askers; those that find none are given back."""
        if not len(askers):
            return askers
        cells, holder = self.demand.cells, self.demand.source.holder
        width = int(domain.max()) + 2
        there = holder[cells.row]
        key = cells.of_row * width + domain[there] + 1
        order = np.lexsort((there, key))
        key = key[order]
        wanted = self.demand.cell[self.piece[askers]] * width + domain[self.device[askers]] + 1
        begin, end = np.searchsorted(key, wanted), np.searchsorted(key, wanted, side="right")
        found = (end > begin) & (domain[self.device[askers]] >= 0)
        start = sum(len(t) for t in self._table_rows)
        self._table_rows.append(cells.row[order])
        self._table_devices.append(there[order])
        self._asked.append((askers[found], begin[found] + start, (end - begin)[found], duty))
        return askers[~found]

    def _items(self) -> Items:
        """All questions: who sends to each asker, and who of a group of several asks."""
        size = np.diff(self.first)
        several = np.flatnonzero(size > 1)
        tables = sum(len(t) for t in self._table_devices)
        devices = np.concatenate([*self._table_devices, self.device[self.members]])
        asker = np.concatenate([*(a for a, _, _, _ in self._asked), self.members[self.first[several]]])
        begin = np.concatenate([*(b for _, b, _, _ in self._asked), tables + self.first[several]])
        count = np.concatenate([*(c for _, _, c, _ in self._asked), size[several]])
        duty = np.concatenate([*(np.full(len(a), d) for a, _, _, d in self._asked), np.full(len(several), 2)])
        self.asker, self.several = asker, several
        return Items.of(devices, begin, count, duty, self.demand.volumes[self.piece[asker]])

    def route(self, pick: Ints) -> Route:
        """The route when item ``k`` is answered by its candidate number ``pick[k]``."""
        rows = np.concatenate([*self._table_rows, np.zeros(0, np.int64)])
        row, relayed = self.row.copy(), np.zeros(len(self.row), bool)
        senders = len(self.asker) - len(self.several)
        at = self.items.begin + pick
        row[self.asker[:senders]] = rows[at[:senders]]
        port = self.members[self.first[:-1]]
        port[self.several] = self.members[at[senders:] - len(rows)]
        group = np.repeat(np.arange(len(port)), np.diff(self.first))
        asked = row[self.members[self.first[:-1]]]
        relayed[self.members] = True
        relayed[port] = False
        row[self.members] = self.target_row[port[group]]
        row[port] = asked
        lo, hi = self.demand.lo[self.piece], self.demand.hi[self.piece]
        written = np.zeros(len(row), bool)
        return Route(self.demand.source, self.demand.target, self.kept, lo, hi, self.target_row, row, relayed, written)


def _is_in(device: Ints, chosen: Ints, devices: int) -> Bools:
    mask = np.zeros(devices, bool)
    mask[chosen] = True
    return mask[device]
