"""Sums of partial sources: where each sum is made, and what every holder sends.

In each node that needs a piece one device, the gateway, is sent the part of every holder, adds the parts up in the
order of the holders' numbers, and passes the sum on to the other devices of the node that need it. So all gateways have
the same sum to the bit. A device that holds a part itself is preferred as gateway, since its own part need not be sent;
between equals load balancing decides.
"""

from __future__ import annotations

import numpy as np

from dynajax.errors import TopologyError
from dynajax.planner.diff import Demand
from dynajax.planner.route import Route
from dynajax.planner.sources.load_balance import RECEIVE_ABROAD, Requests
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.tiling import segment_sum


def by_node(needs: Ints, piece: Ints, device: Ints, node: Ints) -> tuple[Ints, Ints]:
    """Group the needs of one piece in one node.

    Args:
        needs: numbers of needs, shape (needs,).
        piece, device: of each need, shape (needs,).
        node: node of each device, shape (devices,).

    Returns:
        ``members, first``: the needs of group ``g`` are ``members[first[g]:first[g + 1]]``, ordered by device.
    """
    key = piece * (int(node.max(initial=0)) + 1) + node[device]
    order = np.lexsort((device, key))
    _, first = np.unique(key[order], return_index=True)
    return needs[order], np.append(first, len(needs))


class Reduction:
    """The needs of a geometry whose source is partial. The only choice left open is the gateway of each node.

    Args:
        demand: what is needed; pieces are equal or disjoint.
        domains: domain of each device in each tier, the node first, shape (tiers, devices).

    Attributes:
        requests: a gateway for each sum.
    """

    def __init__(self, demand: Demand, domains: Ints) -> None:
        self._demand, self._domains = demand, domains
        device = demand.target.holder[demand.target_row]
        self._members, self._first = by_node(np.arange(len(device)), demand.piece, device, domains[0])
        groups = np.arange(len(self._first) - 1)
        group = np.repeat(groups, np.diff(self._first))
        has = demand.own_row[self._members] >= 0
        eligible = has | ~(segment_sum(group, has.astype(np.int64), len(groups)) > 0)[group]
        self._candidates = self._members[eligible]
        begin = np.searchsorted(group[eligible], groups)
        count = np.searchsorted(group[eligible], groups, side="right") - begin
        piece = demand.piece[self._candidates[begin]]
        parts = np.diff(demand.cells.first)[demand.cell[piece]]
        self.requests = Requests.of(
            device[self._candidates],
            begin,
            count,
            np.full(len(groups), RECEIVE_ABROAD),
            demand.volumes[piece] * parts,
            device[self._candidates[begin]],
            np.zeros((2, 0), np.int64),
        )

    def route(self, pick: Ints) -> Route:
        """The route when candidate number ``pick[g]`` is the gateway of sum ``g``.

        Raises:
            TopologyError: a holder has no link to a gateway.
        """
        demand, cells = self._demand, self._demand.cells
        gateway = self._candidates[self.requests.begin + pick]
        group = np.repeat(np.arange(len(gateway)), np.diff(self._first))
        cell = demand.cell[demand.piece[gateway]]
        need, at = algebra.expand(cells.first[cell], cells.first[cell + 1])
        order = np.lexsort((demand.source.holder[cells.row[at]], need))
        need, source_row = gateway[need[order]], cells.row[at[order]]
        rest = self._members != gateway[group]
        others, passes = self._members[rest], gateway[group[rest]]
        needs = np.concatenate([need, others])
        relayed = np.repeat([False, True], [len(need), len(others)])
        route = Route(
            demand.source,
            demand.target,
            np.zeros(0, np.int64),
            demand.lo[demand.piece[needs]],
            demand.hi[demand.piece[needs]],
            demand.target_row[needs],
            np.concatenate([source_row, demand.target_row[passes]]),
            relayed,
            np.append(False, needs[1:] == needs[:-1])[: len(needs)],
        )
        self._require_links(route.sender, route.receiver)
        return route

    def _require_links(self, sender: Ints, receiver: Ints) -> None:
        domain = self._domains[:, receiver]
        joined = (sender == receiver) | ((self._domains[:, sender] == domain) & (domain >= 0)).any(axis=0)
        if not joined.all():
            k = int(np.argmin(joined))
            raise TopologyError(
                f"the topology has no link to device {int(receiver[k])} from device {int(sender[k])}, whose part of a "
                "sum it needs; add a tier that joins them"
            )
