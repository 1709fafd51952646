"""The schedule of a plan on paper: the exchanges that programs would run, counted without a device.

Routes go one after the other, each for every tensor that has it; groups of devices that do not talk to one another go
side by side. A native collective of k devices is k − 1 messages after one another. Memory is ample, so nothing is cut.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from dynajax.planner.exchanges.exchange import Exchange, Shape
from dynajax.planner.exchanges.groups import Group, groups_of, taken
from dynajax.planner.exchanges.part import box_elements, elements, wire_dtype
from dynajax.planner.plan import Plan
from dynajax.planner.route import Route
from dynajax.types import Ints
from dynajax.vps.tiling import Tiling

_AMPLE = 1 << 60


@dataclass(frozen=True)
class Schedule:
    """What the exchanges of a plan come to.

    Attributes:
        collectives: one after another on the device that takes part in most: rounds, and native ones.
        critical_bytes: the largest message of each of them, summed: what takes time however fast the other devices are.
    """

    collectives: int
    critical_bytes: int


def scheduled(plan: Plan) -> Schedule:
    """The schedule of a plan in stages of whole shards, whose tensors have arrays of their own."""
    process = np.arange(plan.num_devices)
    times = Counter((id(m.route), m.tensor.dtype) for m in plan.moves)
    routes = {id(m.route): m.route for m in plan.moves}
    collectives, critical = 0, 0
    for (key, dtype), count in times.items():
        for groups in _exchanges(routes[key], dtype, process):
            found = [_of_group(group) for group in groups]
            itemsize = wire_dtype(dtype).itemsize
            collectives += count * max((n for n, _ in found), default=0)
            critical += count * itemsize * max((n for _, n in found), default=0)
    return Schedule(collectives, critical)


def _exchanges(route: Route, dtype: str, process: Ints) -> list[list[Group]]:
    """What groups do first, and then when targets are passed on."""
    copies, (before, after) = route.copies, (_shard(tiling) for tiling in (route.source, route.target))
    both = ((copies.relayed == onward, after if onward else before) for onward in (False, True))
    return [
        groups_of(taken(copies, np.flatnonzero(rows)), Exchange(0, shape, after, dtype), _AMPLE, process)
        for rows, shape in both
        if rows.any()
    ]


def _of_group(group: Group) -> tuple[int, int]:
    """Collectives of a group, and the elements of their largest messages."""
    count, critical = 0, 0
    for exchange in (part.exchange for part in group.parts):
        if exchange.collective is not None:
            count, critical = count + 1, critical + (exchange.devices - 1) * box_elements(exchange)
        for message in exchange.messages:
            if any(a != b for a, b in message.pairs):
                count, critical = count + 1, critical + elements(exchange, message)
    return count, critical


def _shard(tiling: Tiling) -> Shape:
    """The shape of a shard: that of its box if there is one of one shape on every device, else all of it in a row."""
    extent = tiling.region.hi - tiling.region.lo
    one = len(np.unique(tiling.holder)) == len(extent) > 0 and (extent == extent[0]).all()
    if one and tiling.room is None:
        return tuple(extent[0].tolist())
    return (int(tiling.elements(int(tiling.holder.max(initial=0)) + 1).max(initial=0)),)
