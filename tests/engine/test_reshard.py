"""Live state between all pairs of layouts: bits, structure, ownership, bytes, against slices of the whole arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engine.states import PLACEMENTS, P, assert_same_bits, bytes_not_held, host_state, mesh, shardings, state
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

import dynajax as dj
from dynajax.arrays import _jax_private as private
from dynajax.engine import plan_reshard
from dynajax.engine.transport import Path
from dynajax.meshes import Tier, Topology

NAMES = list(PLACEMENTS)


def targets(source: str, path: Path) -> list[str]:
    """All, or where programs are compiled for each pair two, so that each placement is a target twice as well."""
    k = NAMES.index(source)
    return [NAMES[(k + 1) % len(NAMES)], NAMES[(k + 5) % len(NAMES)]] if path == "xla" else NAMES


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("donate", [False, True])
def test_every_pair_is_bit_equal_with_the_fewest_bytes(source: str, donate: bool, path: Path) -> None:
    want = host_state()
    for target in targets(source, path):
        before = state(source)
        after, report = dj.reshard(before, shardings(target), donate=donate, check=True, path=path)
        assert report.path == path
        assert_same_bits(after, want)
        assert jax.tree.map(lambda x: x.sharding, after) == shardings(target)
        assert after["weak"].aval.weak_type
        assert (
            report.bytes_moved == report.bytes_lower_bound == bytes_not_held(want, shardings(source), shardings(target))
        )
        assert report.peak_extra_bytes <= report.budget_bytes
        assert report.leaves == len(jax.tree.leaves(want))
        if donate:
            assert all(a.is_deleted() or a is b for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
        else:
            assert_same_bits(before, want)


@pytest.mark.parametrize("target", NAMES)
def test_device_put_gives_the_same(target: str) -> None:
    before = state("fsdp4.tp2")
    after, _ = dj.reshard(before, shardings(target))
    for x, got in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        if x.size and x.dtype not in (jnp.float8_e5m2, jnp.bfloat16):  # device_put changes NaN bits of these
            assert_same_bits(got, jax.block_until_ready(jax.device_put(x, got.sharding)))


@pytest.mark.parametrize("kinds", [("device", "pinned_host"), ("pinned_host", "device")])
@pytest.mark.parametrize("target", ["dp2.tp4", "tp4 overlapping", "tp8 reversed"])
def test_memory_kinds(kinds: tuple[str, str], target: str, path: Path) -> None:
    want = host_state()["params"]
    source_shardings, target_shardings = (
        jax.tree.map(lambda s, kind=kind: s.with_memory_kind(kind), shardings(name)["params"])
        for name, kind in zip(("dp2.tp4", target), kinds, strict=True)
    )
    before = jax.device_put(want, source_shardings)
    after, report = dj.reshard(before, target_shardings, donate=True, path=path)
    assert_same_bits(after, want)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(after)} == {kinds[1]}
    assert report.bytes_moved == sum(s.data.nbytes for x in jax.tree.leaves(after) for s in x.addressable_shards)


def test_a_kept_shard_keeps_its_buffer(path: Path) -> None:
    whole = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    x = jax.jit(lambda a: a + 0, out_shardings=NamedSharding(mesh("dp2.tp4"), P(None, "tp")))(whole)
    pointers = {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    moved, report = dj.reshard(x, NamedSharding(mesh("dp2.tp4"), P(None, ("tp",))), donate=True, path=path)
    assert {s.device: s.data.unsafe_buffer_pointer() for s in moved.addressable_shards} == pointers
    half = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    smaller, report = dj.reshard(moved, NamedSharding(half, P(None, "x")), donate=True, path=path)
    assert {s.device: s.data.unsafe_buffer_pointer() for s in smaller.addressable_shards}.items() <= pointers.items()
    assert report.bytes_moved == 0
    assert moved.is_deleted()
    step = jax.jit(lambda a: a + 1, donate_argnums=0)
    assert np.array_equal(step(smaller), whole + 1)


def test_without_donation_the_source_outlives_a_donated_result(path: Path) -> None:
    want = host_state()
    before = state("dp8")
    for target in ("dp8", "one device", "dp2.tp4"):
        after, _ = dj.reshard(before, shardings(target), path=path)
        numbers = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating)]
        step = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
        jax.block_until_ready(step(numbers))
        assert all(x.is_deleted() for x in numbers)
        assert_same_bits(before, want)


def test_the_result_outlives_a_donated_or_deleted_source(path: Path) -> None:
    want = host_state()
    before = state("dp8")
    after, _ = dj.reshard(before, shardings("dp8"), path=path)
    numbers = [x for x in jax.tree.leaves(before) if jnp.issubdtype(x.dtype, jnp.floating)]
    jax.block_until_ready(jax.jit(lambda xs: [x * 0 for x in xs], donate_argnums=0)(numbers))
    for x in jax.tree.leaves(before):
        x.delete()
    del before, numbers
    jax.block_until_ready([jnp.full((64, 64), 7.0) + k for k in range(50)])  # something to overwrite freed memory with
    assert_same_bits(after, want)


def test_using_a_source_that_was_given_up_raises_and_nothing_worse(path: Path) -> None:
    before = state("dp2.tp4")
    dj.reshard(before, shardings("tp4 overlapping"), donate=True, path=path)
    for x in jax.tree.leaves(before):
        assert x.is_deleted()
        with pytest.raises(RuntimeError, match="deleted"):
            jax.jit(lambda a: a)(x)
    with pytest.raises(dj.DynajaxError, match="deleted or donated"):
        dj.reshard(before, shardings("dp8"))


def test_one_array_at_two_places_becomes_two(path: Path) -> None:
    x = jax.device_put(np.arange(32.0).reshape(8, 4), NamedSharding(mesh("tp8"), P("tp")))
    tied = {"emb": x, "head": x, "alias": jax.make_array_from_single_device_arrays(x.shape, x.sharding, x._arrays)}
    step = jax.jit(lambda t: {k: a + 1 for k, a in t.items()}, donate_argnums=0)
    for target in ("tp8", "dp2.tp4", "tp2 disjoint"):
        moved, _ = dj.reshard(tied, NamedSharding(mesh(target), P("tp")), donate=False, path=path)
        stepped = jax.block_until_ready(step(moved))
        assert all(np.array_equal(a, np.arange(32.0).reshape(8, 4) + 1) for a in stepped.values())
    planned = dj.plan_reshard(tied, NamedSharding(mesh("tp8"), P("tp")), donate=True, path=path)
    moved, _ = dj.reshard(tied, NamedSharding(mesh("tp8"), P("tp")), plan=planned, path=path)
    assert all(np.array_equal(a, np.arange(32.0).reshape(8, 4)) for a in moved.values())
    jax.block_until_ready(step(moved))


def test_other_shardings_and_leaves_without_devices(path: Path) -> None:
    tree = {"x": jnp.arange(6.0), "n": 3, "f": 2.5, "s": "text", "none": None, "np": np.float32(1), "l": [jnp.ones(2)]}
    moved, report = dj.reshard(tree, SingleDeviceSharding(jax.devices()[3]), path=path)
    assert moved["x"].devices() == moved["l"][0].devices() == {jax.devices()[3]}
    assert (moved["n"], moved["f"], moved["s"], moved["none"]) == (3, 2.5, "text", None)
    assert type(moved["n"]) is int
    assert moved["np"] is tree["np"]
    assert report.leaves == 2
    back, _ = dj.reshard(moved, jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree))
    assert np.array_equal(back["x"], np.arange(6.0))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_meshes_with_auto_and_explicit_axes_and_an_ambient_mesh(axis_type: AxisType) -> None:
    devices = np.asarray(jax.devices()[:8])
    source = Mesh(devices.reshape(2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    target = Mesh(devices[::-1].reshape(4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    x = jax.device_put(whole, NamedSharding(source, P("a", "b")))
    with jax.set_mesh(source):
        moved, _ = dj.reshard(x, NamedSharding(target, P("b", "a")))
        assert jax.sharding.get_mesh() == source
    assert np.array_equal(moved, whole)
    with jax.set_mesh(target):
        assert np.array_equal(jax.jit(lambda a: a * 2)(moved), whole * 2)
    typed = jax.typeof(jax.device_put(whole, NamedSharding(target, P("b", "a"))))
    assert jax.typeof(moved) == typed


OPTIMIZERS = {
    "chain": optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.scale_by_schedule(lambda n: 1.0)),
    "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "multi_transform": optax.multi_transform(
        {"x": optax.adam(1e-3), "y": optax.sgd(1e-2, momentum=0.9)}, {"w": "x", "b": "y"}
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 4),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_keep_their_nodes_and_go_on(name: str) -> None:
    optimizer: Any = OPTIMIZERS[name]
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    update = jax.jit(optimizer.update)
    opt = update(params, optimizer.init(params), params)[1]
    placed = jax.device_put(opt, NamedSharding(mesh("dp8"), P()))
    moved, _ = dj.reshard(placed, NamedSharding(mesh("tp4 overlapping"), P()), donate=True)
    assert_same_bits(moved, jax.tree.map(np.asarray, opt))
    on = jax.device_put(params, NamedSharding(mesh("tp4 overlapping"), P()))
    kept = jax.lax.cond(True, lambda s: update(on, s, on)[1], lambda s: s, moved)
    assert_same_bits(kept, jax.tree.map(np.asarray, update(params, opt, params)[1]))


def test_returning_to_a_known_layout_traces_nothing() -> None:
    traces = []

    @jax.jit
    def step(s: Any) -> Any:
        traces.append(1)
        return {"weak": s["weak"] * 2, "w": s["w"] + 1}

    def on(name: str) -> dict[str, NamedSharding]:
        return {"weak": NamedSharding(mesh(name), P()), "w": NamedSharding(mesh(name), P("tp"))}

    s: Any = {"weak": jnp.asarray(1.0), "w": jnp.arange(8.0)}
    s = jax.device_put(s, on("tp8"))
    for name in ("tp8", "tp8 reversed", "tp8", "tp8 reversed"):
        s, _ = dj.reshard(s, on(name), donate=True)
        for _ in range(2):
            s = step(s)
        assert s["weak"].aval.weak_type
        assert s["weak"].committed
    assert len(traces) == 1


def test_a_report_says_over_which_links_the_bytes_went():
    source = {"a": jax.device_put(np.arange(32.0), jax.devices()[0]), "b": jax.device_put(np.ones(8), jax.devices()[1])}
    target = NamedSharding(Mesh(np.asarray(jax.devices()[:8]), ("x",)), P("x"))
    pinned = {"a": target, "b": SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")}
    _, report = dj.reshard(source, pinned)
    assert report.bytes_by_tier == {"device": source["b"].nbytes, "process": source["a"].nbytes * 7 // 8, "network": 0}
    assert sum(report.bytes_by_tier.values()) == report.bytes_moved
    tiers = [(Tier("memory", 1e12, 0.0), 1), (Tier("near", 1e11, 0.0), 2), (Tier("far", 1e10, 0.0), 0)]
    plan = plan_reshard({"a": source["a"]}, target, topology=Topology.regular("pairs", tiers, 8))
    _, report = dj.reshard({"a": source["a"]}, target, plan=plan)
    assert report.bytes_by_tier == {"memory": 0, "near": source["a"].nbytes // 8, "far": source["a"].nbytes * 6 // 8}


def test_an_array_past_31_bits_of_elements(path: Path) -> None:
    """Each element is its position mod 251, so that no second copy of the whole is needed to compare with."""
    rows, columns, at_once = 16, 2**27 + 256, 2**24
    remainders = (np.arange(at_once + 251) % 251).astype(np.uint8)
    # The second path is slow on CPU: there only the last two of sixteen rows change places.
    moves = {"shared memory": ([0, 1], [0, 2, 3, 1]), "xla": (range(rows), [*range(rows - 2), rows - 1, rows - 2])}
    source, target = (
        NamedSharding(Mesh(np.asarray([jax.devices()[k] for k in numbers]), ("x",)), P("x")) for numbers in moves[path]
    )

    def parts(shard: np.ndarray[Any, Any], row: int) -> Any:
        """Runs of the rows from ``row``, each with what it has to be."""
        flat = shard.reshape(-1)
        for start in range(0, flat.size, at_once):
            part = flat[start : start + at_once]
            yield part, remainders[(row * columns + start) % 251 :][: part.size]

    shards = []
    for device, index in source.devices_indices_map((rows, columns)).items():
        held = range(rows)[index[0]]
        shard = np.empty((len(held), columns), np.uint8)
        for part, wanted in parts(shard, held[0]):
            part[:] = wanted
        shards.append(jax.device_put(shard, device))
    whole = jax.make_array_from_single_device_arrays((rows, columns), source, shards)
    del shards, shard, part
    assert whole.size == 2**31 + 4096
    donate = path == "shared memory"  # with room for a shard; buckets of the other path would be as large
    moved, report = dj.reshard(whole, target, donate=donate, budget="600MB" if donate else "64MB", path=path)
    whole.delete()
    assert report.bytes_moved == report.bytes_lower_bound >= 2 * columns
    for shard in moved.addressable_shards:
        row = range(rows)[shard.index[0]][0]
        assert all(np.array_equal(part, wanted) for part, wanted in parts(np.asarray(shard.data), row)), row


def test_shards_that_share_a_buffer_keep_it_and_a_step_may_donate_one_of_two_arrays_that_do(path: Path) -> None:
    """As JAX makes them of one numpy array: replicas stay where they are, and no step overwrites another array."""
    room = np.zeros(32 + 16, np.float32)
    first = -room.ctypes.data % 64 // 4
    own, sharding = room[first : first + 32], NamedSharding(mesh("dp8"), P())
    order = private.device_order(sharding)
    own[...] = np.arange(32)
    like = jax.ShapeDtypeStruct((32,), np.float32)
    one, two = (private.assemble((32,), like, sharding, [own] * len(order), order) for _ in range(2))
    assert private.pointers(one) == private.pointers(two) == (own.ctypes.data,) * 8
    target = {"one": NamedSharding(mesh("sixteen"), P()), "two": NamedSharding(mesh("dp8"), P())}
    moved, _ = dj.reshard({"one": one, "two": two}, target, donate=True, path=path)
    lies = {s.device: s.data.unsafe_buffer_pointer() for s in moved["one"].addressable_shards}
    assert [lies[d] for d in order] == [own.ctypes.data] * 8
    assert all(np.array_equal(x, np.arange(32)) for x in moved.values())
    for gone, left in (("two", "one"), ("one", None)):
        stepped = jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(moved.pop(gone)))
        assert np.array_equal(stepped, np.arange(32) + 1)
        assert left is None or np.array_equal(moved[left], np.arange(32))
