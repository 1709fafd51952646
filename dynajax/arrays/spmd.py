"""Arrays over the devices of a program: blocks by device made one array, and taken apart again.

A program runs on a mesh with one axis. A shard of shape (a, b) is the block of an array of shape (devices · a, b);
scalars are "replicated" ones. The devices may be of several processes: each has the blocks of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynajax.arrays import _jax_private as private

Devices = tuple[jax.Device, ...]
Shape = tuple[int, ...]

AXIS = "device"
_KEPT = 1 << 12


@functools.lru_cache(maxsize=_KEPT)
def mesh_of(devices: Devices) -> Mesh:
    """The mesh of a program over some devices."""
    return Mesh(np.asarray(devices, dtype=object), (AXIS,))


def spec_of(shape: Shape) -> PartitionSpec:
    """How the blocks of one shape lie side by side."""
    return PartitionSpec(AXIS) if shape else PartitionSpec()


@functools.lru_cache(maxsize=_KEPT)
def over(devices: Devices, shape: Shape, dtype: Any, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
    """What an array with a block of ``shape`` on each device is like."""
    spec = spec_of(shape) if spec is None else spec
    whole = (len(devices) * shape[0], *shape[1:]) if spec == PartitionSpec(AXIS) else shape
    return jax.ShapeDtypeStruct(whole, dtype, sharding=NamedSharding(mesh_of(devices), spec))


def array_of_blocks(devices: Devices, shape: Shape, dtype: Any, blocks: Mapping[jax.Device, jax.Array]) -> jax.Array:
    """One array over the devices, made of the blocks of those that are of this process."""
    like = over(devices, shape, dtype)
    mine = [blocks[d] for d in of_this_process(devices)]
    return private.assemble(like.shape, like, like.sharding, mine, of_this_process(devices))


def blocks_of(array: jax.Array, devices: Devices) -> dict[jax.Device, jax.Array]:
    """The blocks of an array over the devices, by device, of this process."""
    return dict(zip(of_this_process(devices), private.shards(array), strict=True))


@functools.lru_cache(maxsize=_KEPT)
def of_this_process(devices: Devices) -> Devices:
    """Those that are of this process, in their order."""
    return tuple(d for d in devices if d.process_index == d.client.process_index())


def replicated(devices: Devices, numbers: Any) -> jax.Array:
    """Numbers that all devices are told, the same in every process. (``device_put`` would have them compare.)"""
    table = np.asarray(numbers, np.int32)
    like = over(devices, table.shape, np.int32, PartitionSpec())
    return jax.make_array_from_callback(table.shape, like.sharding, lambda index: table[index], dtype=table.dtype)


def rows(devices: Devices, table: np.ndarray) -> jax.Array:
    """A row of numbers on each device.

    Args:
        devices: where rows are needed.
        table: rows of the devices of this process, in their order.
    """
    here = list(of_this_process(devices))
    put = jax.device_put(list(table), here) if here else []
    return array_of_blocks(devices, table.shape[1:], table.dtype, dict(zip(here, put, strict=True)))
