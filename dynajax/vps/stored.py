"""Tensors whose arrays are longer than they are, or in another order: padding and permuted blocks.

An array may store a tensor with padding (so that a mesh cuts it equally) or with the runs of a dim in an order of its
own (layers by pipeline stage, blocks of a fused matrix by rank). Pieces say, dim by dim, which runs of the array are
which runs of the tensor. The tiling that follows speaks of the tensor alone: padding is never moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dynajax.errors import LayoutError
from dynajax.vps.parts import Block, parts_tiling
from dynajax.vps.tiling import Tiling

Pieces = tuple[tuple[int, int, int], ...]
"""Runs of a dim: ``(first in the array, first in the tensor, length)``; what no run covers is padding."""


def piece_parts(tensor: str, shape: Sequence[int], pieces: Sequence[Pieces]) -> tuple[Block, ...]:
    """The blocks of an array that stores a tensor by runs of its dims.

    Args:
        tensor: path of the tensor.
        shape: of the tensor.
        pieces: runs of each dim.
    """
    blocks: list[Block] = []
    for runs in itertools.product(*pieces):
        at, first, extent = zip(*runs, strict=True) if runs else ((), (), ())
        blocks.append(Block(tensor, tuple(shape), first, extent, at, tuple(range(len(shape)))))
    return tuple(blocks)


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
    return parts_tiling(array, shape, piece_parts("", shape, pieces))


def _require_inside(array: tuple[int, ...], shape: tuple[int, ...], pieces: Sequence[Pieces]) -> None:
    if not len(array) == len(shape) == len(pieces):
        raise LayoutError(f"an array of shape {array} with {len(pieces)} lists of pieces cannot store {shape}")
    for dim, (stored, logical, runs) in enumerate(zip(array, shape, pieces, strict=True)):
        for at, first, length in runs:
            if min(at, first, length) < 0 or at + length > stored or first + length > logical:
                raise LayoutError(f"dim {dim}: the piece {(at, first, length)} does not fit {stored} and {logical}")


def whole_runs(shape: Sequence[int]) -> tuple[Pieces, ...]:
    """The pieces of an array that stores its tensor as it is."""
    return tuple(((0, 0, n),) for n in shape)
