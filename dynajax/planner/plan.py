"""The plan of a move, as a value: what each device keeps, copies and is sent, in which stage.

A plan knows no devices and no transport. ``digest`` compares plans, ``planner.verify`` proves one,
``planner.price_plan`` says what it costs, and the engine carries it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.meshes import Topology
from dynajax.planner.route import Copies, Route
from dynajax.planner.stages.footprint import Footprint, Granularity
from dynajax.planner.verification.bounds import least_between, least_sent
from dynajax.types import Ints
from dynajax.vps.space import Tensor
from dynajax.vps.tiling import Arrays, Tiling, segment_sum


@dataclass(frozen=True, eq=False)
class Move:
    """What happens to one tensor.

    Attributes:
        tensor: which one.
        route: where its pieces come from; tensors of one geometry share a route.
    """

    tensor: Tensor
    route: Route

    @property
    def source(self) -> Tiling:
        """Who holds what before."""
        return self.route.source

    @property
    def target(self) -> Tiling:
        """Who holds what after."""
        return self.route.target

    @property
    def kept(self) -> Ints:
        """Devices whose buffer stays as it is, byte for byte; no copy is made for them."""
        return self.route.kept

    @property
    def copies(self) -> Copies:
        """The copies that fill the buffers of all other target devices."""
        return self.route.copies


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes from device to device, one row for each pair that talks.

    Attributes:
        sender, receiver: device numbers, shape (pairs,), sorted.
        nbytes: shape (pairs,).
    """

    sender: Ints
    receiver: Ints
    nbytes: Ints


@dataclass(frozen=True, eq=False)
class Plan:
    """A move of a whole state.

    Attributes:
        moves: one a tensor, ordered by path.
        stages: rows of ``moves`` done together, in order; a stage ends before the next begins, on all devices.
        budget: bytes that a device may hold above its base, the larger of what it holds before and after.
        donate: True if the source is given up, but for what ``keep`` says.
        footprint: bytes of each device over the stages.
        granularity: the unit in which devices free memory.
        topology: the links that the routes were chosen for, None if all devices are alike.
        source_arrays, target_arrays: what the tensors lie in before and after; None if each has an array of its own.
        keep: rows of the source arrays (of the tensors, if there are none) that are not given up.
    """

    moves: tuple[Move, ...]
    stages: tuple[tuple[int, ...], ...]
    budget: int
    donate: bool
    footprint: Footprint
    granularity: Granularity = Granularity.SHARDS
    topology: Topology | None = None
    source_arrays: Arrays | None = None
    target_arrays: Arrays | None = None
    keep: frozenset[int] = frozenset()

    def gives(self, row: int) -> bool:
        """Whether the source array of a tensor, which is not shared, is given up."""
        return (row if self.source_arrays is None else self.source_arrays.owner(row)) not in self.keep

    @cached_property
    def num_devices(self) -> int:
        """One more than the largest device number in use."""
        return self.footprint.source.shape[0]

    @cached_property
    def routes(self) -> tuple[tuple[Route, int], ...]:
        """The distinct routes, each with the bytes of an element summed over its tensors."""
        return distinct_routes(self.moves)

    @cached_property
    def traffic(self) -> Traffic:
        """All that crosses from one device to another."""
        n = max(self.num_devices, 1)
        pairs, nbytes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for route, itemsize in self.routes:
            rows = route.sent
            pairs.append(route.sender[rows] * n + route.receiver[rows])
            nbytes.append(route.volumes[rows] * itemsize)
        pair, at = np.unique(np.concatenate(pairs), return_inverse=True)
        return Traffic(*np.divmod(pair, n), segment_sum(at.ravel(), np.concatenate(nbytes), len(pair)))

    @cached_property
    def bytes_sent(self) -> Ints:
        """Bytes from device to device, shape (devices, devices)."""
        dense = np.zeros((self.num_devices, self.num_devices), np.int64)
        dense[self.traffic.sender, self.traffic.receiver] = self.traffic.nbytes
        return dense

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes sent, summed over the devices that receive them."""
        return int(self.traffic.nbytes.sum())

    @cached_property
    def bytes_needed(self) -> int:
        """Bytes that the target layout holds on all devices."""
        return sum(route.target.region.volume * itemsize for route, itemsize in self.routes)

    @property
    def bytes_retained(self) -> int:
        """Bytes of the target, or of parts of its sums, that the device which needs them holds already."""
        summed = sum(int(route.volumes[route.added].sum()) * itemsize for route, itemsize in self.routes)
        return self.bytes_needed + summed - self.bytes_moved

    @cached_property
    def bytes_lower_bound(self) -> int:
        """Bytes that any plan must send, from the layouts alone (``planner.verification.bounds``)."""
        return sum(least_sent(route.source, route.target, self._node) * itemsize for route, itemsize in self.routes)

    @cached_property
    def bytes_inter_node(self) -> int:
        """Bytes that cross from one node of the topology to another."""
        node = self._node
        crosses = node[self.traffic.sender] != node[self.traffic.receiver]
        return int(self.traffic.nbytes[crosses].sum())

    @cached_property
    def bytes_inter_node_lower_bound(self) -> int:
        """Bytes that must cross, from the layouts alone (``planner.verification.bounds``)."""
        if self.topology is None:
            return 0
        return sum(least_between(route.source, route.target, self._node) * itemsize for route, itemsize in self.routes)

    @property
    def _node(self) -> Ints:
        """Node of each device; one for all without a topology."""
        return np.zeros(max(self.num_devices, 1), np.int64) if self.topology is None else self.topology.node

    @cached_property
    def busiest_device_bytes(self) -> int:
        """The most that one device sends or receives."""
        t, n = self.traffic, self.num_devices
        return int(max(segment_sum(end, t.nbytes, n).max(initial=0) for end in (t.sender, t.receiver)))

    def peak_bytes(self) -> list[int]:
        """The most bytes that each device holds at any moment of the move."""
        return self.footprint.peak.tolist()

    @property
    def peak_extra_bytes(self) -> int:
        """The most that a device holds above its base."""
        return self.footprint.extra

    @cached_property
    def digest(self) -> str:
        """A hash of the move: equal wherever the same move is planned, in whichever order its tensors were given."""
        facts = self.budget, self.donate, self.granularity.value, self.stages, sorted(self.keep)
        digest = hashlib.sha256(repr(facts).encode())
        for arrays in (self.source_arrays, self.target_arrays):
            digest.update(b"-" if arrays is None else arrays.key)
        for move in self.moves:
            digest.update(repr(move.tensor).encode() + move.route.key)
        return digest.hexdigest()

    def summary(self) -> str:
        """The plan in a line."""
        return (
            f"{len(self.moves)} tensors, {format_bytes(self.bytes_moved)} moved (lower bound "
            f"{format_bytes(self.bytes_lower_bound)}), {format_bytes(self.bytes_retained)} retained, "
            f"{len(self.stages)} stages, peak +{format_bytes(self.peak_extra_bytes)} of {format_bytes(self.budget)}"
        )


def distinct_routes(moves: Sequence[Move]) -> tuple[tuple[Route, int], ...]:
    """The routes of some moves, each once, with the bytes of an element summed over its tensors."""
    itemsize: dict[int, int] = {}
    routes: dict[int, Route] = {}
    for move in moves:
        key = id(move.route)
        routes[key] = move.route
        itemsize[key] = itemsize.get(key, 0) + move.tensor.itemsize
    return tuple((route, itemsize[key]) for key, route in routes.items())
