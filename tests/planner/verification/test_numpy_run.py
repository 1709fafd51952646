"""The run in numpy copies what a plan says, and finds what is wrong with it."""

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dynajax.errors import CheckError
from dynajax.planner import build_plan
from dynajax.planner.verification.numpy_run import check_on_numpy, device_buffer
from dynajax.vps import Layout, Space, Tensor, mesh_tiling, stored_tiling

P = PartitionSpec
AMPLE = 2**60


def swap(source=None):
    """Halves of a tensor that change places."""
    space = Space((Tensor("w", (8,), "float32", 4),))
    a, b = (mesh_tiling((8,), {"x": 2}, P("x"), np.array(d)) for d in ([0, 1], [1, 0]))
    return build_plan(Layout(space, (source or a,)), Layout(space, (b,)), AMPLE)


def with_route(plan, **changes):
    move = plan.moves[0]
    return replace(plan, moves=(replace(move, route=replace(move.route, **changes)),))


def test_a_copy_that_stops_too_soon_is_found():
    plan = swap()
    with pytest.raises(CheckError, match=r"w: the plan gives device 1 wrong bytes"):
        check_on_numpy(with_route(plan, hi=plan.moves[0].route.hi - [[1], [0]]))


def test_a_copy_that_is_an_element_off_is_found():
    """From one padded array to another, so that the copy stays in both buffers."""
    space = Space((Tensor("w", (6,), "float32", 4),))
    arrays = [mesh_tiling((8,), {"x": len(d)}, P("x"), np.array(d)) for d in ([2], [0, 1])]
    source, target = (stored_tiling(array, (6,), (((0, 0, 6),),)) for array in arrays)
    plan = build_plan(Layout(space, (source,)), Layout(space, (target,)), AMPLE)
    check_on_numpy(plan)
    off = np.array([[0], [1]])
    with pytest.raises(CheckError, match="w: the plan gives device 1 wrong bytes"):
        check_on_numpy(with_route(plan, lo=plan.moves[0].route.lo + off, hi=plan.moves[0].route.hi + off))


def test_a_plan_that_sends_too_much_is_found():
    """Both devices hold the whole, and ask each other for a half."""
    plan = swap(mesh_tiling((8,), {"x": 2}, P(), np.array([0, 1])))
    check_on_numpy(plan)
    with pytest.raises(CheckError, match="the plan moves 32 bytes and 0 would do"):
        check_on_numpy(with_route(plan, source_row=plan.moves[0].route.source_row[::-1]))


def test_given_tensors_are_what_is_moved():
    plan = swap()
    check_on_numpy(plan, {"w": np.zeros(8)})
    with pytest.raises(KeyError):
        check_on_numpy(plan, {"v": np.zeros(8)})


def test_a_buffer_is_cut_and_its_padding_marked():
    array = mesh_tiling((8,), {"x": 2}, P("x"), np.array([0, 1]))
    tiling = stored_tiling(array, (6,), (((0, 0, 6),),))
    buffers = [device_buffer(np.arange(6, dtype=np.uint8), tiling, d).tolist() for d in range(2)]
    assert buffers == [[0, 1, 2, 3], [4, 5, 0xA5, 0xA5]]
