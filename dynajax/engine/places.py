"""Places: the numbers by which plans know a device's memories, and the layouts of jax arrays over them.

A place is one memory of one device. A plan that goes from device memory to pinned host memory of the
same device thus moves bytes, as it does in truth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from dynajax.engine import _jax_private as private
from dynajax.engine.tree import Bundle, Held, Leaf, Stored
from dynajax.engine.words import can_be_summed
from dynajax.errors import LayoutError, TargetError, TopologyError
from dynajax.meshes import Topology
from dynajax.planner import Plan
from dynajax.types import Bools, Ints
from dynajax.vps import Arrays, Layout, Space, Tensor, Tiling, named_tiling, stored_tiling
from dynajax.vps.parts import joined, parts_tiling
from dynajax.vps.tiling import segment_sum

Place = tuple[jax.Device, str | None]


@dataclass(frozen=True)
class Places:
    """All places that a move touches, numbered in the order of device id and memory kind."""

    places: tuple[Place, ...]

    @staticmethod
    def of(shardings: Iterable[Sharding]) -> Places:
        """The places of some shardings."""
        found = {(d, memory_kind(s)) for s in set(shardings) for d in s.device_set}
        return Places(tuple(sorted(found, key=lambda p: (p[0].id, p[1] or ""))))

    @staticmethod
    def of_leaves(leaves: Iterable[Leaf]) -> Places:
        """The places of a state, before and after a move."""
        return Places.of(end.stored.sharding for leaf in leaves for end in (*leaf.sources, *leaf.targets))

    @cached_property
    def number(self) -> dict[Place, int]:
        """Number of each place."""
        return {place: k for k, place in enumerate(self.places)}

    @cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, in the order of their ids."""
        return tuple(dict.fromkeys(device for device, _ in self.places))

    @cached_property
    def are_here(self) -> bool:
        """True if all devices are of this process."""
        return all(device.process_index == device.client.process_index() for device in self.devices)

    def differ(self, a: Ints, b: Ints) -> Bools:
        """True where places ``a[k]`` and ``b[k]`` are of different devices."""
        ids = np.asarray([device.id for device, _ in self.places])
        return ids[a] != ids[b]

    def numbers(self, sharding: Sharding) -> dict[jax.Device, int]:
        """Number of each device of a sharding, in that sharding's memory."""
        kind = memory_kind(sharding)
        return {d: self.number[d, kind] for d in sharding.device_set}

    def by_tier(self, plan: Plan) -> dict[str, int]:
        """Bytes that a plan moves over each kind of link; see ``Report``."""
        traffic, topology = plan.traffic, plan.topology
        if topology is not None:
            names = [tier.name for tier in topology.tiers]
            tier = topology.between(traffic.sender, traffic.receiver)
        else:
            names = ["device", "process", "network"]
            process = np.asarray([device.process_index for device, _ in self.places])
            apart = process[traffic.sender] != process[traffic.receiver]
            tier = self.differ(traffic.sender, traffic.receiver).astype(np.int64) + apart
        return dict(zip(names, segment_sum(tier, traffic.nbytes, len(names)).tolist(), strict=True))

    def links(self, topology: Topology) -> Topology:
        """The links between the places, given those between devices by their ids.

        Raises:
            TopologyError: the topology lacks a device.
        """
        ids = [device.id for device, _ in self.places]
        if max(ids, default=-1) >= topology.num_devices:
            raise TopologyError(
                f"the move uses device {max(ids)} and topology {topology.name!r} has {topology.num_devices} devices, "
                "numbered from 0; use a larger topology"
            )
        return replace(topology, domains=topology.domains[:, ids])


def memory_kind(sharding: Sharding) -> str | None:
    """The memory that a sharding means; the device's default memory by its name."""
    return sharding.memory_kind or next(iter(sharding.device_set)).default_memory().kind


def shards_of(array: Any, places: Places) -> dict[int, jax.Array]:
    """The physical shard of an array at each place of this process; none of what stands for an array elsewhere."""
    if not isinstance(array, jax.Array):
        return {}
    number, order = places.numbers(array.sharding), private.device_order(array.sharding)
    return dict(zip((number[d] for d in order), private.shards(private.physical(array)), strict=True))


