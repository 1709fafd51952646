"""Every branch of the proof can fail: a right plan, one thing broken in it, and the error that names just that."""

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import PartitionSpec
from planner.random_layouts import TIERS

from dynajax.errors import CheckError, LayoutError
from dynajax.meshes import Topology
from dynajax.planner import Granularity, build_plan
from dynajax.planner.verification.proof import prove
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
FOURS = Topology.regular("fours", [(TIERS[0], 1), (TIERS[1], 4), (TIERS[3], 0)], 8)
PIECES = ("lo", "hi", "target_row", "source_row", "relayed", "added")


def layout(spec, devices, names=("w",), shape=(8, 4)):
    """Tensors of one shape on a mesh of one axis."""
    space = Space(tuple(Tensor(name, shape, "float32", 4) for name in names))
    return Layout(space, tuple(mesh_tiling(shape, {"x": len(devices)}, spec, np.array(devices)) for _ in names))


# Right plans ----------------------------------------------------------------------------------------------------------


def swap():
    """Rows on four devices; the last two change places, the first two keep their buffers."""
    return build_plan(layout(P("x"), [0, 1, 2, 3]), layout(P("x"), [0, 1, 3, 2]), AMPLE)


def columns(budget=AMPLE, **kwargs):
    """Rows to columns on two devices, of two tensors, in one stage."""
    rows, columns = (layout(spec, [0, 1], ("v", "w")) for spec in (P("x"), P(None, "x")))
    return build_plan(rows, columns, budget, **kwargs)


def packed_columns():
    """The same in four stages of slices."""
    return columns(32, granularity=Granularity.PACKED)


def relays(**kwargs):
    """One device to a node of four: one of them is sent the tensor and passes it on to the others."""
    return build_plan(layout(P(), [0]), layout(P(), [4, 5, 6, 7]), AMPLE, topology=FOURS, **kwargs)


def packed_relays():
    """The same in stages of slices."""
    return relays(granularity=Granularity.PACKED)


def replicas():
    """A copy in each node, and a newcomer in each."""
    return build_plan(layout(P(), [0, 4]), layout(P(), [1, 5]), AMPLE, topology=FOURS)


def kept_rows():
    """Of what both devices hold whole each keeps its rows."""
    return build_plan(layout(P(), [0, 1]), layout(P("x"), [0, 1]), AMPLE)


def sums():
    """Parts of three devices, summed on the first."""
    source = layout(P(), [0, 1, 2])
    partial = tuple(replace(t, partial=True) for t in source.tilings)
    return build_plan(Layout(source.space, partial), layout(P(), [0]), AMPLE)


# Ways to break them ---------------------------------------------------------------------------------------------------


def with_route(plan, **changes):
    """The plan with something else in its last route."""
    *others, move = plan.moves
    return replace(plan, moves=(*others, replace(move, route=replace(move.route, **changes))))


def with_pieces(plan, rows):
    """The plan with just these of its pieces, some perhaps twice."""
    route = plan.moves[-1].route
    fields = [*PIECES, *(["stage"] if route.stage is not None else [])]
    return with_route(plan, **{f: getattr(route, f)[rows] for f in fields})


def set_at(array, index, value):
    """A copy of the array with another value there."""
    changed = array.copy()
    changed[index] = value
    return changed


def reads_another_row(plan):
    return with_route(plan, source_row=plan.moves[-1].route.source_row[::-1])


def fills_another_row(plan):
    return with_route(plan, target_row=plan.moves[-1].route.target_row[::-1])


def is_too_long(plan):
    return with_route(plan, hi=plan.moves[-1].route.hi + 1)


def adds_to_a_copy(plan):
    return with_route(plan, added=~plan.moves[-1].route.added)


def keeps_a_part(plan):
    return with_route(plan, kept=np.array([0]))


def adds_the_first_part(plan):
    """To whatever lies in the buffer."""
    return with_route(plan, added=set_at(plan.moves[-1].route.added, 0, True))


def writes_the_second_part(plan):
    """Over the first."""
    return with_route(plan, added=set_at(plan.moves[-1].route.added, 1, False))


def adds_half_a_part(plan):
    return with_route(plan, hi=plan.moves[-1].route.hi - [[0, 0], [4, 0], [0, 0]])


def adds_in_another_stage(plan):
    """Before what it is added to is there."""
    return with_route(plan, stage=np.array([1, 0, 1]))


def leaves_out_a_part(plan):
    return with_pieces(plan, [0, 1])


def adds_a_part_twice(plan):
    return with_pieces(plan, [0, 1, 2, 2])


def adds_a_part_in_place_of_another(plan):
    return with_route(plan, source_row=plan.moves[-1].route.source_row[[0, 1, 1]])


def passes_on_what_it_gets_later(plan):
    """A relay whose sender is sent the piece by another relay."""
    route = plan.moves[-1].route
    first, second = np.flatnonzero(route.relayed)[:2]
    return with_route(plan, source_row=set_at(route.source_row, first, route.target_row[second]))


def passes_on_at_once(plan):
    """In the stage in which it arrives, before it is unpacked."""
    return with_route(plan, stage=np.zeros_like(plan.moves[-1].route.stage))


