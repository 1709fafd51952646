"""Meshes with Explicit axes, where shardings are part of the types: set a mesh, train, switch, set the next.

`jax.make_mesh` gives Explicit axes. Operations then say how their results are sharded, and the ambient mesh is the one
that `jax.set_mesh` sets. `reshard` does not mind which mesh is set, and leaves it set.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynajax as dj

jax.config.update("jax_num_cpu_devices", 8)
SPECS = {"embed": P(None, "model"), "head": P("model", None)}


def mesh_of(data: int, model: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices)


def batch(step: int) -> np.ndarray:
    start = np.random.default_rng(step).integers(0, 16, (16, 1))
    return (start + 3 * np.arange(9)) % 16  # every token is the last one plus three


@jax.jit
def train_step(params: dict, tokens: jax.Array) -> tuple[dict, jax.Array]:
    def loss_of(params: dict) -> jax.Array:
        hidden = params["embed"].at[tokens[:, :-1]].get(out_sharding=P("data", None, "model"))
        logits = jnp.einsum("bte,ev->btv", hidden, params["head"], out_sharding=P("data", None, None))
        right = jax.nn.one_hot(tokens[:, 1:], 16, dtype=logits.dtype)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * right, axis=-1))

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 1.0 * g, params, grads), loss


def train(params: dict, steps: range) -> tuple[dict, list[float]]:
    """Train on the mesh that is set."""
    losses = []
    for step in steps:
        tokens = jax.device_put(batch(step), NamedSharding(jax.sharding.get_mesh(), P("data", None)))
        params, loss = train_step(params, tokens)
        losses.append(float(loss))
    return params, losses


def shardings(mesh: jax.sharding.Mesh) -> dict:
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


before, after = mesh_of(2, 4), mesh_of(4, 2)
rng = np.random.default_rng(0)
start = {
    "embed": rng.standard_normal((16, 8)).astype(np.float32),
    "head": rng.standard_normal((8, 16)).astype(np.float32),
}

with jax.set_mesh(before):
    params = jax.device_put(start, shardings(before))
    _, unswitched = train(params, range(10))
    params, first = train(params, range(5))
    params, report = dj.reshard(params, shardings(after), donate=True)  # `before` is still set: no matter
    assert jax.sharding.get_mesh() == before

with jax.set_mesh(after):
    assert jax.typeof(params["embed"]).sharding.spec == SPECS["embed"]
    params, second = train(params, range(5, 10))

print(report.summary())
np.testing.assert_allclose(first + second, unswitched, rtol=1e-5)
print(f"2 × 4, then 4 × 2 devices: loss {first[0]:.4f} … {second[-1]:.4f}, as in the unswitched run")
