"""States with every kind of leaf, the layouts they are moved between, and independent ways to look at them."""

from __future__ import annotations

import gc
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import dynajax as dj

P = PartitionSpec

PLACEMENTS: dict[str, tuple[str, list[int]]] = {
    "dp2.tp4": ("dp2.tp4", [0, 1, 2, 3, 4, 5, 6, 7]),
    "fsdp8": ("fsdp8", [0, 1, 2, 3, 4, 5, 6, 7]),
    "tp8": ("tp8", [0, 1, 2, 3, 4, 5, 6, 7]),
    "tp8 reversed": ("tp8", [7, 6, 5, 4, 3, 2, 1, 0]),
    "dp8": ("dp8", [0, 1, 2, 3, 4, 5, 6, 7]),
    "tp4 overlapping": ("tp4", [2, 3, 4, 5]),
    "fsdp2.tp2 permuted": ("fsdp2.tp2", [7, 1, 4, 2]),
    "fsdp4.tp2": ("fsdp4.tp2", [0, 1, 2, 3, 4, 5, 6, 7]),
    "tp2 disjoint": ("tp2", [8, 9]),
    "dp2.fsdp2.tp2 shifted": ("dp2.fsdp2.tp2", [4, 5, 6, 7, 8, 9, 10, 11]),
    "one device": ("dp1", [5]),
    "sixteen": ("fsdp4.tp4", list(range(16))),
}


def mesh(name: str) -> Any:
    text, numbers = PLACEMENTS[name]
    devices = jax.devices()
    return dj.Strategy.parse(text).mesh([devices[i] for i in numbers])


def specs() -> dict[str, Any]:
    """PartitionSpecs of the leaves of ``host_state``."""
    matrix, vector, none = P("fsdp", "tp"), P("tp"), cast(Any, P())
    adam = {"w": matrix, "b": vector}
    return {
        "params": {"w": matrix, "b": vector},
        "opt": (optax.EmptyState(), optax.ScaleByAdamState(count=none, mu=adam, nu=adam)),
        "half": P(("fsdp", "tp")),
        "nan8": P("tp", "fsdp"),
        "nan16": P("tp"),
        "int4": P("fsdp", "tp"),
        "step": P(),
        "flag": P(),
        "empty": P(None, "tp"),
        "weak": P(),
        "keys": P("tp"),
        "old_key": P(),
        "rbg": P(),
    }


def host_state(seed: int = 0) -> dict[str, Any]:
    """One of everything; floats hold all kinds of bits, NaN payloads included."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    adam = [{"w": floats(16, 32), "b": floats(32).astype(ml_dtypes.bfloat16)} for _ in range(2)]
    return {
        "params": {"w": floats(16, 32), "b": floats(32).astype(ml_dtypes.bfloat16)},
        "opt": (optax.EmptyState(), optax.ScaleByAdamState(count=np.int32(7), mu=adam[0], nu=adam[1])),
        "half": floats(32, 3).astype(np.float16),
        "nan8": np.arange(256, dtype=np.uint8).reshape(16, 16).view(ml_dtypes.float8_e5m2),
        "nan16": rng.integers(0, 2**16, (16, 5)).astype(np.uint16).view(ml_dtypes.bfloat16),
        "int4": rng.integers(-8, 8, (16, 16)).astype(ml_dtypes.int4),
        "step": np.int32(16777217),
        "flag": np.bool_(True),
        "empty": np.zeros((0, 16), np.float32),
        "weak": jnp.asarray(1.5),
        "keys": jax.random.split(jax.random.key(seed), 16),
        "old_key": jax.random.PRNGKey(seed),
        "rbg": jax.random.key(seed, impl="rbg"),
    }


def shardings(name: str) -> Any:
    """The shardings of ``host_state`` under a placement."""
    on = mesh(name)
    return jax.tree.map(lambda s: NamedSharding(on, s), specs(), is_leaf=lambda s: isinstance(s, PartitionSpec))


def state(name: str, seed: int = 0) -> dict[str, Any]:
    """``host_state`` on a placement, put there leaf by leaf so that no two collective programs are in flight."""
    return jax.tree.map(lambda x, s: jax.block_until_ready(jax.device_put(x, s)), host_state(seed), shardings(name))


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def raw(x: Any) -> np.ndarray[Any, Any]:
    """The values of an array or a key array, as numpy."""
    return np.asarray(jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x) else x)


def assert_same_bits(got: Any, want: Any) -> None:
    """Structure, dtype, shape, weak type and every bit of every shard: each shard against a slice of the whole."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        whole = raw(b)
        physical = jax.random.key_data(a) if is_key(a) else a
        for shard in physical.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), (name, shard.device)


def bytes_not_held(shapes: Any, sources: Any, targets: Any) -> int:
    """What devices need and do not hold in that memory, counted element by element from jax's own index maps.

    ``shapes`` has leaves with shapes and dtypes, the others a sharding for each.
    """
    total = 0
    for x, source, target in zip(*map(jax.tree.leaves, (shapes, sources, targets)), strict=True):
        same_memory = (source.memory_kind or "device") == (target.memory_kind or "device")
        held = source.devices_indices_map(x.shape) if same_memory else {}
        for device, index in target.devices_indices_map(x.shape).items():
            need = np.zeros(x.shape, bool)
            need[index] = True
            if device in held:
                need[held[device]] = False
            total += int(need.sum()) * x.dtype.itemsize
    return total


def live_bytes(arrays: Any = None, collect: bool = True) -> dict[Any, int]:
    """Bytes of distinct live buffers on each device: of all arrays, or of the given ones."""
    if collect:
        gc.collect()
    seen: dict[Any, dict[int, int]] = {}
    for x in jax.live_arrays() if arrays is None else jax.tree.leaves(arrays):
        if x.is_deleted():
            continue
        for shard in (jax.random.key_data(x) if is_key(x) else x).addressable_shards:
            # Of an array that was given up while the move goes on, one byte is left, seen as a shard of bytes.
            if not shard.data.is_deleted() and (is_key(x) or shard.data.dtype == x.dtype):
                seen.setdefault(shard.device, {})[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(buffers.values()) for device, buffers in seen.items()}
