"""The algebra of boxes against brute-force masks over small tensors."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.vps import algebra

SIDE = 6
ranks = st.integers(0, 3)


@st.composite
def box_lists(draw, rank, min_size=0, max_size=7):
    """Boxes inside SIDE**rank, some of them empty or equal."""
    corner = st.tuples(*[st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)).map(sorted)] * rank)
    boxes = draw(st.lists(corner, min_size=min_size, max_size=max_size))
    array = np.array(boxes, np.int64).reshape(len(boxes), rank, 2)
    return array[:, :, 0], array[:, :, 1]


def masks(lo, hi):
    """One boolean mask a box, shape (boxes, SIDE, …)."""
    out = np.zeros((len(lo), *[SIDE] * lo.shape[1]), bool)
    for k in range(len(lo)):
        out[(k, *(slice(a, b) for a, b in zip(lo[k], hi[k], strict=True)))] = True
    return out


def counts(lo, hi):
    return masks(lo, hi).sum(axis=0)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.data(), ranks)
def test_overlaps_are_the_pairs_whose_masks_meet(data, rank):
    a, b = data.draw(box_lists(rank)), data.draw(box_lists(rank))
    i, j = algebra.overlaps(*a, *b)
    both = masks(*a)[:, None] & masks(*b)[None]
    expected = np.argwhere(both.reshape(len(a[0]), len(b[0]), SIDE**rank).any(axis=2))
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [tuple(p) for p in expected.tolist()]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data(), st.integers(1, 3))
def test_subtract_leaves_what_no_cut_covers_once(data, rank):
    (lo, hi), cut = data.draw(box_lists(rank, 1, 1)), data.draw(box_lists(rank))
    left = algebra.subtract(lo[0], hi[0], *cut)
    expected = masks(lo, hi)[0] & ~masks(*cut).any(axis=0)
    np.testing.assert_array_equal(counts(*left), expected.astype(int))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data(), ranks)
def test_cells_have_the_same_union_and_lie_inside_or_outside_every_box(data, rank):
    lo, hi = data.draw(box_lists(rank))
    cells = algebra.refine(lo, hi)
    assert (algebra.volumes(*cells) > 0).all()
    np.testing.assert_array_equal(counts(*cells), masks(lo, hi).any(axis=0).astype(int))
    inside = (masks(*cells)[:, None] & masks(lo, hi)[None]).reshape(len(cells[0]), len(lo), SIDE**rank).sum(axis=2)
    assert ((inside == 0) | (inside == algebra.volumes(*cells)[:, None])).all()


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data(), ranks)
def test_covers_and_disjoint_agree_with_masks(data, rank):
    lo, hi = data.draw(box_lists(rank))
    covered = counts(lo, hi)
    assert algebra.covers(lo, hi, (SIDE,) * rank) == bool((covered > 0).all())
    solid = algebra.volumes(lo, hi) > 0
    assert algebra.are_disjoint(lo[solid], hi[solid]) == bool((covered <= 1).all())


def test_boxes_outside_the_tensor_do_not_cover_it():
    lo, hi = np.array([[0], [3]]), np.array([[3], [7]])
    assert algebra.covers(lo, hi, (7,))
    assert not algebra.covers(lo, hi, (6,))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data(), ranks)
def test_unique_boxes_map_back_to_the_given_ones(data, rank):
    lo, hi = data.draw(box_lists(rank))
    u_lo, u_hi, row = algebra.unique_boxes(lo, hi)
    np.testing.assert_array_equal(u_lo[row], lo)
    np.testing.assert_array_equal(u_hi[row], hi)
    assert len({(*a, *b) for a, b in zip(u_lo.tolist(), u_hi.tolist(), strict=True)}) == len(u_lo)


numbers = st.one_of(st.integers(0, 3), st.integers(-(2**40), 2**40))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 4).flatmap(lambda n: st.lists(st.tuples(*[numbers] * n), max_size=12).map(lambda x: (n, x))))
def test_rows_are_grouped_in_their_order_however_large_they_are(drawn):
    """Four columns of 41 bits do not fit a word."""
    columns, listed = drawn
    rows = np.array(listed, np.int64).reshape(len(listed), columns)
    order, first = algebra.grouped(rows)
    groups = [order[a:b].tolist() for a, b in itertools.pairwise(first.tolist())]
    expected = {}
    for k, row in enumerate(listed):
        expected.setdefault(row, []).append(k)
    assert groups == [expected[row] for row in sorted(expected)]
    assert np.argsort(algebra.row_keys(rows), kind="stable").tolist() == order.tolist()


def test_overlaps_of_slices_of_shards_do_not_pay_for_all_pairs_of_a_layer():
    """80 layers in 8 columns of 40 slices: along the layers, or the columns, alone there are ten times as many."""
    layer, column, part = (a.ravel() for a in np.meshgrid(np.arange(80), np.arange(8), np.arange(40), indexing="ij"))
    lo = np.stack([layer, 64 * column, 10 * part], axis=1)
    hi = lo + np.array([1, 64, 10])
    i, j = algebra.overlaps(lo, hi, lo, hi)
    assert i.tolist() == j.tolist() == list(range(len(lo)))


def test_overlaps_on_a_grid_do_not_pay_for_all_pairs():
    """Two grids of 20,000 boxes share some 40,000 pairs out of 4e8; all pairs would not fit in memory."""
    cuts = [np.arange(n + 1, dtype=np.int64) * 420_000 // n for n in (20_000, 21_000)]
    (a, b) = cuts
    i, _ = algebra.overlaps(a[:-1, None], a[1:, None], b[:-1, None], b[1:, None])
    assert len(i) == 40_000


def test_expand_lays_ranges_end_to_end():
    rows, values = algebra.expand(np.array([3, 9, 0]), np.array([5, 9, 2]))
    assert rows.tolist() == [0, 0, 2, 2]
    assert values.tolist() == [3, 4, 0, 1]


def test_volumes_past_two_to_the_32_are_exact():
    lo, hi = np.zeros((1, 3), np.int64), np.array([[70_000, 70_000, 1_000]])
    assert algebra.volumes(lo, hi).tolist() == [4_900_000_000_000]
