"""Arrays that store a tensor by runs of its dims, against arrays that are really filled and cut."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import mesh_tilings
from vps.buffers import addressed_buffer, cut_buffer

from dynajax.errors import LayoutError
from dynajax.vps import mesh_tiling, stored_tiling
from dynajax.vps.stored import whole_runs

POOL = 6


@st.composite
def run_lists(draw, size):
    """Runs that cover a dim of the tensor, in any order in a dim of the array: ``(array size, runs)``."""
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
    spans = draw(st.permutations(list(itertools.pairwise(cuts))))
    runs, at = [], draw(st.integers(0, 1))
    for a, b in spans:
        runs.append((at, a, b - a))
        at += b - a + draw(st.integers(0, 1))
    return at, tuple(runs)


def stored_at(index, runs):
    """Where an index of the tensor lies in the array."""
    return next(at + index - first for at, first, length in runs if first <= index < first + length)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.data())
def test_a_device_has_of_the_tensor_what_its_shard_stores(shape, data):
    dims = [data.draw(run_lists(n)) for n in shape]
    whole = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    array = np.full([n for n, _ in dims], -1)
    for index in np.ndindex(*shape):
        place = [stored_at(i, runs) for i, (_, runs) in zip(index, dims, strict=True)]
        array[tuple(place)] = whole[index]
    cut = data.draw(mesh_tilings(array.shape, POOL))
    tiling = stored_tiling(cut, shape, [runs for _, runs in dims])
    tiling.validate()
    for device in cut.devices.tolist():
        shard = cut_buffer(array, cut.region_of(device))
        np.testing.assert_array_equal(addressed_buffer(whole, tiling.region_of(device), len(shard)), shard)


def test_whole_runs_store_a_tensor_as_it_is():
    array = mesh_tiling((4, 6), {"x": 2}, PartitionSpec(None, "x"), np.arange(2))
    tiling = stored_tiling(array, (4, 6), whole_runs((4, 6)))
    for field in ("lo", "hi", "offset", "stride"):
        np.testing.assert_array_equal(getattr(tiling.region, field), getattr(array.region, field))


@pytest.mark.parametrize(
    ("shape", "pieces", "words"),
    [
        ((6,), (((3, 0, 6),),), r"dim 0: the piece \(3, 0, 6\) does not fit 8 and 6"),
        ((6,), (((0, 1, 6),),), r"dim 0: the piece \(0, 1, 6\) does not fit 8 and 6"),
        ((6,), (((0, -1, 6),),), r"dim 0: the piece \(0, -1, 6\) does not fit 8 and 6"),
        ((6, 2), (((0, 0, 6),),), r"an array of shape \(8,\) with 1 lists of pieces cannot store \(6, 2\)"),
    ],
)
def test_runs_outside_of_the_array_or_the_tensor_are_refused(shape, pieces, words):
    array = mesh_tiling((8,), {"x": 2}, PartitionSpec("x"), np.arange(2))
    with pytest.raises(LayoutError, match=words):
        stored_tiling(array, shape, pieces)
