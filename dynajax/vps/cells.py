"""Cells: a list of boxes, equal or overlapping, as disjoint boxes that each know which of the list hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynajax.types import Ints
from dynajax.vps import algebra


@dataclass(frozen=True, eq=False)
class Cells:
    """Distinct boxes, and the rows of a list of boxes that hold each.

    Attributes:
        lo, hi: shape (cells, rank).
        first, row: the rows that hold cell ``a`` are ``row[first[a]:first[a + 1]]``, ascending.
    """

    lo: Ints
    hi: Ints
    first: Ints
    row: Ints

    @staticmethod
    def distinct(lo: Ints, hi: Ints) -> Cells:
        """The distinct boxes of a list, overlapping or not; each row holds one of them."""
        order, first = algebra.grouped(np.concatenate([lo, hi], axis=1))
        one = order[first[:-1]]
        return Cells(lo[one], hi[one], first, order)

    def refined(self, lo: Ints, hi: Ints) -> Cells:
        """Distinct boxes of the list ``lo, hi`` cut where they overlap: disjoint ones."""
        if algebra.are_disjoint(self.lo, self.hi):
            return self
        cell_lo, cell_hi = algebra.refine(self.lo, self.hi)
        cell, row = algebra.overlaps(cell_lo, cell_hi, lo, hi)
        return Cells(cell_lo, cell_hi, np.searchsorted(cell, np.arange(len(cell_lo) + 1)), row)

    @cached_property
    def of_row(self) -> Ints:
        """Cell of each entry of ``row``."""
        return np.repeat(np.arange(len(self.lo)), np.diff(self.first))
