"""Proof of a plan by bookkeeping on boxes and bytes: no buffers, so thousands of devices are no matter.

What is shown for every route: both layouts cover the tensor and hold nothing twice. A piece lies inside the box that it
is read from and inside the box that it fills; a relayed piece was sent to its sender before. The pieces of a device are
disjoint and fill all that it shall have; a buffer that stays holds the same elements at the same places before and
after. If the source is partial, every filled box is written once and then added to, by the parts of all other holders,
each once. What is shown for the plan: bytes moved, and bytes between nodes, are the least that the layouts allow, every
piece is in one stage, and the peak is that of the live ranges and within the budget.
"""

from __future__ import annotations

import numpy as np

from dynajax.errors import CheckError
from dynajax.planner.plan import Plan
from dynajax.planner.route import Route
from dynajax.planner.stages.live_ranges import live_bytes
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.tiling import Tiling, segment_sum


def prove(plan: Plan) -> None:
    """Show that the plan is right.

    Raises:
        CheckError: naming the tensor and what is wrong.
        LayoutError: a layout is not sound.
    """
    names: dict[int, str] = {}
    for move in plan.moves:
        names.setdefault(id(move.route), move.tensor.path)
    for route, _ in plan.routes:
        name = names[id(route)]
        route.source.validate(name)
        route.target.validate(name)
        _prove_reads(route, name)
        _prove_sums(route, name)
        _prove_relays(route, name)
        _prove_kept(route, name)
        _prove_complete(route, name, plan.num_devices)
    _prove_bytes(plan)
    _prove_stages(plan)
    _prove_peak(plan)


def _prove_reads(route: Route, name: str) -> None:
    """Every piece lies inside the box that is read and the box that is filled."""
    for rows, row, tiling in (
        (~route.relayed, route.source_row, route.source),
        (route.relayed, route.source_row, route.target),
        (np.ones_like(route.relayed), route.target_row, route.target),
    ):
        lo, hi, box = route.lo[rows], route.hi[rows], row[rows]
        inside = (tiling.region.lo[box] <= lo).all(axis=1) & (hi <= tiling.region.hi[box]).all(axis=1)
        if not inside.all():
            raise CheckError(f"{name}: piece {int(np.argmin(inside))} is read or written outside of its box")


def _prove_sums(route: Route, name: str) -> None:
    """Of a partial source every written box gets the parts of all holders, each once; of another none is added."""
    if not route.source.partial:
        if route.added.any():
            raise CheckError(f"{name}: something is added to a copy")
        return
    if len(route.kept):
        raise CheckError(f"{name}: a part is kept as if it were the sum")
    direct = np.flatnonzero(~route.relayed)
    box = np.stack([route.target_row, route.flat_index], axis=1)[direct]
    _, first, of_box = np.unique(box, axis=0, return_index=True, return_inverse=True)
    of_box = of_box.ravel()
    written = direct[first]
    alike = route.added[direct] == (direct != written[of_box])
    for part in (route.lo, route.hi, route.stages_of_pieces()[:, None]):
        alike &= (part[direct] == part[written[of_box]]).all(axis=1)
    if not alike.all():
        raise CheckError(f"{name}: piece {int(direct[np.argmin(alike)])} is not added to what is written before it")
    source = route.source.region
    i, j = algebra.overlaps(route.lo[written], route.hi[written], source.lo, source.hi)
    lo, hi = np.maximum(route.lo[written[i]], source.lo[j]), np.minimum(route.hi[written[i]], source.hi[j])
    parts = segment_sum(i, algebra.volumes(lo, hi), len(written))
    got = segment_sum(of_box, route.volumes[direct], len(written))
    senders = np.unique(np.stack([of_box, route.sender[direct]], axis=1), axis=0)
    if len(senders) != len(direct) or (got != parts).any():
        raise CheckError(f"{name}: a sum lacks the part of a holder, or has it twice")


