"""Layouts whose arrays store parts of several tensors: exact plans, fewest bytes, and when arrays come and go."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import array_layout_pairs, held

from dynajax.errors import BudgetError, LayoutError
from dynajax.planner import build_plan, renumbered, verify
from dynajax.vps import Arrays, BoxPart, Layout, RunPart, Space, Tensor, bucket_parts, fused_parts, mesh_tiling
from dynajax.vps.parts import joined, parts_tiling

P = PartitionSpec
AMPLE = 2**60
proof = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@proof
@given(array_layout_pairs())
def test_any_two_layouts_of_arrays_make_an_exact_plan_that_moves_the_least(pair):
    source, target = pair
    plan = build_plan(source, target, AMPLE)
    verify(plan)
    assert plan.bytes_moved == plan.bytes_lower_bound == _bytes_not_held(source, target)


def _bytes_not_held(source, target):
    return sum(
        int((held(after, d) & ~held(before, d)).sum()) * tensor.itemsize
        for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True)
        for d in after.devices.tolist()
    )


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
    """Bytes without those of buffers that stay: such are only of a tensor with an array of its own."""
    nbytes = nbytes.copy()
    if len(rows) == 1:
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


def test_parts_that_do_not_fit_are_refused():
    BoxPart("t", (4, 3), (1, 0), (1, 3), (2,), (None, 0)).require_fits((5,))
    for bad in (
        BoxPart("t", (4, 3), (1, 0), (1, 3), (3,), (None, 0)),
        BoxPart("t", (4, 3), (4, 0), (1, 3), (0,), (None, 0)),
        BoxPart("t", (4, 3), (1, 0), (2, 3), (0,), (None, 0)),
        BoxPart("t", (4, 3), (1, 0), (1, 3), (0,), (0, 0)),
        RunPart("t", (4, 3), 6, 7, 0),
        RunPart("t", (4, 3), 0, 6, 0),
    ):
        with pytest.raises(LayoutError, match="t: "):
            bad.require_fits((5,))
    with pytest.raises(LayoutError, match="equal shares"):
        fused_parts({"q": (6, 2), "k": (4, 2)}, 4)
    with pytest.raises(LayoutError, match="too small"):
        bucket_parts({"q": (6, 2)}, [5, 6])


@proof
@given(array_layout_pairs(), st.randoms(use_true_random=False))
def test_arrays_follow_their_devices_to_other_numbers(pair, random):
    source, target = pair
    devices = np.array(random.sample(range(2 * target.num_devices), target.num_devices), np.int64)
    placed = renumbered(target, devices)
    assert placed.bytes_by_device(2 * target.num_devices)[devices].tolist() == target.bytes_by_device().tolist()
    verify(build_plan(source, placed, AMPLE))
