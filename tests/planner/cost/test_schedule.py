"""Schedules on paper: as few collectives as a small cluster needs, and none longer than the busiest device is busy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dynajax.planner import build_plan
from dynajax.planner.cost.schedule import Schedule, scheduled
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
SHAPES = {"kernel": (256, 1024), "scale": (256,)}

# Meshes and specs of the kernel before and after, as switches of fsdp and tp make them, on n devices.
REGULAR = {
    "tensor parallelism halved": (lambda n: {"fsdp": n // 8, "tp": 8}, lambda n: {"fsdp": n // 4, "tp": 4}),
    "tensor parallelism begun": (lambda n: {"fsdp": n, "tp": 1}, lambda n: {"fsdp": n // 8, "tp": 8}),
    "twice the devices": (lambda n: {"fsdp": n // 8, "tp": 4}, lambda n: {"fsdp": n // 8, "tp": 8}),
    "more copies": (
        lambda n: {"dp": n // 16, "fsdp": 2, "tp": 8},
        lambda n: {"dp": n // 8, "fsdp": 2, "tp": 4},
    ),
}


def layout(mesh, spec=None):
    """A kernel cut by both, a scale cut by fsdp."""
    space = Space(tuple(Tensor(name, shape, "float32", 4) for name, shape in SHAPES.items()))
    devices = np.arange(int(np.prod(list(mesh.values()))))
    specs = P("fsdp", "tp"), P("fsdp")
    return Layout(
        space, tuple(mesh_tiling(t.shape, mesh, spec or s, devices) for t, s in zip(space, specs, strict=True))
    )


def plan_of(switch, devices):
    before, after = REGULAR[switch]
    return build_plan(layout(before(devices)), layout(after(devices)), AMPLE)


@pytest.mark.parametrize("switch", REGULAR)
@pytest.mark.parametrize("devices", [16, 32, 64, 128])
def test_critical_bytes_of_a_regular_switch_are_those_of_the_busiest_device(switch, devices):
    plan = plan_of(switch, devices)
    busiest = 0
    for move in plan.moves:
        route, sent = move.route, move.route.sent
        loads = (np.bincount(end[sent], weights=route.volumes[sent]) for end in (route.sender, route.receiver))
        busiest += move.tensor.itemsize * max(load.max(initial=0) for load in loads)
    assert scheduled(plan).critical_bytes <= 1.05 * busiest


@pytest.mark.parametrize("switch", REGULAR)
def test_collectives_of_a_regular_switch_do_not_grow_with_the_devices(switch):
    counts = [scheduled(plan_of(switch, devices)).collectives for devices in (16, 32, 64, 128)]
    assert max(counts[1:]) <= max(counts[0], 4)


def test_a_native_collective_is_one_and_takes_a_message_for_each_other_device():
    space = Space((Tensor("w", (8, 8), "float32", 4),))
    rows, columns = (
        Layout(space, (mesh_tiling((8, 8), {"x": 8}, spec, np.arange(8)),)) for spec in (P("x"), P(None, "x"))
    )
    assert scheduled(build_plan(rows, columns, AMPLE)) == Schedule(1, 7 * 4)


def test_who_keeps_its_shard_makes_no_round_more():
    space = Space((Tensor("w", (64, 64), "float32", 4),))
    source = Layout(space, (mesh_tiling((64, 64), {"dp": 2, "tp": 4}, P("tp"), np.arange(8)),))
    target = Layout(space, (mesh_tiling((64, 64), {"x": 8}, P("x"), np.arange(8)),))
    assert scheduled(build_plan(source, target, AMPLE)) == Schedule(1, 4 * 64 * 8)


@given(st.integers(1, 5))
def test_tensors_that_go_alike_go_one_after_the_other(count):
    space = Space(tuple(Tensor(f"w{k}", (8,), "float32", 4) for k in range(count)))
    source, target = (Layout(space, (mesh_tiling((8,), {"x": 1}, P(), np.array([d])),) * count) for d in (0, 1))
    assert scheduled(build_plan(source, target, AMPLE)) == Schedule(count, 32 * count)
