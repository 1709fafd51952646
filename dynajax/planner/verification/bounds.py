"""The least that any plan sends, from two tilings alone: what plans are compared with.

If any holder will do, a device is sent what it needs and does not hold, and a node what its devices need and none of
them holds, once. If all holders are to be summed, every node that needs an element is sent all parts of it that lie
elsewhere, one of its devices adds them up, and the others are sent the sum. That parts could be added up before they
leave a node, or sums be passed from node to node, is not considered.
"""

from __future__ import annotations

import numpy as np

from dynajax.types import Ints
from dynajax.vps import algebra
from dynajax.vps.tiling import Tiling

Corners = tuple[Ints, Ints]
"""Lower and upper corners of boxes, each of shape (boxes, rank)."""


def least_sent(source: Tiling, target: Tiling, node: Ints) -> int:
    """Elements, summed over receivers, that must go from one device to another.

    Args:
        source, target: tilings of one tensor.
        node: node of each device.
    """
    device = np.arange(len(node))
    needs, has = _at(target, device), _at(source, device)
    if not source.partial:
        return _volume(needs) - _volume(_common(has, needs))
    wanted = _distinct(_at(target, node))
    lo, hi = _common(has, needs)
    own = _distinct((_renumbered(lo, node), _renumbered(hi, node, 1)))
    parts = _volume(_common_elements(source, wanted)[1])
    return parts - _volume(own) + _volume(needs) - _volume(wanted)


def least_between(source: Tiling, target: Tiling, node: Ints) -> int:
    """Elements, summed over receiving nodes, that must go from one node to another; arguments as ``least_sent``."""
    wanted = _distinct(_at(target, node))
    if not source.partial:
        return _volume(wanted) - _volume(_common(_distinct(_at(source, node)), wanted))
    row, (lo, hi) = _common_elements(source, wanted)
    elsewhere = node[source.holder[row]] != lo[:, 0]
    return _volume((lo[elsewhere], hi[elsewhere]))


def _at(tiling: Tiling, number: Ints) -> Corners:
    """The boxes of a tiling with a first dim for their holder, or for the node of their holder.

    Args:
        tiling: the boxes.
        number: what to write for each device, shape (devices,).
    """
    at = number[tiling.holder][:, None]
    return np.concatenate([at, tiling.region.lo], axis=1), np.concatenate([at + 1, tiling.region.hi], axis=1)


def _renumbered(corner: Ints, number: Ints, past: int = 0) -> Ints:
    """Corners of boxes whose first dim is a device, with its node there instead; upper corners lie ``past`` it by 1."""
    return np.concatenate([number[corner[:, :1] - past] + past, corner[:, 1:]], axis=1)


def _distinct(boxes: Corners) -> Corners:
    """Disjoint boxes with the same elements."""
    lo, hi, _ = algebra.unique_boxes(*boxes)
    return (lo, hi) if algebra.are_disjoint(lo, hi) else algebra.refine(lo, hi)


def _common(a: Corners, b: Corners) -> Corners:
    """What boxes of ``a`` have in common with boxes of ``b``, pair by pair."""
    i, j = algebra.overlaps(*a, *b)
    return np.maximum(a[0][i], b[0][j]), np.minimum(a[1][i], b[1][j])


def _common_elements(source: Tiling, wanted: Corners) -> tuple[Ints, Corners]:
    """What each source box has in common with boxes that have a first dim: ``(row of the source, common boxes)``."""
    row, j = algebra.overlaps(source.region.lo, source.region.hi, wanted[0][:, 1:], wanted[1][:, 1:])
    lo = np.maximum(source.region.lo[row], wanted[0][j, 1:])
    hi = np.minimum(source.region.hi[row], wanted[1][j, 1:])
    return row, (np.concatenate([wanted[0][j, :1], lo], axis=1), np.concatenate([wanted[1][j, :1], hi], axis=1))


def _volume(boxes: Corners) -> int:
    return int(algebra.volumes(*boxes).sum())
