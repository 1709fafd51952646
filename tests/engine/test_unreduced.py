"""Arrays with unreduced axes: their parts are summed on the way, to the bit as the plan's order says, on both paths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P
from jax.sharding import AxisType, Mesh, NamedSharding

import dynajax as dj
from dynajax.engine import Bundle, Stored
from dynajax.engine.shared_memory import transport as shared_memory
from dynajax.engine.transport import Path
from dynajax.engine.xla import bodies, programs
from dynajax.errors import CheckError, TargetError
from dynajax.meshes import Tier, Topology
from dynajax.vps import Run

EXPLICIT = (AxisType.Explicit,) * 2


def _mesh(numbers: Any, columns: int, kinds: Any = EXPLICIT) -> Mesh:
    return Mesh(np.asarray(jax.devices())[list(numbers)].reshape(-1, columns), ("x", "y"), axis_types=kinds)


def _parts(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> tuple[jax.Array, np.ndarray]:
    """An array whose shards are parts of sums, and the sums: one part after the other, by number of the device."""
    rng = np.random.default_rng(seed)
    total, begun, shards = np.zeros(shape, dtype), np.zeros(shape, bool), {}
    index = NamedSharding(sharding.mesh, P(*sharding.spec.partitions)).devices_indices_map(shape)
    for device in sorted(index, key=lambda d: d.id):
        part = (rng.standard_normal(total[index[device]].shape) * 5).astype(dtype)
        shards[device] = jax.device_put(part, device)
        total[index[device]] = np.where(begun[index[device]], total[index[device]] + part, part)
        begun[index[device]] = True
    buffers = [shards[d] for d in index]
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers), total


def _assert_is(moved: jax.Array, want: np.ndarray) -> None:
    assert moved.dtype == want.dtype
    for shard in moved.addressable_shards:
        assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes(), shard.device


SOURCES = {
    "rows, summed over the rest": NamedSharding(_mesh(range(8), 4), P("x", unreduced=frozenset({"y"}))),
    "all summed": NamedSharding(_mesh([3, 1, 0, 2], 2), P(unreduced=frozenset({"x", "y"}))),
    "columns": NamedSharding(_mesh(range(4, 12), 2), P(None, "y", unreduced=frozenset({"x"}))),
}
TARGETS = {
    "other columns": NamedSharding(_mesh(range(8), 8, (AxisType.Auto,) * 2), P(None, "y")),
    "copies": NamedSharding(_mesh([5, 2, 9], 1), P()),
    "rows": NamedSharding(_mesh(range(8), 4), P("x")),
}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e4m3fn, np.int8, np.complex64])
@pytest.mark.parametrize("before", SOURCES)
@pytest.mark.parametrize("after", TARGETS)
def test_parts_are_summed_in_the_order_of_their_devices(dtype: Any, before: str, after: str, path: Path) -> None:
    large, small = _parts(SOURCES[before], (48, 64), dtype), _parts(SOURCES[before], (4, 24), dtype, 1)
    tree, want = {"l": large[0], "s": small[0]}, {"l": large[1], "s": small[1]}
    for donate in (False, True):
        moved, report = dj.reshard(tree, TARGETS[after], donate=donate, check=True, path=path, budget="64KB")
        for name, x in moved.items():
            _assert_is(x, want[name])
            assert x.sharding == TARGETS[after]
        assert report.bytes_moved == report.bytes_lower_bound
        assert all(x.is_deleted() == donate for x in tree.values())


def test_many_gradients_that_a_step_left_unreduced(path: Path) -> None:
    """As ``jit`` makes them: small ones share crates with others of their dtype, beside leaves that are whole."""
    mesh = _mesh(range(8), 4)
    rng = np.random.default_rng(0)
    x, w = rng.integers(-3, 3, (16, 8)).astype(np.float32), rng.integers(-3, 3, (8, 24)).astype(np.float32)

    @jax.jit
    def gradients(x: jax.Array, w: jax.Array) -> Any:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.einsum("ab,bc->ac", x, w, out_sharding=P("x", None, unreduced=frozenset({"y"})))

        half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return {"a": product(x, w), "b": product(x * 2, w), "h": product(*half), "h2": product(half[0], half[1] * 4)}

    with jax.set_mesh(mesh):
        tree = gradients(jax.device_put(x, NamedSharding(mesh, P("x", "y"))), jax.device_put(w, P("y", None)))
    assert tree["a"].sharding.spec.unreduced == {"y"}
    tree["plain"] = jax.device_put(x, NamedSharding(mesh, P("x", "y")))
    target = {k: NamedSharding(_mesh(range(12), 3), P("y" if k == "a" else None, None)) for k in tree}
    target["a"] = target["plain"] = NamedSharding(_mesh(range(8), 4), P("y"))
    moved, _ = dj.reshard(tree, target, path=path)
    sums = {"a": x @ w, "b": x @ w * 2, "h": (x @ w).astype(jnp.bfloat16), "h2": (x @ w * 4).astype(jnp.bfloat16)}
    for name, want in (sums | {"plain": x}).items():
        _assert_is(moved[name], want)


def test_sums_are_passed_on_inside_nodes_and_into_padding(path: Path) -> None:
    array, want = _parts(SOURCES["all summed"], (10, 4), np.float32)
    tiers = [(Tier("memory", 4e9, 0), 1), (Tier("bus", 2e9, 0), 4), (Tier("net", 1e9, 0), 0)]
    copies = NamedSharding(_mesh(range(4, 12), 1), P())
    plan = dj.plan_reshard(array, copies, path=path, topology=Topology.regular("nodes", tiers, 16))
    assert any((move.copies.relayed & ~move.copies.added).any() for move in plan.moves)
    moved, _ = dj.reshard(array, copies, plan=plan, check=True, path=path)
    _assert_is(moved, want)
    padded = Stored(NamedSharding(_mesh(range(4), 1), P("x")), (12, 4), (10, 4), (((0, 0, 10),), ((0, 0, 4),)))
    moved, _ = dj.reshard(array, padded, path=path)
    _assert_is(moved, np.pad(want, [(0, 2), (0, 0)]))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_sums_into_a_flat_bucket_in_the_middle_of_padding(dtype: Any, path: Path) -> None:
    array, sums = _parts(SOURCES["rows, summed over the rest"], (12, 40), dtype)
    bucket = Bundle(NamedSharding(_mesh(range(5), 1), P("x")), (500,), (Run("['w']", (12, 40), 0, 480, 10),))
    moved, _ = dj.reshard({"w": array}, {"flat": bucket}, check=True, path=path)
    _assert_is(moved["flat"], np.pad(sums.ravel(), (10, 10)))


def test_large_sums_are_cut_between_threads_and_stay_in_order(path: Path) -> None:
    """Seven megabytes a part: more than one batch, and float32 sums that depend on their order."""
    array, want = _parts(SOURCES["all summed"], (1200, 1500), np.float32)
    for _ in range(2):
        _assert_is(dj.reshard(array, TARGETS["copies"], path=path)[0], want)


def test_a_sum_that_is_wrong_is_found_when_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of all parts but the last, made by a program of this shape alone."""
    array, want = _parts(SOURCES["all summed"], (46, 62), np.float32)
    copy, summed = shared_memory._copy_batch, bodies._summed
    with monkeypatch.context() as patch:
        first = lambda batch: [(number, [box for box in boxes if not box.added]) for number, boxes in batch]  # noqa: E731
        patch.setattr(shared_memory, "_copy_batch", lambda batch, buffers: copy(first(batch), buffers))
        patch.setattr(bodies, "_summed", lambda parts, dtype: summed(parts[:-1], dtype))
        with pytest.raises(CheckError, match=r"the bytes that .* holds are not those of its source"):
            dj.reshard(array, TARGETS["copies"], check=True, path=path)
    programs._on.cache_clear()
    programs._anywhere.cache_clear()
    moved, _ = dj.reshard(array, TARGETS["copies"], check=True, path=path)
    _assert_is(moved, want)


def test_what_cannot_be_summed_or_made_is_refused() -> None:
    array, _ = _parts(SOURCES["all summed"], (8, 8), np.float32)
    with pytest.raises(TargetError, match=r"\['g'\]: the target has unreduced axes"):
        dj.plan_reshard({"g": jnp.zeros((8, 8))}, SOURCES["columns"])
    with pytest.raises(TargetError, match=r"\['g'\]: the target has unreduced axes"):
        dj.reshard({"g": array}, SOURCES["columns"])
    four = jax.ShapeDtypeStruct((8, 8), jnp.int4, sharding=SOURCES["all summed"])
    with pytest.raises(TargetError, match=r"\['g'\]: parts of int4 cannot be summed"):
        dj.plan_reshard({"g": four}, TARGETS["rows"])
