"""The ledger of packed stages: bytes alive on every device at every moment, from the routes alone.

Six moments make a stage: pack, free what was read for the last time, exchange, drop the send buffers,
allocate the targets, and, once unpacked, drop the receive buffers and what was copied inside the device.
Before the first stage all is freed that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynajax.planner.plan import Plan
from dynajax.planner.route import Route
from dynajax.planner.stages.footprint import Granularity
from dynajax.types import Bools, Ints
from dynajax.vps.tiling import segment_sum

MOMENTS = 6
Routes = Sequence[tuple[Route, int]]
"""Routes, each with the bytes of an element summed over its tensors."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The pieces of all routes end to end.

    Attributes:
        route, row: where each piece is from.
        sender, receiver, nbytes, relayed, added: as in ``Route``, bytes over all tensors.
        place: as in ``Route``; pieces of a route with one place are one box.
        unit: source piece that it reads, which its sender frees as a whole; −1 if it is relayed or kept.
    """

    route: Ints
    row: Ints
    sender: Ints
    receiver: Ints
    nbytes: Ints
    relayed: Bools
    added: Bools
    place: Ints
    unit: Ints

    @staticmethod
    def of(routes: Routes) -> Rows:
        """The pieces of ``routes``, in order."""
        none, no = np.zeros(0, np.int64), np.zeros(0, bool)
        route = np.concatenate([none, *(np.full(len(r.lo), k) for k, (r, _) in enumerate(routes))])
        row = np.concatenate([none, *(np.arange(len(r.lo)) for r, _ in routes)])
        sender = np.concatenate([none, *(r.sender for r, _ in routes)])
        receiver = np.concatenate([none, *(r.receiver for r, _ in routes)])
        nbytes = np.concatenate([none, *(r.volumes * itemsize for r, itemsize in routes)])
        relayed = np.concatenate([no, *(r.relayed for r, _ in routes)])
        added = np.concatenate([no, *(r.added for r, _ in routes)])
        place = np.concatenate([none, *(r.place for r, _ in routes)])
        stays = np.concatenate([no, *(np.isin(r.sender, r.kept) for r, _ in routes)])
        unit, freed = np.full(len(route), -1), np.flatnonzero(~relayed & ~stays)
        unit[freed] = alike(route[freed], place[freed], sender[freed])
        return Rows(route, row, sender, receiver, nbytes, relayed, added, place, unit)


def alike(*keys: Ints) -> Ints:
    """The same number, counted from 0, for rows that agree in all keys."""
    order = np.lexsort(keys)
    new = np.zeros(len(order), bool)
    for key in keys:
        new[1:] |= key[order[1:]] != key[order[:-1]]
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(new)
    return number


def kept_bytes(routes: Routes, devices: int) -> Ints:
    """Bytes of the buffers that stay as they are, on each device."""
    total = np.zeros(devices, np.int64)
    for route, itemsize in routes:
        held = segment_sum(route.target.holder, route.target.region.volumes, devices)
        total[route.kept] += held[route.kept] * itemsize
    return total


def packed_peak(routes: Routes, source: Ints, donate: bool) -> Ints:
    """The most bytes that each device holds at any moment, shape (devices,); arguments as for ``packed_live``."""
    return packed_live(routes, source, donate).max(axis=0)


def packed_live(routes: Routes, source: Ints, donate: bool) -> Ints:
    """Bytes that each device holds before the first stage and after each moment, shape (moments, devices).

    Args:
        routes: with a stage for each piece.
        source: bytes of the source layout on each device.
        donate: whether sources are freed.
    """
    devices, rows = len(source), Rows.of(routes)
    stage = np.concatenate([np.zeros(0, np.int64), *(r.stages_of_pieces() for r, _ in routes)])
    stages = int(stage.max(initial=-1)) + 1
    change = np.zeros((MOMENTS * stages + 2, devices), np.int64)
    sent = rows.sender != rows.receiver
    for moment, end, chosen, sign in (
        (0, rows.sender, sent, 1),
        (2, rows.receiver, sent, 1),
        (3, rows.sender, sent, -1),
        (4, rows.receiver, ~rows.added, 1),
        (5, rows.receiver, sent, -1),
    ):
        np.add.at(change, (2 + MOMENTS * stage[chosen] + moment, end[chosen]), sign * rows.nbytes[chosen])
    change[0] = source
    if donate:
        _free(change, rows, stage, ~sent)
        change[1] = kept_bytes(routes, devices) + _read_bytes(rows, devices) - source
    return np.cumsum(change, axis=0)


def _free(change: Ints, rows: Rows, stage: Ints, local: Bools) -> None:
    """Take off every unit after its last reader: at once if that is sent, after unpacking if it is copied inside."""
    read = np.flatnonzero(rows.unit >= 0)
    order = read[np.lexsort((local[read], stage[read], rows.unit[read]))]
    last = order[np.append(np.diff(rows.unit[order]) != 0, True)] if len(order) else order
    moment = np.where(local[last], 5, 1)
    np.subtract.at(change, (2 + MOMENTS * stage[last] + moment, rows.sender[last]), rows.nbytes[last])


def _read_bytes(rows: Rows, devices: int) -> Ints:
    """Bytes of all units on their holders."""
    _, first = np.unique(rows.unit, return_index=True)
    first = first[rows.unit[first] >= 0]
    return segment_sum(rows.sender[first], rows.nbytes[first], devices)


def live_bytes(plan: Plan) -> Ints:
    """Bytes that each device holds at every moment of the plan, in order, shape (moments, devices).

    Where shards are freed whole a stage has two moments: its targets are made, its sources are gone. Packed stages
    have those of ``planner.stages.live_ranges``.
    """
    if plan.granularity is Granularity.PACKED:
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
