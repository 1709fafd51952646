"""Primitives are found where one would write them by hand, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec
from planner.random_layouts import layout_pairs

from dynajax.meshes import Topology
from dynajax.planner import build_plan
from dynajax.planner.cost.primitives import Primitive, operations
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
SPACE = Space((Tensor("w", (8, 8), "float32", 4),))


def layout(spec, devices, mesh=None):
    mesh = mesh or {"x": len(devices)}
    return Layout(SPACE, (mesh_tiling((8, 8), mesh, spec, np.array(devices)),))


CASES = [
    (Primitive.BROADCAST, layout(P(), [0]), layout(P(), [0, 1, 2, 3]), 1),
    (Primitive.SCATTER, layout(P(), [0]), layout(P("x"), [0, 1, 2, 3]), 1),
    (Primitive.SCATTER, layout(P(), [7]), layout(P("x"), [0, 1, 2, 3]), 1),
    (Primitive.GATHER, layout(P("x"), [0, 1, 2, 3]), layout(P(), [0]), 1),
    (Primitive.ALL_GATHER, layout(P("x"), [0, 1, 2, 3]), layout(P(), [0, 1, 2, 3]), 1),
    (Primitive.ALL_TO_ALL, layout(P("x"), [0, 1, 2, 3]), layout(P(None, "x"), [0, 1, 2, 3]), 1),
    (Primitive.ALL_GATHER, layout(P("x"), range(8)), layout(P("x"), range(8), {"x": 2, "y": 4}), 2),
    (Primitive.POINT_TO_POINT, layout(P("x"), [0, 1, 2, 3]), layout(P("x"), [4, 5, 6, 7]), 4),
    (Primitive.POINT_TO_POINT, layout(P("x"), [0, 1, 2, 3]), layout(P("x"), [1, 2, 3, 0]), 1),
]


@pytest.mark.parametrize(("primitive", "source", "target", "groups"), CASES)
def test_the_pattern_has_its_name(primitive, source, target, groups):
    plan = build_plan(source, target, AMPLE)
    found = operations(plan)
    assert [o.primitive for o in found] == [primitive] * groups
    assert sum(o.nbytes for o in found) == plan.bytes_moved
    assert {p for o in found for p in o.paths} == {"w"}


def test_replicas_that_fan_out_in_a_node_are_broadcasts_from_the_one_that_was_sent_to():
    plan = build_plan(layout(P(), [0]), layout(P(), range(8)), AMPLE, topology=Topology.regular("t", tiers(), 8))
    sent = plan.bytes_sent
    assert plan.bytes_inter_node == 256
    assert (sent > 0).sum() == 7
    assert (sent[:4, 4:] > 0).sum() == 1


def tiers():
    from dynajax.meshes import Tier

    return [(Tier("memory", 1e9, 0), 1), (Tier("node", 1e9, 0), 4), (Tier("net", 1e9, 0), 0)]


@settings(max_examples=80)
@given(layout_pairs())
def test_operations_are_all_that_is_sent(pair):
    source, target = pair
    plan = build_plan(source, target, AMPLE)
    found = operations(plan)
    assert sum(o.nbytes for o in found) == plan.bytes_moved
    pairs = {(s, r) for s, r in zip(plan.traffic.sender.tolist(), plan.traffic.receiver.tolist(), strict=True)}
    assert all({s for s, _ in pairs} >= set(o.senders) and {r for _, r in pairs} >= set(o.receivers) for o in found)
