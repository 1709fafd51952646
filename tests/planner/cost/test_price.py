"""Prices against sums done by hand."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dynajax.errors import TopologyError
from dynajax.meshes import Tier, Topology
from dynajax.planner import Granularity, build_plan
from dynajax.planner.cost.price import price_plan, worth_it
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
SPACE = Space((Tensor("w", (1024, 1024), "float32", 4),))
LINKS = Topology.regular(
    "hand", [(Tier("memory", 4e9, 0), 1), (Tier("bus", 2e9, 1e-3), 4), (Tier("net", 1e9, 5e-3), 0)], 8
)


def layout(spec, devices, mesh=None):
    mesh = mesh or {"x": len(devices)}
    return Layout(SPACE, (mesh_tiling((1024, 1024), mesh, spec, np.array(devices)),))


def test_one_message_takes_its_latency_and_its_bytes_over_the_links_speed():
    plan = build_plan(layout(P(), [0]), layout(P(), [4]), AMPLE, topology=LINKS)
    cost = price_plan(plan)
    nbytes = 4 * 2**20
    assert cost.memory_s == pytest.approx(nbytes / 4e9)
    assert cost.seconds == pytest.approx(5e-3 + nbytes / 1e9 + nbytes / 4e9)
    assert cost.floor_s == pytest.approx(nbytes / 1e9)
    assert cost.rounds == 1
    assert cost.bytes_by_tier == {"memory": 0, "bus": 0, "net": nbytes}


def test_rounds_add_up_and_directions_do_not():
    """Rows to columns on four devices of a node: three rounds of a sixteenth each way."""
    plan = build_plan(layout(P("x"), range(4)), layout(P(None, "x"), range(4)), AMPLE, topology=LINKS)
    cost = price_plan(plan)
    piece = 4 * 2**20 // 16
    assert cost.rounds == 3
    assert cost.seconds - cost.memory_s == pytest.approx(3 * (1e-3 + piece / 2e9))
    assert cost.bytes_by_tier == {"memory": 4 * piece, "bus": 12 * piece, "net": 0}


def test_a_device_whose_partner_is_free_does_not_wait_for_the_others():
    """Messages of 4 and 3 units side by side, then one of 2 from the sender of the 3: 5 units; 4 + 2 in lockstep."""
    ends = ([0, 2, 2], [1, 3, 4])
    space = Space(tuple(Tensor(f"w{k}", (n * 2**18,), "float32", 4) for k, n in enumerate((4, 3, 2))))
    source, target = (
        Layout(space, tuple(mesh_tiling(t.shape, {"x": 1}, P(), np.array([d])) for t, d in zip(space, at, strict=True)))
        for at in ends
    )
    bus = Topology.regular("bus", [(Tier("memory", 4e9, 0), 1), (Tier("bus", 2e9, 0), 0)], 8)
    cost = price_plan(build_plan(source, target, AMPLE, topology=bus))
    unit = 2**20 / 2e9
    assert cost.seconds - cost.memory_s == pytest.approx(5 * unit)
    assert cost.lockstep_s - cost.memory_s == pytest.approx(6 * unit)
    assert cost.rounds == 2


def test_relays_wait_for_what_they_pass_on():
    plan = build_plan(layout(P(), [0]), layout(P(), range(8)), AMPLE, topology=LINKS)
    nbytes = 4 * 2**20
    cost = price_plan(plan)
    first = 3 * (1e-3 + nbytes / 2e9) + 5e-3 + nbytes / 1e9
    assert cost.seconds - cost.memory_s == pytest.approx(first + 3 * (1e-3 + nbytes / 2e9))


def test_stages_pay_their_latency_again():
    ends = layout(P("x"), range(4)), layout(P(None, "x"), range(4))
    one, many = (build_plan(*ends, n, topology=LINKS, granularity=Granularity.PACKED) for n in (AMPLE, 2**18))
    assert price_plan(many).rounds > price_plan(one).rounds
    assert price_plan(many).seconds > price_plan(one).seconds
    assert price_plan(many).floor_s == price_plan(one).floor_s


def test_a_switch_is_worth_it_if_it_saves_more_than_it_costs():
    cost = price_plan(build_plan(layout(P(), [0]), layout(P(), [4]), AMPLE, topology=LINKS))
    assert worth_it(cost, 1e-3, 100)
    assert not worth_it(cost, 1e-3, 5)
    assert not worth_it(1.0, 0.5, 2)


def test_assumptions_name_the_links():
    cost = price_plan(build_plan(layout(P(), [0]), layout(P(), [4]), AMPLE), LINKS)
    assert "net 1 GB/s after 5000 µs" in cost.assumptions[0]


def test_without_a_topology_there_is_no_price():
    plan = build_plan(layout(P(), [0]), layout(P(), [4]), AMPLE)
    with pytest.raises(TopologyError, match="give one"):
        price_plan(plan)
    islands = Topology("islands", LINKS.tiers[:2], LINKS.domains[:2])
    with pytest.raises(TopologyError, match="no link between devices 0 and 4"):
        price_plan(plan, islands)
