"""Tilings and layouts: what they count, and what they refuse."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dynajax.errors import LayoutError
from dynajax.vps import Layout, Space, Tensor, Tiling, blocks, box, interval, mesh_tiling, stored_tiling
from dynajax.vps.tiling import segment_sum, side_by_side


def test_flat_slices_with_padding_keep_their_logical_elements():
    """UNEVEN-5: 57 elements over two, three and four devices, each slice of a padded buffer."""
    for parts, padded in ((2, 60), (3, 60), (4, 64)):
        step = padded // parts
        regions = [(d, interval((57,), min(d * step, 57), min((d + 1) * step, 57))) for d in range(parts)]
        tiling = Tiling.of_regions((57,), regions)
        tiling.validate()
        assert tiling.elements(parts).sum() == 57


def test_layouts_side_by_side_are_replicas_that_share_tilings_where_both_do():
    space = Space(tuple(Tensor(name, (4,), "float32", 4) for name in "ab"))
    halves = mesh_tiling((4,), {"x": 2}, PartitionSpec("x"), np.array([5, 2]))
    whole = [mesh_tiling((4,), {"x": 1}, PartitionSpec(), np.array([d])) for d in (0, 0)]
    one, two = Layout(space, (halves, halves)), Layout(space, (whole[0], whole[0]))
    both = side_by_side([one, two])
    assert both.tilings[0] is both.tilings[1]
    assert both.tilings[0].holder.tolist() == [5, 2, 0]
    assert both.tilings[0].region.hi.ravel().tolist() == [2, 4, 4]
    assert side_by_side([one]) is one
    apart = side_by_side([one, Layout(space, (whole[0], whole[1]))])
    assert apart.tilings[0] is not apart.tilings[1]


def test_a_hole_an_overhang_and_a_double_hold_are_refused():
    with pytest.raises(LayoutError, match="w: the regions do not cover"):
        Tiling.of_regions((4, 4), [(0, box((0, 0), (3, 4)))]).validate("w")
    with pytest.raises(LayoutError, match="do not cover"):
        Tiling.of_regions((4,), [(0, box((0,), (5,)))]).validate()
    with pytest.raises(LayoutError, match="holds one element twice"):
        Tiling.of_regions((4,), [(0, blocks([((0,), (4,)), ((3,), (4,))]))]).validate()
    Tiling.of_regions((4,), [(0, box((0,), (4,))), (1, box((3,), (4,)))]).validate()


def test_keys_tell_tilings_apart():
    halves = [(0, box((0,), (2,))), (1, box((2,), (4,)))]
    one = Tiling.of_regions((4,), halves)
    assert one.key == Tiling.of_regions((4,), halves).key
    assert one.key != Tiling.of_regions((4,), [(1, halves[0][1]), (0, halves[1][1])]).key
    assert one.key != Tiling((4,), one.holder, one.region, partial=True).key


def test_a_layout_fits_its_space():
    space = Space((Tensor("a", (4,), "float32", 4),))
    with pytest.raises(LayoutError, match="0 tilings for the 1 tensors"):
        Layout(space, ())
    with pytest.raises(LayoutError, match=r"a has shape \(4,\) and its tiling is for \(5,\)"):
        Layout(space, (Tiling.of_regions((5,), [(0, box((0,), (5,)))]),))


def test_empty_tensors_are_held_by_nobody_and_are_whole():
    """SMALL-1."""
    tiling = Tiling.of_boxes((16, 0), np.arange(2), np.array([[0, 0], [8, 0]]), np.array([[8, 0], [16, 0]]))
    tiling.validate()
    assert len(tiling.devices) == 0
    assert Layout(Space((Tensor("lora", (16, 0), "float32", 4),)), (tiling,)).num_devices == 0


def test_sums_are_exact_where_floats_are_not():
    big = 2**53
    assert segment_sum(np.array([0, 0, 1]), np.array([big, 1, big]), 2).tolist() == [big + 1, big]


def test_a_device_that_holds_padding_alone_has_its_bytes():
    """Six elements stored as eight over four devices: the last two places, all of the last device, are padding."""
    array = mesh_tiling((8,), {"x": 4}, PartitionSpec("x"), np.array([5, 6, 7, 9]))
    tiling = stored_tiling(array, (6,), (((0, 0, 6),),))
    assert tiling.holder.tolist() == [5, 6, 7]
    assert tiling.devices.tolist() == [5, 6, 7, 9]
    assert tiling.elements(10).tolist() == [0] * 5 + [2, 2, 2, 0, 2]
    assert (
        tiling.key
        != stored_tiling(
            mesh_tiling((6,), {"x": 3}, PartitionSpec("x"), np.array([5, 6, 7])), (6,), (((0, 0, 6),),)
        ).key
    )
    layout = Layout(Space((Tensor("w", (6,), "float32", 4),)), (tiling,))
    assert layout.num_devices == 10
    assert layout.bytes_by_device().sum() == 4 * 8
