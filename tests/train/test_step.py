"""A step on its own: norms of whole gradients, state in its layout, and a state that moves between all layouts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from train.small_runs import bits, closed_walk, data, job, random_state

from dynajax.engine import reshard
from dynajax.meshes import Placement
from dynajax.train.state import TrainState, initial_state
from dynajax.train.step import make_step


@pytest.mark.parametrize("strategy", ["dp1", "tp2", "dp4.tp2", "tp4", "tp8", "fsdp2.tp4"])
def test_the_global_norm_counts_every_element_once(strategy: str):
    """Gradients of norm 5 with one leaf cut and one whole: clipped to 1, the update is a fifth of them."""
    rng = np.random.default_rng(0)
    grads = {"w": rng.normal(size=(8, 8)).astype(np.float32), "norm": rng.normal(size=8).astype(np.float32)}
    length = np.sqrt(sum((g**2).sum() for g in grads.values()))
    grads = {name: 5 * g / length for name, g in grads.items()}
    params = {name: jnp.ones(g.shape) for name, g in grads.items()}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))

    placement = Placement.parse(strategy)
    state, mesh = initial_state(params, optimizer, jax.random.key(0)), placement.mesh(jax.devices())
    specs = {"w": PartitionSpec("fsdp", "tp"), "norm": PartitionSpec()}
    layout = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state)
    layout = replace(layout, params=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    state = jax.device_put(state, layout)

    def loss(params, batch):
        return sum(jnp.sum(params[name] * g) for name, g in grads.items()) + 0.0 * batch

    step = jax.jit(make_step(loss, optimizer, layout, samples=6), donate_argnums=0)
    after, _ = step(state, jnp.float32(1.0))
    for name, g in grads.items():
        np.testing.assert_allclose(after.params[name], 1 - g / 5, rtol=1e-6, atol=1e-6)
    assert (int(after.step), int(after.cursor)) == (1, 6)
    assert bits(after.rng) != bits(jax.random.key(0))


LAYOUTS = [
    *("dp2.tp4", "fsdp8", "tp8", "tp8@7-0", "tp4@4-7", "dp8", "fsdp2.tp2@1,6,3,4", "dp2.fsdp2.tp2", "tp2@2-3"),
    *("fsdp4@0,2,4,6", "dp1@5"),
]


def test_the_state_of_every_pair_of_layouts_is_bit_equal():
    """Parameters, moments, accumulated gradients, counters, keys and cursor, through all ordered pairs of layouts."""
    rate = optax.linear_schedule(0.0, 1e-3, 5)
    inner = optax.inject_hyperparams(optax.adamw)(learning_rate=rate, weight_decay=0.1)
    work = job(optax.MultiSteps(inner, 4).gradient_transformation())
    start = random_state(work, Placement.parse(LAYOUTS[0]))
    wanted, tree, state = bits(start), jax.tree.structure(start), start
    seen = set()
    for source, target in closed_walk(len(LAYOUTS)):
        layout = work.layout(Placement.parse(LAYOUTS[target]))
        state, report = reshard(state, layout, budget="64KB", donate=True)
        assert bits(state) == wanted, (LAYOUTS[source], LAYOUTS[target])
        assert jax.tree.structure(state) == tree
        assert jax.tree.all(jax.tree.map(lambda leaf, stored: leaf.sharding == stored.sharding, state, layout))
        assert report.bytes_moved == report.bytes_lower_bound
        assert report.peak_extra_bytes <= report.budget_bytes
        seen.add((source, target))
    assert len(seen) == len(LAYOUTS) * (len(LAYOUTS) - 1)


def test_a_new_state_is_born_where_it_lies():
    work = job()
    placement = Placement.parse("dp2.tp4")
    state, one = work.initial_state(placement, 3), work.initial_state(Placement.parse("dp1"), 3)
    assert jax.tree.all(jax.tree.map(lambda leaf, lies: leaf.sharding == lies.sharding, state, work.layout(placement)))
    assert isinstance(state.params["embed"]["tokens"].sharding, NamedSharding)
    for ours, alone in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-5, atol=1e-6)
    assert isinstance(state, TrainState)
    assert work.batch.rows == data().batch_size
