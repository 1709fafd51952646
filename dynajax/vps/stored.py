"""Tensors whose arrays are longer than they are, or in another order: padding and permuted blocks.

An array may store a tensor with padding (so that a mesh cuts it equally) or with the runs of a dim in an order of its
own (layers by pipeline stage, blocks of a fused matrix by rank). Pieces say, dim by dim, which runs of the array are
which runs of the tensor. The tiling that follows speaks of the tensor alone: padding is never moved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from dynajax.errors import LayoutError
from dynajax.vps.region import Region, dense_strides
from dynajax.vps.tiling import Tiling

Pieces = tuple[tuple[int, int, int], ...]
"""Runs of a dim: ``(first in the array, first in the tensor, length)``; what no run covers is padding."""


def stored_tiling(array: Tiling, shape: Sequence[int], pieces: Sequence[Pieces]) -> Tiling:
    """Who holds what of a tensor, from who holds what of the array that stores it.

    Args:
        array: tiling of the array, one dense box a device.
        shape: of the tensor.
        pieces: runs of each dim.

    Raises:
        LayoutError: a run lies outside the array or the tensor.
    """
    _require_inside(array.shape, tuple(shape), pieces)
    lows: list[list[int]] = []
    highs: list[list[int]] = []
    offsets: list[int] = []
    strides: list[list[int]] = []
    holders: list[int] = []
    bounds = zip(array.holder.tolist(), array.region.lo.tolist(), array.region.hi.tolist(), strict=True)
    for holder, lo, hi in bounds:
        stride = dense_strides([b - a for a, b in zip(lo, hi, strict=True)]).tolist()
        runs = [_runs(a, b, p) for a, b, p in zip(lo, hi, pieces, strict=True)]
        for corner in itertools.product(*runs):
            holders.append(holder)
            lows.append([first for _, first, _ in corner])
            highs.append([first + length for _, first, length in corner])
            offsets.append(sum(at * s for (at, _, _), s in zip(corner, stride, strict=True)))
            strides.append(stride)
    rank = len(array.shape)
    box = (len(holders), rank)
    region = Region(
        np.asarray(lows, np.int64).reshape(box),
        np.asarray(highs, np.int64).reshape(box),
        np.asarray(offsets, np.int64),
        np.asarray(strides, np.int64).reshape(box),
    )
    room = int(array.region.volumes.max(initial=0))
    return Tiling(tuple(shape), np.asarray(holders, np.int64), region, array.partial, room)


def _runs(lo: int, hi: int, pieces: Pieces) -> list[tuple[int, int, int]]:
    """What of the pieces lies in ``lo`` to ``hi`` of the array: ``(offset from lo, first in the tensor, length)``."""
    found: list[tuple[int, int, int]] = []
    for stored, logical, length in pieces:
        a, b = max(lo, stored), min(hi, stored + length)
        if a < b:
            found.append((a - lo, logical + a - stored, b - a))
    return found


def _require_inside(array: tuple[int, ...], shape: tuple[int, ...], pieces: Sequence[Pieces]) -> None:
    if not len(array) == len(shape) == len(pieces):
        raise LayoutError(f"an array of shape {array} with {len(pieces)} lists of pieces cannot store {shape}")
    for dim, (stored, logical, runs) in enumerate(zip(array, shape, pieces, strict=True)):
        for at, first, length in runs:
            if min(at, first, length) < 0 or at + length > stored or first + length > logical:
                raise LayoutError(f"dim {dim}: the piece {(at, first, length)} does not fit {stored} and {logical}")


def whole(shape: Sequence[int]) -> tuple[Pieces, ...]:
    """The pieces of an array that stores its tensor as it is."""
    return tuple(((0, 0, n),) for n in shape)


def padded(shape: Sequence[int], stored: Sequence[int]) -> tuple[Pieces, ...]:
    """The pieces of an array of shape ``stored`` that has its padding at the end of each dim."""
    if math.prod(stored) < math.prod(shape) or any(a < b for a, b in zip(stored, shape, strict=True)):
        raise LayoutError(f"an array of shape {tuple(stored)} is too small for a tensor of shape {tuple(shape)}")
    return whole(shape)