def keeps_other_elements(plan):
    return with_route(plan, kept=np.array([0, 1, 2]))


def keeps_another_order(plan):
    """The same elements, but the target has columns side by side where the source has rows."""
    region = plan.moves[-1].target.region
    turned = replace(region, stride=np.broadcast_to([1, 2], region.stride.shape))
    return with_route(plan, target=replace(plan.moves[-1].target, region=turned))


def writes_a_piece_twice(plan):
    return with_pieces(plan, [0, 0, 1])


def leaves_out_a_piece(plan):
    return with_pieces(plan, [0])


def makes_no_copy_for_a_buffer_that_goes(plan):
    return with_route(plan, kept=np.array([0]))


def asks_the_other_device(plan):
    """For what it holds itself, or what a nearer device holds."""
    return with_route(plan, source_row=plan.moves[-1].route.source_row[::-1])


def reads_a_source_without_its_last_row(plan):
    source = plan.moves[-1].source
    shorter = replace(source.region, hi=source.region.hi - [[0, 0], [0, 0], [0, 0], [1, 0]])
    return with_route(plan, source=replace(source, region=shorter))


def gives_one_device_both_copies(plan):
    target = plan.moves[-1].target
    return with_route(plan, target=replace(target, holder=np.ones_like(target.holder)))


def leaves_out_a_tensor(plan):
    return replace(plan, stages=((0,),))


def moves_a_tensor_twice(plan):
    return replace(plan, stages=((0, 1), (1,)))


def lists_no_last_stage(plan):
    """Pieces of packed tensors are in stages that do not list them."""
    return replace(plan, stages=(*plan.stages[:-1], ()))


def promises_a_lower_peak(plan):
    return replace(plan, footprint=replace(plan.footprint, peak=plan.footprint.peak - 1))


def needs_more_than_its_budget(plan):
    return replace(plan, budget=plan.peak_extra_bytes - 1)


OUTSIDE = r"w: piece \d is read or written outside of its box"
NOT_ADDED = r"w: piece \d is not added to what is written before it"
NOT_COMPLETE = "w: a sum lacks the part of a holder, or has it twice"
NOT_SENT = r"w: device [4-7] passes on what was not sent to it"
NOT_THE_SAME = "w: a buffer is kept that does not hold what it should"
CASES = [
    (swap, reads_another_row, OUTSIDE),
    (swap, fills_another_row, OUTSIDE),
    (swap, is_too_long, OUTSIDE),
    (relays, is_too_long, OUTSIDE),
    (swap, adds_to_a_copy, "w: something is added to a copy"),
    (sums, keeps_a_part, "w: a part is kept as if it were the sum"),
    (sums, adds_the_first_part, NOT_ADDED),
    (sums, writes_the_second_part, NOT_ADDED),
    (sums, adds_half_a_part, NOT_ADDED),
    (sums, adds_in_another_stage, NOT_ADDED),
    (sums, leaves_out_a_part, NOT_COMPLETE),
    (sums, adds_a_part_twice, NOT_COMPLETE),
    (sums, adds_a_part_in_place_of_another, NOT_COMPLETE),
    (relays, passes_on_what_it_gets_later, NOT_SENT),
    (packed_relays, passes_on_at_once, NOT_SENT),
    (swap, keeps_other_elements, NOT_THE_SAME),
    (swap, keeps_another_order, NOT_THE_SAME),
    (swap, writes_a_piece_twice, "w: an element is written twice"),
    (swap, leaves_out_a_piece, "w: device [23] gets 0 elements and needs 8"),
    (swap, makes_no_copy_for_a_buffer_that_goes, "w: device 1 gets 0 elements and needs 8"),
    (kept_rows, asks_the_other_device, "the plan moves 128 bytes and 0 would do"),
    (replicas, asks_the_other_device, "the plan moves 256 bytes between nodes and 0 would do"),
    (columns, leaves_out_a_tensor, r"w: in stages \[\], which is not where its pieces are"),
    (columns, moves_a_tensor_twice, r"w: in stages \[0, 1\], which is not where its pieces are"),
    (packed_columns, lists_no_last_stage, r"v: in stages \[0, 1, 2\], which is not where its pieces are"),
    (columns, promises_a_lower_peak, "device 0 holds up to 256 bytes, not 255"),
    (packed_columns, promises_a_lower_peak, r"device 0 holds up to \d+ bytes, not \d+"),
    (columns, needs_more_than_its_budget, "a device holds 128 bytes above its base; the budget is 127"),
]


@pytest.mark.parametrize(("plan", "break_it", "words"), CASES)
def test_the_proof_names_what_is_broken(plan, break_it, words):
    right = plan()
    prove(right)
    with pytest.raises(CheckError, match=f"^{words}"):
        prove(break_it(right))


@pytest.mark.parametrize(
    ("plan", "break_it", "words"),
    [
        (swap, reads_a_source_without_its_last_row, r"w: the regions do not cover its shape \(8, 4\) exactly"),
        (replicas, gives_one_device_both_copies, "w: a device holds one element twice"),
    ],
)
def test_the_proof_names_a_layout_that_is_not_sound(plan, break_it, words):
    with pytest.raises(LayoutError, match=words):
        prove(break_it(plan()))
