"""The pipeline against a plain loop over layers and micro-batches: output, sums and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from runtime.packed_rows import assert_close, tokens_of

from dynajax.meshes import Strategy
from dynajax.models import packed_attention
from dynajax.runtime import layer_order, pipeline_blocks, ring_attention

BATCH, SEQ, EMBED = 4, 6, 8
STRATEGIES = [
    # strategy, layers, micro-batches, chunks
    ("pp2", 4, 3, 1),
    ("pp3.dp2.tp2", 4, 2, 1),
    ("pp4", 10, 4, 1),
    ("pp2", 8, 4, 2),
    ("pp3", 10, 5, 2),
    ("pp2.cp3", 3, 2, 1),
    ("pp4.cp2", 3, 1, 1),
    ("dp2", 3, 2, 1),
]


def layer(w, x, rows):
    y = x + jnp.tanh(jnp.einsum("bse,ef->bsf", x, w.astype(x.dtype))) * (1 + rows[..., None])
    return y, {"square": jnp.sum(y.astype(jnp.float32) ** 2)}


def inputs(layers, microbatches) -> Any:
    rng = np.random.default_rng(0)
    stack = (rng.normal(size=(layers, EMBED, EMBED)) * 0.3).astype(np.float32)
    x = rng.normal(size=(microbatches, BATCH, SEQ, EMBED)).astype(np.float32)
    return stack, x, rng.integers(0, 2, (microbatches, BATCH, SEQ)).astype(np.float32)


def loss_of(y, squares):
    return jnp.sum(y.astype(jnp.float32) ** 3) + jnp.sum(jnp.sqrt(1 + squares))


def loop(stack, x, rows):
    squares = []
    for w in stack:
        x, sums = jax.vmap(layer, (None, 0, 0))(w, x, rows)
        squares.append(sums["square"].sum())
    return loss_of(x, jnp.stack(squares))


def piped(mesh, order, layers, rows, chunks, remat=False):
    def run(stack, x):
        y, sums = pipeline_blocks(layer, layers, stack, x, rows, mesh, chunks=chunks, remat=remat)
        assert sums["square"].shape == order.shape
        return loss_of(y, sums["square"][order >= 0])

    return run


def stored(mesh, order, stack, x) -> Any:
    places = np.where((order >= 0)[:, None, None], stack[order], 0)
    specs = PartitionSpec("pp", None, "tp"), PartitionSpec(None, "dp", "cp")
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((places, x), specs, strict=True)]


@pytest.mark.parametrize(("strategy", "layers", "microbatches", "chunks"), STRATEGIES)
def test_output_sums_and_gradients_are_those_of_a_loop(strategy, layers, microbatches, chunks):
    strategy = Strategy.parse(strategy)
    mesh = strategy.mesh(jax.devices()[: strategy.num_devices])
    order, (stack, x, rows) = layer_order(layers, strategy.size("pp"), chunks), inputs(layers, microbatches)
    run = piped(mesh, order, layers, rows, chunks, remat=layers % 2 == 0)
    value, (d_places, dx) = jax.jit(jax.value_and_grad(run, (0, 1)))(*stored(mesh, order, stack, x))
    want, (d_stack, want_dx) = jax.value_and_grad(loop, (0, 1))(stack, x, rows)
    d_places = np.asarray(d_places)
    assert np.all(d_places[order < 0] == 0)
    layer_first = np.argsort(order[order >= 0])
    assert_close((value, d_places[order >= 0][layer_first], dx), (want, d_stack, want_dx))


def test_bfloat16_runs_in_a_pipeline_and_stays_near_float32():
    strategy = Strategy.parse("pp2.dp2.tp2")
    mesh = strategy.mesh(jax.devices()[:8])
    order, (stack, x, rows) = layer_order(3, 2), inputs(3, 2)
    run = piped(mesh, order, 3, rows.astype(jnp.bfloat16), 1)
    value, grad = jax.jit(jax.value_and_grad(run))(*stored(mesh, order, stack, x.astype(jnp.bfloat16)))
    want, d_stack = jax.value_and_grad(loop)(stack, x, rows)
    assert grad.dtype == jnp.float32
    assert_close((value, np.asarray(grad)[order >= 0]), (want, d_stack), rtol=0.1)


def test_a_tick_keeps_its_input_alone():
    mesh, microbatches, seq = Strategy.parse("pp2").mesh(jax.devices()[:2]), 8, 64
    x = np.ones((microbatches, BATCH, seq, EMBED), np.float32)
    rows = np.ones((microbatches, BATCH, seq), np.float32)

    def bytes_kept(layers):
        stack, order = np.ones((layers, EMBED, EMBED), np.float32), layer_order(layers, 2)
        run = jax.jit(jax.grad(piped(mesh, order, layers, rows, 1, remat=True)))
        memory = run.lower(*stored(mesh, order, stack, x)).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    # Eight more layers are four more on a stage: their inputs are kept for one tick, not for all nine.
    inputs_of_one_tick = 4 * x[0].nbytes
    assert bytes_kept(16) - bytes_kept(8) < 3 * inputs_of_one_tick


def test_a_layer_in_a_pipeline_may_attend_round_the_ring():
    mesh = Strategy.parse("pp2.cp2.tp2").mesh(jax.devices()[:8])
    rng = np.random.default_rng(0)
    stack = (rng.normal(size=(3, EMBED, 2, 4)) * 0.2).astype(np.float32)
    x = rng.normal(size=(2, BATCH, SEQ, EMBED)).astype(np.float32)
    rows = jax.tree.map(lambda r: np.stack([r, r]), tokens_of([[4, 2], [6], [], [1, 1, 1]], SEQ))

    def loss(attention, run):
        def layer(w, x, rows):
            heads = jnp.einsum("bse,ehd->bshd", x, w)
            return x + jnp.einsum("bshd,ehd->bse", attention(heads, heads, heads, *rows), w), None

        return lambda stack, x: jnp.sum(run(layer, stack, x) ** 3)

    def plain(layer, stack, x):
        for w in stack:
            x = jax.vmap(lambda w, x, rows: layer(w, x, rows)[0], (None, 0, 0))(w, x, rows)
        return x

    order = layer_order(3, 2)
    ring = loss(ring_attention(mesh), lambda layer, s, x: pipeline_blocks(layer, 3, s, x, rows, mesh)[0])
    places = np.where((order >= 0)[:, None, None, None], stack[order], 0)
    placed = jax.device_put(places, NamedSharding(mesh, PartitionSpec("pp", None, "tp")))
    value, grad = jax.jit(jax.value_and_grad(ring))(placed, x)
    want, d_stack = jax.value_and_grad(loss(packed_attention, plain))(stack, x)
    assert_close((value, np.asarray(grad)[order >= 0]), (want, d_stack))
