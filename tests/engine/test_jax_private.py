"""Every private name of JAX that the engine uses, tried on its own: a new JAX that breaks one fails here by name."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from engine.states import P, mesh
from jax.sharding import NamedSharding

from dynajax.arrays import _jax_private as private


def _array() -> jax.Array:
    make = jax.jit(lambda a: a + 0, out_shardings=NamedSharding(mesh("tp8 reversed"), P("tp")))
    return make(np.arange(32, dtype=np.float32).reshape(8, 4))


def test_device_order_is_the_order_of_the_shards() -> None:
    x = _array()
    assert private.device_order(x.sharding) == tuple(jax.devices()[:8][::-1])


def test_assemble_uses_aligned_numpy_memory_and_jax_buffers_where_they_lie() -> None:
    x = _array()
    room = np.empty(16 + 16, np.float32)
    start = -room.ctypes.data % 64 // 4
    own = room[start : start + 4].reshape(1, 4)
    own[...] = 9
    order = private.device_order(x.sharding)
    pieces = {s.device: s.data for s in x.addressable_shards}
    buffers = [own if k == 2 else pieces[d] for k, d in enumerate(order)]
    made = private.assemble(x.shape, x, x.sharding, buffers, order)
    pointers = {s.device: s.data.unsafe_buffer_pointer() for s in made.addressable_shards}
    assert pointers == {
        d: own.ctypes.data if k == 2 else pieces[d].unsafe_buffer_pointer() for k, d in enumerate(order)
    }
    assert made.aval == x.aval


def test_a_disowned_array_is_deleted_and_its_buffers_live_on() -> None:
    x = _array()
    want = np.arange(32, dtype=np.float32).reshape(8, 4)
    pieces = [s.data for s in x.addressable_shards]
    heir = private.assemble(x.shape, x, x.sharding, pieces, private.device_order(x.sharding))
    pointers = [p.unsafe_buffer_pointer() for p in pieces]
    del pieces
    disowner = private.Disowner()
    disowner.disown(x)
    disowner.close()
    assert x.is_deleted()
    assert x.shape == (8, 4)
    with pytest.raises(RuntimeError, match=r"deleted with shape=float32\[8,4\]"):
        jax.jit(lambda a: a)(x)
    assert np.array_equal(heir, want)
    stepped = jax.jit(lambda a: a + 1, donate_argnums=0)(heir)
    assert [s.data.unsafe_buffer_pointer() for s in stepped.addressable_shards] == pointers


def test_physical_is_the_array_below_a_key() -> None:
    key = jax.random.key(3)
    assert np.array_equal(private.physical(key), jax.random.key_data(key))
    x = _array()
    assert private.physical(x) is x
