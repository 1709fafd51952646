"""The XLA programs of an exchange, each compiled once for its devices and shapes. Offsets and sizes are data.

All are ``shard_map`` over a mesh with one axis: a jitted function of single-device arrays would be compiled for every
device. A shard of shape (a, b) is the block of an array of shape (devices · a, b); scalars are "replicated" ones.

The devices may be of several processes. Each calls the program and has the blocks of its own devices; one without any
is given arrays of which nothing is there, so that callers do the same everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.engine.words import Words

Devices = tuple[jax.Device, ...]
Shape = tuple[int, ...]
_KEPT = 4096


@dataclass(frozen=True)
class Buckets:
    """The flat buffer that every device sends from and receives in.

    Attributes:
        count: buckets of a device, a power of two.
        words: of a bucket, a power of two.
    """

    count: int
    words: int

    @property
    def total(self) -> int:
        """Words of all buckets of a device."""
        return self.count * self.words


@dataclass(frozen=True)
class Hold:
    """A buffer that grains are taken from or put in: a shard, or a crate of small ones.

    Attributes:
        shape: of the buffer on one device.
        words: how its elements are words.
        grain: words of a grain.
    """

    shape: Shape
    words: Words
    grain: int

    def rows(self, buffer: jax.Array) -> jax.Array:
        """The buffer with a row for each grain."""
        return buffer.reshape(-1, self.words.elements(self.grain))


def spread(devices: Devices, shape: Shape, buffers: Mapping[jax.Device, jax.Array], dtype: Any) -> jax.Array:
    """One array over the devices, made of the buffers of those that are of this process."""
    sharding = NamedSharding(_mesh(devices), _spec(shape))
    return jax.make_array_from_single_device_arrays(
        _whole(devices, shape), sharding, [buffers[d] for d in of_this_process(devices)], dtype=dtype
    )


def gathered(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """The buffers of an array by device, of this process."""
    return {s.device: s.data for s in array.addressable_shards}


def of_this_process(devices: Devices) -> list[jax.Device]:
    """Those that are of this process, in their order."""
    return _mesh(devices).local_devices if devices else []


def place(devices: Devices, table: np.ndarray, owners: Sequence[jax.Device]) -> jax.Array:
    """A row of numbers on each device.

    Args:
        devices: where rows are needed.
        table: rows for devices of this process; other processes have those of theirs.
        owners: device of each row.
    """
    rows, here = dict(zip(owners, table, strict=True)), of_this_process(devices)
    put = jax.device_put([rows[d] for d in here], here)
    return spread(devices, table.shape[1:], dict(zip(here, put, strict=True)), table.dtype)


def tell(devices: Devices, numbers: Any) -> jax.Array:
    """Numbers that all devices are told, the same in every process. (``device_put`` would have them compare.)"""
    told = np.asarray(numbers, np.int32)
    sharding = NamedSharding(_mesh(devices), PartitionSpec())
    return jax.make_array_from_callback(told.shape, sharding, lambda index: told[index], dtype=told.dtype)


@functools.lru_cache(maxsize=_KEPT)
def exchange(devices: Devices, buckets: Buckets) -> Any:
    """``(area, rounds, count) -> area``: bucket k of device i becomes that of device ``i ^ rounds[k]``, for k < count.

    One program for all moves between these devices: the rounds are data, and pick one of the permutations that the
    program holds.
    """
    n = len(devices)

    def round_of(step: int) -> Callable[[jax.Array], jax.Array]:
        pairs = [(i, i ^ step) for i in range(n) if i ^ step < n]
        return lambda x: jax.lax.ppermute(x, "device", pairs) if step else x

    rounds = [round_of(step) for step in range(1 << (n - 1).bit_length())]

    def body(area: jax.Array, steps: jax.Array, count: jax.Array) -> jax.Array:
        def one(k: jax.Array, area: jax.Array) -> jax.Array:
            at = k * buckets.words
            came = jax.lax.switch(steps[k], rounds, jax.lax.dynamic_slice(area, (at,), (buckets.words,)))
            return jax.lax.dynamic_update_slice(area, came, (at,))

        return jax.lax.fori_loop(0, count, one, area)

    told = [((buckets.count,), np.int32, True), ((), np.int32, True)]
    return _compiled("exchange", body, devices, [_area(buckets), *told], donate=0)


@functools.lru_cache(maxsize=_KEPT)
def gather(devices: Devices, words: int) -> Any:
    """``(said) -> heard``: the words of every device, told to all of them."""

    def body(said: jax.Array) -> jax.Array:
        return jax.lax.all_gather(said, "device", tiled=True)

    return _compiled("gather", body, devices, [((words,), np.uint32, False)], outputs=(len(devices) * words,))


@functools.lru_cache(maxsize=_KEPT)
def pack(devices: Devices, hold: Hold, buckets: Buckets, used: int) -> Any:
    """``(area, buffer, grains) -> area``: the first ``used`` words of each bucket are the named grains."""

    def body(area: jax.Array, buffer: jax.Array, grains: jax.Array) -> jax.Array:
        rows = hold.words.unsigned(hold.rows(buffer))
        taken = hold.words.join(rows.at[grains].get(mode="promise_in_bounds"))
        filled = area.reshape(buckets.count, -1).at[:, :used].set(taken.reshape(buckets.count, -1))
        return filled.reshape(-1)

    shapes = [_area(buckets), (hold.shape, hold.words.dtype, False), _grains(hold, buckets, used)]
    return _compiled("pack", body, devices, shapes, donate=0)


@functools.lru_cache(maxsize=_KEPT)
def unpack(devices: Devices, hold: Hold, buckets: Buckets, used: int, summed: Words | None = None) -> Any:
    """``(buffer, area, grains) -> buffer``: the inverse of ``pack``; grains past the end are dropped.

    With ``summed``, which says what the words are, they are added to what the buffer has.
    """

    def body(buffer: jax.Array, area: jax.Array, grains: jax.Array) -> jax.Array:
        came = area.reshape(buckets.count, -1)[:, :used].reshape(-1, hold.grain)
        if summed:
            rows = hold.words.unsigned(hold.rows(buffer).at[grains].get(mode="clip"))
            came = summed.sum(hold.words.join(rows), came)
        rows = hold.words.typed(hold.words.split(came))
        return hold.rows(buffer).at[grains].set(rows, mode="drop", unique_indices=True).reshape(hold.shape)

    shapes = [(hold.shape, hold.words.dtype, False), _area(buckets), _grains(hold, buckets, used)]
    return _compiled("unpack", body, devices, shapes, donate=0)


@functools.lru_cache(maxsize=_KEPT)
def put(devices: Devices, crate: int, shape: Shape, words: Words, count: int) -> Any:
    """``(crate, offsets, *shards) -> crate``: ``count`` shards laid in a crate of so many words."""

    def body(crate: jax.Array, offsets: jax.Array, *shards: jax.Array) -> jax.Array:
        for k, shard in enumerate(shards):
            flat = words.join(words.unsigned(shard.reshape(1, -1))).reshape(-1)
            crate = jax.lax.dynamic_update_slice(crate, flat, (offsets[k],))
        return crate

    shapes = [((crate,), np.uint32, False), ((count,), np.int32, True), *[(shape, words.dtype, False)] * count]
    return _compiled("put", body, devices, shapes, donate=0)


@functools.lru_cache(maxsize=_KEPT)
def take(devices: Devices, crate: int, shape: Shape, words: Words, count: int) -> Any:
    """``(crate, offsets) -> shards``: the inverse of ``put``."""
    size = words.count(int(np.prod(shape)))

    def body(crate: jax.Array, offsets: jax.Array) -> list[jax.Array]:
        flat = [jax.lax.dynamic_slice(crate, (offsets[k],), (size,)) for k in range(count)]
        return [words.typed(words.split(f.reshape(1, -1))).reshape(shape) for f in flat]

    shapes = [((crate,), np.uint32, False), ((count,), np.int32, True)]
    return _compiled("take", body, devices, shapes, outputs=[shape] * count)


@functools.lru_cache(maxsize=_KEPT)
def zeros(devices: Devices, shape: Shape, dtype: Any) -> Any:
    """``() -> buffer``, all zeros."""
    return _compiled("zeros", lambda: jnp.zeros(shape, dtype), devices, [], outputs=shape)


@functools.lru_cache(maxsize=_KEPT)
def retype(devices: Devices, shape: Shape, words: Words) -> Any:
    """``(buffer) -> buffer``: what ``words.carrier`` carried, as what it is, in the same memory."""

    def body(buffer: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(buffer, words.dtype)

    return _compiled("retype", body, devices, [(shape, words.carrier.dtype, False)], donate=0)


PROGRAMS = (exchange, gather, pack, unpack, put, take, zeros, retype)


def compiled_so_far() -> int:
    """Programs compiled since the process began."""
    return sum(program.cache_info().misses for program in PROGRAMS)


def _area(buckets: Buckets) -> tuple[Shape, Any, bool]:
    return (buckets.total,), np.uint32, False


def _grains(hold: Hold, buckets: Buckets, used: int) -> tuple[Shape, Any, bool]:
    return (buckets.count * used // hold.grain,), np.int32, False


@functools.lru_cache(maxsize=_KEPT)
def _mesh(devices: Devices) -> Mesh:
    return Mesh(np.asarray(devices, dtype=object), ("device",))


def _spec(shape: Shape) -> PartitionSpec:
    return PartitionSpec("device") if shape else PartitionSpec()


def _whole(devices: Devices, shape: Shape) -> Shape:
    return (len(devices) * shape[0], *shape[1:]) if shape else ()


def _compiled(
    name: str,
    body: Callable[..., Any],
    devices: Devices,
    inputs: Sequence[tuple[Shape, Any, bool]],
    *,
    outputs: Any = None,
    donate: int | None = None,
) -> Any:
    """Compile ``body`` over the devices, or stand in for it where none of them is of this process.

    Args:
        name: for logs and profiles.
        body: from blocks to blocks.
        devices: the mesh.
        inputs: shape and dtype of each block, and True if all devices are told the same.
        outputs: shapes of the blocks that come out; by default one like the first input.
        donate: input that the output takes the place of.
    """
    mesh = _mesh(devices)
    specs = [PartitionSpec() if told else _spec(shape) for shape, _, told in inputs]
    arguments = [
        jax.ShapeDtypeStruct(shape if told else _whole(devices, shape), dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype, told), spec in zip(inputs, specs, strict=True)
    ]
    out = inputs[0][0] if outputs is None else outputs
    out_specs = [_spec(shape) for shape in out] if isinstance(out, list) else _spec(out)
    body.__name__ = body.__qualname__ = f"dynajax_{name}"
    mapped = jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)
    program = jax.jit(mapped, donate_argnums=() if donate is None else donate)
    if of_this_process(devices):
        return program.lower(*arguments).compile()
    return functools.partial(_nothing, jax.eval_shape(program, *arguments), mesh)


def _nothing(outputs: Any, mesh: Mesh, *_: jax.Array) -> Any:
    """What a program returns to a process that has none of its devices."""
    return jax.tree.map(
        lambda x: jax.make_array_from_single_device_arrays(
            x.shape, NamedSharding(mesh, _spec(x.shape)), [], dtype=x.dtype
        ),
        outputs,
    )
