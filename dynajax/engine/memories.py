"""The numbers by which plans know the memories of devices, and the layouts of jax arrays over them.

A plan that goes from device memory to pinned host memory of the same device moves bytes, as it does in truth: to a plan
these are two memories.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from numpy.typing import NDArray

from dynajax.arrays import _jax_private as private
from dynajax.arrays.dtypes import can_be_summed
from dynajax.engine.request import Request
from dynajax.engine.stored import Bundle, Endpoint, Stored, memory_kind
from dynajax.errors import LayoutError, TargetError, TopologyError
from dynajax.meshes import Topology
from dynajax.planner import Plan
from dynajax.types import Ints
from dynajax.vps import Arrays, Layout, Space, Tensor, Tiling, named_tiling, stored_tiling
from dynajax.vps.parts import joined, parts_tiling
from dynajax.vps.tiling import segment_sum

Memory = tuple[jax.Device, str | None]
"""A device and the kind of its memory."""


@dataclass(frozen=True)
class Memories:
    """All memories that a move touches, numbered in the order of device id and memory kind."""

    listed: tuple[Memory, ...]

    @staticmethod
    def of(shardings: Iterable[Sharding]) -> Memories:
        """The memories of some shardings."""
        found = {(d, memory_kind(s)) for s in set(shardings) for d in s.device_set}
        return Memories(tuple(sorted(found, key=lambda m: (m[0].id, m[1] or ""))))

    @staticmethod
    def of_request(request: Request) -> Memories:
        """The memories of a state, before and after a move."""
        return Memories.of(end.stored.sharding for end in (*request.sources, *request.targets))

    @cached_property
    def number(self) -> dict[Memory, int]:
        """Number of each memory."""
        return {memory: k for k, memory in enumerate(self.listed)}

    @cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, in the order of their ids."""
        return tuple(dict.fromkeys(device for device, _ in self.listed))

    @cached_property
    def are_here(self) -> bool:
        """True if all devices are of this process."""
        return all(device.process_index == device.client.process_index() for device in self.devices)

    def differ(self, a: Ints, b: Ints) -> NDArray[np.bool_]:
        """True where memories ``a[k]`` and ``b[k]`` are of different devices."""
        ids = np.asarray([device.id for device, _ in self.listed])
        return ids[a] != ids[b]

    def numbers(self, sharding: Sharding) -> dict[jax.Device, int]:
        """Number of each device of a sharding, in that sharding's memory."""
        if sharding not in self._numbers:
            kind = memory_kind(sharding)
            self._numbers[sharding] = {d: self.number[d, kind] for d in sharding.device_set}
        return self._numbers[sharding]

    @cached_property
    def _numbers(self) -> dict[Sharding, dict[jax.Device, int]]:
        return {}

    def by_tier(self, plan: Plan) -> dict[str, int]:
        """Bytes that a plan moves over each kind of link; see ``Report``."""
        traffic, topology = plan.traffic, plan.topology
        if topology is not None:
            names = [tier.name for tier in topology.tiers]
            tier = topology.between(traffic.sender, traffic.receiver)
        else:
            names = ["device", "process", "network"]
            process = np.asarray([device.process_index for device, _ in self.listed])
            apart = process[traffic.sender] != process[traffic.receiver]
            tier = self.differ(traffic.sender, traffic.receiver).astype(np.int64) + apart
        return dict(zip(names, segment_sum(tier, traffic.nbytes, len(names)).tolist(), strict=True))

    def links(self, topology: Topology) -> Topology:
        """The links between the memories, given those between devices by their ids.

        Raises:
            TopologyError: the topology lacks a device.
        """
        ids = [device.id for device, _ in self.listed]
        if max(ids, default=-1) >= topology.num_devices:
            raise TopologyError(
                f"the move uses device {max(ids)} and topology {topology.name!r} has {topology.num_devices} devices, "
                "numbered from 0; use a larger topology"
            )
        return replace(topology, domains=topology.domains[:, ids])


def shards_by_device(array: Any) -> dict[jax.Device, jax.Array]:
    """The physical shard of an array on each device of this process; none of what stands for an array elsewhere."""
    if not isinstance(array, jax.Array):
        return {}
    return dict(zip(private.device_order(array.sharding), private.shards(private.physical(array)), strict=True))


def shards_of(array: Any, memories: Memories) -> dict[int, jax.Array]:
    """See ``shards_by_device``, by the number of each shard's memory."""
    shards = shards_by_device(array)
    number = memories.numbers(array.sharding) if shards else {}
    return {number[device]: shard for device, shard in shards.items()}


