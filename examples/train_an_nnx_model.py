"""A Flax NNX model and optimizer, switched in the middle: split, move the state, merge.

`nnx.split` gives a description without arrays and a state, which is a pytree. `reshard` moves the state; `nnx.merge`
makes model and optimizer of it again, so nothing in them remembers the mesh they came from.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynajax as dj

jax.config.update("jax_num_cpu_devices", 8)
devices = np.array(jax.devices()[:8])


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(nnx.gelu(self.norm(self.up(x)))))


def new_training() -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def shardings(state: Any, mesh: Mesh) -> Any:
    """Kernels by columns over tp, in the model as in the moments; all else (statistics, keys, counters) whole."""

    def of(leaf: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, P(None, "tp") if leaf.ndim == 2 else P())

    return jax.tree.map(of, state)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((32, 16)).astype(np.float32)
    return x, x.reshape(32, 4, 4).sum(axis=2)


graph, start = nnx.split(new_training())


@jax.jit
def train_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    model, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def train(state: Any, mesh: Mesh, steps: range) -> tuple[Any, list[float]]:
    losses = []
    for step in steps:
        state, loss = train_step(state, *jax.device_put(batch(step), NamedSharding(mesh, P("dp"))))
        losses.append(float(loss))
    return state, losses


before = Mesh(devices.reshape(2, 4), ("dp", "tp"))
after = Mesh(devices[::-1][:4].reshape(2, 2), ("dp", "tp"))

state = jax.device_put(start, shardings(start, before))
_, unswitched = train(state, before, range(10))

state, first = train(state, before, range(5))
state, report = dj.reshard(state, shardings(state, after), donate=True)
print(report.summary())
state, second = train(state, after, range(5, 10))

np.testing.assert_allclose(first + second, unswitched, rtol=1e-5)
model, optimizer = nnx.merge(graph, state)
assert int(optimizer.step[...]) == 10
assert model.up.kernel[...].sharding == NamedSharding(after, P(None, "tp"))
print(f"dp2.tp4, then dp2.tp2: loss {first[0]:.4f} … {second[-1]:.4f}, as in the unswitched run")
