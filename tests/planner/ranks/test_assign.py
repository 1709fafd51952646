"""Ranks: as few bytes as any assignment of its kind, found by trying them all on small cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import array_layout_pairs, layout_pairs

from dynajax.errors import LayoutError, TopologyError
from dynajax.meshes import Strategy, Tier, Topology
from dynajax.planner import assign_ranks, build_plan, coupled_ranks, renumbered, verify
from dynajax.planner.ranks.assign import devices_of
from dynajax.vps import Layout, Space, Tensor, mesh_tiling, zero1_layout

P = PartitionSpec
AMPLE = 2**60
TIERS = [(Tier("memory", 1e9, 0), 1), (Tier("node", 1e9, 0), 2), (Tier("all", 1e8, 0), 0)]


def moved(source, target, devices):
    return build_plan(source, renumbered(target, devices), AMPLE).bytes_moved


def permutations_of(ranks, pool, size):
    """Every way to play the ranks, as arrays by rank number."""
    for chosen in itertools.permutations(pool, len(ranks)):
        devices = np.full(size, -1)
        devices[ranks] = chosen
        yield devices


@settings(max_examples=60)
@given(layout_pairs(max_devices=3))
def test_within_a_node_no_assignment_moves_less(pair):
    source, target = pair
    ranks = devices_of(target)
    pool = np.union1d(devices_of(source), ranks)
    chosen = assign_ranks(source, target)
    best = min(moved(source, target, d) for d in permutations_of(ranks, pool, target.num_devices))
    assert moved(source, target, chosen) == best
    assert len(np.unique(chosen[ranks])) == len(ranks)


@settings(max_examples=25)
@given(layout_pairs(max_devices=4))
def test_across_nodes_no_assignment_that_keeps_nodes_together_moves_less(pair):
    source, target = pair
    size = max(source.num_devices, target.num_devices)
    size += size % 2
    topology = Topology.regular("pairs", TIERS, size)
    ranks = devices_of(target)
    chosen = assign_ranks(source, target, topology, pool=np.arange(size))
    groups = [ranks[ranks // 2 == n] for n in range(size // 2) if (ranks // 2 == n).any()]
    assert all(len(np.unique(chosen[g] // 2)) == 1 for g in groups)
    best = np.inf
    for nodes in itertools.permutations(range(size // 2), len(groups)):
        for orders in itertools.product(*(itertools.permutations((0, 1), len(g)) for g in groups)):
            devices = np.full(target.num_devices, -1)
            for g, n, order in zip(groups, nodes, orders, strict=True):
                devices[g] = 2 * n + np.array(order)
            best = min(best, moved(source, target, devices))
    assert moved(source, target, chosen) == best


@settings(max_examples=60)
@given(layout_pairs(), st.integers(1, 4))
def test_ranks_never_cost_bytes_and_plans_stay_exact(pair, node):
    source, target = pair
    size = max(source.num_devices, target.num_devices, 1)
    topology = Topology.regular("even", [TIERS[0], (TIERS[1][0], node), TIERS[2]], size)
    devices = assign_ranks(source, target, topology)
    plan = build_plan(source, renumbered(target, devices), AMPLE, topology=topology)
    verify(plan)
    assert plan.bytes_moved <= build_plan(source, target, AMPLE).bytes_moved


@settings(max_examples=25)
@given(layout_pairs(max_devices=4))
def test_units_that_change_nodes_keep_more_and_never_less_than_whole_nodes(pair):
    """Single devices on nodes of two."""
    source, target = pair
    size = max(source.num_devices, target.num_devices)
    size += size % 2
    topology = Topology.regular("pairs", TIERS, size)
    ranks = devices_of(target)
    alone = assign_ranks(source, target, topology, np.arange(size), together=1)
    whole = assign_ranks(source, target, topology, np.arange(size))
    best = (
        min(moved(source, target, d) for d in permutations_of(ranks, range(min(size, 6)), target.num_devices))
        if size <= 6
        else 0
    )
    assert len(np.unique(alone[ranks])) == len(ranks)
    assert best <= moved(source, target, alone) <= moved(source, target, whole)


def test_experts_stay_where_their_weights_are_if_only_tensor_groups_must_stay_together():
    """Experts 0 to 3 are on the first node, and their two halves can be: each node then keeps half of what it needs."""
    space = Space((Tensor("w", (4, 8, 64), "float32", 4),))
    axes = {"w": ("layers", "expert", "embed")}
    source, target = (zero1_layout(space, axes, Strategy.parse(s)) for s in ("tp2.dp4/ep8", "tp2.dp4/ep4"))
    topology = Topology.regular("fours", [TIERS[0], (TIERS[1][0], 4), TIERS[2]], 8)
    whole, units = (assign_ranks(source, target, topology, together=n) for n in (None, 2))
    assert (units.reshape(-1, 2) // 4 == units.reshape(-1, 2)[:, :1] // 4).all()
    assert moved(source, target, units) == space.nbytes // 2
    assert moved(source, target, whole) == space.nbytes * 3 // 4
    assert build_plan(source, renumbered(target, units), AMPLE, topology=topology).bytes_inter_node == 0


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("tp4.pp8.dp4", 4),
        ("tp4.pp8.dp4/ep8", 8),
        ("tp4.pp8.dp4/ep16", 4),
        ("cp2.tp2.dp8", 4),
        ("ep4.cp2.dp8", 8),
        ("tp16.pp2", 16),
        ("tp8|2*tp4", 8),
        ("pp2.tp4|8*dp1", 4),
        ("tp2|tp4", None),
        ("tp6|tp4", None),
    ],
)
def test_ranks_that_talk_in_every_layer_are_close(strategy, ranks):
    assert coupled_ranks(Strategy.parse(strategy), Topology.load("h100", 64)) == ranks


def test_a_permuted_target_is_recognised_and_nothing_moves():
    space = Space((Tensor("w", (64, 4), "float32", 4),))
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    source, target = (Layout(space, (mesh_tiling((64, 4), {"x": 8}, P("x"), d),)) for d in (order, np.arange(8)))
    devices = assign_ranks(source, target)
    assert devices.tolist() == order.tolist()
    assert moved(source, target, devices) == 0


def test_equals_are_decided_for_the_order_of_the_caller():
    space = Space((Tensor("w", (64,), "float32", 4),))
    source, target = (Layout(space, (mesh_tiling((64,), {"x": 8}, s, np.arange(8)),)) for s in (P(), P("x")))
    assert assign_ranks(source, target, Topology.load("h100", 8)).tolist() == list(range(8))


def test_those_that_stay_are_those_that_hold_what_stays():
    """Shrink from 8 to 4 devices, of any of the 8: the holders of the second half of the pipeline keep it."""
    space = Space((Tensor("w", (8, 4), "float32", 4),))
    axes = {"w": ("layers", "mlp")}
    source = zero1_layout(space, axes, Strategy.parse("pp2.dp2.tp2"))
    target = zero1_layout(space, axes, Strategy.parse("pp2.tp2"))
    topology = Topology.regular("pairs", TIERS, 8)
    devices = assign_ranks(source, target, topology)
    assert moved(source, target, devices) == space.nbytes // 2
    assert moved(source, target, np.arange(4)) == space.nbytes * 3 // 4


def test_a_pool_may_be_larger_than_the_layouts_and_one_without_room_is_refused():
    space = Space((Tensor("w", (8, 4), "float32", 4),))
    there, back = (
        Layout(space, (mesh_tiling((8, 4), {"x": 4}, P("x"), np.array(d)),)) for d in ([0, 1, 2, 3], [3, 2, 1, 0])
    )
    assert assign_ranks(there, back, pool=np.arange(8)).tolist() == [3, 2, 1, 0]
    pairs = Topology.regular("pairs", TIERS, 4)
    with pytest.raises(TopologyError, match="use device 7 and topology 'pairs' has 4 devices"):
        assign_ranks(there, back, pairs, np.arange(8))
    with pytest.raises(LayoutError, match=r"1 groups of up to 4 ranks .* pool's 1 nodes of up to 3 devices"):
        assign_ranks(there, back, pool=np.arange(3))
    for pool in ([0, 1], [0, 1, 2]):
        with pytest.raises(LayoutError, match="2 groups of up to 2 ranks"):
            assign_ranks(there, back, pairs, np.array(pool))


@pytest.mark.parametrize("devices", [1024])
def test_a_thousand_devices_keep_their_tensor_groups_in_a_node(devices):
    space = Space((Tensor("w", (64, 256, 256), "float32", 4),))
    axes = {"w": ("layers", "embed", "mlp")}
    source, target = (zero1_layout(space, axes, Strategy.parse(s)) for s in ("tp8.pp8.dp16", "tp4.pp16.dp16"))
    topology = Topology.load("h100", devices)
    chosen = assign_ranks(source, target, topology)
    assert sorted(chosen.tolist()) == list(range(devices))
    assert (topology.node[chosen.reshape(-1, 4)] == topology.node[chosen.reshape(-1, 4)][:, :1]).all()
    assert moved(source, target, chosen) < moved(source, target, np.arange(devices))


@settings(max_examples=120)
@given(array_layout_pairs(), st.randoms(use_true_random=False))
def test_arrays_follow_their_devices_to_other_numbers(pair, random):
    source, target = pair
    devices = np.array(random.sample(range(2 * target.num_devices), target.num_devices), np.int64)
    placed = renumbered(target, devices)
    assert placed.bytes_by_device(2 * target.num_devices)[devices].tolist() == target.bytes_by_device().tolist()
    verify(build_plan(source, placed, AMPLE))
