"""Stages of whole shards: within the budget, in a good order, with the peak that an allocator sees."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import layout_pairs

from dynajax.errors import BudgetError
from dynajax.planner import build_plan, verify
from dynajax.planner.stages.shards import Allocations, Shards, plan_stages
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


@st.composite
def allocations(draw):
    """Arrays that store parts of up to six tensors, before and after, on three devices."""
    count = draw(st.integers(1, 6))
    sides = []
    for _ in range(2):
        rows = [[k] for k in range(count)]
        for extra in draw(st.lists(st.lists(st.integers(0, count - 1), min_size=1, unique=True), max_size=3)):
            rows.append(sorted(extra))
        nbytes = [draw(st.lists(st.integers(0, 9), min_size=3, max_size=3)) for _ in rows]
        plain = draw(st.booleans())
        rows, nbytes = (rows[:count], nbytes[:count]) if plain else (rows, nbytes)
        held = np.array(nbytes, np.int64)
        sides.append(Shards(held, np.zeros_like(held), None if plain else tuple(map(tuple, rows))))
    given = draw(st.lists(st.booleans(), min_size=len(sides[0].nbytes), max_size=len(sides[0].nbytes)))
    return Allocations(sides[0], sides[1], count, np.array(given))


@settings(max_examples=150)
@given(allocations(), st.randoms(use_true_random=False))
def test_an_array_comes_with_its_first_tensor_and_goes_with_its_last(found, random):
    order = random.sample(range(found.count), found.count)
    comes, goes = np.zeros((found.count, 3), np.int64), np.zeros((found.count, 3), np.int64)
    for out, shards, pick in ((comes, found.target, min), (goes, found.source, max)):
        for k, nbytes in enumerate(shards.nbytes):
            if out is goes and not found.given[k]:
                continue
            out[pick(order.index(row) for row in (shards.tensors[k] if shards.tensors else (k,)))] += nbytes
    np.testing.assert_array_equal(found.allocated(np.array(order)), comes)
    np.testing.assert_array_equal(found.freed(np.array(order)), goes)


@settings(max_examples=150)
@given(allocations())
def test_groups_are_tensors_that_share_arrays_directly_or_through_others(found):
    reach = np.eye(found.count, dtype=bool)
    for shards in (found.source, found.target):
        for rows in shards.tensors or ():
            reach[np.ix_(rows, rows)] = True
    for _ in range(found.count):
        reach |= (reach.astype(int) @ reach.astype(int)) > 0
    expected = {tuple(np.flatnonzero(row).tolist()) for row in reach}
    groups = found.groups
    if groups is None:
        assert found.source.tensors is None
        assert found.target.tensors is None
    else:
        assert {tuple(sorted(g)) for g in groups} == expected


@settings(max_examples=150)
@given(allocations(), st.integers(0, 60), st.integers(0, 40))
def test_a_stage_of_several_tensors_allocates_at_once_no_more_than_it_may(found, budget, at_once):
    names = [f"t{k}" for k in range(found.count)]
    try:
        stages = plan_stages(found, budget, names, at_once)
    except BudgetError:
        return
    order = [k for stage in stages for k in stage]
    assert sorted(order) == list(range(found.count))
    allocated = dict(zip(order, found.allocated(np.array(order)).sum(axis=1).tolist(), strict=True))
    assert not found.given.any() or all(
        sum(allocated[k] for k in stage) <= at_once for stage in stages if len(stage) > 1
    )
    assert found.footprint(stages).extra <= budget
    wider = plan_stages(found, budget, names)
    assert len(wider) <= len(stages)
