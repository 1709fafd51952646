"""Plans seen before, and what may not change a digest."""

import numpy as np
from jax.sharding import PartitionSpec

from dynajax.meshes import Topology
from dynajax.planner import Memory, Plans, build_plan
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60


def layout(spec, order, paths=("a", "b", "c")):
    """A layout made anew, with arrays of its own."""
    space = Space(tuple(Tensor(p, (16, 16), "float32", 4) for p in paths))
    return Layout(space, tuple(mesh_tiling((16, 16), {"x": 4}, spec, np.array(order)) for _ in space))


def test_a_pair_of_layouts_seen_before_is_not_planned_again():
    plans = Plans()
    first = plans.build(layout(P("x"), range(4)), layout(P(None, "x"), range(4)), AMPLE)
    assert plans.build(layout(P("x"), range(4)), layout(P(None, "x"), range(4), "cba"), AMPLE) is first
    assert len(plans) == 1


def test_what_makes_another_plan_is_told_apart():
    plans = Plans()
    a, b = layout(P("x"), range(4)), layout(P(None, "x"), range(4))
    asked = [
        (a, b, AMPLE, True, None, Memory.SHARDS),
        (b, a, AMPLE, True, None, Memory.SHARDS),
        (a, b, 4096, True, None, Memory.SHARDS),
        (a, b, AMPLE, False, None, Memory.SHARDS),
        (a, b, AMPLE, True, Topology.load("h100", 4), Memory.SHARDS),
        (a, b, AMPLE, True, None, Memory.PACKED),
        (layout(P("x"), [1, 0, 2, 3]), b, AMPLE, True, None, Memory.SHARDS),
        (layout(P("x"), range(4), "abd"), layout(P(None, "x"), range(4), "abd"), AMPLE, True, None, Memory.SHARDS),
    ]
    made = [plans.build(s, t, n, d, topology=links, memory=m) for s, t, n, d, links, m in asked]
    assert len({id(p) for p in made}) == len(asked)
    assert [plans.build(s, t, n, d, topology=links, memory=m) for s, t, n, d, links, m in asked] == made


def test_old_plans_make_room():
    plans = Plans(keep=2)
    ends = [layout(P("x"), np.roll(range(4), k)) for k in range(4)]
    first = plans.build(ends[0], ends[1], AMPLE)
    plans.build(ends[0], ends[2], AMPLE)
    assert plans.build(ends[0], ends[1], AMPLE) is first
    plans.build(ends[0], ends[3], AMPLE)
    assert len(plans) == 2
    assert plans.build(ends[0], ends[1], AMPLE) is first
    assert plans.build(ends[0], ends[2], AMPLE) is not first


def test_looking_at_a_plan_does_not_change_its_digest():
    one, two = (build_plan(layout(P("x"), range(4)), layout(P(None, "x"), range(4)), AMPLE) for _ in range(2))
    _ = one.bytes_sent, one.bytes_lower_bound, one.moves[0].copies.volumes, one.rounds
    assert one.digest == two.digest


def test_equal_tensors_share_one_route():
    plan = build_plan(layout(P("x"), range(4)), layout(P(None, "x"), range(4)), AMPLE)
    assert len({id(m.route) for m in plan.moves}) == len(plan.routes) == 1
    assert plan.routes[0][1] == 12
