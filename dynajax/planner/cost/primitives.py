"""Primitives: which parts of a plan are a broadcast, scatter, gather, all-gather or all-to-all, or a sum of their kind.

Devices that exchange pieces of one route, directly or through others, form a group, and the pattern of its pieces has a
name. Patterns without one of these names are point to point. For analysis: no transport of dynajax looks at the names.
A transport with a fast broadcast could use it, and one without sends the pieces of each pair in one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dynajax.planner.plan import Plan
from dynajax.planner.route import Route
from dynajax.types import Ints


class Primitive(Enum):
    """What a group of devices does."""

    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    POINT_TO_POINT = "point to point"


@dataclass(frozen=True)
class Operation:
    """What one group does with the tensors of one route.

    Attributes:
        primitive: its name.
        senders, receivers: device numbers.
        paths: the tensors.
        nbytes: bytes sent.
        messages: pairs of devices that talk.
    """

    primitive: Primitive
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    paths: tuple[str, ...]
    nbytes: int
    messages: int


def operations(plan: Plan) -> tuple[Operation, ...]:
    """All that is sent in a plan, group by group."""
    paths: dict[int, list[str]] = {}
    for move in plan.moves:
        paths.setdefault(id(move.route), []).append(move.tensor.path)
    found: list[Operation] = []
    for route, itemsize in plan.routes:
        found += _operations(route, itemsize, tuple(paths[id(route)]))
    return tuple(found)


def _operations(route: Route, itemsize: int, paths: tuple[str, ...]) -> list[Operation]:
    rows = np.flatnonzero(route.sent)
    if not len(rows):
        return []
    place = route.flat_index
    sender, receiver = route.sender[rows], route.receiver[rows]
    size = 1 + int(max(sender.max(), receiver.max()))
    graph = coo_array((np.ones(len(rows)), (sender, receiver)), shape=(size, size))
    group = connected_components(graph, directed=False)[1][sender]
    stays = _same_rows(route.receiver, place, ~route.sent, sender, place[rows])
    found: list[Operation] = []
    order = np.argsort(group, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        s, r, p = sender[mine], receiver[mine], place[rows][mine]
        found.append(
            Operation(
                _named_sum(s, r, p) if route.source.partial else _named(s, r, p, bool(stays[mine].all())),
                tuple(np.unique(s).tolist()),
                tuple(np.unique(r).tolist()),
                paths,
                int(route.volumes[rows][mine].sum()) * itemsize,
                len(np.unique(s * size + r)),
            )
        )
    return found


def _same_rows(device: Ints, place: Ints, chosen: np.ndarray, by: Ints, at: Ints) -> np.ndarray:
    """True where the pair ``(by, at)`` is among the chosen pairs ``(device, place)``."""
    known = np.stack([device[chosen], place[chosen]], axis=1)
    both, number = np.unique(np.concatenate([known, np.stack([by, at], axis=1)]), axis=0, return_inverse=True)
    seen = np.zeros(len(both), bool)
    seen[number.ravel()[: len(known)]] = True
    return seen[number.ravel()[len(known) :]]


def _named(sender: Ints, receiver: Ints, place: Ints, keeps: bool) -> Primitive:
    """The name of what a connected group does.

    Args:
        sender, receiver, place: of each piece that is sent.
        keeps: whether each sender needs what it sends itself.
    """
    senders, receivers = np.unique(sender), np.unique(receiver)
    _, readers = np.unique(place, return_counts=True)
    if len(senders) == 1 and len(receivers) > 1:
        if (readers == len(receivers)).all():
            return Primitive.BROADCAST
        return Primitive.SCATTER if (readers == 1).all() else Primitive.POINT_TO_POINT
    if len(receivers) == 1 and len(senders) > 1:
        return Primitive.GATHER
    if len(senders) > 1 and np.array_equal(senders, receivers):
        if keeps and (readers == len(senders) - 1).all():
            return Primitive.ALL_GATHER
        pairs = len(np.unique(np.stack([sender, receiver], axis=1), axis=0))
        if not keeps and (readers == 1).all() and pairs == len(senders) * (len(senders) - 1):
            return Primitive.ALL_TO_ALL
    return Primitive.POINT_TO_POINT


def _named_sum(sender: Ints, receiver: Ints, place: Ints) -> Primitive:
    """The name of what a connected group does with parts that are summed; arguments as for ``_named``."""
    senders, receivers = np.unique(sender), np.unique(receiver)
    _, messages = np.unique(place, return_counts=True)
    if len(receivers) == 1:
        return Primitive.REDUCE
    if np.array_equal(senders, receivers):
        if (messages == len(senders) - 1).all():
            return Primitive.REDUCE_SCATTER
        if (messages == 2 * (len(senders) - 1)).all():
            return Primitive.ALL_REDUCE
    return Primitive.POINT_TO_POINT
