"""Every private name of JAX that is used, tried on its own: a new JAX that breaks one fails here by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.states import P, mesh
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding

from dynajax.arrays import _jax_private as private
from dynajax.errors import DynajaxError


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
    with private.Disowner() as disowner:
        disowner.disown(x)
        disowner.commit()
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


def test_what_was_not_committed_comes_back_if_the_body_raises() -> None:
    x, y = _array(), _array()
    disowner = private.Disowner()

    def interrupted() -> None:
        with disowner:
            disowner.disown(x)
            disowner.commit()
            disowner.disown(y)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert x.is_deleted()
    assert np.array_equal(y, np.arange(32, dtype=np.float32).reshape(8, 4))


@pytest.mark.parametrize("dtype", [np.float32, jnp.int4])
def test_a_compiled_program_runs_on_arrays_and_on_other_devices(dtype: Any) -> None:
    """Loaded for other devices it computes the same there; what it is compiled from is compiled once."""
    on = [Mesh(np.asarray(jax.devices())[numbers], ("x",)) for numbers in ([0, 1, 2, 3], [9, 4, 11, 6])]
    shape = jax.ShapeDtypeStruct((8, 4), dtype, sharding=NamedSharding(on[0], P("x")))
    never_seen = int(np.random.default_rng().integers(2**31))  # so that JAX's own cache has not kept the program

    def shifted(x: jax.Array) -> jax.Array:
        sent = jax.lax.ppermute(x.astype(jnp.int32) + never_seen, "x", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return (sent - never_seen).astype(dtype)

    shift = jax.shard_map(
        shifted,
        mesh=on[0],
        in_specs=P("x"),
        out_specs=P("x"),
    )
    compiled, is_new = private.compiled(jax.jit(shift).lower(shape))
    assert is_new
    values = np.arange(32).reshape(8, 4) % 7
    for mesh_there in on:
        program = (
            compiled
            if mesh_there is on[0]
            else private.loaded_for(compiled, *(list(np.asarray(m.devices).flat) for m in on))
        )
        x = jax.device_put(values.astype(dtype), NamedSharding(mesh_there, P("x")))
        (made,) = private.run_compiled(program, [x])[:1]
        assert made.sharding.device_set == set(mesh_there.devices.flat)
        assert np.array_equal(np.asarray(made).astype(np.int8), np.roll(values, 2, axis=0))


def test_settings_of_the_caller_do_not_reach_in_and_come_back() -> None:
    with jax.set_mesh(mesh("tp8")), jax.debug_nans(True), jax.transfer_guard("disallow"), jax.disable_jit():
        with private.own_settings():
            assert private.mesh_that_is_set() is None
            assert jnp.asarray(np.float64(1)).dtype == np.float64
            assert not jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
            assert not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
            assert (jnp.zeros(3) + np.ones(3)).shape == (3,)
        assert private.mesh_that_is_set() == mesh("tp8")
        assert jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]

    def traced(x: jax.Array) -> jax.Array:
        with private.own_settings():
            return x

    with pytest.raises(DynajaxError, match="outside of jit"):
        jax.jit(traced)(1.0)


def test_the_layout_of_an_array_is_the_order_of_its_dims_in_memory() -> None:
    x = _array()
    assert private.layout_of(x) is None
    turned = jax.device_put(np.arange(32.0).reshape(8, 4), Format(Layout((1, 0)), x.sharding))
    assert private.layout_of(turned) == (1, 0)
    assert private.layout_of(jax.random.split(jax.random.key(0), 4)) is None


def test_pointers_are_where_the_shards_lie() -> None:
    x = _array()
    lies = {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    assert private.pointers(x) == tuple(lies[d] for d in private.device_order(x.sharding))
    assert private.pointers(x, 2) == private.pointers(x)[:2]


def test_a_value_that_is_told_fills_every_shard() -> None:
    value = np.arange(32, dtype=np.int16).reshape(8, 4)
    like = jax.ShapeDtypeStruct((8, 4), np.int16)
    made = private.array_of_value(value, like, _array().sharding)
    assert made.sharding == _array().sharding
    assert np.array_equal(made, value)
    key = jax.random.key(3)
    keys = private.array_of_value(np.asarray(jax.random.key_data(key)), key, NamedSharding(mesh("tp8"), P()))
    assert np.array_equal(jax.random.key_data(keys), jax.random.key_data(key))
