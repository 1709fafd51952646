"""The one seam to what JAX does not export. tests/arrays/test_jax_private.py tries every name."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler, config, core
from jax._src import mesh as mesh_lib
from jax._src.array import ArrayImpl
from jax._src.interpreters import pxla
from jax._src.random import prng
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dynajax.errors import DynajaxError


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
    if any(isinstance(b, jax.Array) for b in buffers):
        # Of a replicated array JAX would use one buffer for all devices, and none of theirs.
        buffers = [
            b if isinstance(b, jax.Array) else _on(b, d, sharding) for b, d in zip(buffers, devices, strict=True)
        ]
    made = pxla.batched_device_put(aval, sharding, buffers, devices, True)  # pyright: ignore[reportArgumentType]
    return prng.random_wrap(made, impl=like.dtype._impl) if inner else made  # pyright: ignore[reportAttributeAccessIssue]


def _on(buffer: np.ndarray[Any, Any], device: jax.Device, sharding: Sharding) -> jax.Array:
    """A numpy buffer as an array of one device."""
    place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    aval = core.update_aval_with_sharding(core.ShapedArray(buffer.shape, buffer.dtype), place)
    return pxla.batched_device_put(aval, place, [buffer], [device], True)  # pyright: ignore[reportArgumentType]


def array_of_value(value: np.ndarray[Any, Any], like: Any, sharding: Sharding) -> jax.Array:
    """An array of a value that every process has, machine numbers of keys too; each fills its own shards."""
    order = device_order(sharding)
    index = sharding.addressable_devices_indices_map(tuple(like.shape))
    buffers = [
        jax.device_put(value[index[d]], SingleDeviceSharding(d, memory_kind=sharding.memory_kind)) for d in order
    ]
    return assemble(tuple(like.shape), like, sharding, buffers, order)


def mesh_that_is_set() -> Mesh | None:
    """The mesh of ``jax.set_mesh``, if one is set."""
    mesh = mesh_lib.get_concrete_mesh()
    return None if mesh.empty else mesh


def pointers(array: jax.Array, most: int | None = None) -> tuple[int, ...]:
    """Where the buffers of this process lie, in the order of ``device_order``; none where devices do not say it.

    Args:
        array: any array.
        most: how many to tell.
    """
    told = all(d.platform in ("cpu", "cuda", "rocm") for d in array.sharding.addressable_devices)
    return tuple(b.unsafe_buffer_pointer() for b in shards(physical(array))[:most]) if told else ()


def layout_of(array: Any) -> tuple[int, ...] | None:
    """The order of the dims of an array in memory, the slowest first, if that is not row-major; keys as their words."""
    array = physical(array)
    if not isinstance(array, ArrayImpl) or array.is_deleted():
        return None
    order = getattr(array.format.layout, "major_to_minor", None)
    return None if order == tuple(range(array.ndim)) else order


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
    process when a program gets it. So the array is given one-byte buffers, which are deleted on leaving. Until
    ``commit`` arrays can have their own back, and get it if the body raises: an interrupt may come at any time.
    """

    def __init__(self) -> None:
        self._stand_ins: dict[tuple[jax.Device, str | None], jax.Array] = {}
        self._whole: list[tuple[jax.Array, jax.Array]] = []

    def __enter__(self) -> Self:
        return self

    def disown(self, array: jax.Array) -> None:
        """Make ``array`` a deleted one; its buffers live as long as other arrays hold them."""
        kind = array.sharding.memory_kind
        order = device_order(array.sharding)
        if not order:
            array.delete()
            return
        new = [device for device in order if (device, kind) not in self._stand_ins]
        if new:
            place = NamedSharding(Mesh(np.asarray(new), ("x",)), PartitionSpec("x"), memory_kind=kind)
            made = shards(jax.device_put(np.zeros(len(new), np.uint8), place))
            self._stand_ins |= zip([(device, kind) for device in new], made, strict=True)
        hollow, whole = (_like(array, b) for b in ([self._stand_ins[d, kind] for d in order], shards(array)))
        array.__dict__.pop("addressable_shards", None)  # a cache that holds the buffers
        self._whole.append((array, whole))
        array._replace_with(hollow)  # pyright: ignore[reportAttributeAccessIssue]

    def commit(self) -> None:
        """Let the buffers of all arrays that were disowned go."""
        self._whole.clear()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Give back what was not committed if the body raised; delete the other arrays that were disowned."""
        if error is not None:
            for array, whole in self._whole:
                array._replace_with(whole)  # pyright: ignore[reportAttributeAccessIssue]
        self.commit()
        for stand_in in self._stand_ins.values():
            stand_in.delete()
        self._stand_ins.clear()


def _like(array: jax.Array, buffers: list[jax.Array]) -> ArrayImpl:
    """An array like another one, made of other buffers."""
    return ArrayImpl(array.aval, array.sharding, buffers, committed=array.committed, _skip_checks=True)  # pyright: ignore


def physical(array: jax.Array) -> jax.Array:
    """The array of machine numbers that a typed PRNG key array wraps; any other array is its own."""
    return getattr(array, "_base_array", array)


def physical_element(dtype: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Machine dtype and trailing dims of one element: ``(uint32, (2,))`` for a threefry key, no dims for numbers."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.dtype(dtype), ()
    return np.dtype(np.uint32), tuple(dtype._impl.key_shape)


@contextmanager
def own_settings() -> Iterator[None]:
    """JAX as the engine means it, whatever the caller has set: no mesh, no guards, no checks of values, 64 bits.

    These are settings of this thread; those of all threads are not changed.

    Raises:
        DynajaxError: inside a transformation of JAX.
    """
    if not core.trace_state_clean():
        raise DynajaxError("a move is of live arrays; make it outside of jit and other transformations of JAX")
    with ExitStack() as stack:
        for setting, value in _SETTINGS:
            stack.enter_context(setting(value))
        stack.enter_context(jax.set_mesh(None))  # pyright: ignore[reportArgumentType]
        yield


_SETTINGS: tuple[tuple[Any, Any], ...] = (
    (config.enable_x64, True),
    (config.transfer_guard_host_to_device, "allow"),
    (config.transfer_guard_device_to_device, "allow"),
    (config.transfer_guard_device_to_host, "allow"),
    (config.debug_nans, False),
    (config.debug_infs, False),
    (config.debug_key_reuse, False),
    (config.check_tracer_leaks, False),
    (config.disable_jit, False),
    (config.no_tracing, False),
    (config.no_execution, False),
    (config.default_device, None),
    (config.numpy_rank_promotion, "allow"),
    (config.numpy_dtype_promotion, "standard"),
    (config.array_garbage_collection_guard, "allow"),
    (config.thread_guard, False),
)


def run_compiled(compiled: jax.stages.Compiled, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a compiled program on arrays that lie where it was compiled for.

    ``Compiled`` itself compares layouts and refuses numbers of less than a byte: those of arrays do not say their
    width, those of programs do.
    """
    return compiled._executable.unsafe_call(*arguments)  # pyright: ignore[reportAttributeAccessIssue]


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """A compiled program, and whether it was compiled now: ``loaded_for`` cannot use one that JAX's cache had kept."""
    hits: list[str] = []
    thread = threading.get_ident()

    def heard(event: str, **_: Any) -> None:
        if event.endswith("/cache_hits") and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(heard)
    try:
        return lowered.compile(), not hits
    finally:
        jax.monitoring.unregister_event_listener(heard)


