"""Whole training states with the optimizers that people compose: moved bit for bit, and the losses go on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engine.states import P, assert_same_bits, bytes_not_held, is_key, raw
from engine.training import SHAPES, by_role, by_shape, mesh_of, new_state, step_of, train

import dynajax as dj
from dynajax.engine import Bundle
from dynajax.vps import bucket_parts

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
ON = {"up": True, "bias": False, "down": True}
OPTIMIZERS: dict[str, Any] = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, mask=ON), optax.ema(0.9)),
    "masked": optax.masked(optax.adam(1e-2), ON),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(SCHEDULE, momentum=0.9)}, {"up": "a", "bias": "b", "down": "b"}
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(SCHEDULE), 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "lion, if finite": optax.apply_if_finite(optax.lion(1e-3), 3),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(1e-2)),
    "bfloat16 moments": optax.adam(1e-2, mu_dtype="bfloat16"),
}


def shardings_of(state: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, state)


def as_numpy(state: Any) -> Any:
    """The values, which no later move can touch."""
    return jax.tree.map(lambda x: jax.random.wrap_key_data(jnp.array(raw(x))) if is_key(x) else np.array(x), state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_two_switches(name: str) -> None:
    """Two steps on eight devices, two on six others, two more on the eight; each against a run on one device."""
    optimizer = OPTIMIZERS[name]
    start = new_state(optimizer)
    layouts = [
        by_shape(mesh, start)
        for mesh in (mesh_of(range(8), a=2, b=4), mesh_of([9, 3, 12, 5, 6, 0], a=3, b=2), mesh_of([15], a=1))
    ]
    steps = [step_of(optimizer, layout) for layout in layouts]
    _, unswitched = train(steps[2], jax.device_put(start, layouts[2]), 6)
    state, losses = train(steps[0], jax.device_put(start, layouts[0]), 2)
    for there in (1, 0):
        want = as_numpy(state)
        state, report = dj.reshard(state, layouts[there], donate=True, check=True)
        assert_same_bits(state, want)
        assert jax.tree.map(lambda x: x.sharding, state) == layouts[there]
        assert report.bytes_moved == report.bytes_lower_bound > 0
        state, more = train(steps[there], state, 2)
        losses += more
    np.testing.assert_allclose(losses, unswitched, rtol=1e-5)
    assert int(state["step"]) == 6


WHOLE = dict.fromkeys(SHAPES, P())
TP = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp")}
ZERO_TP = {"up": P("dp", "tp"), "bias": P("tp"), "down": P("tp", "dp")}
ROWS = dict.fromkeys(SHAPES, P("dp"))
ROLES: dict[str, tuple[Any, Any, Any]] = {
    "dp4": (mesh_of(range(4), dp=4), WHOLE, WHOLE),
    "ZeRO-1": (mesh_of(range(4), dp=4), WHOLE, ROWS),
    "ZeRO-1 with tp": (mesh_of(range(8), dp=4, tp=2), TP, ZERO_TP),
    "fsdp": (mesh_of([7, 6, 5, 4], dp=4), ROWS, ROWS),
    "tp": (mesh_of([2, 9, 1], dp=1, tp=3), TP, TP),
    "moments whole, params cut": (mesh_of(range(4, 10), dp=6), ROWS, WHOLE),
}


@pytest.mark.parametrize("source", ROLES)
def test_moments_sharded_differently_from_parameters(source: str) -> None:
    optimizer = optax.adam(1e-2)
    start = new_state(optimizer)
    layouts = {name: by_role(mesh, start, *specs) for name, (mesh, *specs) in ROLES.items()}
    step = {name: step_of(optimizer, layout) for name, layout in layouts.items()}
    before, _ = train(step[source], jax.device_put(start, layouts[source]), 2)
    want = as_numpy(before)
    _, unswitched = train(step[source], before, 2)
    for target in layouts:
        after, report = dj.reshard(before, layouts[target], check=True)
        assert_same_bits(after, want)
        assert (
            report.bytes_moved
            == report.bytes_lower_bound
            == bytes_not_held(before, shardings_of(before), layouts[target])
        )
        _, losses = train(step[target], after, 2)
        np.testing.assert_allclose(losses, unswitched, rtol=1e-5)


def test_moments_in_host_memory_move_there_and_back() -> None:
    """Offloaded moments go to another mesh, to device memory for a step, and back; a change of memory is a move."""
    optimizer = optax.adam(1e-2)
    start = new_state(optimizer)
    eight, three = mesh_of(range(8), dp=4, tp=2), mesh_of([2, 9, 1], dp=1, tp=3)
    places = {
        (name, memory): by_role(mesh, start, TP, moments, memory)
        for name, mesh, moments in (("eight", eight, ZERO_TP), ("three", three, TP))
        for memory in ("device", "pinned_host")
    }
    step = {name: step_of(optimizer, places[name, "device"]) for name in ("eight", "three")}
    state, _ = train(step["eight"], jax.device_put(start, places["eight", "device"]), 2)
    _, unswitched = train(step["eight"], state, 6)
    losses = []
    route = [("eight", "pinned_host"), ("three", "pinned_host"), ("three", "device"), ("three", "pinned_host"),
             ("eight", "device"), ("eight", "pinned_host"), ("eight", "device")]  # fmt: skip
    for where in route:
        want = as_numpy(state)
        least = bytes_not_held(state, shardings_of(state), places[where])
        moments = sum(s.data.nbytes for x in jax.tree.leaves(state["opt"][0].mu) for s in x.addressable_shards) * 2
        stays = state["step"].sharding == places[where]["step"]
        state, report = dj.reshard(state, places[where], donate=True, check=True)
        assert_same_bits(state, want)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state["opt"][0].mu)} == {where[1]}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state["params"])} <= {"device", None}
        assert report.bytes_moved == report.bytes_lower_bound == least
        if stays:
            assert report.bytes_moved == moments
        if where in (("three", "device"), ("eight", "device")):
            state, more = train(step[where[0]], state, 2)
            losses += more
    assert len(losses) == 6
    np.testing.assert_allclose(losses, unswitched, rtol=1e-5)


def test_flat_buckets_in_host_memory() -> None:
    """ZeRO-Offload: flat moments over four hosts' memories become tensors in device memory, and go back."""
    shapes = {f"['{name}']": shape for name, shape in SHAPES.items()}
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    flat = np.concatenate([tensors[name].ravel() for name in SHAPES])
    mesh = mesh_of(range(4), dp=4)
    (parts,) = bucket_parts(shapes, [604])
    host = jax.NamedSharding(mesh, P("dp"), memory_kind="pinned_host")
    bucket = Bundle(host, (604,), parts)
    x = jax.device_put(np.pad(flat, (0, 604 - flat.size)), host)
    cut = {name: jax.NamedSharding(mesh_of([3, 1], tp=2), spec) for name, spec in TP.items()}
    moved, report = dj.reshard(x, cut, stored=bucket, check=True)
    assert all(np.array_equal(moved[name], tensors[name]) for name in SHAPES)
    assert report.bytes_moved == flat.nbytes
    back, report = dj.reshard(moved, bucket, stored=None, donate=True)
    assert back.sharding.memory_kind == "pinned_host"
    assert np.array_equal(back, x)
    assert report.bytes_moved == flat.nbytes
