"""The plan of a move, as a value: what each device keeps, copies and is sent, in which stage.

A plan knows no devices and no transport. It can be checked (``verify``), compared (``digest``) and
carried out by numpy (``planner.virtual``) or by the engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.planner.memory import Footprint
from dynajax.vps import algebra
from dynajax.vps.region import Ints
from dynajax.vps.space import Tensor
from dynajax.vps.tiling import Tiling, sums


@dataclass(frozen=True, eq=False)
class Copies:
    """Boxes to copy, one row each; offsets and strides in elements of the holders' buffers.

    A row whose source is its target stays on its device: it is retained, and only its place in the buffer changes.
    """

    source: Ints
    target: Ints
    extent: Ints
    source_offset: Ints
    source_stride: Ints
    target_offset: Ints
    target_stride: Ints

    @cached_property
    def volumes(self) -> Ints:
        """Elements of each row."""
        return self.extent.prod(axis=1, dtype=np.int64)

    @property
    def sent(self) -> np.ndarray:
        """True for the rows that cross from one device to another."""
        return self.source != self.target


@dataclass(frozen=True, eq=False)
class Move:
    """What happens to one tensor.

    Attributes:
        tensor: which one.
        source, target: who holds what before and after.
        kept: devices whose buffer stays as it is, byte for byte; no copy is made for them.
        copies: what all other target devices are made of.
    """

    tensor: Tensor
    source: Tiling
    target: Tiling
    kept: Ints
    copies: Copies


@dataclass(frozen=True, eq=False)
class Plan:
    """A move of a whole state.

    Attributes:
        moves: one a tensor, ordered by path.
        stages: rows of ``moves`` done together, in order; a stage ends before the next begins, on all devices.
        budget: bytes that a device may hold above its base (see ``donate``).
        donate: True if the source is given up: base = max(source, target); False: base = source + target.
        footprint: bytes of each device over the stages.
    """

    moves: tuple[Move, ...]
    stages: tuple[tuple[int, ...], ...]
    budget: int
    donate: bool
    footprint: Footprint

    @cached_property
    def num_devices(self) -> int:
        """One more than the largest device number in use."""
        return self.footprint.source.shape[0]

    @cached_property
    def bytes_sent(self) -> Ints:
        """Bytes from device to device, shape (devices, devices)."""
        n = self.num_devices
        flat = np.zeros(n * n, np.int64)
        for move in self.moves:
            c = move.copies
            flat += sums((c.source * n + c.target)[c.sent], c.volumes[c.sent] * move.tensor.itemsize, n * n)
        return flat.reshape(n, n)

    @property
    def bytes_moved(self) -> int:
        """Bytes sent, summed over the devices that receive them."""
        return int(self.bytes_sent.sum())

    @cached_property
    def bytes_needed(self) -> int:
        """Bytes that the target layout holds on all devices."""
        return sum(m.target.region.volume * m.tensor.itemsize for m in self.moves)

    @property
    def bytes_retained(self) -> int:
        """Bytes of the target that their devices hold already."""
        return self.bytes_needed - self.bytes_moved

    @cached_property
    def bytes_lower_bound(self) -> int:
        """Bytes that any plan must send: what a device needs and does not hold, from the layouts alone."""
        return sum(_missing(m.source, m.target) * m.tensor.itemsize for m in self.moves)

    @property
    def busiest_device_bytes(self) -> int:
        """The most that one device sends or receives."""
        return int(max(self.bytes_sent.sum(0).max(initial=0), self.bytes_sent.sum(1).max(initial=0)))

    def peak_bytes(self) -> list[int]:
        """The most bytes that each device holds at any moment of the move."""
        return self.footprint.peak.tolist()

    @property
    def peak_extra_bytes(self) -> int:
        """The most that a device holds above its base."""
        return self.footprint.extra(self.donate)

    @cached_property
    def digest(self) -> str:
        """Equal for the same move however it was written down and wherever it was planned."""
        digest = hashlib.sha256(repr((self.budget, self.donate, self.stages)).encode())
        for move in self.moves:
            digest.update(repr(move.tensor).encode() + move.source.key + move.target.key)
            for field in (move.kept, *vars(move.copies).values()):
                digest.update(np.ascontiguousarray(field).tobytes())
        return digest.hexdigest()

    def summary(self) -> str:
        """The plan in a line."""
        return (
            f"{len(self.moves)} tensors, {format_bytes(self.bytes_moved)} moved (lower bound "
            f"{format_bytes(self.bytes_lower_bound)}), {format_bytes(self.bytes_retained)} retained, "
            f"{len(self.stages)} stages, peak +{format_bytes(self.peak_extra_bytes)} of {format_bytes(self.budget)}"
        )


def _missing(source: Tiling, target: Tiling) -> int:
    """Elements, summed over devices, that a device holds in ``target`` and not in ``source``."""
    with_device = [
        (np.concatenate([t.holder[:, None], t.region.lo], 1), np.concatenate([t.holder[:, None] + 1, t.region.hi], 1))
        for t in (source, target)
    ]
    (s_lo, s_hi), (t_lo, t_hi) = with_device
    i, j = algebra.overlaps(s_lo, s_hi, t_lo, t_hi)
    held = algebra.volumes(np.maximum(s_lo[i], t_lo[j]), np.minimum(s_hi[i], t_hi[j]))
    return target.region.volume - int(held.sum())
