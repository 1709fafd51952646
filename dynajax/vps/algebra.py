"""Exact integer algebra on lists of boxes: overlap, subtract, refine, cover.

A list of boxes is a pair ``lo, hi`` of int64 arrays of shape (boxes, rank). Every function is
vectorised; the pairs that overlap are found along one dim by sorting, so grids never need all pairs.
"""

from __future__ import annotations

import numpy as np

from dynajax.types import Ints


def volumes(lo: Ints, hi: Ints) -> Ints:
    """Elements of each box, shape (boxes,)."""
    product = np.ones(len(lo), np.int64)
    for begin, end in zip(lo.T, hi.T, strict=True):  # numpy is slow to multiply along a short dim
        product *= np.maximum(end - begin, 0)
    return product


def overlaps(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> tuple[Ints, Ints]:
    """Index pairs ``(i, j)``, sorted, for which box i of ``a`` and box j of ``b`` share an element."""
    rank = a_lo.shape[1]
    if rank == 0 or not (len(a_lo) and len(b_lo)):
        return np.divmod(np.arange(len(a_lo) * len(b_lo)), max(len(b_lo), 1))
    pairs = [_pairs_along(a_lo[:, d], a_hi[:, d], b_lo[:, d], b_hi[:, d]) for d in range(rank)]
    dims = sorted(range(rank), key=lambda d: pairs[d])
    across = dims[min(1, rank - 1)]
    slabs = len(a_lo) * len(b_lo) // max(pairs[across], 1) if rank > 1 else 1
    i, j = _overlaps_in_slabs(a_lo, a_hi, b_lo, b_hi, dims[0], across, slabs)
    for d in dims[1:]:
        keep = np.maximum(a_lo[i, d], b_lo[j, d]) < np.minimum(a_hi[i, d], b_hi[j, d])
        i, j = i[keep], j[keep]
    return np.divmod(np.sort(i * len(b_lo) + j), len(b_lo))


def _pairs_along(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> int:
    """How many pairs of intervals share an element, if none is empty."""
    before = np.searchsorted(np.sort(b_hi), a_lo, side="right")
    return int((np.searchsorted(np.sort(b_lo), a_hi, side="left") - before).sum())


def _overlaps_in_slabs(
    a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints, dim: int, across: int, count: int
) -> tuple[Ints, Ints]:
    """Pairs of boxes that overlap along ``dim`` and meet the same slab.

    About ``count`` slabs are cut along ``across``, in which as many boxes begin each; a box that meets several is in
    each of them.
    """
    starts = np.sort(np.concatenate([a_lo[:, across], b_lo[:, across]]))
    slabs = np.unique(starts[np.arange(1, count) * len(starts) // count])
    first, width = [], int(max(a_hi[:, dim].max(), b_hi[:, dim].max())) + 1
    listed: list[tuple[Ints, Ints, Ints]] = []
    for lo, hi in ((a_lo, a_hi), (b_lo, b_hi)):
        begin = np.searchsorted(slabs, lo[:, across], side="right")
        end = np.searchsorted(slabs, hi[:, across], side="left") + 1
        row, slab = expand(begin, np.maximum(end, begin))
        first.append(begin)
        listed.append((row, slab * width + lo[row, dim], slab * width + hi[row, dim]))
    (a, *a_ends), (b, *b_ends) = listed
    p, q = _overlaps_1d(*a_ends, *b_ends)
    i, j = a[p], b[q]
    once = a_ends[0][p] // width == np.maximum(first[0][i], first[1][j])
    return i[once], j[once]


def _overlaps_1d(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> tuple[Ints, Ints]:
    """Pairs of intervals that share an element; empty intervals share nothing."""
    order, first = grouped(np.stack([b_lo, b_hi], 1))
    one = order[first[:-1]]
    u_lo, u_hi = b_lo[one], b_hi[one]
    furthest = np.maximum.accumulate(u_hi) if len(u_hi) else u_hi
    begin = np.searchsorted(furthest, a_lo, side="right")
    end = np.searchsorted(u_lo, a_hi, side="left")
    i, u = expand(begin, np.maximum(end, begin))
    keep = (np.maximum(a_lo[i], u_lo[u])) < np.minimum(a_hi[i], u_hi[u])
    i, u = i[keep], u[keep]
    k, at = expand(first[u], first[u + 1])
    return i[k], order[at]


def expand(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Rows and values of all ranges ``begin[k] … end[k] − 1`` laid end to end."""
    counts = end - begin
    rows = np.repeat(np.arange(len(begin)), counts)
    values = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    return rows, values


def grouped(rows: Ints) -> tuple[Ints, Ints]:
    """Equal rows together: group k, in ascending order, is ``order[first[k]:first[k + 1]]``, ascending too.

    Args:
        rows: shape (rows, columns).

    Returns:
        ``order``, shape (rows,), and ``first``, shape (groups + 1,).
    """
    key = row_keys(rows)
    order = np.argsort(key, kind="stable")
    sorted_key = key[order]
    begins = np.flatnonzero(np.append(True, sorted_key[1:] != sorted_key[:-1])[: len(key)])
    return order, np.append(begins, len(key))


def row_keys(rows: Ints) -> Ints:
    """A number for each row; they are ordered, and equal, as rows are."""
    key, size = np.zeros(len(rows), np.int64), 1
    if not len(rows):
        return key
    low = rows.min(axis=0).tolist()
    for column, least, most in zip(rows.T, low, rows.max(axis=0).tolist(), strict=True):
        values, span = column - least, most - least + 1
        if size * span >= 2**63:
            key, values = (np.unique(x, return_inverse=True)[1].ravel() for x in (key, values))
            size, span = int(key.max()) + 1, int(values.max()) + 1
        key, size = key * span + values, size * span
    return key


def unique_boxes(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Distinct boxes ``lo, hi``, sorted, and for each given box the row of its distinct one."""
    rank = lo.shape[1]
    if rank == 0:
        n = min(len(lo), 1)
        return lo[:n], hi[:n], np.zeros(len(lo), np.int64)
    order, first = grouped(np.concatenate([lo, hi], axis=1))
    row = np.empty(len(lo), np.int64)
    row[order] = np.repeat(np.arange(len(first) - 1), np.diff(first))
    one = order[first[:-1]]
    return lo[one], hi[one], row


def subtract(lo: Ints, hi: Ints, cut_lo: Ints, cut_hi: Ints) -> tuple[Ints, Ints]:
    """Disjoint boxes of one box ``lo, hi`` (shape (rank,)) that no box of the cut covers."""
    left_lo, left_hi = lo[None], hi[None]
    for c_lo, c_hi in zip(cut_lo, cut_hi, strict=True):
        left_lo, left_hi = _subtract_one(left_lo, left_hi, c_lo, c_hi)
    return left_lo, left_hi


def _subtract_one(lo: Ints, hi: Ints, cut_lo: Ints, cut_hi: Ints) -> tuple[Ints, Ints]:
    meet = (np.maximum(lo, cut_lo) < np.minimum(hi, cut_hi)).all(axis=1)
    out_lo, out_hi = [lo[~meet]], [hi[~meet]]
    lo, hi = lo[meet].copy(), hi[meet].copy()
    for d in range(lo.shape[1]):
        for side_lo, side_hi in (
            (lo[:, d], np.minimum(hi[:, d], cut_lo[d])),
            (np.maximum(lo[:, d], cut_hi[d]), hi[:, d]),
        ):
            rows = side_lo < side_hi
            piece_lo, piece_hi = lo[rows].copy(), hi[rows].copy()
            piece_lo[:, d], piece_hi[:, d] = side_lo[rows], side_hi[rows]
            out_lo.append(piece_lo)
            out_hi.append(piece_hi)
        lo[:, d], hi[:, d] = np.maximum(lo[:, d], cut_lo[d]), np.minimum(hi[:, d], cut_hi[d])
    return np.concatenate(out_lo), np.concatenate(out_hi)


def are_disjoint(lo: Ints, hi: Ints) -> bool:
    """True if no two non-empty boxes share an element."""
    if _are_on_a_grid(lo, hi):
        return True
    i, j = overlaps(lo, hi, lo, hi)
    return bool((i == j).all())


def _are_on_a_grid(lo: Ints, hi: Ints) -> bool:
    """True if no two boxes are equal, and in every dim no two of their intervals overlap unless they are equal."""
    for begin, end in zip(lo.T, hi.T, strict=True):
        order, first = grouped(np.stack([begin, end], axis=1))
        one = order[first[:-1]]
        if (begin[one][1:] < end[one][:-1]).any():
            return False
    return len(grouped(lo)[1]) - 1 == len(lo)


def refine(lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """Disjoint boxes with the same union, each inside or outside every given box: the cells."""
    out_lo: list[Ints] = []
    out_hi: list[Ints] = []
    for group in _connected(lo, hi):
        cells_lo, cells_hi = _grid_cells(lo[group], hi[group])
        inside, _ = overlaps(cells_lo, cells_hi, lo[group], hi[group])
        keep = np.unique(inside)
        out_lo.append(cells_lo[keep])
        out_hi.append(cells_hi[keep])
    if not out_lo:
        return lo[:0], hi[:0]
    return np.concatenate(out_lo), np.concatenate(out_hi)


def _connected(lo: Ints, hi: Ints) -> list[Ints]:
    """Rows of boxes that overlap one another, directly or through others, group by group."""
    i, j = overlaps(lo, hi, lo, hi)
    label = np.arange(len(lo))
    while True:
        lowest = label.copy()
        np.minimum.at(lowest, i, label[j])
        if (lowest == label).all():
            break
        label = lowest
    live = np.unique(i)
    return [live[label[live] == root] for root in np.unique(label[live])]


def _grid_cells(lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """Cells of the grid that all borders of the boxes cut."""
    if lo.shape[1] == 0:
        return lo[:1], hi[:1]
    cuts = [np.unique(np.concatenate([lo[:, d], hi[:, d]])) for d in range(lo.shape[1])]
    shape = [len(c) - 1 for c in cuts]
    at = np.indices(shape).reshape(len(shape), -1)
    return (
        np.stack([c[k] for c, k in zip(cuts, at, strict=True)], 1),
        np.stack([c[k + 1] for c, k in zip(cuts, at, strict=True)], 1),
    )


def covers(lo: Ints, hi: Ints, shape: tuple[int, ...]) -> bool:
    """True if the boxes, overlapping or not, cover a tensor of ``shape`` and nothing outside it."""
    if (lo < 0).any() or (hi > np.asarray(shape, np.int64)).any():
        return False
    distinct_lo, distinct_hi, _ = unique_boxes(lo, hi)
    if not are_disjoint(distinct_lo, distinct_hi):
        distinct_lo, distinct_hi = refine(distinct_lo, distinct_hi)
    return int(volumes(distinct_lo, distinct_hi).sum()) == int(np.prod(np.asarray(shape, object), initial=1))
