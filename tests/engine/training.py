"""A small training loop on any optimizer and any layout, and layouts to switch between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from engine.states import P
from jax.sharding import Mesh, NamedSharding

State = dict[str, Any]
SHAPES = {"up": (12, 24), "bias": (24,), "down": (24, 12)}


def new_state(optimizer: Any) -> State:
    """Parameters, optimizer state, step and key of a perceptron, on one device."""
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for name, shape in SHAPES.items()}
    return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0), "rng": jax.random.key(1)}


def step_of(optimizer: Any, layout: State) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """A compiled step that leaves its state in the layout."""

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["up"] + params["bias"])
        return jnp.mean((hidden @ params["down"] - jnp.sin(3 * x)) ** 2)

    def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        rng, noise = jax.random.split(state["rng"])
        x = x + 0.1 * jax.random.normal(noise, x.shape)
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1, "rng": rng}, loss

    return jax.jit(step, out_shardings=(layout, None))


def train(step: Any, state: State, steps: int) -> tuple[State, list[float]]:
    """So many steps; the batch depends on the step alone."""
    losses = []
    mesh = state["params"]["up"].sharding.mesh
    for _ in range(steps):
        x = np.random.default_rng(int(state["step"])).standard_normal((24, 12)).astype(np.float32)
        state, loss = step(state, jax.device_put(x, NamedSharding(mesh, P())))
        losses.append(float(loss))
    return state, losses


def mesh_of(devices: Any, **axes: int) -> Mesh:
    """The devices of these numbers with axes of these sizes."""
    return Mesh(np.asarray(jax.devices())[np.asarray(devices)].reshape(tuple(axes.values())), tuple(axes))


def by_shape(mesh: Mesh, state: State) -> State:
    """Every leaf cut along its first dims that the axes divide, the rest whole: any state has such a layout."""

    def of(leaf: Any) -> NamedSharding:
        left = list(mesh.axis_names)
        entries = [left.pop(0) if left and n % mesh.shape[left[0]] == 0 else None for n in leaf.shape]
        return NamedSharding(mesh, P(*entries))

    return jax.tree.map(of, state)


def by_role(mesh: Mesh, state: State, params: Any, moments: Any, memory: str = "device") -> State:
    """Parameters by one set of specs, moments by another and in a memory of their own; all else whole on each device.

    Args:
        mesh: of all leaves.
        state: with the state of ``optax.adam``.
        params, moments: specs by name of parameter.
        memory: memory kind of the moments.
    """
    whole = NamedSharding(mesh, P())
    adam, *rest = jax.tree.map(lambda _: whole, state["opt"])
    cut = {name: NamedSharding(mesh, spec, memory_kind=memory) for name, spec in moments.items()}
    opt = (adam._replace(mu=cut, nu=cut), *rest)
    return {
        "params": {name: NamedSharding(mesh, spec) for name, spec in params.items()},
        "opt": opt,
        "step": whole,
        "rng": whole,
    }
