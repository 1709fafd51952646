"""What JAX is set to by the caller reaches no move, and a move leaves it as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, assert_same_bits, host_state, mesh, shardings, state
from jax.sharding import AxisType, NamedSharding

import dynajax as dj
from dynajax.engine import prepare_reshard
from dynajax.engine.transport import Path
from dynajax.errors import DynajaxError

Setting = Callable[[], AbstractContextManager[Any]]

SETTINGS: dict[str, Setting] = {
    "mesh of the source": lambda: jax.set_mesh(mesh("dp2.tp4")),
    "mesh of the target": lambda: jax.set_mesh(mesh("fsdp2.tp2 permuted")),
    "another mesh": lambda: jax.set_mesh(mesh("tp2 disjoint")),
    "an explicit mesh": lambda: jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))),
    "no transfers": lambda: jax.transfer_guard("disallow"),
    "no transfers to the host": lambda: jax.transfer_guard_device_to_host("disallow_explicit"),
    "no transfers to devices": lambda: jax.transfer_guard_host_to_device("disallow_explicit"),
    "no transfers between devices": lambda: jax.transfer_guard_device_to_device("disallow_explicit"),
    "no NaN": lambda: jax.debug_nans(True),
    "no infinity": lambda: jax.debug_infs(True),
    "no leaks": lambda: jax.checking_leaks(),
    "no jit": lambda: jax.disable_jit(),
    "64 bits": lambda: jax.enable_x64(True),
    "32 bits": lambda: jax.enable_x64(False),
    "another device": lambda: jax.default_device(jax.devices()[11]),
    "no ranks promoted": lambda: jax.numpy_rank_promotion("raise"),
    "no types promoted": lambda: jax.numpy_dtype_promotion("strict"),
    "no keys used twice": lambda: jax.debug_key_reuse(True),
    "another default for keys": lambda: jax.default_prng_impl("rbg"),
    "precise products": lambda: jax.default_matmul_precision("highest"),
}


def seen() -> list[Any]:
    """What the caller finds set."""
    names = ("enable_x64", "debug_nans", "debug_infs", "disable_jit", "default_device", "numpy_rank_promotion")
    guards = [f"transfer_guard_{way}" for way in ("host_to_device", "device_to_host", "device_to_device")]
    return [jax.sharding.get_mesh(), *(getattr(jax.config, f"jax_{name}") for name in (*names, *guards))]


@pytest.fixture(scope="module")
def targets() -> Any:
    return shardings("fsdp2.tp2 permuted")


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_move_is_the_same_whatever_is_set(setting: str, targets: Any, path: Path) -> None:
    tree = state("dp2.tp4")
    with SETTINGS[setting]():
        before = seen()
        moved, report = dj.reshard(tree, targets, donate=True, check=True, budget="64KB", path=path)
        assert seen() == before
    assert report.bytes_moved == report.bytes_lower_bound
    assert_same_bits(moved, host_state())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_prepared_move_runs_under_settings_that_it_was_not_prepared_under(
    setting: str, targets: Any, path: Path
) -> None:
    tree = state("dp2.tp4")
    move = prepare_reshard(tree, targets, donate=True, path=path)
    with SETTINGS[setting]():
        moved, report = move(tree)
    assert report.compile_s == 0
    assert_same_bits(moved, host_state())


@pytest.mark.parametrize("setting", ["another mesh", "no transfers", "no jit"])
def test_a_plan_is_the_same_whatever_is_set(setting: str, targets: Any) -> None:
    tree = state("dp2.tp4")
    digest = dj.plan_reshard(tree, targets).digest
    with SETTINGS[setting]():
        assert dj.plan_reshard(tree, targets).digest == digest


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64, np.complex128])
@pytest.mark.parametrize("on", [True, False])
def test_64_bit_numbers_arrive_whole_where_jax_is_set_to_32(dtype: Any, on: bool, path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (16, 8 * np.dtype(dtype).itemsize), np.uint8)
    want = bits.view(dtype)
    with jax.enable_x64(True):
        x = jax.device_put(want, NamedSharding(mesh("tp8"), P("tp")))
    with jax.enable_x64(on):
        moved, _ = dj.reshard([x], NamedSharding(mesh("tp4 overlapping"), P(None, "tp")), check=True, path=path)
    for shard in moved[0].addressable_shards:
        assert shard.data.dtype == dtype
    with jax.enable_x64(True):
        assert np.asarray(moved[0]).tobytes() == want.tobytes()


def test_inside_a_transformation_of_jax_a_move_is_refused() -> None:
    tree = {"w": jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh("tp8"), P("tp")))}

    def step(x: jax.Array) -> jax.Array:
        dj.reshard(tree, NamedSharding(mesh("tp8"), P()))
        return x

    with pytest.raises(DynajaxError, match="outside of jit"):
        jax.jit(step)(jnp.ones(2))
    assert not tree["w"].is_deleted()


@pytest.mark.parametrize("setting", ["no transfers", "mesh of the source", "no NaN", "32 bits"])
def test_no_setting_loses_a_state_that_is_given_up_in_stages(setting: str, path: Path) -> None:
    """Small leaves after large ones: what a setting forbids would come after the large ones are gone."""
    source, target = NamedSharding(mesh("tp8"), P("tp")), NamedSharding(mesh("tp8"), P(None, "tp"))
    tree = {f"w{k}": jax.device_put(np.full((64, 64), k, np.float32), source) for k in range(3)}
    tree["z"] = jax.device_put(np.full((8, 8), np.nan, np.float32), source)
    goal = dict.fromkeys(tree, target) | {"z": NamedSharding(mesh("tp8"), P())}
    with SETTINGS[setting]():
        moved, report = dj.reshard(tree, goal, donate=True, budget="8KB", path=path)
    assert report.stages > 1 or path == "shared memory"
    assert all(np.array_equal(moved[f"w{k}"], np.full((64, 64), k)) for k in range(3))
    assert np.isnan(moved["z"]).all()
