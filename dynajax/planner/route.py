"""Routes: who sends which piece to whom, for one pair of tilings. Tensors with that pair of tilings share a route.

If the source is partial, a box of the target has a piece from every holder: the first is written, the others are
added to it in the order of their rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.types import Bools, Ints
from dynajax.vps import algebra
from dynajax.vps.region import dense_strides
from dynajax.vps.tiling import Tiling

RELAYED = 2**31 - 1
"""Phase of the relayed copies: they read targets, so they come after all others."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Boxes to copy, one row each; offsets and strides in elements of the holders' buffers.

    A row whose source is its target stays on its device: it is retained, and only its place in the buffer changes.
    A relayed row is read from its source's *target* buffer, once the rows that are not relayed have filled it.
    An added row is added to what the row before it wrote, or added, at the same place.
    """

    source: Ints
    target: Ints
    extent: Ints
    source_offset: Ints
    source_stride: Ints
    target_offset: Ints
    target_stride: Ints
    relayed: Bools
    added: Bools

    @cached_property
    def volumes(self) -> Ints:
        """Elements of each row."""
        return self.extent.prod(axis=1, dtype=np.int64)

    @cached_property
    def phases(self) -> Ints:
        """Phase of each row: 0 if it is written, k if it is the k-th added to what was written, ``RELAYED`` if relayed.

        Rows of one phase are independent; those of a later phase read or change what earlier ones wrote.
        """
        row = np.arange(len(self.source))
        phases = row - np.maximum.accumulate(np.where(self.added, 0, row))
        return np.where(self.relayed, RELAYED, phases)

    @property
    def sent(self) -> Bools:
        """True for the rows that cross from one device to another."""
        return self.source != self.target


@dataclass(frozen=True, eq=False)
class Route:
    """How tensors get from one tiling to another.

    Attributes:
        source, target: who holds what before and after.
        kept: devices whose buffer stays as it is; no piece is listed for them.
        lo, hi: the pieces, one row for each device that needs one, shape (pieces, rank).
        target_row: row of the target tiling that the piece fills.
        source_row: row that the piece is read from: of the source tiling, or of the target tiling if relayed.
        relayed: True if the sender passes on what was sent to it.
        added: True if the piece is added to one before it that fills the same box.
        stage: stage in which each piece is copied; None if the whole tensor is in one stage.
    """

    source: Tiling
    target: Tiling
    kept: Ints
    lo: Ints
    hi: Ints
    target_row: Ints
    source_row: Ints
    relayed: Bools
    added: Bools
    stage: Ints | None = None

    @cached_property
    def sender(self) -> Ints:
        """Device that each piece comes from."""
        sender = np.empty(len(self.source_row), np.int64)
        direct = ~self.relayed
        sender[direct] = self.source.holder[self.source_row[direct]]
        sender[self.relayed] = self.target.holder[self.source_row[self.relayed]]
        return sender

    @cached_property
    def receiver(self) -> Ints:
        """Device that each piece is for."""
        return self.target.holder[self.target_row]

    @cached_property
    def volumes(self) -> Ints:
        """Elements of each piece."""
        return algebra.volumes(self.lo, self.hi)

    @cached_property
    def flat_index(self) -> Ints:
        """First element of each piece in the flattened tensor."""
        return (self.lo * dense_strides(self.source.shape)).sum(axis=1)

    @property
    def sent(self) -> Bools:
        """True for the pieces that cross from one device to another."""
        return self.sender != self.receiver

    def stages_of_pieces(self) -> Ints:
        """Stage of each piece, 0 if the whole tensor is in one stage."""
        return np.zeros(len(self.lo), np.int64) if self.stage is None else self.stage

    @cached_property
    def copies(self) -> Copies:
        """The pieces as copies between buffers."""
        s, t = self.source_row, self.target_row
        offset, stride = np.empty_like(s), np.empty_like(self.lo)
        for tiling, rows in ((self.source, ~self.relayed), (self.target, self.relayed)):
            offset[rows] = tiling.region.address(s[rows], self.lo[rows])
            stride[rows] = tiling.region.stride[s[rows]]
        return Copies(
            self.sender,
            self.receiver,
            self.hi - self.lo,
            offset,
            stride,
            self.target.region.address(t, self.lo),
            self.target.region.stride[t],
            self.relayed,
            self.added,
        )

    @cached_property
    def key(self) -> bytes:
        """Equal for routes that say the same."""
        digest = hashlib.sha256(self.source.key + self.target.key)
        stage = np.zeros(0, np.int64) if self.stage is None else self.stage
        for part in (self.kept, self.lo, self.hi, self.target_row, self.source_row, self.relayed, self.added, stage):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.digest()