@functools.lru_cache(maxsize=4096)
def array_tiling(sharding: Sharding, shape: tuple[int, ...], memories: Memories) -> Tiling:
    """Who holds what of a jax array.

    Raises:
        LayoutError: the sharding does not fit the shape.
    """
    if isinstance(sharding, NamedSharding):
        numbers = memories.numbers(sharding)
        devices = np.asarray(sharding.mesh.devices).flat
        return named_tiling(sharding, shape, np.asarray([numbers[d] for d in devices], np.int64))
    numbers = memories.numbers(sharding)
    try:
        slices = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    bounds = np.zeros((2, len(slices), len(shape)), np.int64)
    for row, index in enumerate(slices.values()):
        for dim, part in enumerate(index):
            bounds[:, row, dim] = part.indices(shape[dim])[:2]
    return Tiling.of_boxes(shape, np.asarray([numbers[d] for d in slices], np.int64), bounds[0], bounds[1])


def layouts(request: Request, memories: Memories) -> tuple[Layout, Layout]:
    """Source and target layout of the tensors.

    Raises:
        TargetError: the shardings do not fit the tensors, or ask for sums that cannot be made.
    """
    space = Space(tuple(leaf.tensor for leaf in request.leaves))
    source = _layout(space, [leaf.sources for leaf in request.leaves], memories, True)
    target = _layout(space, [leaf.targets for leaf in request.leaves], memories, False)
    for leaf, has, wants in zip(request.leaves, source.tilings, target.tilings, strict=True):
        if wants.partial:
            raise TargetError(f"{leaf.tensor.path}: the target has unreduced axes, and a move makes no parts of a sum")
        if has.partial and not can_be_summed(leaf.sources[0].like.dtype):
            raise TargetError(f"{leaf.tensor.path}: parts of {leaf.tensor.dtype} cannot be summed on the way")
    return source, target


def _layout(space: Space, ends: list[tuple[Endpoint, ...]], memories: Memories, spare_copies: bool) -> Layout:
    """The layout of the arrays that hold each tensor; ``spare_copies`` on one device count once."""
    tilings = tuple(_tiling(t, arrays, memories, spare_copies) for t, arrays in zip(space, ends, strict=True))
    if all(len(arrays) == 1 and arrays[0].tensors == 1 for arrays in ends):
        return Layout(space, tilings)
    rows: dict[Endpoint, list[int]] = {}
    for row, array in ((row, array) for row, arrays in enumerate(ends) for array in arrays):
        rows.setdefault(array, []).append(row)
    order = sorted(rows, key=lambda array: array.index)
    nbytes = np.zeros((len(order), len(memories.listed)), np.int64)
    for k, array in enumerate(order):
        on = list(memories.numbers(array.stored.sharding).values())
        nbytes[k, on] = array.room * space.tensors[rows[array][0]].itemsize
    # Several tensors of one array that is no bundle are that array, at several places of the tree.
    repeated = frozenset(row for array in order if isinstance(array.stored, Stored) for row in rows[array][1:])
    return Layout(space, tilings, Arrays(tuple(tuple(rows[array]) for array in order), nbytes, repeated))


@functools.lru_cache(maxsize=4096)
def _stored_tiling(stored: Stored | Bundle, path: str, memories: Memories) -> Tiling:
    array = array_tiling(stored.sharding, stored.array_shape, memories)
    if isinstance(stored, Bundle):
        parts = [part for part in stored.parts if part.tensor == path]
        return parts_tiling(array, parts[0].shape, parts)
    return array if stored.is_plain else stored_tiling(array, stored.shape, stored.pieces)


def _tiling(tensor: Tensor, arrays: tuple[Endpoint, ...], memories: Memories, spare_copies: bool) -> Tiling:
    try:
        tilings = [_stored_tiling(a.stored, _path(tensor, a), memories) for a in arrays]
        if len(arrays) == 1 and isinstance(arrays[0].stored, Stored):
            return tilings[0]
        tiling = joined(tilings, [a.room for a in arrays], spare_copies)
        tiling.validate("its arrays")
        return tiling
    except LayoutError as error:
        raise TargetError(f"{tensor.path}: {error}") from None


def _path(tensor: Tensor, array: Endpoint) -> str:
    """The tensor's path where it matters, so that tensors alike share what is known of their tilings."""
    return tensor.path if isinstance(array.stored, Bundle) else ""


def located(arrays: Sequence[Endpoint], offset: Ints) -> tuple[Ints, Ints]:
    """Which of a tensor's arrays each offset is in, and where in its shard; the shards are numbered end to end."""
    starts = np.cumsum([0, *(array.room for array in arrays)])
    k = np.searchsorted(starts, offset, side="right") - 1
    return k, offset - starts[k]
