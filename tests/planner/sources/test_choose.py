"""Plans that know the links: nodes are entered once, loads are level, nothing is lost."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import TIERS, end_to_end, held, layout_pairs, topologies
from scipy.optimize import linprog

from dynajax.errors import TopologyError
from dynajax.meshes import Topology
from dynajax.planner import build_plan, verify
from dynajax.vps import Layout, Space, Tensor, Tiling, interval, mesh_tiling
from dynajax.vps.tiling import segment_sum

P = PartitionSpec
AMPLE = 2**60
proof = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def brute_force_inter_node(source, target, node):
    """Bytes that the devices of a node need together and do not hold together."""
    total = 0
    for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True):
        for n in np.unique(node):
            devices = np.flatnonzero(node == n).tolist()
            need = np.any([held(after, d) for d in devices], axis=0)
            have = np.any([held(before, d) for d in devices], axis=0)
            total += int((need & ~have).sum()) * tensor.itemsize
    return total


@proof
@given(layout_pairs(), topologies())
def test_bytes_moved_and_bytes_between_nodes_are_the_least(pair, topology):
    source, target = pair
    plan = build_plan(source, target, AMPLE, topology=topology)
    verify(plan)
    assert plan.bytes_moved == plan.bytes_lower_bound
    least = brute_force_inter_node(source, target, topology.node)
    assert plan.bytes_inter_node == plan.bytes_inter_node_lower_bound == least


@proof
@given(layout_pairs(), topologies())
def test_a_piece_comes_from_the_nearest_tier_that_has_it(pair, topology):
    source, target = pair
    for move in build_plan(source, target, AMPLE, topology=topology).moves:
        route = move.route
        for k in np.flatnonzero(route.sent).tolist():
            holders = [
                d
                for d in move.source.devices.tolist()
                if held(move.source, d)[tuple(slice(a, b) for a, b in zip(route.lo[k], route.hi[k], strict=True))].all()
            ]
            receiver = np.full(len(holders), route.receiver[k])
            nearest = int(topology.between(np.array(holders), receiver).min())
            used = int(topology.between(route.sender[[k]], route.receiver[[k]])[0])
            assert used == nearest or (route.relayed[k] and used <= 1 < nearest)


def test_a_replica_wanted_by_a_whole_node_crosses_once_and_fans_out():
    space = Space(tuple(Tensor(f"w{k}", (64,), "float32", 4) for k in range(8)))
    topology = Topology.load("h100", 16)
    one = Layout(space, tuple(mesh_tiling((64,), {"x": 8}, P(), np.arange(8)) for _ in space))
    two = Layout(space, tuple(mesh_tiling((64,), {"x": 16}, P(), np.arange(16)) for _ in space))
    plan = build_plan(one, two, AMPLE, topology=topology)
    verify(plan)
    assert plan.bytes_inter_node == 8 * 256
    assert plan.bytes_moved == 8 * 8 * 256
    sent = plan.bytes_sent
    assert sent[:8, 8:].sum(axis=0).tolist() == [256] * 8
    assert sent[:8, 8:].sum(axis=1).tolist() == [256] * 8
    assert sent[8:, 8:].sum(axis=1).tolist() == [7 * 256] * 8
    assert build_plan(one, two, AMPLE).bytes_sent[8:].sum() == 0


def test_a_replica_on_the_own_node_is_not_fetched_from_another():
    space = Space((Tensor("w", (4, 4), "float32", 4),))
    source = Layout(space, (mesh_tiling((4, 4), {"x": 4}, P(), np.array([0, 3, 4, 7])),))
    target = Layout(space, (mesh_tiling((4, 4), {"x": 4}, P("x"), np.array([1, 2, 5, 6])),))
    topology = Topology.regular("fours", [(TIERS[0], 1), (TIERS[1], 4), (TIERS[3], 0)], 8)
    assert build_plan(source, target, AMPLE, topology=topology).bytes_inter_node == 0


def least_load(before, after):
    """The least possible largest sender load, in elements, as a linear programme over fractions of elements."""
    choices = []
    for device, lo, hi in zip(after.holder.tolist(), after.region.lo, after.region.hi, strict=True):
        for element in np.argwhere(held(after, device) & ~held(before, device)):
            if (lo <= element).all() and (element < hi).all():
                choices.append([d for d in before.devices.tolist() if held(before, d)[tuple(element)]])
    columns = [(k, d) for k, holders in enumerate(choices) for d in holders]
    devices = int(before.devices[-1]) + 1
    whole, load = np.zeros((len(choices), len(columns) + 1)), np.zeros((devices, len(columns) + 1))
    load[:, -1] = -1
    for j, (k, d) in enumerate(columns):
        whole[k, j], load[d, j] = 1, 1
    cost = np.append(np.zeros(len(columns)), 1.0)
    return linprog(cost, A_ub=load, b_ub=np.zeros(devices), A_eq=whole, b_eq=np.ones(len(choices))).fun


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_sender_loads_of_every_route_are_within_a_piece_of_the_optimum(data):
    """Copies of slices on overlapping groups of devices; every element is asked for by newcomers."""
    space = Space(tuple(Tensor(f"t{k}", (12,), "float32", 4) for k in range(data.draw(st.integers(1, 4)))))
    tilings = ([], [])
    for _ in space:
        slices, parts = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([2, 3, 4]))
        held_by = [data.draw(st.sets(st.integers(0, 4), min_size=1, max_size=4)) for _ in range(slices)]
        spans = [interval((12,), 12 * k // slices, 12 * (k + 1) // slices) for k in range(slices)]
        mine = [(d, [s for s, who in zip(spans, held_by, strict=True) if d in who]) for d in range(5)]
        tilings[0].append(Tiling.of_regions((12,), [(d, end_to_end(some)) for d, some in mine if some]))
        cut = [(5 + k, interval((12,), 12 * k // parts, 12 * (k + 1) // parts)) for k in range(parts)]
        tilings[1].append(Tiling.of_regions((12,), cut))
    source, target = (Layout(space, tuple(t)) for t in tilings)
    for move in build_plan(source, target, AMPLE).moves:
        sent = segment_sum(move.route.sender, move.route.volumes, 5).max()
        best = least_load(move.source, move.target)
        assert best - 1e-6 <= sent <= best + int(move.route.volumes.max()) + 1e-6


@st.composite
def meshes_of_replicas(draw):
    """Two ways to lay a tensor on a mesh of the same devices, with copies along the axes that its spec leaves out."""
    sizes = draw(st.sampled_from([{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}]))
    specs = []
    for _ in range(2):
        axes = draw(st.permutations(sorted(sizes)))
        first, last = sorted(draw(st.tuples(*[st.integers(0, len(axes))] * 2)))
        specs.append(P(tuple(axes[:first]) or None, tuple(axes[first:last]) or None))
    return tuple(mesh_tiling((16, 16), sizes, spec, np.arange(8)) for spec in specs)


@proof
@given(meshes_of_replicas())
def test_replicas_share_what_every_route_sends(tilings):
    """Holders of the same elements send as much, but for a piece."""
    space = Space((Tensor("w", (16, 16), "float32", 4),))
    source, target = (Layout(space, (t,)) for t in tilings)
    (move,) = build_plan(source, target, AMPLE).moves
    before = move.source
    sent = segment_sum(move.route.sender, move.route.volumes * move.route.sent, 8)
    piece = int((move.route.volumes * move.route.sent).max(initial=0))
    for k in range(before.region.count):
        alike = [d for d in range(8) if (before.region_of(d).lo == before.region.lo[k]).all()]
        assert np.ptp(sent[alike]) <= piece


@pytest.mark.parametrize("spec", [P(("dp", "tp")), P(("tp", "dp"))])
def test_who_keeps_its_shard_need_not_send_as_well(spec):
    """Four shards on eight devices, cut in eight: each device sends one message or keeps its own."""
    space = Space(tuple(Tensor(f"w{k}", (64, 64), "float32", 4) for k in range(3)))
    source = Layout(space, (mesh_tiling((64, 64), {"dp": 2, "tp": 4}, P("tp"), np.arange(8)),) * 3)
    target = Layout(space, (mesh_tiling((64, 64), {"tp": 4, "dp": 2}, spec, np.arange(8)),) * 3)
    plan = build_plan(source, target, AMPLE)
    assert len(plan.routes) == 1
    ((route, _),) = plan.routes
    assert sorted(route.sender.tolist()) == sorted(route.receiver.tolist()) == list(range(8))


def test_what_is_equal_in_a_route_is_levelled_over_the_state():
    """Each tensor is sent to one newcomer by one of four that have it: each of these sends one in turn."""
    space = Space(tuple(Tensor(f"w{k}", (8, k + 1), "float32", 4) for k in range(4)))
    source = Layout(space, tuple(mesh_tiling(t.shape, {"x": 4}, P(), np.arange(4)) for t in space))
    target = Layout(space, tuple(mesh_tiling(t.shape, {"x": 1}, P(), np.array([4])) for t in space))
    assert (build_plan(source, target, AMPLE).bytes_sent[:4, 4] > 0).all()


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(["dp", "tp", "mixed"], 2)))
def test_equal_holders_send_equally(before, after):
    """Eight replicas or shards to eight newcomers: nobody sends more than its share."""
    specs = {"dp": P(), "tp": P(("a", "b")), "mixed": P("b")}
    space = Space(tuple(Tensor(f"w{k}", (64, 64), "float32", 4) for k in range(8)))
    mesh = {"a": 2, "b": 4}
    source = Layout(space, tuple(mesh_tiling((64, 64), mesh, specs[before], np.arange(8)) for _ in space))
    target = Layout(space, tuple(mesh_tiling((64, 64), mesh, specs[after], np.arange(8, 16)) for _ in space))
    sent = build_plan(source, target, AMPLE).bytes_sent.sum(axis=1)[:8]
    assert sent.max() == sent.min()


def test_a_missing_device_or_link_is_one_clear_line():
    space = Space((Tensor("w", (4,), "float32", 4),))
    a, b = (Layout(space, (mesh_tiling((4,), {"x": 2}, P("x"), np.array(d)),)) for d in ([0, 1], [8, 9]))
    with pytest.raises(TopologyError, match=r"use device 9 and topology 'pcie4' has 8 devices"):
        build_plan(a, b, AMPLE, topology=Topology.load("pcie4", 8))
    islands = Topology("islands", TIERS[:2], np.stack([np.arange(16), np.arange(16) // 8]))
    with pytest.raises(TopologyError, match="no link to device 8 from any device that holds what it needs"):
        build_plan(a, b, AMPLE, topology=islands)
