"""Tilings and layouts: which device holds which region of which tensor.

Devices are numbers here. What a number stands for (a device, a device's host memory, a snapshot)
is the business of whoever made the layout.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.errors import LayoutError
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.region import Region, concatenate, dense_boxes
from dynajax.vps.space import Space


@dataclass(frozen=True, eq=False)
class Tiling:
    """Who holds what of one tensor.

    Attributes:
        shape: logical shape of the tensor.
        holder: device number that holds each box, shape (boxes,). A box that several devices hold has a row for each.
        region: the boxes, each addressed in its holder's buffer.
        partial: False if any holder of an element will do; True if all holders must be summed.
        room: elements of every buffer, where padding makes it larger than its boxes; None: just the boxes.
        padded: devices whose buffer is all padding, if there is room; they hold no box.
    """

    shape: tuple[int, ...]
    holder: Ints
    region: Region
    partial: bool = False
    room: int | None = None
    padded: tuple[int, ...] = ()

    @staticmethod
    def of_boxes(shape: Sequence[int], holder: Ints, lo: Ints, hi: Ints) -> Tiling:
        """One dense box a device: what a mesh makes of a tensor. Empty boxes are left out.

        Args:
            shape: logical shape.
            holder: device numbers, shape (boxes,).
            lo, hi: shape (boxes, rank).
        """
        held = algebra.volumes(lo, hi) > 0
        return Tiling(tuple(shape), holder[held], dense_boxes(lo[held], hi[held]))

    @staticmethod
    def of_regions(shape: Sequence[int], regions: Sequence[tuple[int, Region]]) -> Tiling:
        """Any region for each device, given as ``(device, region)``."""
        holder = np.repeat([d for d, _ in regions], [r.count for _, r in regions]).astype(np.int64)
        return Tiling(tuple(shape), holder, concatenate([r for _, r in regions]))

    @cached_property
    def devices(self) -> Ints:
        """Sorted numbers of the devices that have a buffer."""
        return np.union1d(self.holder, np.asarray(self.padded, np.int64))

    @cached_property
    def key(self) -> bytes:
        """Equal for tilings that say the same; a cache key and a part of a plan's digest."""
        digest = hashlib.sha256(repr((self.shape, self.partial, self.room, self.padded, self.region.lo.shape)).encode())
        for part in (self.holder, self.region.lo, self.region.hi, self.region.offset, self.region.stride):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.digest()

    def region_of(self, device: int) -> Region:
        """What one device holds."""
        return self.region.take(self.holder == device)

    def elements(self, devices: int) -> Ints:
        """Elements of each device's buffer, for device numbers below ``devices``."""
        if self.room is None:
            return segment_sum(self.holder, self.region.volumes, devices)
        held = np.zeros(devices, np.int64)
        held[self.devices] = self.room
        return held

    def validate(self, name: str = "the tensor") -> None:
        """Check that the boxes cover the tensor and nothing else, and that no device holds an element twice.

        Raises:
            LayoutError: with ``name`` and what is wrong.
        """
        lo, hi = self.region.lo, self.region.hi
        if not algebra.covers(lo, hi, self.shape):
            raise LayoutError(f"{name}: the regions do not cover its shape {self.shape} exactly")
        with_holder_lo = np.concatenate([self.holder[:, None], lo], axis=1)
        with_holder_hi = np.concatenate([self.holder[:, None] + 1, hi], axis=1)
        if not algebra.are_disjoint(with_holder_lo, with_holder_hi):
            raise LayoutError(f"{name}: a device holds one element twice")


@dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays of a layout, where an array stores parts of several tensors or a tensor lies in several arrays.

    Attributes:
        tensors: rows of the space that each array stores parts of.
        nbytes: bytes of each array's shard on each device, shape (arrays, devices).
        repeated: rows of tensors that are an array which an earlier tensor is too: that one counts as alone in it.
    """

    tensors: tuple[tuple[int, ...], ...]
    nbytes: Ints
    repeated: frozenset[int] = frozenset()

    @cached_property
    def _owners(self) -> dict[int, int]:
        return {row: array for array, rows in enumerate(self.tensors) for row in rows}

    def owner(self, row: int) -> int:
        """An array that stores a part of a tensor; the one that does, for tensors that are not shared."""
        return self._owners[row]

    @cached_property
    def shared(self) -> frozenset[int]:
        """Tensors that are not alone in an array of their own."""
        times = Counter(row for rows in self.tensors for row in rows)
        alone = [rows for rows in self.tensors if self.repeated.issuperset(rows[1:])]
        several = frozenset(row for rows in self.tensors for row in rows) - {rows[0] for rows in alone}
        return several | self.repeated | {row for row, n in times.items() if n > 1}

    @cached_property
    def key(self) -> bytes:
        """Equal for arrays that are alike."""
        facts = self.tensors, sorted(self.repeated), self.nbytes.shape
        return hashlib.sha256(repr(facts).encode() + self.nbytes.tobytes()).digest()


@dataclass(frozen=True, eq=False)
class Layout:
    """A tiling for every tensor of a space, in the space's order.

    Attributes:
        space: the tensors.
        tilings: who holds what of each.
        arrays: the arrays that they lie in; None if each has one of its own.
    """

    space: Space
    tilings: tuple[Tiling, ...]
    arrays: Arrays | None = None

    def __post_init__(self) -> None:
        if len(self.space) != len(self.tilings):
            raise LayoutError(f"{len(self.tilings)} tilings for the {len(self.space)} tensors of the space")
        for tensor, tiling in zip(self.space, self.tilings, strict=True):
            if tensor.shape != tiling.shape:
                raise LayoutError(f"{tensor.path} has shape {tensor.shape} and its tiling is for {tiling.shape}")

    @cached_property
    def num_devices(self) -> int:
        """One more than the largest device number in use."""
        held = 1 + max((int(t.devices[-1]) for t in self.tilings if len(t.devices)), default=-1)
        return held if self.arrays is None else max(held, self.arrays.nbytes.shape[1])

    def bytes_by_device(self, devices: int | None = None) -> Ints:
        """Bytes that each device holds, shape (devices,)."""
        devices = self.num_devices if devices is None else devices
        total = np.zeros(devices, np.int64)
        if self.arrays is not None:
            total[: self.arrays.nbytes.shape[1]] = self.arrays.nbytes.sum(axis=0)
            return total
        for tensor, tiling in zip(self.space, self.tilings, strict=True):
            total += tiling.elements(devices) * tensor.itemsize
        return total

    def validate(self) -> None:
        """Check every tiling; see ``Tiling.validate``."""
        for tensor, tiling in zip(self.space, self.tilings, strict=True):
            tiling.validate(tensor.path)


def side_by_side(layouts: Sequence[Layout]) -> Layout:
    """Layouts of one space on different devices as one: each has a replica. Tensors that share a tiling still do."""
    if len(layouts) == 1:
        return layouts[0]
    made: dict[tuple[int, ...], Tiling] = {}
    chosen: list[Tiling] = []
    for tilings in zip(*(layout.tilings for layout in layouts), strict=True):
        key = tuple(map(id, tilings))
        if key not in made:
            holder, region = np.concatenate([t.holder for t in tilings]), concatenate([t.region for t in tilings])
            made[key] = Tiling(tilings[0].shape, holder, region)
        chosen.append(made[key])
    return Layout(layouts[0].space, tuple(chosen))


def segment_sum(index: Ints, values: Ints, length: int) -> Ints:
    """Exact int64 sums of ``values`` by ``index`` (``np.bincount`` would go through float64)."""
    out = np.zeros(length, np.int64)
    np.add.at(out, index, values)
    return out
