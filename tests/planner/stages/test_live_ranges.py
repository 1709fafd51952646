"""Bytes alive at every moment, against an allocator that makes and frees the buffers."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.random_layouts import array_layout_pairs, layout_pairs, summed_pairs, topologies
from planner.stages.allocator import simulate

from dynajax.errors import BudgetError
from dynajax.planner import Granularity, build_plan
from dynajax.planner.stages.live_ranges import live_bytes, numbered

SETTINGS = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])


def plan_within(pair, budget, *args, **kwargs):
    """A plan of the budget, or of the least that does."""
    try:
        return build_plan(pair[0], pair[1], budget, *args, **kwargs)
    except BudgetError as error:
        least = int(str(error).split("budget that does is ")[1].split()[0])
        return build_plan(pair[0], pair[1], least, *args, **kwargs)


@SETTINGS
@given(st.one_of(layout_pairs(), summed_pairs()), topologies(), st.integers(0, 300), st.booleans())
def test_packed_pieces_live_as_long_as_an_allocator_keeps_them(pair, topology, budget, donate):
    plan = plan_within(pair, budget, donate, topology=topology, granularity=Granularity.PACKED)
    _, moments = simulate(plan)
    live = live_bytes(plan).tolist()
    # Of a plan without pieces the last stages are empty, and nothing changes in them.
    assert live == moments[: len(live)]
    assert all(m == moments[-1] for m in moments[len(live) :])


@SETTINGS
@given(st.one_of(layout_pairs(), array_layout_pairs()), st.integers(0, 300), st.booleans())
def test_whole_shards_are_made_for_their_first_tensor_and_freed_after_their_last(pair, budget, donate):
    plan = plan_within(pair, budget, donate)
    before, after = (arrays(layout, plan.num_devices) for layout in pair)
    live = sum((nbytes for _, nbytes in before), np.zeros(plan.num_devices, np.int64))
    moments, done = [live], set()
    for stage in plan.stages:
        for rows, nbytes in after:
            if rows & set(stage) and not rows & done:
                live = live + changed(plan, rows, nbytes)
        moments.append(live)
        done |= set(stage)
        for rows, nbytes in before:
            if donate and rows & set(stage) and rows <= done:
                live = live - changed(plan, rows, nbytes)
        moments.append(live)
    np.testing.assert_array_equal(live_bytes(plan), moments)


def arrays(layout, devices):
    """Tensors, and bytes by device, of every array."""
    if layout.arrays is None:
        sizes = [tensor.itemsize for tensor in layout.space]
        return [({k}, tiling.elements(devices) * sizes[k]) for k, tiling in enumerate(layout.tilings)]
    nbytes = np.pad(layout.arrays.nbytes, ((0, 0), (0, devices - layout.arrays.nbytes.shape[1])))
    return [(set(rows), n) for rows, n in zip(layout.arrays.tensors, nbytes, strict=True)]


def changed(plan, rows, nbytes):
    """Bytes without those of buffers that are handed over: of a tensor with an array of its own that is given up."""
    nbytes = nbytes.copy()
    if plan.donate and len(rows) == 1:
        nbytes[plan.moves[min(rows)].kept] = 0
    return nbytes


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), max_size=20))
def test_rows_have_one_number_if_they_agree_in_all_keys(rows):
    numbers = numbered(*(np.array([r[k] for r in rows], np.int64) for k in range(2))).tolist()
    assert sorted(set(numbers)) == list(range(len(set(rows))))
    assert len(set(zip(rows, numbers, strict=True))) == len(set(rows))
