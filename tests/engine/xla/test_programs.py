"""Programs of the XLA path: every bit arrives, few are compiled, and just what has to travel does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from engine.states import P, assert_same_bits, host_state, mesh, shardings, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

import dynajax as dj
from dynajax.arrays import _jax_private as private
from dynajax.engine import prepare_reshard
from dynajax.engine.transport import Path
from dynajax.errors import TopologyError
from dynajax.meshes import Tier, Topology

KINDS = [
    *("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "bool", "int8", "uint16"),
    *("int4", "uint2", "float4_e2m1fn", "complex64"),
]


def random_values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of random bits, NaNs among them."""
    kind = jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    if dtype == "bool" or dtype in ("int4", "uint2", "float4_e2m1fn"):
        return rng.integers(0, 2, shape).astype(kind)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("columns", [16, 6])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("tp8", P("tp")), ("fsdp2.tp2 permuted", P("fsdp", "tp"))),
        (("tp8", P("tp")), ("tp8 reversed", P("tp"))),
        (("dp2.tp4", P("tp")), ("tp8", P("tp"))),
        (("tp2 disjoint", P(None, "tp")), ("tp8", P("tp"))),
    ],
)
def test_every_bit_arrives_in_one_part_and_in_many(dtype: str, columns: int, source: tuple, target: tuple) -> None:
    values = random_values(dtype, (64, columns))
    x = jax.block_until_ready(jax.device_put(values, NamedSharding(mesh(source[0]), source[1])))
    for budget in ("6KB", "4MB"):
        moved, report = dj.reshard(x, NamedSharding(mesh(target[0]), target[1]), path="xla", check=True, budget=budget)
        assert_same_bits(moved, values)
        assert report.peak_extra_bytes <= report.budget_bytes


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    """How many programs of moves JAX has had compiled, or read from its cache."""
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        yield lambda: sum("Finished XLA compilation of jit(dynajax_" in r.getMessage() for r in caplog.records)


def _line(numbers: list[int]) -> Mesh:
    return Mesh(np.asarray(jax.devices())[numbers], ("x",))


def test_equal_geometry_on_other_devices_compiles_nothing(compiled: Callable[[], int]) -> None:
    """Rows to columns among the first eight devices, and then among others, in another order."""
    counts = []
    for numbers in ([0, 1, 2, 3, 4, 5, 6, 7], [12, 9, 10, 11, 8, 13, 14, 15], [8, 9, 2, 3, 19, 5, 16, 17]):
        values = random_values("float32", (48, 40))
        x = jax.device_put(values, NamedSharding(_line(numbers), P("x")))
        before = compiled()
        moved, _ = dj.reshard([x], NamedSharding(_line(numbers), P(None, "x")), path="xla")
        counts.append(compiled() - before)
        assert_same_bits(moved, [values])
    assert counts[1:] == [0, 0]


def test_many_leaves_share_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = jax.device_put([np.full(16, k, np.float32) for k in range(300)], NamedSharding(mesh("tp8"), P("tp")))
    move = prepare_reshard(tree, NamedSharding(mesh("tp8 reversed"), P()), path="xla")
    calls: list[int] = []
    run = private.run_compiled
    monkeypatch.setattr(
        private, "run_compiled", lambda program, given: (calls.append(len(given)), run(program, given))[1]
    )
    moved, _ = move(tree)
    assert all(np.array_equal(x, np.full(16, k, np.float32)) for k, x in enumerate(moved))
    assert len(calls) <= 2 + 300 // 16


def test_a_second_move_of_a_known_geometry_compiles_nothing(compiled: Callable[[], int]) -> None:
    before, _ = dj.reshard(state("dp2.tp4"), shardings("fsdp8"), path="xla")
    back, _ = dj.reshard(before, shardings("dp2.tp4"), path="xla")
    count = compiled()
    again, report = dj.reshard(back, shardings("fsdp8"), path="xla")
    assert compiled() == count
    assert report.compile_s == 0
    assert_same_bits(again, host_state())


MESHES = ["dp2.tp4", "fsdp8", "tp8", "tp8 reversed", "tp4 overlapping", "fsdp2.tp2 permuted", "tp2 disjoint", "sixteen"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MESHES), st.sampled_from(MESHES), st.data())
def test_bytes_that_travel_are_those_that_are_moved(source: str, target: str, data: st.DataObject) -> None:
    """Between meshes that divide an array each crosses once, and nothing else does."""
    ends = []
    for name in (source, target):
        axes = list(mesh(name).axis_names)
        ends.append(NamedSharding(mesh(name), P(*data.draw(st.permutations([*axes, None, None])).copy()[:2])))
    values = random_values("float32", (64, 32))
    moved, report = dj.reshard([jax.device_put(values, ends[0])], ends[1], path="xla")
    assert_same_bits(moved, [values])
    assert report.bytes_moved == report.bytes_lower_bound == report.bytes_travelled


def test_what_is_passed_on_inside_a_node_arrives(path: Path) -> None:
    """A plan for two nodes: each piece crosses once, to one device that gives it to the others."""
    tiers = [(Tier("memory", 4e9, 0), 1), (Tier("bus", 2e9, 0), 4), (Tier("net", 1e9, 0), 0)]
    nodes = Topology.regular("two nodes", tiers, 16)
    want = [np.arange(4096.0, dtype=np.float32).reshape(64, 64), np.arange(8, dtype=ml_dtypes.bfloat16)]
    moved = None
    for source, target in (("tp4 overlapping", "sixteen"), ("one device", "dp8"), ("fsdp2.tp2 permuted", "dp8")):
        tree = jax.device_put(want, NamedSharding(mesh(source), P("tp")))
        goal = NamedSharding(mesh(target), P("fsdp"))
        plan = dj.plan_reshard(tree, goal, donate=True, budget="64KB", path=path, topology=nodes)
        assert any(move.copies.relayed.any() for move in plan.moves)
        assert plan.bytes_inter_node == plan.bytes_inter_node_lower_bound
        moved, _ = dj.reshard(tree, goal, plan=plan, check=True, path=path)
        assert_same_bits(moved, want)
    with pytest.raises(TopologyError, match="device 7 and topology 'small' has 4"):
        dj.plan_reshard(moved, goal, topology=Topology.regular("small", tiers, 4))
