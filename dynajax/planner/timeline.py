"""Memory over a plan: bytes alive on every device, from the routes and stages alone."""

from __future__ import annotations

import numpy as np

from dynajax.planner.ledger import packed_live
from dynajax.planner.memory import Memory
from dynajax.planner.plan import Plan
from dynajax.types import Ints


def live_bytes(plan: Plan) -> Ints:
    """Bytes that each device holds at every moment of the plan, in order, shape (moments, devices).

    Where shards are freed whole a stage has two moments: its targets are made, its sources are gone. Packed stages
    have those of ``planner.ledger``.
    """
    if plan.memory is Memory.PACKED:
        return packed_live(plan.routes, plan.footprint.source, plan.donate)
    made, gone = stage_changes(plan)
    change = np.empty((1 + 2 * len(plan.stages), plan.num_devices), np.int64)
    change[0] = plan.footprint.source
    change[1::2] = made
    change[2::2] = -gone if plan.donate else 0
    return np.cumsum(change, axis=0)


def stage_changes(plan: Plan) -> tuple[Ints, Ints]:
    """Bytes of shards that each stage makes at its start, and has no more use for at its end.

    An array that stores parts of several tensors is made in the first stage that fills it, and of no use after the
    last that reads it.

    Returns:
        Two arrays of shape (stages, devices).
    """
    stage_of = {k: number for number, stage in enumerate(plan.stages) for k in stage}
    made, gone = (np.zeros((len(plan.stages), plan.num_devices), np.int64) for _ in range(2))
    for out, arrays, when in ((made, plan.target_arrays, min), (gone, plan.source_arrays, max)):
        for k, rows in enumerate(((r,) for r in range(len(plan.moves))) if arrays is None else arrays.tensors):
            move = plan.moves[rows[0]]
            if arrays is None:
                held = (move.target if out is made else move.source).elements(plan.num_devices) * move.tensor.itemsize
            else:
                held = np.pad(arrays.nbytes[k], (0, plan.num_devices - arrays.nbytes.shape[1]))
            if len(rows) == 1:
                held[move.kept] = 0
            out[when(stage_of[r] for r in rows)] += held
    return made, gone
