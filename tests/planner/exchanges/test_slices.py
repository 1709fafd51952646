"""Boxes as slices of shards: what is one is found, and what turns or skips is refused."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynajax.planner.exchanges.slices import Slices
from dynajax.vps.region import dense_strides


@st.composite
def slices(draw):
    """A shard, and a slice of it that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = [draw(st.integers(0, n - 1)) for n in shape]
    return shape, start, [draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)]


def found(shape, offset, stride, extent):
    return Slices.of(shape, *(np.array([x], np.int64) for x in (offset, stride, extent)))


@given(slices(), st.data())
def test_a_slice_is_found_from_its_offset_and_strides(drawn, data):
    """Also where dims of length one say nothing by their strides, or are left out."""
    shape, start, size = drawn
    strides = dense_strides(shape)
    dims = [d for d in range(len(shape)) if size[d] > 1 or data.draw(st.booleans())]
    stride = [int(strides[d]) if size[d] > 1 else data.draw(st.integers(0, 9)) for d in dims]
    one = found(shape, int(np.dot(start, strides)), stride, [size[d] for d in dims])
    assert one is not None
    index = tuple(slice(a, a + n) for a, n in zip(one.start[0], one.size[0], strict=True))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    expected = numbers[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
    assert numbers[index].ravel().tolist() == expected.ravel().tolist()


def test_dims_that_change_their_order_are_no_slice():
    assert found((4, 6), 0, [6, 1], [2, 3]) is not None
    assert found((4, 6), 0, [1, 6], [3, 2]) is None


def test_every_other_element_is_no_slice():
    assert found((8,), 0, [2], [3]) is None


def test_what_runs_over_the_end_of_a_row_is_no_slice():
    assert found((4, 6), 4, [1], [3]) is None
    assert found((4, 6), 3, [1], [3]) is not None


def test_one_box_that_is_none_makes_all_none():
    rows = np.array([0, 0]), np.array([[1], [2]]), np.array([[3], [3]])
    assert Slices.of((8,), *rows) is None
