"""Regions against index arrays: a region is right if its buffer is what slicing the tensor gives."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vps.buffers import cut_buffer

from dynajax.vps import blocks, box, interval
from dynajax.vps.region import dense_strides, intervals

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def numbered(shape):
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data(), shapes)
def test_an_interval_is_a_slice_of_the_flattened_tensor(data, shape):
    size = int(np.prod(shape, dtype=np.int64))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    region = interval(shape, start, stop)
    assert region.volume == stop - start
    assert (region.volumes > 0).all()
    assert region.count <= max(2 * len(shape) - 1, 1)
    np.testing.assert_array_equal(cut_buffer(numbered(shape), region), numbered(shape).reshape(-1)[start:stop])


def test_many_intervals_at_once_equal_each_alone():
    start, stop = np.array([0, 3, 3, 17]), np.array([3, 3, 17, 24])
    owner, region = intervals((2, 3, 4), start, stop)
    for k in range(4):
        alone, of_k = interval((2, 3, 4), int(start[k]), int(stop[k])), region.take(owner == k)
        for field in ("lo", "hi", "offset", "stride"):
            np.testing.assert_array_equal(getattr(of_k, field), getattr(alone, field))


def test_a_slice_of_a_matrix_is_at_most_three_boxes():
    assert interval((10, 8), 3, 75).count == 3
    assert interval((10, 8), 8, 72).count == 1


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_blocks_lie_side_by_side_along_their_dim(data, shape):
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.sets(st.integers(0, shape[dim]), min_size=2)) | {0, shape[dim]})
    chosen = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    parts, slices = [], []
    for a, b in chosen[: max(1, len(chosen) - 1)]:
        lo, hi = [0] * len(shape), list(shape)
        lo[dim], hi[dim] = a, b
        parts.append((lo, hi))
        slices.append(np.take(numbered(shape), np.arange(a, b), axis=dim))
    expected = np.concatenate(slices, axis=dim).reshape(-1)
    np.testing.assert_array_equal(cut_buffer(numbered(shape), blocks(parts, dim)), expected)


def test_a_fused_projection_gives_each_rank_its_share_of_every_block():
    """FUSED-1: [Q|K|V|Z|beta|alpha] over two ranks."""
    sizes = [16, 16, 32, 32, 4, 4]
    starts = np.cumsum([0, *sizes[:-1]])
    tensor = numbered((104, 8))
    for rank in range(2):
        parts = [((s + rank * n // 2, 0), (s + (rank + 1) * n // 2, 8)) for s, n in zip(starts, sizes, strict=True)]
        held = cut_buffer(tensor, blocks(parts)).reshape(-1, 8)
        expected = [tensor[s + rank * n // 2 : s + (rank + 1) * n // 2] for s, n in zip(starts, sizes, strict=True)]
        np.testing.assert_array_equal(held, np.concatenate(expected))


def test_a_box_is_dense_and_addressed_from_its_first_element():
    region = box((1, 2), (3, 5))
    np.testing.assert_array_equal(cut_buffer(numbered((4, 6)), region).reshape(2, 3), numbered((4, 6))[1:3, 2:5])
    assert region.address(np.array([0]), np.array([[2, 4]])).tolist() == [5]
    assert repr(region) == "Region([1:3, 2:5])"


def test_a_scalar_is_one_box_without_dims():
    region = box((), ())
    assert (region.volume, region.rank, region.count) == (1, 0, 1)
    assert cut_buffer(np.array(7), region).tolist() == [7]


@pytest.mark.parametrize(("shape", "strides"), [((), []), ((3,), [1]), ((2, 3, 4), [12, 4, 1]), ((2, 0, 4), [0, 4, 1])])
def test_dense_strides_are_row_major(shape, strides):
    assert dense_strides(shape).tolist() == strides


def test_offsets_past_two_to_the_32_are_exact():
    """BIG-1: integers, not floats, from end to end."""
    shape = (70_000, 70_000)
    total = 70_000 * 70_000
    region = interval(shape, total - 70_001, total)
    assert region.lo.tolist() == [[69_998, 69_999], [69_999, 0]]
    assert region.volume == 70_001
    whole = interval(shape, 1, total)
    assert whole.volume == total - 1
    assert int(whole.address(np.array([whole.count - 1]), np.array([[69_999, 69_999]]))[0]) == total - 2
