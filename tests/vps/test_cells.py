"""Cells of any tiling, against masks of single elements."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from planner.random_layouts import mask, shapes, tilings

SETTINGS = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
any_tilings = shapes.flatmap(lambda shape: tilings(shape, 6))


@SETTINGS
@given(any_tilings)
def test_distinct_boxes_are_those_of_the_list(tiling):
    cells, region = tiling.region.distinct, tiling.region
    assert sorted(cells.row.tolist()) == list(range(region.count))
    assert len({(*a, *b) for a, b in zip(cells.lo.tolist(), cells.hi.tolist(), strict=True)}) == len(cells.lo)
    np.testing.assert_array_equal(cells.lo[cells.of_row], region.lo[cells.row])
    np.testing.assert_array_equal(cells.hi[cells.of_row], region.hi[cells.row])


@SETTINGS
@given(any_tilings)
def test_cells_are_disjoint_and_their_rows_are_all_that_hold_them(tiling):
    cells = tiling.region.cells
    region, seen = tiling.region, np.zeros(tiling.shape, int)
    rows = [mask(region.lo[k], region.hi[k], tiling.shape) for k in range(region.count)]
    for k in range(len(cells.lo)):
        inside = mask(cells.lo[k], cells.hi[k], tiling.shape)
        seen += inside
        holding = [r for r, row in enumerate(rows) if (row & inside).any()]
        assert sorted(cells.row[cells.first[k] : cells.first[k + 1]].tolist()) == holding
        assert all((rows[r] & inside).sum() == inside.sum() for r in holding)
        assert (cells.of_row[cells.first[k] : cells.first[k + 1]] == k).all()
    np.testing.assert_array_equal(seen, np.any(rows, axis=0).astype(int) if rows else seen * 0)
