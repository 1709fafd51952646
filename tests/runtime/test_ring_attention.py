"""Ring attention against the plain attention of one device, values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from runtime.packed_rows import assert_close, restored, tokens_of

from dynajax.errors import LayoutError
from dynajax.meshes import Strategy
from dynajax.models import packed_attention
from dynajax.runtime import AttentionTiles, contiguous, ring_attention, zigzag

DOCUMENTS = [[5, 3, 6], [13], [], [1, 1, 9]]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4


def mesh_of(strategy):
    strategy = Strategy.parse(strategy)
    return strategy.mesh(jax.devices()[: strategy.num_devices])


def arguments(documents, seq, heads=HEADS, kv_heads=KV_HEADS) -> Any:
    rng, rows = np.random.default_rng(0), len(documents)
    q, weight = rng.normal(size=(2, rows, seq, heads, HEAD_DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, rows, seq, kv_heads, HEAD_DIM)).astype(np.float32)
    return q, k, v, *tokens_of(documents, seq), weight


def outputs(attention):
    """Output and gradients of q, k and v for one random direction of the output."""

    def run(q, k, v, segments, positions, weight):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, segments, positions), q, k, v)
        return out, *pull(weight)

    return run


def place(mesh, arrays) -> Any:
    heads = PartitionSpec("dp", "cp", "tp"), PartitionSpec("dp", "cp")
    return [jax.device_put(x, NamedSharding(mesh, heads[x.ndim == 2])) for x in arrays]


@pytest.mark.parametrize(
    "tiles", [AttentionTiles(512, one_row=False), AttentionTiles(2, one_row=False), AttentionTiles(2, one_row=True)]
)
@pytest.mark.parametrize("order", [contiguous, zigzag])
@pytest.mark.parametrize(
    ("strategy", "seq"), [("dp1", 15), ("dp2.tp2", 16), ("cp2", 16), ("cp3", 14), ("cp4", 15), ("dp2.cp2.tp2", 16)]
)
def test_values_and_gradients_are_those_of_plain_attention(strategy, seq, order, tiles):
    mesh, args = mesh_of(strategy), arguments(DOCUMENTS, seq)
    order = order(seq, mesh.shape["cp"])
    got = jax.jit(outputs(ring_attention(mesh, tiles=tiles)))(*place(mesh, order.arrange(args)))
    got, want = restored(order, got), outputs(packed_attention)(*args)
    assert_close(got, want)
    padding = args[3] == 0
    assert all(np.all(x[padding] == 0) for x in got)


@pytest.mark.parametrize("order", [contiguous, zigzag])
def test_PACK_1_a_document_does_not_see_another(order):
    q, k, v, segments, positions, _ = arguments([[5, 3]], 8)
    mesh, order = mesh_of("cp2"), order(8, 2)
    ring: Any = jax.jit(ring_attention(mesh, tiles=AttentionTiles(2, one_row=True)))

    def second_document(k, v):
        out = ring(*place(mesh, order.arrange((q, k, v, segments, positions))))
        return restored(order, out)[:, 5:]

    changed_k, changed_v = k.copy(), v.copy()
    changed_k[:, :5], changed_v[:, :5] = 7.0, -3.0
    before, after = second_document(k, v), second_document(changed_k, changed_v)
    alone = packed_attention(q[:, 5:], k[:, 5:], v[:, 5:], jnp.ones((1, 3), jnp.int32), jnp.arange(3)[None])
    assert np.array_equal(before, after)
    assert_close(before, alone)


def test_a_step_of_the_ring_stores_no_scores_of_the_whole_row():
    mesh, args = mesh_of("cp2"), arguments([[256]], 256, heads=2, kv_heads=2)
    whole_scores = 2 * 256 * 256 * 4

    def bytes_needed(attention, args):
        memory = jax.jit(outputs(attention)).lower(*args).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert (
        bytes_needed(ring_attention(mesh, tiles=AttentionTiles(16, one_row=False)), place(mesh, args))
        < whole_scores / 2
    )
    assert bytes_needed(packed_attention, args) > whole_scores


def test_bfloat16_comes_back_as_bfloat16_near_the_float32_result():
    mesh, (q, k, v, segments, positions, _) = mesh_of("cp2"), arguments(DOCUMENTS, 16)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    got = jax.jit(ring_attention(mesh))(*place(mesh, (*low, segments, positions)))
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), packed_attention(q, k, v, segments, positions), rtol=2e-2)


def test_a_row_that_does_not_divide_names_the_remedy():
    with pytest.raises(LayoutError, match="1 rows of 10 tokens do not divide over cp = 3"):
        ring_attention(mesh_of("cp3"))(*arguments([[10]], 10)[:5])
