"""Packed stages, carried out by an allocator that knows pieces of memory and nothing of the planner's arithmetic."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import layout_pairs, summed_pairs, topologies
from planner.stages.allocator import assert_exact, simulate

from dynajax.errors import BudgetError
from dynajax.planner import Granularity, build_plan, verify
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
proof = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])


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
    devices, _ = simulate(plan)
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
