"""Packed stages, carried out by an allocator that knows pieces of memory and nothing of the planner's arithmetic."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import held as mask
from planner.random_layouts import layout_pairs, summed_pairs, topologies

from dynajax.errors import BudgetError
from dynajax.planner import Granularity, build_plan, verify
from dynajax.planner.verification.numpy_run import device_buffer
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
proof = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])


class Device:
    """Named blocks of memory, and the most bytes there ever were."""

    def __init__(self):
        self.blocks, self.peak, self.live = {}, 0, 0

    def allocate(self, name, values):
        assert name not in self.blocks
        self.blocks[name] = values
        self.live += values.nbytes
        self.peak = max(self.peak, self.live)

    def free(self, name):
        self.live -= self.blocks.pop(name).nbytes


def simulate(plan):
    """Run the stages: pack, free, exchange, allocate, unpack. Returns the devices."""
    devices = [Device() for _ in range(plan.num_devices)]
    readers = {}
    for k, move in enumerate(plan.moves):
        whole = np.arange(int(np.prod(move.tensor.shape))).reshape(move.tensor.shape)
        whole = whole.astype(np.int32 if move.tensor.itemsize == 4 else np.int16)
        route = move.route
        boxes = {(d, tuple(lo), tuple(hi)) for d, lo, hi in source_cells(route)}
        for d, lo, hi in sorted(boxes):
            devices[d].allocate(("old", k, lo, hi), whole[box(lo, hi)].copy())
        for row in range(len(route.lo)):
            if not route.relayed[row]:
                readers.setdefault(piece(plan, k, row), set()).add(row)
    if plan.donate:
        for d, device in enumerate(devices):
            for name in [n for n in device.blocks if (d, n) not in readers and d not in plan.moves[n[1]].kept]:
                device.free(name)
    for number in range(len(plan.stages)):
        run_stage(plan, devices, readers, number)
    return devices


def source_cells(route):
    """What the devices hold, cut as the pieces are: the memory of a device is made of the pieces that are read."""
    shape = route.source.shape
    pieces = sorted({(tuple(a), tuple(b)) for a, b in zip(route.lo.tolist(), route.hi.tolist(), strict=True)})
    for d in route.source.devices.tolist():
        mask = np.zeros(shape, bool)
        region = route.source.region_of(d)
        for lo, hi in zip(region.lo, region.hi, strict=True):
            mask[box(lo, hi)] = True
        for lo, hi in pieces:
            if mask[box(lo, hi)].all():
                mask[box(lo, hi)] = False
                yield d, lo, hi
        for at in np.argwhere(mask):
            yield d, tuple(at.tolist()), tuple((at + 1).tolist())


def box(lo, hi):
    return tuple(slice(int(a), int(b)) for a, b in zip(lo, hi, strict=True))


def piece(plan, k, row):
    route = plan.moves[k].route
    return int(route.sender[row]), ("old", k, tuple(route.lo[row].tolist()), tuple(route.hi[row].tolist()))


def run_stage(plan, devices, readers, number):
    rows = [
        (k, row)
        for k in plan.stages[number]
        for row in np.flatnonzero(plan.moves[k].route.stages_of_pieces() == number).tolist()
    ]
    sent = [(k, row) for k, row in rows if plan.moves[k].route.sent[row]]
    kept_here = [(k, row) for k, row in rows if not plan.moves[k].route.sent[row]]
    for k, row in sent:
        holder, name = piece(plan, k, row)
        route = plan.moves[k].route
        if route.relayed[row]:
            name = ("new", *name[1:])
        devices[holder].allocate(("send", k, row), devices[holder].blocks[name].copy())
    done(plan, devices, readers, sent)
    for k, row in sent:
        route = plan.moves[k].route
        buffer = devices[int(route.sender[row])].blocks["send", k, row]
        devices[int(route.receiver[row])].allocate(("receive", k, row), buffer.copy())
    for k, row in sent:
        devices[int(plan.moves[k].route.sender[row])].free(("send", k, row))
    for k, row in rows:
        route = plan.moves[k].route
        holder, name = piece(plan, k, row)
        at = devices[int(route.receiver[row])]
        data = at.blocks["receive", k, row] if route.sent[row] else devices[holder].blocks[name]
        if route.added[row]:
            at.blocks["new", *name[1:]] += data
        else:
            at.allocate(("new", *name[1:]), data.copy())
    for k, row in sent:
        devices[int(plan.moves[k].route.receiver[row])].free(("receive", k, row))
    done(plan, devices, readers, kept_here)


def done(plan, devices, readers, rows):
    """Readers that have read; a piece without further readers goes."""
    if not plan.donate:
        return
    for k, row in rows:
        if plan.moves[k].route.relayed[row]:
            continue
        holder, name = piece(plan, k, row)
        readers[holder, name].discard(row)
        if not readers[holder, name] and holder not in plan.moves[k].kept:
            devices[holder].free(name)


def assert_exact(plan, devices):
    """Every device has what it shall have, and with donation nothing else."""
    for k, move in enumerate(plan.moves):
        whole = np.arange(int(np.prod(move.tensor.shape))).reshape(move.tensor.shape)
        if move.source.partial:
            whole = whole * sum(mask(move.source, d).astype(int) for d in move.source.devices.tolist())
        for d in move.target.devices.tolist():
            flat = np.full(whole.shape, -1)
            for (kind, owner, lo, hi), block in devices[d].blocks.items():
                if owner == k and kind == ("old" if d in move.kept else "new"):
                    flat[box(lo, hi)] = block
            np.testing.assert_array_equal(device_buffer(flat, move.target, d), device_buffer(whole, move.target, d))
        for d in range(plan.num_devices):
            left = [n for n in devices[d].blocks if n[1] == k and n[0] not in ("old" if d in move.kept else "new",)]
            assert not plan.donate or not left


@proof
@given(st.one_of(layout_pairs(), summed_pairs()), topologies(), st.integers(0, 300), st.booleans(), st.booleans())
def test_packed_stages_are_exact_and_peak_where_the_plan_says(pair, topology, budget, donate, links):
    source, target = pair
    links = topology if links else None
    try:
        plan = build_plan(source, target, budget, donate, topology=links, granularity=Granularity.PACKED)
    except BudgetError as error:
        least = int(str(error).split("budget that does is ")[1].split()[0])
        assert least > budget
        plan = build_plan(source, target, least, donate, topology=links, granularity=Granularity.PACKED)
        with pytest.raises(BudgetError):
            build_plan(source, target, least - 1, donate, topology=links, granularity=Granularity.PACKED)
    verify(plan)
    devices = simulate(plan)
    assert [d.peak for d in devices] == plan.peak_bytes()
    assert plan.peak_extra_bytes <= plan.budget
    assert_exact(plan, devices)


@pytest.mark.parametrize(("rows", "columns", "after", "itemsize"), [(30, 11, 2, 4), (30, 11, 2, 2), (7, 11, 3, 4)])
def test_what_fits_a_budget_fits_a_larger_one(rows, columns, after, itemsize):
    space = Space((Tensor("w", (rows, columns), "any", itemsize),))
    source, target = (
        Layout(space, (mesh_tiling((rows, columns), {"x": n}, spec, np.arange(n)),))
        for n, spec in ((3, P("x")), (after, P(None, "x")))
    )

    def fits(budget):
        try:
            return build_plan(source, target, budget, granularity=Granularity.PACKED).peak_extra_bytes <= budget
        except BudgetError:
            return False

    answers = [fits(budget) for budget in range(48)]
    assert answers == sorted(answers)
    assert any(answers)


def test_a_leaf_larger_than_the_budget_is_cut():
    space = Space((Tensor("w", (64, 64), "float32", 4),))
    rows, columns = (Layout(space, (mesh_tiling((64, 64), {"x": 4}, s, np.arange(4)),)) for s in (P("x"), P(None, "x")))
    whole = 64 * 64 * 4 // 4
    plan = build_plan(rows, columns, whole // 4, granularity=Granularity.PACKED)
    verify(plan)
    assert len(plan.stages) == 4
    assert plan.peak_extra_bytes <= whole // 4
    with pytest.raises(BudgetError):
        build_plan(rows, columns, whole // 4)


def test_memory_goes_down_as_a_device_leaves():
    """Freed as early as possible: what nobody reads goes before the first stage."""
    space = Space((Tensor("w", (64,), "float32", 4),))
    source = Layout(space, (mesh_tiling((64,), {"x": 4}, P(), np.arange(4)),))
    target = Layout(space, (mesh_tiling((64,), {"x": 2}, P("x"), np.arange(2)),))
    plan = build_plan(source, target, 48, granularity=Granularity.PACKED)
    verify(plan)
    assert plan.peak_bytes() == [256] * 4
    assert plan.bytes_moved == 0
