"""Diff of two tilings: the pieces that target devices need, and who could give each.

The distinct source boxes are cut into cells: disjoint boxes, each with a fixed set of holders. Boxes on a grid are
cells as they are. If pieces shall be disjoint, target boxes are cut in the same way. A piece is what one cell and one
target box have in common, and a need is a piece that one device needs: it can come from any holder of the cell. A need
that its own device holds is retained, never sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.errors import LayoutError
from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.cells import Cells
from dynajax.vps.tiling import Tiling, segment_sum


@dataclass(frozen=True, eq=False)
class Demand:
    """What the target devices of one tensor need.

    Attributes:
        source, target: the tilings.
        cells: source cells.
        lo, hi: the pieces, shape (pieces, rank).
        cell: source cell of each piece.
        piece: piece of each need, shape (needs,).
        target_row: row of the target tiling that each need fills.
        own_row: row of the source tiling by which the device itself holds the piece, −1 if it does not.
    """

    source: Tiling
    target: Tiling
    cells: Cells
    lo: Ints
    hi: Ints
    cell: Ints
    piece: Ints
    target_row: Ints
    own_row: Ints

    @cached_property
    def volumes(self) -> Ints:
        """Elements of each piece."""
        return algebra.volumes(self.lo, self.hi)


def diff(source: Tiling, target: Tiling, disjoint: bool = False) -> Demand:
    """The demand of a move from ``source`` to ``target``.

    Args:
        source, target: tilings of one tensor.
        disjoint: cut overlapping target boxes too, so that no two pieces share an element.

    Raises:
        LayoutError: the shapes differ, the target is partial, or the source lacks something that the target needs.
    """
    if target.partial:
        raise LayoutError(f"the target of shape {target.shape} is partial: a move sums parts and makes none")
    if source.shape != target.shape:
        raise LayoutError(f"source shape {source.shape} is not the target shape {target.shape}")
    cells, wanted = source.region.cells, target.region.cells if disjoint else target.region.distinct
    cell, box = algebra.overlaps(cells.lo, cells.hi, wanted.lo, wanted.hi)
    lo, hi = np.maximum(cells.lo[cell], wanted.lo[box]), np.minimum(cells.hi[cell], wanted.hi[box])
    if (segment_sum(box, algebra.volumes(lo, hi), len(wanted.lo)) != algebra.volumes(wanted.lo, wanted.hi)).any():
        raise LayoutError(f"the source lacks a part that the target needs, of the tensor of shape {source.shape}")
    piece, at = algebra.expand(wanted.first[box], wanted.first[box + 1])
    row = wanted.row[at]
    own = _own_rows(cells, source.holder, cell[piece], target.holder[row])
    return Demand(source, target, cells, lo, hi, cell, piece, row, own)


def _own_rows(cells: Cells, holder: Ints, cell: Ints, device: Ints) -> Ints:
    """The source row by which ``device`` itself holds ``cell``, or −1."""
    if not len(cell) or not len(cells.row):
        return np.full(len(cell), -1, np.int64)
    width = 1 + max(int(holder.max()), int(device.max()))
    held = cells.of_row * width + holder[cells.row]
    order = np.argsort(held, kind="stable")
    wanted = cell * width + device
    at = np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)
    return np.where(held[order[at]] == wanted, cells.row[order[at]], -1)


def unchanged_devices(source: Tiling, target: Tiling) -> Ints:
    """Devices whose buffer holds the same elements at the same places before and after; none if parts are summed."""
    if source.partial or source.room != target.room:
        return np.empty(0, np.int64)
    order = [np.lexsort((t.region.offset, t.holder)) for t in (source, target)]
    width = 1 + max((int(t.holder.max(initial=-1)) for t in (source, target)), default=-1)
    counts = [np.bincount(t.holder, minlength=width) for t in (source, target)]
    alike = (counts[0] == counts[1]) & (counts[0] > 0)
    rows = [o[alike[t.holder[o]]] for o, t in zip(order, (source, target), strict=True)]
    a, b = source.region.take(rows[0]), target.region.take(rows[1])
    same = (a.lo == b.lo).all(1) & (a.hi == b.hi).all(1) & (a.stride == b.stride).all(1) & (a.offset == b.offset)
    alike[source.holder[rows[0]][~same]] = False
    return np.flatnonzero(alike)
