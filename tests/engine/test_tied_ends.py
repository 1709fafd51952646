"""A table that the first and the last pipeline stage compute with: one tensor, held at both ends and not between."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from engine.states import P
from jax.sharding import Mesh, NamedSharding

import dynajax as dj
from dynajax import models
from dynajax.models import Execution, LlamaConfig

MODEL = LlamaConfig(layers=6, hidden=8, ffn=12, heads=2, kv_heads=2, head_dim=4, vocab=32, tied=True)
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) * 7 % 32
INSIDE, POSITIONS = np.ones_like(TOKENS), np.broadcast_to(np.arange(12, dtype=np.int32), TOKENS.shape)


def layout(state: Any, pp: int) -> Any:
    """Where the state lies under pp stages of two devices, cut in two along the width wherever there is one.

    Parameters and moments of a block are with its stage, those of the table at both ends.
    """
    devices = np.asarray(jax.devices()[: 2 * pp]).reshape(pp, 2)
    stages = Mesh(devices, ("pp", "half"))
    ends = Mesh(devices[:: max(pp - 1, 1)], ("ends", "half"))
    last = Mesh(devices[-1:], ("ends", "half"))

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        if "blocks" in name:
            return NamedSharding(stages, P("pp"))
        if "embed" in name:
            return NamedSharding(ends, P(None, "half"))
        return NamedSharding(last if "head" in name else ends, P())

    return jax.tree_util.tree_map_with_path(place, state)


def logits(params: Any, pp: int) -> np.ndarray:
    """The forward pass of a pipeline whose stages each compute with what their first device holds."""
    run = Execution()
    devices = jax.devices()

    def held(tree: Any, stage: int) -> Any:
        pair = devices[2 * stage : 2 * stage + 2]
        shards = [jax.tree.map(lambda x, d=d: {s.device: s.data for s in x.addressable_shards}[d], tree) for d in pair]
        return jax.tree.map(np.asarray, shards[0]), jax.tree.map(np.asarray, shards[1])

    def table(stage: int) -> Any:
        return jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=-1), *held(params["embed"], stage))

    x = models.embed(MODEL, table(0), jnp.asarray(TOKENS), jnp.asarray(POSITIONS), run)
    for stage in range(pp):
        blocks = jax.tree.map(jnp.asarray, held(params["blocks"], stage)[0])
        x, _ = models.run_blocks(MODEL, blocks, x, jnp.asarray(INSIDE), jnp.asarray(POSITIONS), run)
    head = jax.tree.map(jnp.asarray, held(params["head"], pp - 1)[0])
    return np.asarray(models.project(MODEL, head, x, table(pp - 1)["tokens"], run))


def test_a_tied_table_follows_the_ends_of_the_pipeline(path: Any):
    params = models.init(MODEL, jax.random.key(0))
    state = {"params": params, "opt": optax.adam(1e-3).init(jax.tree.map(jnp.cos, params))}
    wanted = jax.tree.map(np.asarray, state)
    reference = np.asarray(models.forward(MODEL, params, TOKENS, INSIDE, POSITIONS))
    for pp in (1, 2, 3, 1):
        state, report = dj.reshard(state, layout(state, pp), donate=True, check=True, path=path)
        assert report.bytes_moved == report.bytes_lower_bound
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), wanted)
        for leaf in (state["params"]["embed"]["tokens"], state["opt"][0].mu["embed"]["tokens"]):
            shards = {s.device.id: np.asarray(s.data) for s in leaf.addressable_shards}
            assert sorted(shards) == sorted({0, 1, 2 * pp - 2, 2 * pp - 1})
            for half in (0, 1):
                np.testing.assert_array_equal(shards[half], shards[2 * pp - 2 + half])
        np.testing.assert_allclose(logits(state["params"], pp), reference, rtol=1e-5, atol=1e-6)
