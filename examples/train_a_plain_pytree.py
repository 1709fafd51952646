"""Your own training loop on a plain pytree, switched in the middle: from data parallel to tensor parallel.

The mesh has the usual Auto axes and is never set as the ambient one: shardings on the arrays say all that `jit` needs.
The losses are those of a run that never switched.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dynajax as dj

jax.config.update("jax_num_cpu_devices", 8)
devices = np.array(jax.devices()[:8])
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def new_state() -> dict:
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(up, (16, 64)) / 4,
        "bias": jnp.zeros(64),
        "down": jax.random.normal(down, (64, 1)) / 8,
    }
    return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((32, 16)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


@jax.jit
def train_step(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    def loss_of(params: dict) -> jax.Array:
        hidden = jax.nn.gelu(x @ params["up"] + params["bias"])
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, loss


def shardings(mesh: Mesh, state: dict) -> dict:
    """`up` by columns and `down` by rows over tp, wherever they occur: in the parameters and in the moments of Adam."""
    specs = {"up": PartitionSpec(None, "tp"), "bias": PartitionSpec("tp"), "down": PartitionSpec("tp")}

    def of(path: tuple, _: jax.Array) -> NamedSharding:
        name = str(getattr(path[-1], "key", ""))
        return NamedSharding(mesh, specs.get(name, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(of, state)


def train(state: dict, mesh: Mesh, steps: range) -> tuple[dict, list[float]]:
    rows = NamedSharding(mesh, PartitionSpec("dp"))
    losses = []
    for step in steps:
        state, loss = train_step(state, *jax.device_put(batch(step), rows))
        losses.append(float(loss))
    return state, losses


wide = Mesh(devices.reshape(4, 2), ("dp", "tp"))
narrow = Mesh(devices[[7, 5, 3, 1]].reshape(1, 4), ("dp", "tp"))

state = jax.device_put(new_state(), shardings(wide, new_state()))
_, unswitched = train(state, wide, range(10))

state, first = train(state, wide, range(5))
state, report = dj.reshard(state, shardings(narrow, state), donate=True)
print(report.summary())
state, second = train(state, narrow, range(5, 10))

np.testing.assert_allclose(first + second, unswitched, rtol=1e-5)
assert report.bytes_moved == report.bytes_lower_bound
print(f"dp4.tp2 on 8 devices, then tp4 on 4: loss {first[0]:.4f} … {second[-1]:.4f}, as in the unswitched run")
