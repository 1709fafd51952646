"""Plans as values: what a digest tells apart, and what is shared."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import layout_pairs

from dynajax.planner import build_plan
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
proof = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@proof
@given(layout_pairs(), st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_order(pair, random):
    source, target = pair
    order = list(range(len(source.space)))
    random.shuffle(order)
    tensors = tuple(source.space.tensors[k] for k in order)
    before, after = (Layout(Space(tensors), layout.tilings) for layout in pair)
    assert build_plan(before, after, AMPLE).digest == build_plan(source, target, AMPLE).digest


def alike(spec):
    """A layout of three equal tensors, made anew, with arrays of its own."""
    space = Space(tuple(Tensor(p, (16, 16), "float32", 4) for p in "abc"))
    return Layout(space, tuple(mesh_tiling((16, 16), {"x": 4}, spec, np.arange(4)) for _ in space))


def test_looking_at_a_plan_does_not_change_its_digest():
    one, two = (build_plan(alike(P("x")), alike(P(None, "x")), AMPLE) for _ in range(2))
    _ = one.bytes_sent, one.bytes_lower_bound, one.moves[0].copies.volumes
    assert one.digest == two.digest


def test_equal_tensors_share_one_route():
    plan = build_plan(alike(P("x")), alike(P(None, "x")), AMPLE)
    assert len({id(m.route) for m in plan.moves}) == len(plan.routes) == 1
    assert plan.routes[0][1] == 12


def test_the_digest_tells_plans_apart():
    space = Space((Tensor("w", (8,), "float32", 4),))
    cut = [Layout(space, (mesh_tiling((8,), {"x": 4}, P("x"), np.array(d)),)) for d in ([0, 1, 2, 3], [3, 2, 1, 0])]
    digests = {
        build_plan(a, b, n, donate).digest for a in cut for b in cut for n in (32, 64) for donate in (True, False)
    }
    assert len(digests) == 16
