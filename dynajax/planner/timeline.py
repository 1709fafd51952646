"""Memory over a plan: bytes alive on every device, from the routes and stages alone."""

from __future__ import annotations

import numpy as np

from dynajax.planner.ledger import packed_live
from dynajax.planner.memory import Memory
from dynajax.planner.plan import Plan
from dynajax.vps.region import Ints


def live_bytes(plan: Plan) -> Ints:
    """Bytes that each device holds at every moment of the plan, in order, shape (moments, devices).

    Where shards are freed whole a stage has two moments: its targets are made, its sources are gone. Packed stages
    have those of ``planner.ledger``.
    """
    if plan.memory is Memory.PACKED:
        return packed_live(plan.routes, plan.footprint.source, plan.donate)
    n = plan.num_devices
    change = [sum((m.source.elements(n) * m.tensor.itemsize for m in plan.moves), np.zeros(n, np.int64))]
    for stage in plan.stages:
        made, gone = np.zeros(n, np.int64), np.zeros(n, np.int64)
        for move in (plan.moves[k] for k in stage):
            new, old = move.target.elements(n), move.source.elements(n)
            new[move.kept] = old[move.kept] = 0
            made += new * move.tensor.itemsize
            gone -= old * move.tensor.itemsize
        change += [made, gone if plan.donate else np.zeros_like(gone)]
    return np.cumsum(change, axis=0)
