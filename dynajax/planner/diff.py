"""Diff of two tilings: the pieces that target devices need, and who could give each.

The distinct source boxes are cut into atoms (disjoint boxes with a fixed set of holders; on a grid
they are the boxes themselves). A need is one atom ∩ one target box: a target device wants it, and
any holder of the atom has it. What a device needs and holds itself is retained, never sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynajax.errors import LayoutError
from dynajax.vps import algebra
from dynajax.vps.region import Ints
from dynajax.vps.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Demand:
    """What the target devices of one tensor need. A row is one piece for one device.

    Attributes:
        target_row: row of the target tiling that the piece belongs to, shape (needs,).
        lo, hi: the piece, shape (needs, rank).
        atom: source atom that holds the piece, shape (needs,).
        own_row: row of the source tiling by which the target device itself holds the piece, −1 if it does not.
        first, source_row: holders of atom ``a`` are the source rows ``source_row[first[a]:first[a + 1]]``.
    """

    target_row: Ints
    lo: Ints
    hi: Ints
    atom: Ints
    own_row: Ints
    first: Ints
    source_row: Ints


def diff(source: Tiling, target: Tiling) -> Demand:
    """The demand of a move from ``source`` to ``target``.

    Raises:
        LayoutError: the shapes differ, or the source lacks something that the target needs.
    """
    if source.shape != target.shape:
        raise LayoutError(f"source shape {source.shape} is not the target shape {target.shape}")
    atom_lo, atom_hi, first, source_row = _atoms(source)
    box_lo, box_hi, box_of_row = algebra.unique_boxes(target.region.lo, target.region.hi)
    atom, box = algebra.overlaps(atom_lo, atom_hi, box_lo, box_hi)
    lo, hi = np.maximum(atom_lo[atom], box_lo[box]), np.minimum(atom_hi[atom], box_hi[box])
    got = np.zeros(len(box_lo), np.int64)
    np.add.at(got, box, algebra.volumes(lo, hi))
    if (got != algebra.volumes(box_lo, box_hi)).any():
        raise LayoutError(f"the source lacks a part that the target needs, of the tensor of shape {source.shape}")
    pair, row = _members(box, box_of_row, len(box_lo))
    own = _own_rows(atom[pair], target.holder[row], source.holder, first, source_row)
    return Demand(row, lo[pair], hi[pair], atom[pair], own, first, source_row)


def _atoms(source: Tiling) -> tuple[Ints, Ints, Ints, Ints]:
    """Disjoint atoms of the source boxes, and for each the source rows that hold it."""
    lo, hi, inverse = algebra.unique_boxes(source.region.lo, source.region.hi)
    if algebra.are_disjoint(lo, hi):
        order = np.argsort(inverse, kind="stable")
        return lo, hi, np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(lo)))]), order
    lo, hi = algebra.refine(lo, hi)
    atom, row = algebra.overlaps(lo, hi, source.region.lo, source.region.hi)
    return lo, hi, np.searchsorted(atom, np.arange(len(lo) + 1)), row


def _members(box: Ints, box_of_row: Ints, boxes: int) -> tuple[Ints, Ints]:
    """For every pair of an atom and a distinct target box, one need for each target row with that box."""
    order = np.argsort(box_of_row, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(box_of_row, minlength=boxes))])
    pair, at = algebra.expand(first[box], first[box + 1])
    return pair, order[at]


def _own_rows(atom: Ints, device: Ints, holder: Ints, first: Ints, source_row: Ints) -> Ints:
    """The source row by which ``device`` itself holds ``atom``, or −1."""
    if not len(atom) or not len(source_row):
        return np.full(len(atom), -1, np.int64)
    width = 1 + max(int(holder.max()), int(device.max()))
    held = np.repeat(np.arange(len(first) - 1), np.diff(first)) * width + holder[source_row]
    order = np.argsort(held, kind="stable")
    wanted = atom * width + device
    at = np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)
    return np.where(held[order[at]] == wanted, source_row[order[at]], -1)
