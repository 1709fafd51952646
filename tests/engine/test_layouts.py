"""Arrays that lie otherwise than row by row in memory: moved by value, and asked for as a target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, mesh
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding

import dynajax as dj
from dynajax.engine.transport import Path
from dynajax.errors import TargetError

WANT = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def row_major() -> NamedSharding:
    return NamedSharding(mesh("tp8"), P("tp"))


def put() -> jax.Array:
    return jax.device_put(WANT, Format(Layout((1, 0)), row_major()))


def by_jit() -> jax.Array:
    turned = jax.jit(lambda a: a * 1, out_shardings=Format(Layout((1, 0)), row_major()))
    return turned(jax.device_put(WANT, row_major()))


def by_auto() -> jax.Array:
    like = jax.ShapeDtypeStruct((32, 64), np.float32)
    columns = NamedSharding(mesh("tp8"), P(None, "tp"))
    turned = jax.jit(lambda a: a.T, in_shardings=Format(Layout((0, 1)), columns), out_shardings=Format(Layout.AUTO))
    return turned.lower(like).compile()(jax.device_put(WANT.T, columns))


@pytest.mark.parametrize(
    ("make", "options"), [(put, {}), (by_jit, {"donate": True}), (by_auto, {"donate": True, "commit": "safe"})]
)
@pytest.mark.parametrize("target", ["tp8", "tp8 reversed", "fsdp4.tp2", "tp4 overlapping", "tp2 disjoint"])
@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp"), P()])
def test_the_order_in_memory_changes_no_value(make: Any, options: Any, target: str, spec: Any, path: Path) -> None:
    """Also where the shard would stay."""
    x = make()
    assert np.array_equal(np.asarray(x), WANT)
    moved, report = dj.reshard([x], NamedSharding(mesh(target), spec), check=True, path=path, **options)
    assert np.array_equal(np.asarray(moved[0]), WANT)
    assert np.array_equal(np.asarray(jnp.sum(moved[0], axis=0)), WANT.sum(axis=0))
    assert report.bytes_moved == report.bytes_lower_bound


def test_shards_that_would_stay_beside_new_ones_lie_as_those_do(path: Path) -> None:
    """Six of eight shards are on their devices already."""
    line = np.asarray(jax.devices()[:8])
    source, target = (NamedSharding(Mesh(d, ("x",)), P("x")) for d in (line, line[[0, 2, 1, 3, 4, 5, 6, 7]]))
    for donate in (False, True):
        x = jax.device_put(WANT, Format(Layout((1, 0)), source))
        moved, report = dj.reshard([x], target, donate=donate, path=path, check=True)
        assert np.array_equal(np.asarray(jnp.sum(moved[0], axis=0)), WANT.sum(axis=0))
        assert report.bytes_moved == WANT.nbytes // 4
    x = jax.device_put(WANT, Format(Layout((1, 0)), source))
    plan = dj.plan_reshard([jax.ShapeDtypeStruct(WANT.shape, WANT.dtype, sharding=source)], target, path=path)
    with pytest.raises(TargetError, match=r"\[0\]: the plan lets shards stay that are not row-major"):
        dj.reshard([x], target, plan=plan, path=path)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "float8_e5m2", "complex64"])
def test_so_for_every_width(dtype: str, path: Path) -> None:
    kind = jnp.dtype(dtype)
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, (64, 16 * kind.itemsize), np.uint8)
    want = bits.view(kind)
    x = jax.device_put(want, Format(Layout((1, 0)), row_major()))
    moved, _ = dj.reshard([x], NamedSharding(mesh("fsdp2.tp2 permuted"), P("fsdp", "tp")), check=True, path=path)
    assert np.asarray(moved[0]).tobytes() == want.tobytes()


def test_a_layout_is_refused_by_path_before_anything_is_given_up() -> None:
    state = {"a": jax.device_put(WANT, row_major()), "b": jax.device_put(WANT, row_major())}
    targets = {"a": row_major(), "b": Format(Layout((1, 0)), NamedSharding(mesh("tp4 overlapping"), P("tp")))}
    with pytest.raises(TargetError, match=r"\['b'\]") as error:
        dj.reshard(state, targets, donate=True)
    assert "\n" not in str(error.value)
    assert not any(x.is_deleted() for x in state.values())


def test_a_format_of_rows_is_a_sharding() -> None:
    target = NamedSharding(mesh("tp4 overlapping"), P("tp"))
    moved, _ = dj.reshard([jax.device_put(WANT, row_major())], Format(Layout((0, 1)), target))
    assert moved[0].sharding == target
    assert np.array_equal(np.asarray(moved[0]), WANT)
