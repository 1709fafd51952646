"""The one seam of the engine to what JAX does not export. tests/engine/test_jax_private.py tries every name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.array import ArrayImpl
from jax._src.interpreters import pxla
from jax._src.random import prng
from jax.sharding import Sharding, SingleDeviceSharding


def assemble(
    shape: tuple[int, ...],
    like: Any,
    sharding: Sharding,
    buffers: Sequence[Any],
    devices: Sequence[jax.Device],
) -> jax.Array:
    """An array with dtype and weak type of ``like`` made of one buffer for each device of this process.

    A numpy buffer that is aligned to 64 bytes is used where it lies; a jax array on its device is shared. Without any
    buffer it is an array of which nothing is here.

    Args:
        shape: of the array.
        like: an array, or a ``ShapeDtypeStruct``; if of keys, the buffers are of the numbers below them.
        sharding: of the array.
        buffers: one for each of ``devices``.
        devices: see ``device_order``.
    """
    dtype, inner = physical_element(like.dtype)
    shaped = core.ShapedArray((*shape, *inner), dtype, weak_type=not inner and is_weak(like))
    aval = core.update_aval_with_sharding(shaped, sharding)
    made = pxla.batched_device_put(aval, sharding, buffers, devices, True)  # pyright: ignore[reportArgumentType]
    return prng.random_wrap(made, impl=like.dtype._impl) if inner else made  # pyright: ignore[reportAttributeAccessIssue]


def is_weak(x: Any) -> bool:
    """True for an array, or what stands for one, of a weak type."""
    return bool(getattr(getattr(x, "aval", x), "weak_type", False))


def device_order(sharding: Sharding) -> tuple[jax.Device, ...]:
    """Devices of this process in the order in which an array with this sharding lists its shards."""
    return tuple(sharding._addressable_device_assignment)


def shards(array: jax.Array) -> list[jax.Array]:
    """What an array is made of on each device, in the order of ``device_order``."""
    return list(array._arrays)  # pyright: ignore[reportAttributeAccessIssue]


class Disowner:
    """Marks arrays as deleted whose buffers live on in other arrays.

    ``delete`` would free the shared buffers too, and an array with only some of its buffers deleted aborts the
    process when a program gets it. So the array is given one-byte buffers, which are then deleted.
    """

    def __init__(self) -> None:
        self._stand_ins: dict[tuple[jax.Device, str | None], jax.Array] = {}

    def disown(self, array: jax.Array) -> None:
        """Make ``array`` a deleted one; its buffers live as long as other arrays hold them."""
        kind = array.sharding.memory_kind
        order = device_order(array.sharding)
        if not order:
            array.delete()
            return
        for device in order:
            if (device, kind) not in self._stand_ins:
                place = SingleDeviceSharding(device, memory_kind=kind)
                self._stand_ins[device, kind] = jax.device_put(np.zeros((), np.uint8), place)
        buffers = [self._stand_ins[d, kind] for d in order]
        hollow = ArrayImpl(array.aval, array.sharding, buffers, committed=True, _skip_checks=True)  # pyright: ignore
        array.__dict__.pop("addressable_shards", None)  # a cache that holds the buffers
        array._replace_with(hollow)  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Delete the stand-ins, and with them every array that was disowned."""
        for stand_in in self._stand_ins.values():
            stand_in.delete()
        self._stand_ins.clear()


def physical(array: jax.Array) -> jax.Array:
    """The array of machine numbers that a typed PRNG key array wraps; any other array is its own."""
    return getattr(array, "_base_array", array)


def physical_element(dtype: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Machine dtype and trailing dims of one element: ``(uint32, (2,))`` for a threefry key, no dims for numbers."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.dtype(dtype), ()
    return np.dtype(np.uint32), tuple(dtype._impl.key_shape)
