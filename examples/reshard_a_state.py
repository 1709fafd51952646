"""Move a training state that you made yourself: any pytree, any two meshes, bit for bit.

Eight devices in two by four become four devices, in another order. Nothing of dynajax is needed
to make the state, and nothing to use it afterwards.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dynajax as dj

jax.config.update("jax_num_cpu_devices", 8)
devices = jax.devices()


def shardings(mesh: Mesh, state: dict) -> dict:
    """Matrices are cut by columns over tp, everything else is whole on each device."""

    def of(leaf: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None, "tp") if leaf.ndim == 2 else PartitionSpec())

    return jax.tree.map(of, state)


optimizer = optax.adam(1e-3)
params = {"up": jnp.arange(64 * 32.0).reshape(64, 32), "bias": jnp.ones(32)}
state = {"params": params, "opt_state": optimizer.init(params), "rng": jax.random.key(0), "step": jnp.int32(7)}

eight = Mesh(np.array(devices).reshape(2, 4), ("dp", "tp"))
four = Mesh(np.array(devices)[[6, 4, 2, 0]], "tp")
state = jax.device_put(state, shardings(eight, state))

target = shardings(four, state)
plan = dj.plan_reshard(state, target, budget="1MB", donate=True)
print("plan:  ", plan.summary())
moved, report = dj.reshard(state, target, plan=plan, donate=True)
print("report:", report.summary())

assert report.bytes_moved == report.bytes_lower_bound
assert jax.tree.structure(moved) == jax.tree.structure(state)
np.testing.assert_array_equal(moved["params"]["up"], np.arange(64 * 32.0).reshape(64, 32))
print("`up` now lies on devices", [device.id for device in moved["params"]["up"].sharding.mesh.devices])
