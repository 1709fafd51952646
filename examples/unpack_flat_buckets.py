"""Moments in flat ZeRO buckets, moved to one tensor each, and back: `Bundle` says what lies where in an array.

As in ZeRO, the moments of Adam are one flat vector that ignores the borders of tensors, padded and cut over eight
devices. In the middle of training they become tensors, cut by tensor parallelism on four devices, and go on as such.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynajax as dj
from dynajax.engine import Bundle
from dynajax.vps import bucket_parts

jax.config.update("jax_num_cpu_devices", 8)
SHAPES = {"down": (63, 3), "up": (15, 63)}  # nothing here is divided by eight
SIZE = 1136  # 63·3 + 15·63 elements and two of padding, for eight equal shards
adam = optax.adam(1e-2)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((16, 15)).astype(np.float32)
    return x, np.cos(x.reshape(16, 3, 5).sum(axis=2))


def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


@jax.jit
def flat_step(params: dict, opt: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    """A step with flat moments: gradients are flattened, and the update is brought back into shape."""
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    flat, unravel = ravel_pytree(grads)
    update, opt = adam.update(jnp.pad(flat, (0, SIZE - flat.size)), opt)
    return optax.apply_updates(params, unravel(jnp.asarray(update)[: flat.size])), opt, loss


@jax.jit
def step(params: dict, opt: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    """The same step with a moment for each tensor."""
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, opt = adam.update(grads, opt)
    return optax.apply_updates(params, updates), opt, loss


def train(one_step: Any, state: dict, steps: range) -> tuple[dict, list[float]]:
    losses = []
    for number in steps:
        params, opt, loss = one_step(state["params"], state["opt"], *batch(number))
        state = {"params": params, "opt": opt}
        losses.append(float(loss))
    return state, losses


def flat_layout(mesh: Mesh) -> dict:
    """Where everything is with flat moments. The parts name the tensors as the other layout calls them."""

    def bucket(name: str) -> Bundle:
        shapes = {f"['opt'][0].{name}['{tensor}']": shape for tensor, shape in SHAPES.items()}
        (parts,) = bucket_parts(shapes, [SIZE])
        return Bundle(NamedSharding(mesh, P("dp")), (SIZE,), parts)

    whole = NamedSharding(mesh, P())
    scale = optax.ScaleByAdamState(count=whole, mu=bucket("mu"), nu=bucket("nu"))  # pyright: ignore[reportArgumentType]
    return {"params": dict.fromkeys(SHAPES, whole), "opt": (scale, optax.EmptyState())}


def tensor_layout(mesh: Mesh) -> dict:
    """Where everything is with moments like the parameters."""
    cut = {"down": NamedSharding(mesh, P("tp")), "up": NamedSharding(mesh, P(None, "tp"))}
    scale = optax.ScaleByAdamState(count=NamedSharding(mesh, P()), mu=cut, nu=cut)  # pyright: ignore
    return {"params": cut, "opt": (scale, optax.EmptyState())}


eight = Mesh(np.array(jax.devices()[:8]), ("dp",))
three = Mesh(np.array(jax.devices()[5:8]), ("tp",))

rng = np.random.default_rng(0)
params = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in SHAPES.items()}
on_eight = jax.tree.map(lambda layout: layout.sharding if isinstance(layout, Bundle) else layout, flat_layout(eight))
state = jax.device_put({"params": params, "opt": adam.init(jnp.zeros(SIZE))}, on_eight)
_, unswitched = train(flat_step, state, range(15))

state, first = train(flat_step, state, range(5))
state, report = dj.reshard(state, tensor_layout(three), stored=flat_layout(eight), donate=True)
print(report.summary())
assert state["opt"][0].mu["up"].shape == SHAPES["up"]
state, second = train(step, state, range(5, 10))

state, report = dj.reshard(state, flat_layout(eight), donate=True)  # and back into flat buckets
assert report.bytes_moved == report.bytes_lower_bound
state, third = train(flat_step, state, range(10, 15))

np.testing.assert_allclose(first + second + third, unswitched, rtol=1e-5)
print(f"flat over 8 devices, by tensor over 3, flat again: loss {first[0]:.4f} … {third[-1]:.4f}, as unswitched")
