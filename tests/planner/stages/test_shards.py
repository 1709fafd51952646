"""Stages of whole shards: within the budget, in a good order, with the peak that an allocator sees."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import array_layout_pairs, layout_pairs

from dynajax.errors import BudgetError
from dynajax.planner import build_plan, verify
from dynajax.vps import Arrays, Layout, Space, Tensor, bucket_parts, mesh_tiling
from dynajax.vps.parts import joined, parts_tiling

P = PartitionSpec
AMPLE = 2**60
proof = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def size(tiling, device):
    """Elements of a device's buffer, padding included."""
    if tiling.room is not None and device in tiling.devices:
        return tiling.room
    return tiling.region_of(device).volume


@proof
@given(layout_pairs(), st.integers(0, 400), st.booleans())
def test_the_peak_stays_in_the_budget_or_the_least_sufficient_one_is_named(pair, budget, donate):
    source, target = pair
    try:
        plan = build_plan(source, target, budget, donate)
    except BudgetError as error:
        smallest = int(str(error).split("budget that does is ")[1].split()[0])
        assert smallest > budget
        plan = build_plan(source, target, smallest, donate)
        assert plan.peak_extra_bytes <= smallest
        with pytest.raises(BudgetError):
            build_plan(source, target, smallest - 1, donate)
        return
    assert plan.peak_extra_bytes <= budget
    assert sorted(k for stage in plan.stages for k in stage) == list(range(len(plan.moves)))


@proof
@given(layout_pairs())
def test_no_order_of_tensors_does_with_half_the_budget(pair):
    before, after = pair
    plan = build_plan(before, after, AMPLE)
    devices, base = range(plan.num_devices), np.maximum(plan.footprint.source, plan.footprint.target)
    made, freed = (
        [
            [0 if d in m.kept else size(t, d) * m.tensor.itemsize for d in devices]
            for m, t in zip(plan.moves, tilings, strict=True)
        ]
        for tilings in ([m.target for m in plan.moves], [m.source for m in plan.moves])
    )
    best = AMPLE
    for order in itertools.permutations(range(len(plan.moves))):
        live, needed = plan.footprint.source.copy(), 0
        for k in order:
            live = live + made[k]
            needed = max(needed, int((live - base).max()))
            live = live - freed[k]
        best = min(best, needed)
    assert build_plan(before, after, 2 * best).peak_extra_bytes <= 2 * best


@proof
@given(layout_pairs(), st.booleans())
def test_the_peak_is_what_an_allocator_sees(pair, donate):
    """Walk the stages with a ledger of live buffers, one for every device and tensor.

    Only what is given up can serve on both sides.
    """
    source, target = pair
    plan = build_plan(source, target, AMPLE, donate)
    devices = range(plan.num_devices)
    kept = [set(move.kept.tolist()) if donate else set() for move in plan.moves]
    live = {("old", k, d): size(m.source, d) * m.tensor.itemsize for k, m in enumerate(plan.moves) for d in devices}
    peak = [sum(n for (_, _, at), n in live.items() if at == d) for d in devices]
    for stage in plan.stages:
        for k in stage:
            for d in set(devices) - kept[k]:
                live["new", k, d] = size(plan.moves[k].target, d) * plan.moves[k].tensor.itemsize
        peak = [max(p, sum(n for (_, _, at), n in live.items() if at == d)) for d, p in zip(devices, peak, strict=True)]
        for k in stage:
            for d in set(devices) - kept[k]:
                if donate:
                    del live["old", k, d]
    assert plan.peak_bytes() == peak


@proof
@given(array_layout_pairs(), st.booleans(), st.integers(0, 200))
def test_an_array_lives_from_its_first_tensor_to_its_last(pair, donate, budget):
    before, after = pair
    try:
        plan = build_plan(before, after, budget, donate)
    except BudgetError as error:
        plan = build_plan(before, after, int(str(error).split("budget that does is ")[1].split()[0]), donate)
    held_before, held_after = (_arrays(layout, plan.num_devices) for layout in pair)
    live = sum((nbytes for _, nbytes in held_before), np.zeros(plan.num_devices, np.int64))
    peak, done = live.copy(), set()
    for stage in plan.stages:
        for rows, nbytes in held_after:
            if rows & set(stage) and not rows & done:
                live = live + _changed(plan, rows, nbytes)
        peak = np.maximum(peak, live)
        for rows, nbytes in held_before:
            if donate and rows & set(stage) and rows <= done | set(stage):
                live = live - _changed(plan, rows, nbytes)
        done |= set(stage)
    assert plan.peak_bytes() == peak.tolist()
    if donate:
        assert live.tolist() == np.sum([nbytes for _, nbytes in held_after], axis=0).tolist()
    assert plan.peak_extra_bytes <= plan.budget


def _arrays(layout, devices):
    """Tensors, and bytes by device, of every array."""
    if layout.arrays is None:
        sizes = [tensor.itemsize for tensor in layout.space]
        return [({k}, tiling.elements(devices) * sizes[k]) for k, tiling in enumerate(layout.tilings)]
    nbytes = np.pad(layout.arrays.nbytes, ((0, 0), (0, devices - layout.arrays.nbytes.shape[1])))
    return [(set(rows), n) for rows, n in zip(layout.arrays.tensors, nbytes, strict=True)]


def _changed(plan, rows, nbytes):
    """Bytes without those of buffers that serve on both sides: of a tensor with an array of its own, given up."""
    nbytes = nbytes.copy()
    if len(rows) == 1 and plan.donate:
        nbytes[plan.moves[min(rows)].kept] = 0
    return nbytes


def test_a_chain_of_buckets_is_freed_bucket_by_bucket():
    """Ten tensors that straddle five buckets: the most above the base is a bucket and a tensor, not the state."""
    shapes = {f"t{k}": (24,) for k in range(10)}
    space = Space(tuple(Tensor(path, shape, "float32", 4) for path, shape in shapes.items()))
    parts = bucket_parts(shapes, [50] * 5)
    on = [mesh_tiling((50,), {"x": 2}, P("x"), np.arange(2)) for _ in parts]
    lies_in = [tuple(k for k, path in enumerate(shapes) if path in {p.tensor for p in runs}) for runs in parts]
    tilings = []
    for path, shape in shapes.items():
        mine = [[p for p in runs if p.tensor == path] for runs in parts]
        found = [parts_tiling(t, shape, p) for t, p in zip(on, mine, strict=True) if p]
        tilings.append(joined(found, [25] * len(found), True))
    buckets = Layout(space, tuple(tilings), Arrays(tuple(lies_in), np.full((5, 2), 100)))
    plain = Layout(space, tuple(mesh_tiling((24,), {"x": 2}, P("x"), np.arange(2)[::-1]) for _ in space))
    for source, target in ((buckets, plain), (plain, buckets)):
        with pytest.raises(BudgetError) as error:
            build_plan(source, target, 0)
        smallest = int(str(error.value).split("budget that does is ")[1].split()[0])
        assert smallest <= 100 + 2 * 48
        plan = build_plan(source, target, smallest)
        verify(plan)
        assert plan.peak_extra_bytes <= smallest
