"""Parts of tensors in arrays, against arrays that are really filled and cut."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import mesh_tilings
from vps.buffers import addressed_buffer, cut_buffer

from dynajax.errors import LayoutError
from dynajax.vps import Block, Run, bucket_parts, fused_parts, layer_part, mesh_tiling, slice_part
from dynajax.vps.parts import joined, parts_tiling

POOL = 6
SETTINGS = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def fill(array, part, whole):
    """Write what the part stores of the tensor into the array, element by element."""
    if isinstance(part, Run):
        array[part.row][part.at : part.at + part.length] = whole.reshape(-1)[part.first : part.first + part.length]
        return
    for step in np.ndindex(*part.extent):
        place = list(part.at)
        for dim, offset in zip(part.dims, step, strict=True):
            if dim is not None:
                place[dim] += offset
        array[tuple(place)] = whole[tuple(np.add(part.first, step))]


def numbered(shape):
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)


@st.composite
def arrays(draw):
    """A tensor, and an array that stores disjoint parts of it: ``(shape, array shape, parts)``."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    size = int(np.prod(shape))
    kind = draw(st.sampled_from(["runs", "rows of runs", "slice", "layer", "box"]))
    if kind == "slice":
        a, b = sorted(draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=2, unique=True)))
        return shape, (b - a, *shape[1:]), [slice_part("t", shape, a, b)]
    if kind == "layer":
        return shape, shape[1:], [layer_part("t", shape, draw(st.integers(0, shape[0] - 1)))]
    if kind == "box":
        dims = tuple(draw(st.permutations(range(len(shape)))))
        pad = [draw(st.integers(0, 2)) for _ in shape]
        array, at = [0] * len(shape), [0] * len(shape)
        for d, (n, dim) in enumerate(zip(shape, dims, strict=True)):
            array[dim], at[dim] = n + pad[d], draw(st.integers(0, pad[d]))
        return shape, tuple(array), [Block("t", shape, (0,) * len(shape), shape, tuple(at), dims)]
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
    gaps = [draw(st.integers(0, 2)) for _ in cuts]
    runs, at = [], gaps[0]
    for (a, b), gap in zip(itertools.pairwise(cuts), gaps[1:], strict=True):
        runs.append(Run("t", shape, a, b - a, at))
        at += b - a + gap
    if kind == "runs":
        return shape, (at,), runs
    row = draw(st.integers(0, 2))
    return shape, (3, at), [Run(r.tensor, r.shape, r.first, r.length, r.at, (row,)) for r in runs]


@SETTINGS
@given(arrays(), st.data())
def test_a_device_has_of_a_tensor_what_its_shard_of_the_array_stores(case, data):
    shape, array_shape, parts = case
    whole, array = numbered(shape), np.full(array_shape, -1)
    for part in parts:
        part.require_fits(array_shape)
        fill(array, part, whole)
    cut = data.draw(mesh_tilings(array_shape, POOL))
    tiling = parts_tiling(cut, shape, parts)
    assert tiling.devices.tolist() == cut.devices.tolist()
    for device in cut.devices.tolist():
        shard = cut_buffer(array, cut.region_of(device))
        np.testing.assert_array_equal(addressed_buffer(whole, tiling.region_of(device), len(shard)), shard)
        assert tiling.region_of(device).volume == (shard >= 0).sum()


@SETTINGS
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_buckets_lie_end_to_end_and_ignore_the_borders_of_tensors(lengths, sizes):
    shapes = {f"t{k}": (n,) for k, n in enumerate(lengths)}
    if sum(sizes) < sum(lengths):
        with pytest.raises(LayoutError, match="too small"):
            bucket_parts(shapes, sizes)
        return
    wanted = [(path, k) for path, (n,) in shapes.items() for k in range(n)]
    laid: list[tuple[str, int] | None] = [None] * sum(sizes)
    for start, runs in zip(np.cumsum([0, *sizes[:-1]]).tolist(), bucket_parts(shapes, sizes), strict=True):
        for run in runs:
            for k in range(run.length):
                assert laid[start + run.at + k] is None
                laid[start + run.at + k] = (run.tensor, run.first + k)
    assert laid == [*wanted, *[None] * (sum(sizes) - len(wanted))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_fused_array_gives_each_rank_its_share_of_every_tensor(ranks, dim):
    shapes = {"q": (8, 3), "k": (4, 3), "v": (4, 3)} if dim == 0 else {"q": (3, 8), "k": (3, 4), "v": (3, 4)}
    wholes = {path: numbered(shape) + 100 * k for k, (path, shape) in enumerate(shapes.items())}
    array = np.full((16, 3) if dim == 0 else (3, 16), -1)
    for part in fused_parts(shapes, ranks, dim):
        fill(array, part, wholes[part.tensor])
    for rank, share in enumerate(np.split(array, ranks, axis=dim)):
        expected = [np.split(whole, ranks, axis=dim)[rank] for whole in wholes.values()]
        np.testing.assert_array_equal(share, np.concatenate(expected, axis=dim))


def test_buffers_of_several_arrays_are_numbered_end_to_end_and_spare_copies_left_out():
    """Two arrays store the whole tensor, device 1 the second half of one and the first of the other; then twice one."""
    whole = Block.whole("t", (4,))
    on = [mesh_tiling((4,), {"x": 2}, PartitionSpec("x"), np.array(d)) for d in ([0, 1], [1, 2])]
    found = [parts_tiling(array, (4,), [whole]) for array in on]
    tiling = joined(found, [2, 2], spare_copies=True)
    assert tiling.holder.tolist() == [0, 1, 1, 2]
    assert tiling.region.offset.tolist() == [0, 0, 2, 2]
    assert tiling.room == 4
    again = joined([found[0], found[0]], [2, 2], spare_copies=True)
    assert again.holder.tolist() == [0, 1]
    assert again.region.offset.tolist() == [0, 0]
    assert joined([found[0], found[0]], [2, 2], spare_copies=False).holder.tolist() == [0, 1, 0, 1]


def test_parts_that_do_not_fit_are_refused():
    Block("t", (4, 3), (1, 0), (1, 3), (2,), (None, 0)).require_fits((5,))
    for bad in (
        Block("t", (4, 3), (1, 0), (1, 3), (3,), (None, 0)),
        Block("t", (4, 3), (4, 0), (1, 3), (0,), (None, 0)),
        Block("t", (4, 3), (1, 0), (2, 3), (0,), (None, 0)),
        Block("t", (4, 3), (1, 0), (1, 3), (0,), (0, 0)),
        Run("t", (4, 3), 6, 7, 0),
        Run("t", (4, 3), 0, 6, 0),
    ):
        with pytest.raises(LayoutError, match="t: "):
            bad.require_fits((5,))
    with pytest.raises(LayoutError, match="equal shares"):
        fused_parts({"q": (6, 2), "k": (4, 2)}, 4)
