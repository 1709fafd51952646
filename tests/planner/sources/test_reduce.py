"""Partial sources: sums that are exact and complete, of the least bytes, in packed stages and across nodes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.element_counts import counted
from planner.random_layouts import TIERS, summed_pairs, topologies

from dynajax.errors import BudgetError, CheckError, LayoutError, TopologyError
from dynajax.meshes import Topology
from dynajax.planner import Granularity, assign_ranks, build_plan, price_plan, renumbered, verify
from dynajax.planner.cost.primitives import Primitive, operations
from dynajax.planner.verification.numpy_run import check_on_numpy, run_move
from dynajax.planner.verification.proof import prove
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
proof = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@proof
@given(summed_pairs(), topologies(), st.booleans())
def test_sums_are_exact_and_move_the_least(pair, topology, links):
    source, target = pair
    plan = build_plan(source, target, AMPLE, topology=topology if links else None)
    verify(plan)
    sent, between = counted(source, target, topology.node if links else np.zeros(plan.num_devices, int))
    assert plan.bytes_moved == plan.bytes_lower_bound == sent
    assert plan.bytes_inter_node == plan.bytes_inter_node_lower_bound == (between if links else 0)


@proof
@given(summed_pairs(), topologies(), st.integers(0, 300), st.booleans())
def test_packed_sums_are_exact_within_their_budget(pair, topology, budget, donate):
    source, target = pair
    try:
        plan = build_plan(source, target, budget, donate, topology=topology, granularity=Granularity.PACKED)
    except BudgetError as error:
        least = int(str(error).split("budget that does is ")[1].split()[0])
        assert least > budget
        plan = build_plan(source, target, least, donate, topology=topology, granularity=Granularity.PACKED)
    verify(plan)
    assert price_plan(plan).seconds >= price_plan(plan).floor_s


def gradients(holders, target, shape=(8, 4)):
    """Every holder has a part of the whole tensor."""
    space = Space((Tensor("g", shape, "float32", 4),))
    source = replace(mesh_tiling(shape, {"x": len(holders)}, P(), np.array(holders)), partial=True)
    return Layout(space, (source,)), Layout(space, (target,))


def test_the_sum_is_made_in_the_order_of_the_devices():
    """In float32 the order shows: (1e8 + 1) − 1e8 is not 1e8 − 1e8 + 1."""
    source, target = gradients([2, 0, 1], mesh_tiling((1,), {"x": 1}, P(), np.array([1])), (1,))
    move = build_plan(source, target, AMPLE).moves[0]
    buffers = {d: np.array([x], np.float32) for d, x in ((0, 1e8), (1, 1), (2, -1e8))}
    assert run_move(move, buffers)[1].tolist() == [np.float32(np.float32(1e8) + np.float32(1)) - np.float32(1e8)]
    assert buffers[0].tolist() == [1e8]


@pytest.mark.parametrize(
    ("holders", "spec", "devices", "primitive", "messages"),
    [
        ([0, 1, 2, 3], P("x"), [0, 1, 2, 3], Primitive.REDUCE_SCATTER, 12),
        ([0, 1, 2, 3], P(), [0, 1, 2, 3], Primitive.ALL_REDUCE, 6),
        ([0, 1, 2, 3], P(), [2], Primitive.REDUCE, 3),
        ([0, 1, 2, 3], P(), [7], Primitive.REDUCE, 4),
        ([0, 1], P("x"), [4, 5], Primitive.POINT_TO_POINT, 4),
    ],
)
def test_sums_have_their_names_and_least_messages(holders, spec, devices, primitive, messages):
    source, target = gradients(holders, mesh_tiling((8, 4), {"x": len(devices)}, spec, np.array(devices)))
    plan = build_plan(source, target, AMPLE)
    verify(plan)
    assert [(o.primitive, o.messages) for o in operations(plan)] == [(primitive, messages)]


def test_roles_go_to_those_that_hold_a_part():
    source, target = gradients([4, 5], mesh_tiling((8, 4), {"x": 2}, P("x"), np.array([0, 1])))
    devices = assign_ranks(source, target)
    assert sorted(devices.tolist()) == [4, 5]
    assert build_plan(source, renumbered(target, devices), AMPLE).bytes_moved == 8 * 4 * 4


def test_the_price_counts_every_part():
    topology = Topology.regular("fours", [(TIERS[0], 1), (TIERS[1], 0)], 8)
    two, four = (
        price_plan(
            build_plan(
                *gradients(range(n), mesh_tiling((8, 4), {"x": 1}, P(), np.array([0]))), AMPLE, topology=topology
            )
        )
        for n in (2, 4)
    )
    assert four.bytes_by_tier["node"] == 3 * two.bytes_by_tier["node"] == 3 * 128
    assert four.seconds > two.seconds


def test_a_sum_that_is_wrong_is_found():
    """A part left out, and one that comes twice."""
    source, target = gradients([0, 1, 2], mesh_tiling((8, 4), {"x": 1}, P(), np.array([0])))
    plan = build_plan(source, target, AMPLE)
    move = plan.moves[0]
    for rows in ([0, 1], [0, 1, 1]):
        route = replace(
            move.route,
            **{f: getattr(move.route, f)[rows] for f in ("lo", "hi", "target_row", "source_row", "relayed", "added")},
        )
        wrong = replace(plan, moves=(replace(move, route=route),))
        with pytest.raises(CheckError, match="lacks the part of a holder"):
            prove(wrong)
        with pytest.raises(CheckError, match="wrong bytes"):
            check_on_numpy(wrong)


def test_what_cannot_be_summed_is_one_clear_line():
    source, target = gradients([0, 8], mesh_tiling((8, 4), {"x": 1}, P(), np.array([0])))
    with pytest.raises(LayoutError, match=r"the target of shape \(8, 4\) is partial"):
        build_plan(target, source, AMPLE)
    islands = Topology("islands", TIERS[:2], np.stack([np.arange(16), np.arange(16) // 8]))
    with pytest.raises(TopologyError, match="no link to device 0 from device 8, whose part of a sum it needs"):
        build_plan(source, target, AMPLE, topology=islands)


def test_many_devices_push_their_gradients_to_flat_slices():
    """Data-parallel copies, cut over all their holders: a part of each slice from every copy but one's own."""
    shape, copies = (1024, 512), 256
    source, _ = gradients(range(copies), mesh_tiling(shape, {"x": 1}, P(), np.array([0])), shape)
    target = Layout(source.space, (mesh_tiling(shape, {"x": copies}, P("x"), np.arange(copies)),))
    topology = Topology.load("h100", copies)
    plan = build_plan(source, target, 2**20, topology=topology, granularity=Granularity.PACKED)
    verify(plan)
    assert plan.bytes_moved == (copies - 1) * source.space.nbytes
    assert plan.bytes_inter_node == (copies - 8) * source.space.nbytes
