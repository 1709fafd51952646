"""A Flax Linen `TrainState`, switched in the middle: the whole object goes in, and the whole object comes out.

The model names the logical axes of its parameters (`nn.with_logical_partitioning`); rules map them to mesh axes. The
moments of Adam are cut over the data axis as well, the parameters are not: what ZeRO calls stage 1.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.spmd import logical_to_mesh_sharding
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynajax as dj

jax.config.update("jax_num_cpu_devices", 8)
devices = np.array(jax.devices()[:8])
PARAMETERS = (("embed", None), ("mlp", "tp"))
MOMENTS = (("embed", "dp"), ("mlp", "tp"))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def kernel(*axes: str) -> Any:
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)

        hidden = nn.gelu(nn.Dense(64, use_bias=False, kernel_init=kernel("embed", "mlp"))(x))
        return nn.Dense(16, use_bias=False, kernel_init=kernel("mlp", "embed"))(hidden)


model = Block()
optimizer = optax.adam(1e-2)  # made once: it is part of what two states must agree in


def new_state() -> TrainState:
    params = nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 16))))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def shardings(mesh: Mesh) -> TrainState:
    """A `TrainState` of shardings: parameters by one set of rules, moments by another, counters whole."""
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16))))
    logical = nn.get_partition_spec(boxed)["params"]
    params, moments = (logical_to_mesh_sharding(logical, mesh, rules) for rules in (PARAMETERS, MOMENTS))
    whole = NamedSharding(mesh, P())
    shapes = jax.eval_shape(new_state)
    adam, rest = shapes.opt_state
    adam = adam._replace(count=whole, mu=moments, nu=moments)
    return shapes.replace(step=whole, params=params, opt_state=(adam, rest))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((32, 16)).astype(np.float32)
    return x, np.roll(np.tanh(x), 1, axis=1)


def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(state: TrainState, mesh: Mesh, steps: range) -> tuple[TrainState, list[float]]:
    step_here = jax.jit(train_step, out_shardings=(shardings(mesh), None))
    losses = []
    for step in steps:
        state, loss = step_here(state, *jax.device_put(batch(step), NamedSharding(mesh, P("dp"))))
        losses.append(float(loss))
    return state, losses


before = Mesh(devices.reshape(4, 2), ("dp", "tp"))
after = Mesh(devices[:6].reshape(2, 3)[:, :2], ("dp", "tp"))  # devices 0, 1, 3, 4

state = jax.device_put(new_state(), shardings(before))
_, unswitched = train(state, before, range(10))

state, first = train(state, before, range(5))
state, report = dj.reshard(state, shardings(after), donate=True)
print(report.summary())
assert isinstance(state, TrainState)
assert int(state.step) == 5
state, second = train(state, after, range(5, 10))

np.testing.assert_allclose(first + second, unswitched, rtol=1e-5)
assert report.bytes_moved == report.bytes_lower_bound
print(f"dp4.tp2, then dp2.tp2: loss {first[0]:.4f} … {second[-1]:.4f}, as in the unswitched run")
