"""Sources: one for every needed piece, near and not busy.

The device itself comes first, then a holder in the same node, then a holder over the nearest tier of links. A piece
that several devices of a node need and none of its devices holds crosses to the node once: one of them, the gateway, is
sent it and passes it on. Where several devices could send, or be the gateway, load balancing decides
(``planner.sources.load_balance``). Parts that are to be summed leave no choice of senders: all their holders send
(``planner.sources.reduce``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.errors import TopologyError
from dynajax.meshes import Topology
from dynajax.planner.diff import Demand
from dynajax.planner.route import Route
from dynajax.planner.sources.load_balance import RECEIVE_ABROAD, SEND_ABROAD, SEND_IN_NODE, Requests, balance_load
from dynajax.planner.sources.reduce import Reduction, by_node
from dynajax.types import Bools, Ints
from dynajax.vps.tiling import segment_sum

_MOST_VARIANTS = 8


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
    """The route of every tensor of every geometry, in the order of their itemsizes.

    Tensors of one geometry share a route, or a few variants of it where that levels loads.

    Args:
        geometries: what is needed, and by which tensors.
        devices: one more than the largest device number.
        topology: the links; None if all devices are alike and in one node.

    Raises:
        TopologyError: the topology lacks a device, or a link that the move needs.
    """
    domains = _domains(topology, devices)
    open_routes = [
        Reduction(g.demand, domains) if g.demand.source.partial else _Copying(g, domains) for g in geometries
    ]
    variants = [_variants(r.requests, g.itemsizes) for r, g in zip(open_routes, geometries, strict=True)]
    weights = [
        segment_sum(variant, np.asarray(g.itemsizes), int(variant.max()) + 1)
        for variant, g in zip(variants, geometries, strict=True)
    ]
    picks = balance_load([r.requests for r in open_routes], weights, devices)
    routes: list[list[Route]] = []
    for open_route, variant, picked in zip(open_routes, variants, picks, strict=True):
        made: dict[bytes, Route] = {}
        for pick in picked:
            if pick.tobytes() not in made:
                made[pick.tobytes()] = open_route.route(pick)
        routes.append([made[picked[k].tobytes()] for k in variant.tolist()])
    return routes


def _domains(topology: Topology | None, devices: int) -> Ints:
    """Domain of each device in each tier beyond the device itself, the node first, shape (tiers, devices)."""
    if topology is None:
        return np.zeros((1, devices), np.int64)
    topology.require_devices(devices)
    return topology.domains[min(1, len(topology.domains) - 1) :, :devices]


def _variants(requests: Requests, itemsizes: Sequence[int]) -> Ints:
    """Which variant of the route each tensor takes, shape (tensors,).

    With one variant, a group of few requests and many candidates leaves most candidates idle. There are enough variants
    for each candidate to get one, but no more than tensors or ``_MOST_VARIANTS``.
    """
    several = requests.count > 1
    variants = 1
    if several.any():
        _, first, needs = np.unique(requests.group[several], return_index=True, return_counts=True)
        enough = int(np.ceil(requests.count[several][first] / needs).max())
        variants = min(enough, len(itemsizes), _MOST_VARIANTS)
    order = np.argsort(-np.asarray(itemsizes), kind="stable")
    variant = np.empty(len(order), np.int64)
    variant[order] = np.arange(len(order)) % variants
    return variant


class _Copying:
    """The needs of a geometry whose pieces are copied: each has its source, or candidates for it.

    A need that its own device does not hold is requested from the holders in its node. If there are none, one need of
    each piece and node, that of the gateway, is requested from the holders in the nearest tier, and the others are
    relayed by the gateway.

    Args:
        geometry: what is needed.
        domains: domain of each device in each tier, the node first, shape (tiers, devices).

    Raises:
        TopologyError: a device has no link to any holder of what it needs.

    Attributes:
        requests: a sender for each need that is not held, and a gateway for each piece that a node has to be sent.
    """

    def __init__(self, geometry: Geometry, domains: Ints) -> None:
        demand = geometry.demand
        self._demand, self._kept = demand, geometry.kept
        needs = np.flatnonzero(~_is_in(demand.target.holder[demand.target_row], geometry.kept, domains.shape[1]))
        self._piece, self._target_row = demand.piece[needs], demand.target_row[needs]
        self._row = demand.own_row[needs].copy()
        self._device = demand.target.holder[self._target_row]
        self._table_rows: list[Ints] = []
        self._table_devices: list[Ints] = []
        self._asked: list[tuple[Ints, Ints, Ints, int]] = []
        waiting = self._ask(np.flatnonzero(self._row < 0), domains[0], SEND_IN_NODE)
        self._members, self._first = by_node(waiting, self._piece[waiting], self._device[waiting], domains[0])
        askers = self._members[self._first[:-1]]
        for tier in domains[1:]:
            askers = self._ask(askers, tier, SEND_ABROAD)
        if len(askers):
            raise TopologyError(
                f"the topology has no link to device {int(self._device[askers[0]])} from any device that holds what it "
                "needs; add a tier that joins them"
            )
        self.requests = self._requests()

    def _ask(self, askers: Ints, domain: Ints, port: int) -> Ints:
        """Request the pieces of the needs ``askers`` from holders in their domains; returns the needs without any."""
        if not len(askers):
            return askers
        cells, holder = self._demand.cells, self._demand.source.holder
        width = int(domain.max()) + 2
        there = holder[cells.row]
        key = cells.of_row * width + domain[there] + 1
        order = np.lexsort((there, key))
        key = key[order]
        wanted = self._demand.cell[self._piece[askers]] * width + domain[self._device[askers]] + 1
        begin, end = np.searchsorted(key, wanted), np.searchsorted(key, wanted, side="right")
        found = (end > begin) & (domain[self._device[askers]] >= 0)
        start = sum(len(t) for t in self._table_rows)
        self._table_rows.append(cells.row[order])
        self._table_devices.append(there[order])
        self._asked.append((askers[found], begin[found] + start, (end - begin)[found], port))
        return askers[~found]

    def _requests(self) -> Requests:
        """A sender for every asker, then a gateway for every group of several needs."""
        size = np.diff(self._first)
        several = np.flatnonzero(size > 1)
        tables = sum(len(t) for t in self._table_devices)
        devices = np.concatenate([*self._table_devices, self._device[self._members]])
        asker = np.concatenate([*(a for a, _, _, _ in self._asked), self._members[self._first[several]]])
        begin = np.concatenate([*(b for _, b, _, _ in self._asked), tables + self._first[several]])
        count = np.concatenate([*(c for _, _, c, _ in self._asked), size[several]])
        ports = (*(np.full(len(a), p) for a, _, _, p in self._asked), np.full(len(several), RECEIVE_ABROAD))
        self._asker, self._several = asker, several
        volumes, own = self._demand.volumes[self._piece], self._row >= 0
        return Requests.of(
            devices,
            begin,
            count,
            np.concatenate(ports),
            volumes[asker],
            self._device[asker],
            np.stack([self._device[own], volumes[own]]),
        )

    def route(self, pick: Ints) -> Route:
        """The route when request ``k`` is given to its candidate number ``pick[k]``."""
        demand = self._demand
        rows = np.concatenate([*self._table_rows, np.zeros(0, np.int64)])
        row, relayed = self._row.copy(), np.zeros(len(self._row), bool)
        senders = len(self._asker) - len(self._several)
        at = self.requests.begin + pick
        row[self._asker[:senders]] = rows[at[:senders]]
        gateway = self._members[self._first[:-1]]
        gateway[self._several] = self._members[at[senders:] - len(rows)]
        group = np.repeat(np.arange(len(gateway)), np.diff(self._first))
        asked = row[self._members[self._first[:-1]]]
        relayed[self._members] = True
        relayed[gateway] = False
        row[self._members] = self._target_row[gateway[group]]
        row[gateway] = asked
        lo, hi = demand.lo[self._piece], demand.hi[self._piece]
        added = np.zeros(len(row), bool)
        return Route(demand.source, demand.target, self._kept, lo, hi, self._target_row, row, relayed, added)


def _is_in(device: Ints, chosen: Ints, devices: int) -> Bools:
    """True where ``device``, of numbers below ``devices``, is among the ``chosen``."""
    mask = np.zeros(devices, bool)
    mask[chosen] = True
    return mask[device]