def _prove_relays(route: Route, name: str) -> None:
    """A relayed piece was sent to its sender by a holder, in an earlier stage or earlier in this one."""
    relayed, direct = np.flatnonzero(route.relayed), np.flatnonzero(~route.relayed & ~route.added)
    if not len(relayed):
        return
    want = _with_device(route.sender[relayed], route.lo[relayed], route.hi[relayed])
    have = _with_device(route.receiver[direct], route.lo[direct], route.hi[direct])
    i, j = algebra.overlaps(*have, *want)
    if route.stage is not None:
        early = route.stage[direct[i]] < route.stage[relayed[j]]
        i, j = i[early], j[early]
    got = segment_sum(
        j, algebra.volumes(np.maximum(have[0][i], want[0][j]), np.minimum(have[1][i], want[1][j])), len(relayed)
    )
    lacking = relayed[got != route.volumes[relayed]]
    if len(lacking):
        raise CheckError(f"{name}: device {int(route.sender[lacking[0]])} passes on what was not sent to it")


def _prove_kept(route: Route, name: str) -> None:
    """A buffer that stays has all that its device shall have, at the same places, and is as long."""
    s, t = (np.flatnonzero(np.isin(x.holder, route.kept)) for x in (route.source, route.target))
    a, b = route.source.region, route.target.region
    have = _with_device(route.source.holder[s], a.lo[s], a.hi[s])
    want = _with_device(route.target.holder[t], b.lo[t], b.hi[t])
    i, j = algebra.overlaps(*have, *want)
    lo, hi = np.maximum(have[0][i], want[0][j])[:, 1:], np.minimum(have[1][i], want[1][j])[:, 1:]
    same_place = a.address(s[i], lo) == b.address(t[j], lo)
    same_stride = ((a.stride[s[i]] == b.stride[t[j]]) | (hi - lo == 1)).all(axis=1)
    full = int(algebra.volumes(lo, hi).sum()) == int(b.volumes[t].sum()) == int(a.volumes[s].sum())
    if not (full and same_place.all() and same_stride.all()):
        raise CheckError(f"{name}: a buffer is kept that does not hold what it should")


def _prove_complete(route: Route, name: str, devices: int) -> None:
    """Pieces of a device are disjoint and add up to what it shall have."""
    rows = ~route.added
    if not algebra.are_disjoint(*_with_device(route.receiver[rows], route.lo[rows], route.hi[rows])):
        raise CheckError(f"{name}: an element is written twice")
    wanted = _elements(route.target, devices)
    wanted[route.kept] = 0
    got = segment_sum(route.receiver[rows], route.volumes[rows], devices)
    if (got != wanted).any():
        device = int(np.argmax(got != wanted))
        raise CheckError(f"{name}: device {device} gets {int(got[device])} elements and needs {int(wanted[device])}")


def _prove_bytes(plan: Plan) -> None:
    for what, moved, least in (
        ("", plan.bytes_moved, plan.bytes_lower_bound),
        (" between nodes", plan.bytes_inter_node, plan.bytes_inter_node_lower_bound),
    ):
        if moved != least:
            raise CheckError(f"the plan moves {moved} bytes{what} and {least} would do")


def _prove_stages(plan: Plan) -> None:
    """Whole tensors are in one stage; a tensor whose pieces are staged is listed in the stages of its pieces."""
    listed: list[set[int]] = [set() for _ in plan.moves]
    for number, stage in enumerate(plan.stages):
        for k in stage:
            listed[k].add(number)
    for move, stages in zip(plan.moves, listed, strict=True):
        staged = move.route.stage
        wrong = len(stages) != 1 if staged is None or not len(staged) else stages != set(np.unique(staged).tolist())
        if wrong:
            raise CheckError(f"{move.tensor.path}: in stages {sorted(stages)}, which is not where its pieces are")


def _prove_peak(plan: Plan) -> None:
    peak = live_bytes(plan).max(axis=0)
    if (peak != plan.footprint.peak).any():
        device = int(np.argmax(peak != plan.footprint.peak))
        raise CheckError(
            f"device {device} holds up to {int(peak[device])} bytes, not {int(plan.footprint.peak[device])}"
        )
    if plan.peak_extra_bytes > plan.budget:
        raise CheckError(f"a device holds {plan.peak_extra_bytes} bytes above its base; the budget is {plan.budget}")


def _elements(tiling: Tiling, devices: int) -> Ints:
    return segment_sum(tiling.holder, tiling.region.volumes, devices)


def _with_device(device: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """Boxes with the device as a first dim."""
    return np.concatenate([device[:, None], lo], axis=1), np.concatenate([device[:, None] + 1, hi], axis=1)
