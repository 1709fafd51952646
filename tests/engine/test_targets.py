"""What a target tree may be, and what is refused by path before anything moves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, mesh
from jax.sharding import Mesh, NamedSharding

import dynajax as dj
from dynajax.engine import prepare_reshard
from dynajax.engine.transport import Path
from dynajax.errors import CheckError, TargetError


def _state() -> dict[str, Any]:
    on = NamedSharding(mesh("tp8"), P())
    return jax.device_put({"a": {"w": jnp.ones((8, 8)), "b": jnp.arange(8)}, "step": jnp.int32(3)}, on)


TARGET = NamedSharding(Mesh(np.asarray(jax.devices()[:4]), ("x",)), P())
ROWS = NamedSharding(TARGET.mesh, P("x"))


@pytest.mark.parametrize(
    "targets",
    [
        TARGET,
        {"a": ROWS, "step": TARGET},
        {"a": {"w": ROWS, "b": ROWS}, "step": TARGET},
        {
            "a": {
                "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=ROWS),
                "b": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=ROWS),
            },
            "step": TARGET,
        },
    ],
    ids=["one for all", "prefix", "whole", "shapes"],
)
def test_targets_as_device_put_takes_them(targets: Any) -> None:
    moved, _ = dj.reshard(_state(), targets)
    assert np.array_equal(moved["a"]["w"], np.ones((8, 8)))
    assert moved["step"].sharding == TARGET
    planned = dj.plan_reshard(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _state()), targets
    )
    assert planned.digest == dj.plan_reshard(_state(), targets).digest


def _sds(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=TARGET)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"a": {"w": ROWS}, "step": TARGET}, r"missing: \['a'\]\['b'\]"),
        ({"a": ROWS, "step": TARGET, "more": ROWS}, r"extra: \['more'\]"),
        ({"a": {"w": ROWS, "b": _sds((8,), jnp.float32)}, "step": TARGET}, r"\['a'\]\['b'\].*float32\[8\].*int32\[8\]"),
        ({"a": {"w": _sds((8, 4), jnp.float32), "b": ROWS}, "step": TARGET}, r"\['a'\]\['w'\].*\[8, 4\].*\[8, 8\]"),
        ({"a": {"w": "x", "b": ROWS}, "step": TARGET}, r"\['a'\]\['w'\].*str"),
        ({"a": TARGET, "step": ROWS}, r"\['step'\]"),
        (NamedSharding(Mesh(np.asarray(jax.devices()[:3]), ("x",)), P("x")), r"dim 0 of size 8.*pad the dim to 9"),
    ],
    ids=["missing", "extra", "dtype", "shape", "not a sharding", "scalar cut", "uneven"],
)
def test_what_does_not_fit_is_refused_by_path(targets: Any, message: str) -> None:
    state = _state()
    with pytest.raises(TargetError, match=message) as error:
        dj.reshard(state, targets, donate=True)
    assert "\n" not in str(error.value)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_shape_without_data_is_refused() -> None:
    state = _state() | {"ghost": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=TARGET)}
    with pytest.raises(TargetError, match=r"\['ghost'\].*ShapeDtypeStruct"):
        dj.reshard(state, TARGET)
    with pytest.raises(TargetError, match=r"\['bare'\].*no sharding"):
        dj.plan_reshard({"bare": jax.ShapeDtypeStruct((4,), jnp.float32)}, TARGET)


def test_a_key_of_another_implementation_is_refused() -> None:
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh("tp8"), P()))
    target = jax.ShapeDtypeStruct((), jax.random.key(0, impl="rbg").dtype, sharding=TARGET)
    with pytest.raises(TargetError, match=r"key<rbg>.*key<fry>"):
        dj.reshard({"k": key}, {"k": target})


def test_a_plan_for_another_state_is_refused() -> None:
    plan = dj.plan_reshard(_state(), TARGET)
    moved, _ = dj.reshard(_state(), TARGET, plan=plan)
    assert np.array_equal(moved["a"]["b"], np.arange(8))
    with pytest.raises(TargetError, match="another state"):
        dj.reshard(_state(), {"a": ROWS, "step": TARGET}, plan=plan)
    with pytest.raises(TargetError, match="another state"):
        dj.reshard(moved, TARGET, plan=plan)


def test_the_digest_does_not_depend_on_the_order_of_dicts() -> None:
    a = _state()
    b = {"step": a["step"], "a": dict(reversed(a["a"].items()))}
    assert dj.plan_reshard(a, TARGET).digest == dj.plan_reshard(b, TARGET).digest
    assert dj.plan_reshard(a, TARGET).digest != dj.plan_reshard(a, {"a": ROWS, "step": TARGET}).digest


def test_unequal_replicas_are_named_when_asked() -> None:
    on = NamedSharding(mesh("dp8"), P())
    pieces = [jax.device_put(np.full((4,), d.id == 5, np.float32), d) for d in jax.devices()[:8]]
    x = jax.make_array_from_single_device_arrays((4,), on, pieces)
    with pytest.raises(CheckError, match=r"\['x'\].*replicas differ.*(0|5)"):
        dj.reshard({"x": x}, ROWS, check=True)
    moved, _ = dj.reshard({"x": x}, ROWS)
    assert moved["x"].sharding == ROWS


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(TargetError, match="'rdma'; give one of 'shared memory', 'xla' or None"):
        dj.plan_reshard(_state(), TARGET, path="rdma")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("path", ["shared memory", "xla"])
def test_a_device_and_a_spec_are_targets(path: Path) -> None:
    device = jax.devices()[3]
    moved, _ = dj.reshard(_state(), {"a": device, "step": TARGET}, path=path)
    assert {d for x in jax.tree.leaves(moved["a"]) for d in x.devices()} == {device}
    assert np.array_equal(moved["a"]["b"], np.arange(8))
    on = mesh("tp4 overlapping")
    with jax.set_mesh(on):
        moved, _ = dj.reshard(_state(), {"a": P("tp"), "step": P()}, path=path, donate=True)
        planned = dj.plan_reshard(_state(), P())
    assert moved["a"]["w"].sharding == NamedSharding(on, P("tp"))
    assert planned.digest == dj.plan_reshard(_state(), NamedSharding(on, P())).digest


def test_none_leaves_an_array_as_it_is() -> None:
    state = _state()
    moved, report = dj.reshard(state, {"a": {"w": ROWS, "b": None}, "step": None}, donate=True)
    assert moved["a"]["b"] is state["a"]["b"]
    assert moved["step"] is state["step"]
    assert moved["a"]["w"].sharding == ROWS
    assert report.leaves >= 1
    assert [x.is_deleted() for x in jax.tree.leaves(state)] == [False, True, False]


def test_none_of_the_state_is_passed_on() -> None:
    state = _state() | {"ema": None}
    for targets in (TARGET, {"a": ROWS, "step": TARGET, "ema": None}):
        moved, _ = dj.reshard(state, targets)
        assert moved["ema"] is None
        assert jax.tree.structure(moved) == jax.tree.structure(state)


@pytest.mark.parametrize("path", ["shared memory", "xla"])
def test_donation_is_said_array_by_array(path: Path) -> None:
    state = _state()
    moved, _ = dj.reshard(state, TARGET, donate={"a": {"w": True, "b": False}, "step": False}, path=path)
    assert [x.is_deleted() for x in jax.tree.leaves(state)] == [False, True, False]
    assert np.array_equal(moved["a"]["w"], np.ones((8, 8)))
    assert np.array_equal(state["a"]["b"], moved["a"]["b"])
    with pytest.raises(TargetError, match=r"missing: \['a'\]\['b'\]"):
        dj.reshard(moved, TARGET, donate={"a": {"w": True}, "step": False})


EXPLICIT = jax.sharding.AbstractMesh((8,), ("x",))


@pytest.mark.parametrize("path", ["shared memory", "xla", None])
@pytest.mark.parametrize(
    ("leaf", "target", "message"),
    [
        (np.zeros((8, 4)), NamedSharding(EXPLICIT, P("x")), r"\['leaf'\].*[Mm]esh"),
        (np.zeros((8, 4)), P("x"), r"\['leaf'\].*no mesh is set"),
        (np.zeros((10, 4)), ROWS, r"\['leaf'\].*dim 0 of size 10"),
        (np.float32(1), ROWS, r"\['leaf'\]"),
        (np.zeros((8, 4)), NamedSharding(TARGET.mesh, P(None, None, "x")), r"\['leaf'\]"),
        (np.zeros((8, 4)), NamedSharding(TARGET.mesh, P(None, "x")).update(memory_kind="pinned_host"), None),
        (np.zeros((8, 4)), 3, r"\['leaf'\].*int"),
        (np.zeros((8, 4)), "cpu", r"\['leaf'\].*str"),
    ],
)
def test_refusals_name_the_leaf_and_come_before_anything_is_given_up(
    leaf: Any, target: Any, message: str | None, path: Path | None
) -> None:
    state = {"first": jax.device_put(np.ones((8, 8)), TARGET), "leaf": jax.device_put(leaf, TARGET)}
    goal = {"first": NamedSharding(mesh("tp8"), P("tp")), "leaf": target}
    if message is None:
        assert dj.reshard(state, goal, path=path)[0]["leaf"].sharding == target
        return
    for call in (dj.plan_reshard, dj.reshard, prepare_reshard):
        with pytest.raises(TargetError, match=message) as error:
            call(state, goal, donate=True, path=path)
        assert "\n" not in str(error.value)
    assert not any(x.is_deleted() for x in state.values())
