"""Plans of random layouts, proved, carried out in numpy and compared with brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from planner.random_layouts import array_layout_pairs, held, layout_pairs, shapes, tilings
from vps.buffers import cut_buffer

from dynajax.errors import LayoutError
from dynajax.planner import build_plan, verify
from dynajax.planner.verification.numpy_run import device_buffer, run_move
from dynajax.vps import Layout, Space, Tensor, Tiling, box, interval, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
proof = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def brute_force_bytes(source, target):
    """Bytes that devices of the target need and do not hold."""
    return sum(
        int((held(after, d) & ~held(before, d)).sum()) * tensor.itemsize
        for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True)
        for d in after.devices.tolist()
    )


@proof
@given(layout_pairs())
def test_any_two_layouts_make_an_exact_plan_that_moves_the_least(pair):
    source, target = pair
    plan = build_plan(source, target, AMPLE)
    verify(plan)
    assert plan.bytes_moved == plan.bytes_lower_bound == brute_force_bytes(source, target)
    wanted = sum(t.itemsize * x.region.volume for t, x in zip(target.space, target.tilings, strict=True))
    assert plan.bytes_retained + plan.bytes_moved == wanted


@proof
@given(array_layout_pairs())
def test_any_two_layouts_of_arrays_make_an_exact_plan_that_moves_the_least(pair):
    source, target = pair
    plan = build_plan(source, target, AMPLE)
    verify(plan)
    assert plan.bytes_moved == plan.bytes_lower_bound == brute_force_bytes(source, target)


@proof
@given(layout_pairs())
def test_a_device_sends_only_what_it_holds_and_never_what_the_other_has(pair):
    source, target = pair
    for move in build_plan(source, target, AMPLE).moves:
        c = move.copies
        for d in move.target.devices.tolist():
            mine = c.target == d
            wanted = 0 if d in move.kept else move.target.region_of(d).volume
            assert int(c.volumes[mine].sum()) == wanted
            missing = int((held(move.target, d) & ~held(move.source, d)).sum())
            assert int(c.volumes[mine & c.sent].sum()) == missing
        assert np.isin(c.source, move.source.devices).all()


@proof
@given(st.data())
def test_there_and_back_is_the_state_one_started_from(data):
    shape = data.draw(shapes)
    a, b = data.draw(tilings(shape, 6)), data.draw(tilings(shape, 6))
    space = Space((Tensor("w", shape, "int64", 8),))
    there, back = (build_plan(Layout(space, (x,)), Layout(space, (y,)), AMPLE).moves[0] for x, y in ((a, b), (b, a)))
    whole = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape) + 1
    before = {d: device_buffer(whole, a, d) for d in a.devices.tolist()}
    if not before:
        return
    after = run_move(back, run_move(there, before))
    for d in a.devices.tolist():
        np.testing.assert_array_equal(after[d], before[d])


def test_a_buffer_that_stays_as_it_is_is_kept_and_not_copied():
    space = Space((Tensor("w", (8, 4), "float32", 4),))
    rows = mesh_tiling((8, 4), {"x": 4}, P("x"), np.arange(4))
    swapped = mesh_tiling((8, 4), {"x": 4}, P("x"), np.array([0, 1, 3, 2]))
    plan = build_plan(Layout(space, (rows,)), Layout(space, (swapped,)), AMPLE)
    assert plan.moves[0].kept.tolist() == [0, 1]
    assert sorted(zip(plan.moves[0].copies.source.tolist(), plan.moves[0].copies.target.tolist(), strict=True)) == [
        (2, 3),
        (3, 2),
    ]
    assert plan.bytes_sent.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 32], [0, 0, 32, 0]]


def test_an_expert_or_a_layer_goes_where_its_number_says():
    """MOE-1, LAYER-1: expert e and layer l keep their values over ep and pp that do not divide them."""
    whole = np.broadcast_to(np.arange(10)[:, None], (10, 3)).copy()
    space = Space((Tensor("w", (10, 3), "int64", 8),))
    stages = [mesh_tiling((10, 3), {"pp": n}, P("pp"), np.arange(n)) for n in (1, 3, 4, 2, 1)]
    buffers = {0: cut_buffer(whole, stages[0].region_of(0))}
    for a, b in itertools.pairwise(stages):
        buffers = run_move(build_plan(Layout(space, (a,)), Layout(space, (b,)), AMPLE).moves[0], buffers)
        for d in b.devices.tolist():
            np.testing.assert_array_equal(buffers[d], cut_buffer(whole, b.region_of(d)))
    np.testing.assert_array_equal(buffers[0].reshape(10, 3), whole)


def test_interleaved_stages_are_lists_of_boxes():
    """LAYER-1 with two chunks a stage."""
    chunks = {0: [(0, 3), (6, 8)], 1: [(3, 6), (8, 10)]}
    regions = [(d, end_to_end(parts)) for d, parts in chunks.items()]
    target = Tiling.of_regions((10, 2), regions)
    target.validate()
    space = Space((Tensor("w", (10, 2), "float32", 4),))
    source = Layout(space, (mesh_tiling((10, 2), {"pp": 2}, P("pp"), np.arange(2)),))
    plan = build_plan(source, Layout(space, (target,)), AMPLE)
    verify(plan)
    assert plan.bytes_moved == (2 + 2) * 2 * 4


def end_to_end(parts):
    from dynajax.vps import blocks

    return blocks([((a, 0), (b, 2)) for a, b in parts])


def test_a_tensor_of_nineteen_gigabytes_is_counted_exactly():
    """BIG-1: shapes only."""
    shape, total = (70_000, 70_000), 70_000 * 70_000
    space = Space((Tensor("w", shape, "float32", 4),))
    rows, columns = (mesh_tiling(shape, {"x": 8}, s, np.arange(8)) for s in (P("x"), P(None, "x")))
    flat = Tiling.of_regions(shape, [(d, interval(shape, d * total // 7, (d + 1) * total // 7)) for d in range(7)])
    for a, b in ((rows, columns), (columns, flat), (flat, rows)):
        plan = build_plan(Layout(space, (a,)), Layout(space, (b,)), AMPLE)
        c = plan.moves[0].copies
        assert c.volumes.sum() == total
        assert all((field >= 0).all() for field in (c.extent, c.source_offset, c.target_offset))
        assert plan.bytes_moved == plan.bytes_lower_bound
        assert plan.bytes_moved + plan.bytes_retained == 4 * total
        assert max(plan.peak_bytes()) < 2 * 4 * total
    assert build_plan(Layout(space, (rows,)), Layout(space, (columns,)), AMPLE).bytes_moved == 4 * total * 7 // 8


def test_eight_rows_to_columns_send_equally():
    space = Space((Tensor("w", (64, 64), "float32", 4),))
    rows, columns = (Layout(space, (mesh_tiling((64, 64), {"x": 8}, s, np.arange(8)),)) for s in (P("x"), P(None, "x")))
    sent = build_plan(rows, columns, AMPLE).bytes_sent
    assert (sent.sum(axis=0) == sent.sum(axis=1)).all()
    assert set(sent.sum(axis=0).tolist()) == {64 * 64 * 4 // 8 * 7 // 8}


def test_copies_of_a_replicated_tensor_are_sent_by_all_its_holders():
    space = Space(tuple(Tensor(f"w{k}", (64,), "float32", 4) for k in range(8)))
    source = Layout(space, tuple(mesh_tiling((64,), {"x": 4}, P(), np.arange(4)) for _ in space))
    target = Layout(space, tuple(mesh_tiling((64,), {"x": 4}, P(), np.arange(4, 8)) for _ in space))
    sent = build_plan(source, target, AMPLE).bytes_sent.sum(axis=1)
    assert sent.tolist() == [8 * 256] * 4 + [0] * 4


def test_layouts_of_unlike_spaces_and_lost_elements_are_refused():
    w, v = (Space((Tensor(name, (4,), "float32", 4),)) for name in ("w", "v"))
    one = Tiling.of_regions((4,), [(0, box((0,), (4,)))])
    part = Tiling.of_regions((4,), [(0, box((0,), (3,)))])
    with pytest.raises(LayoutError, match="different spaces"):
        build_plan(Layout(w, (one,)), Layout(v, (one,)), 0)
    with pytest.raises(LayoutError, match="lacks a part"):
        build_plan(Layout(w, (part,)), Layout(w, (one,)), 0)
