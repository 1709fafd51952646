"""Rounds of boxes: for few kinds of slices, summed in order, cut where the room is small."""

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from planner.exchanges.performed import AMPLE, assert_copied, copies_between, exchanges, sliced, there_are

from dynajax.planner.exchanges.by_box import by_box
from dynajax.planner.exchanges.part import need
from dynajax.vps import Layout, Space, Tensor, Tiling, mesh_tiling


def found(copies, whole, room=AMPLE):
    return by_box(*sliced(copies, whole), room)


def parts_of(copies, whole, room=AMPLE):
    return there_are(found(copies, whole, room))


def test_twice_the_devices_is_one_round_of_halves():
    """Each old device keeps, or gives away, half a shard: in one round, in which none stands still."""
    copies, whole = copies_between((16,), ({"x": 4}, P("x")), ({"x": 8}, P("x")))
    (part,) = parts_of(copies, whole)
    sent = [m for m in part.exchange.messages if any(a != b for a, b in m.pairs)]
    assert {m.boxes[0].read.size for m in sent} == {(2,)}
    assert len(sent) == 2
    assert_copied(copies, whole, [part])


@pytest.mark.parametrize("room", [288, 320, 400, 1000, AMPLE])
def test_boxes_are_cut_until_they_fit(room):
    copies, whole = copies_between((16, 12), ({"x": 4}, P("x")), ({"x": 3}, P(None, "x")))
    parts = parts_of(copies, whole, room)
    assert_copied(copies, whole, parts)
    assert all(need(part.exchange) <= room for part in parts)
    assert (len(parts) > 1) == (room < 1000)


def test_more_kinds_than_programs_are_worth_are_refused():
    shape = (60,)
    space = Space((Tensor("w", shape, "float32", 4),))
    cuts = [0, 1, 3, 6, 10, 15, 21, 28, 60]
    boxes = Layout(space, (_of_cuts(shape, cuts),)), Layout(space, (mesh_tiling(shape, {"x": 1}, P(), np.array([9])),))
    assert found(*next(exchanges(boxes))) is None


def _of_cuts(shape, cuts):
    ends = np.array(cuts)
    return Tiling.of_boxes(shape, np.arange(len(cuts) - 1), ends[:-1, None], ends[1:, None])


def _summed(shape, mesh, spec):
    space = Space((Tensor("w", shape, "float32", 4),))
    source = replace(mesh_tiling(shape, {"dp": 4}, P(), np.arange(4)), partial=True)
    return next(exchanges((Layout(space, (source,)), Layout(space, (mesh_tiling(shape, mesh, spec, np.arange(4)),)))))


@pytest.mark.parametrize("room", [AMPLE, 500])
@pytest.mark.parametrize(("mesh", "spec"), [({"x": 4}, P("x")), ({"x": 2, "y": 2}, P("x", "y")), ({"x": 4}, P())])
def test_parts_of_a_sum_are_added_in_their_order(mesh, spec, room):
    copies, whole = _summed((8, 4), mesh, spec)
    parts = parts_of(copies, whole, room)
    assert {part.exchange.parts for part in parts} == {4}
    assert all(cut.slot is not None for part in parts for m in part.exchange.messages for cut in m.boxes)
    assert_copied(copies, whole, parts)
