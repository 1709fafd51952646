"""Places: the numbers by which plans know a device's memories, and the layouts of jax arrays over them.

A place is one memory of one device. A plan that goes from device memory to pinned host memory of the
same device thus moves bytes, as it does in truth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from dynajax.engine.tree import Leaf, Stored
from dynajax.errors import LayoutError, TargetError
from dynajax.vps import Layout, Space, Tiling, named_tiling, stored_tiling

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

    @cached_property
    def number(self) -> dict[Place, int]:
        """Number of each place."""
        return {place: k for k, place in enumerate(self.places)}

    def numbers(self, sharding: Sharding) -> dict[jax.Device, int]:
        """Number of each device of a sharding, in that sharding's memory."""
        kind = memory_kind(sharding)
        return {d: self.number[d, kind] for d in sharding.device_set}


def memory_kind(sharding: Sharding) -> str | None:
    """The memory that a sharding means; the device's default memory by its name."""
    return sharding.memory_kind or next(iter(sharding.device_set)).default_memory().kind


@functools.lru_cache(maxsize=4096)
def array_tiling(sharding: Sharding, shape: tuple[int, ...], places: Places) -> Tiling:
    """Who holds what of a jax array.

    Raises:
        LayoutError: the sharding does not fit the shape.
    """
    if isinstance(sharding, NamedSharding):
        if getattr(sharding.spec, "unreduced", None):
            raise LayoutError(f"{sharding.spec} has unreduced axes: sum them before the move")
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
    return (
        Layout(space, tuple(_tiling(leaf, leaf.source, places) for leaf in leaves)),
        Layout(space, tuple(_tiling(leaf, leaf.target, places) for leaf in leaves)),
    )


@functools.lru_cache(maxsize=4096)
def _stored_tiling(stored: Stored, places: Places) -> Tiling:
    array = array_tiling(stored.sharding, stored.array_shape, places)
    return array if stored.is_plain else stored_tiling(array, stored.shape, stored.pieces)


def _tiling(leaf: Leaf, stored: Stored, places: Places) -> Tiling:
    try:
        return _stored_tiling(stored, places)
    except LayoutError as error:
        raise TargetError(f"{leaf.tensor.path}: {error}") from None