class _Loader(serialize_executable._JaxPjrtUnpickler):
    """Loads an executable for other devices than it was compiled for."""

    def __init__(self, data: bytes, devices: Mapping[int, jax.Device]) -> None:
        chosen = list(devices.values())
        super().__init__(io.BytesIO(data), chosen[0].client, chosen)
        self.devices_by_id = dict(devices)
        numbers = np.asarray([[d.id for d in chosen]])
        self._options = compiler.get_compile_options(1, len(chosen), device_assignment=numbers)

    def persistent_load(self, pid: Any) -> Any:
        """What pickle could not hold."""
        if pid[0] != "exec":
            return super().persistent_load(pid)
        return self.backend.deserialize_executable(
            pid[1], executable_devices=self.execution_devices, compile_options=self._options
        )


def loaded_for(compiled: jax.stages.Compiled, before: Sequence[jax.Device], after: Sequence[jax.Device]) -> Any:
    """A program compiled for some devices, as one for others: device by device in their place."""
    data, inputs, outputs = serialize_executable.serialize(compiled)
    devices = {old.id: new for old, new in zip(before, after, strict=True)}
    unloaded, arguments, no_kwargs = _Loader(data, devices).load()
    return jax.stages.Compiled(unloaded.load(), [], inputs.unflatten(arguments), outputs, no_kwargs=no_kwargs)
