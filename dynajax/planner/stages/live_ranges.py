"""Live ranges: the bytes alive on every device at every moment of a plan, from its routes and stages alone.

A packed stage has six moments: pack into send buffers, free the pieces that were read for the last time, receive, free
the send buffers, allocate target pieces, and, once these are filled, free the receive buffers and the pieces that were
copied inside the device for the last time. Before the first stage a device frees every piece that nobody reads. A stage
of whole shards has two moments: its targets are allocated, its sources are freed.
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
class PieceTable:
    """The pieces of all routes end to end, one row for each device that needs one.

    Attributes:
        sender, receiver: device numbers.
        nbytes: bytes of the piece over all tensors of its route.
        added: True if the piece is added to one before it.
        freed_with: equal for rows that read the same piece of the same device, which the device frees after the last
            of them; −1 if nothing is freed, because the piece is relayed or its device keeps the buffer.
    """

    sender: Ints
    receiver: Ints
    nbytes: Ints
    added: Bools
    freed_with: Ints

    @staticmethod
    def of(routes: Routes) -> PieceTable:
        """The pieces of ``routes``, in order."""
        none, no = np.zeros(0, np.int64), np.zeros(0, bool)
        sender = np.concatenate([none, *(r.sender for r, _ in routes)])
        receiver = np.concatenate([none, *(r.receiver for r, _ in routes)])
        nbytes = np.concatenate([none, *(r.volumes * itemsize for r, itemsize in routes)])
        added = np.concatenate([no, *(r.added for r, _ in routes)])
        stays = np.concatenate([no, *(r.relayed | np.isin(r.sender, r.kept) for r, _ in routes)])
        route = np.concatenate([none, *(np.full(len(r.lo), k) for k, (r, _) in enumerate(routes))])
        flat_index = np.concatenate([none, *(r.flat_index for r, _ in routes)])
        freed_with, freed = np.full(len(route), -1), np.flatnonzero(~stays)
        # Pieces of a route are equal or disjoint, so those that begin at one element are one box.
        freed_with[freed] = numbered(route[freed], flat_index[freed], sender[freed])
        return PieceTable(sender, receiver, nbytes, added, freed_with)


def numbered(*keys: Ints) -> Ints:
    """A number for each row, counted from 0: the same for rows that agree in all keys."""
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
        routes: with a stage for each piece; the pieces of a route are equal or disjoint.
        source: bytes of the source layout on each device.
        donate: whether sources are freed.
    """
    devices, pieces = len(source), PieceTable.of(routes)
    stage = np.concatenate([np.zeros(0, np.int64), *(r.stages_of_pieces() for r, _ in routes)])
    stages = int(stage.max(initial=-1)) + 1
    change = np.zeros((MOMENTS * stages + 2, devices), np.int64)
    sent = pieces.sender != pieces.receiver
    for moment, end, chosen, sign in (
        (0, pieces.sender, sent, 1),
        (2, pieces.receiver, sent, 1),
        (3, pieces.sender, sent, -1),
        (4, pieces.receiver, ~pieces.added, 1),
        (5, pieces.receiver, sent, -1),
    ):
        np.add.at(change, (2 + MOMENTS * stage[chosen] + moment, end[chosen]), sign * pieces.nbytes[chosen])
    change[0] = source
    if donate:
        _free(change, pieces, stage, ~sent)
        change[1] = kept_bytes(routes, devices) + _read_bytes(pieces, devices) - source
    return np.cumsum(change, axis=0)


def _free(change: Ints, pieces: PieceTable, stage: Ints, local: Bools) -> None:
    """Subtract each piece after the last row that reads it: after packing if that is sent, after filling if local."""
    read = np.flatnonzero(pieces.freed_with >= 0)
    order = read[np.lexsort((local[read], stage[read], pieces.freed_with[read]))]
    last = order[np.append(np.diff(pieces.freed_with[order]) != 0, True)] if len(order) else order
    moment = np.where(local[last], 5, 1)
    np.subtract.at(change, (2 + MOMENTS * stage[last] + moment, pieces.sender[last]), pieces.nbytes[last])


def _read_bytes(pieces: PieceTable, devices: int) -> Ints:
    """Bytes of the pieces that are read, and then freed, on the devices that hold them."""
    _, first = np.unique(pieces.freed_with, return_index=True)
    first = first[pieces.freed_with[first] >= 0]
    return segment_sum(pieces.sender[first], pieces.nbytes[first], devices)


def live_bytes(plan: Plan) -> Ints:
    """Bytes that each device holds at every moment of the plan, in order, shape (moments, devices).

    Args:
        plan: with its stages; the moments of a stage are at the top of this file.
    """
    if plan.granularity is Granularity.PACKED:
        return packed_live(plan.routes, plan.footprint.source, plan.donate)
    made, gone = stage_changes(plan)
    change = np.empty((1 + 2 * len(plan.stages), plan.num_devices), np.int64)
    change[0] = plan.footprint.source
    change[1::2] = made
    change[2::2] = -gone
    return np.cumsum(change, axis=0)


def stage_changes(plan: Plan) -> tuple[Ints, Ints]:
    """Bytes of shards that each stage allocates at its start, and frees at its end.

    An array that stores parts of several tensors is allocated in the first stage that fills it, and freed in the last
    that reads it.

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
            if plan.gives(rows[0]):
                held[move.kept] = 0
            if out is gone and k in plan.keep:
                continue
            out[when(stage_of[r] for r in rows)] += held
    return made, gone