@functools.lru_cache(maxsize=4096)
def array_tiling(sharding: Sharding, shape: tuple[int, ...], places: Places) -> Tiling:
    """Who holds what of a jax array.

    Raises:
        LayoutError: the sharding does not fit the shape.
    """
    if isinstance(sharding, NamedSharding):
        numbers = places.numbers(sharding)
        devices = np.asarray(sharding.mesh.devices).flat
        return named_tiling(sharding, shape, np.asarray([numbers[d] for d in devices], np.int64))
    numbers = places.numbers(sharding)
    try:
        slices = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    bounds = np.zeros((2, len(slices), len(shape)), np.int64)
    for row, index in enumerate(slices.values()):
        for dim, part in enumerate(index):
            bounds[:, row, dim] = part.indices(shape[dim])[:2]
    return Tiling.of_boxes(shape, np.asarray([numbers[d] for d in slices], np.int64), bounds[0], bounds[1])


def layouts(leaves: list[Leaf], places: Places) -> tuple[Layout, Layout]:
    """Source and target layout of the leaves."""
    space = Space(tuple(leaf.tensor for leaf in leaves))
    before, after = [leaf.sources for leaf in leaves], [leaf.targets for leaf in leaves]
    source, target = _layout(space, before, places, True), _layout(space, after, places, False)
    for leaf, has, wants in zip(leaves, source.tilings, target.tilings, strict=True):
        if wants.partial:
            raise TargetError(f"{leaf.tensor.path}: the target has unreduced axes, and a move makes no parts of a sum")
        if has.partial and not can_be_summed(leaf.sources[0].array.dtype):
            raise TargetError(f"{leaf.tensor.path}: parts of {leaf.tensor.dtype} cannot be summed on the way")
    return source, target


def _layout(space: Space, held: list[tuple[Held, ...]], places: Places, spare_copies: bool) -> Layout:
    """The layout of the arrays that hold each tensor; ``spare_copies`` on one device count once."""
    tilings = tuple(_tiling(t, arrays, places, spare_copies) for t, arrays in zip(space, held, strict=True))
    if all(len(arrays) == 1 and arrays[0].tensors == 1 for arrays in held):
        return Layout(space, tilings)
    rows: dict[Held, list[int]] = {}
    for row, array in ((row, array) for row, arrays in enumerate(held) for array in arrays):
        rows.setdefault(array, []).append(row)
    order = sorted(rows, key=lambda array: array.index)
    nbytes = np.zeros((len(order), len(places.places)), np.int64)
    for k, array in enumerate(order):
        on = list(places.numbers(array.stored.sharding).values())
        nbytes[k, on] = array.room * space.tensors[rows[array][0]].itemsize
    return Layout(space, tilings, Arrays(tuple(tuple(rows[array]) for array in order), nbytes))


@functools.lru_cache(maxsize=4096)
def _stored_tiling(stored: Stored | Bundle, path: str, places: Places) -> Tiling:
    array = array_tiling(stored.sharding, stored.array_shape, places)
    if isinstance(stored, Bundle):
        parts = [part for part in stored.parts if part.tensor == path]
        return parts_tiling(array, parts[0].shape, parts)
    return array if stored.is_plain else stored_tiling(array, stored.shape, stored.pieces)


def _tiling(tensor: Tensor, arrays: tuple[Held, ...], places: Places, spare_copies: bool) -> Tiling:
    try:
        tilings = [_stored_tiling(a.stored, _path(tensor, a), places) for a in arrays]
        if len(arrays) == 1 and isinstance(arrays[0].stored, Stored):
            return tilings[0]
        tiling = joined(tilings, [a.room for a in arrays], spare_copies)
        tiling.validate("its arrays")
        return tiling
    except LayoutError as error:
        raise TargetError(f"{tensor.path}: {error}") from None


def _path(tensor: Tensor, array: Held) -> str:
    """The tensor's path where it matters, so that tensors alike share what is known of their tilings."""
    return tensor.path if isinstance(array.stored, Bundle) else ""
