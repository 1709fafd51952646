"""Two layouts and a budget make a plan: diff, route, keep, stage."""

from __future__ import annotations

import numpy as np

from dynajax.errors import LayoutError
from dynajax.planner.diff import Demand, diff
from dynajax.planner.memory import Buffers, plan_stages
from dynajax.planner.plan import Copies, Move, Plan
from dynajax.planner.route import choose_sources
from dynajax.vps.region import Ints
from dynajax.vps.tiling import Layout, Tiling


def build_plan(source: Layout, target: Layout, budget: int, donate: bool = True) -> Plan:
    """The plan of a move between two layouts of one space.

    Args:
        source, target: who holds what before and after; device numbers mean the same in both.
        budget: bytes a device may hold above its base.
        donate: whether the source is given up as the move goes on.

    Raises:
        LayoutError: the layouts are of different spaces, or the source does not cover the target.
        BudgetError: the budget cannot hold the smallest stages.
    """
    if source.space != target.space:
        raise LayoutError("source and target are layouts of different spaces")
    devices = max(source.num_devices, target.num_devices, 1)
    load = np.zeros(devices, np.int64)
    demands: dict[tuple[bytes, bytes], Demand] = {}
    moves: list[Move] = []
    for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True):
        key = (before.key, after.key)
        if key not in demands:
            demands[key] = diff(before, after)
        rows = choose_sources(demands[key], before, tensor.itemsize, load)
        kept = unchanged_devices(before, after)
        moves.append(Move(tensor, before, after, kept, _copies(demands[key], rows, before, after, kept)))
    buffers = _buffers(moves, devices)
    stages = plan_stages(buffers, budget, donate, [t.path for t in source.space])
    return Plan(tuple(moves), stages, budget, donate, buffers.footprint(stages, donate))


def unchanged_devices(source: Tiling, target: Tiling) -> Ints:
    """Devices whose buffer holds the same elements at the same places before and after."""
    same: list[int] = []
    rows = [{d: np.flatnonzero(t.holder == d) for d in t.devices.tolist()} for t in (source, target)]
    for device, before in rows[0].items():
        after = rows[1].get(device)
        if after is not None and len(before) == len(after) and _same_rows(source, before, target, after):
            same.append(device)
    return np.asarray(same, np.int64)


def _same_rows(source: Tiling, before: Ints, target: Tiling, after: Ints) -> bool:
    a, b = source.region, target.region
    return all(np.array_equal(getattr(a, f)[before], getattr(b, f)[after]) for f in ("lo", "hi", "offset", "stride"))


def _copies(demand: Demand, source_row: Ints, source: Tiling, target: Tiling, kept: Ints) -> Copies:
    needed = ~np.isin(target.holder[demand.target_row], kept)
    lo, hi = demand.lo[needed], demand.hi[needed]
    s, t = source_row[needed], demand.target_row[needed]
    return Copies(
        source.holder[s],
        target.holder[t],
        hi - lo,
        source.region.address(s, lo),
        source.region.stride[s],
        target.region.address(t, lo),
        target.region.stride[t],
    )


def _buffers(moves: list[Move], devices: int) -> Buffers:
    shape = (len(moves), devices)
    source, target, kept = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for k, move in enumerate(moves):
        source[k] = move.source.elements(devices) * move.tensor.itemsize
        target[k] = move.target.elements(devices) * move.tensor.itemsize
        kept[k, move.kept] = target[k, move.kept]
    return Buffers(source, target, kept)
