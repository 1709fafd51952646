"""Cells, needs and buffers that stay, against masks of single elements."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.random_layouts import held, mask, shapes, tilings

from dynajax.errors import LayoutError
from dynajax.planner.diff import diff, unchanged_devices
from dynajax.vps import Region, Tiling, box, interval

SETTINGS = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
POOL = 6


@st.composite
def two_tilings(draw):
    """Two tilings of one tensor, of any kinds."""
    shape = draw(shapes)
    return draw(tilings(shape, POOL)), draw(tilings(shape, POOL))


@SETTINGS
@given(two_tilings(), st.booleans())
def test_every_element_of_a_device_is_needed_once_and_its_own_row_holds_it(pair, disjoint):
    source, target = pair
    demand = diff(source, target, disjoint)
    pieces = [mask(demand.lo[k], demand.hi[k], source.shape) for k in range(len(demand.lo))]
    needed = {d: np.zeros(source.shape, int) for d in target.devices.tolist()}
    for piece, row, own in zip(*(a.tolist() for a in (demand.piece, demand.target_row, demand.own_row)), strict=True):
        device = int(target.holder[row])
        needed[device] += pieces[piece]
        inside = mask(target.region.lo[row], target.region.hi[row], source.shape)
        assert not (pieces[piece] & ~inside).any()
        if own >= 0:
            assert source.holder[own] == device
            assert not (pieces[piece] & ~mask(source.region.lo[own], source.region.hi[own], source.shape)).any()
        else:
            assert not (pieces[piece] & held(source, device)).any()
    for device, count in needed.items():
        np.testing.assert_array_equal(count, held(target, device).astype(int))
    assert demand.volumes.tolist() == [int(p.sum()) for p in pieces]


@SETTINGS
@given(two_tilings())
def test_disjoint_pieces_share_no_element_and_lie_in_one_cell(pair):
    demand = diff(*pair, disjoint=True)
    count = np.zeros(pair[0].shape, int)
    for k in range(len(demand.lo)):
        piece, cell = mask(demand.lo[k], demand.hi[k], count.shape), demand.cell[k]
        count += piece
        assert not (piece & ~mask(demand.cells.lo[cell], demand.cells.hi[cell], count.shape)).any()
    assert count.max(initial=0) <= 1


def addresses(tiling):
    """Where each element lies in each device's buffer: ``{device: {flat index: address}}``."""
    found: dict[int, dict[int, int]] = {}
    for row in range(tiling.region.count):
        lo, hi = tiling.region.lo[row], tiling.region.hi[row]
        for index in np.ndindex(*(hi - lo).tolist()):
            at = int(tiling.region.offset[row] + (np.array(index, np.int64) * tiling.region.stride[row]).sum())
            flat = int(np.ravel_multi_index(tuple(lo + index), tiling.shape)) if tiling.shape else 0
            found.setdefault(int(tiling.holder[row]), {})[flat] = at
    return found


@st.composite
def nearly_equal(draw):
    """A tiling, and one like it in which some devices hold something else, or the same in another order."""
    source, other = draw(two_tilings())
    others = [d for d in draw(st.sets(st.integers(0, POOL - 1))) if d in other.holder or d in source.holder]
    mine, theirs = ~np.isin(source.holder, others), np.isin(other.holder, others)
    fields = {
        f: np.concatenate([getattr(source.region, f)[mine], getattr(other.region, f)[theirs]])
        for f in ("lo", "hi", "offset", "stride")
    }
    holder = np.concatenate([source.holder[mine], other.holder[theirs]])
    order = np.array(draw(st.permutations(range(len(holder)))), np.int64)
    return source, Tiling(source.shape, holder[order], Region(**fields).take(order), room=source.room)


@SETTINGS
@given(nearly_equal())
def test_unchanged_devices_have_every_element_at_its_address(pair):
    source, target = pair
    before, after = addresses(source), addresses(target)
    unchanged = unchanged_devices(source, target).tolist()
    for device in unchanged:
        assert before[device] == after[device]
    # Boxes cut elsewhere may hide that a device is unchanged, which costs a copy and no more.
    alike = [d for d in before if rows_of(source, d) == rows_of(target, d)]
    assert set(alike) <= set(unchanged)


def rows_of(tiling, device):
    """All that a tiling says of a device, as a set."""
    region = tiling.region_of(device)
    parts = (region.lo, region.hi, region.stride, region.offset[:, None])
    return {tuple(row) for row in np.concatenate(parts, axis=1).tolist()}


def test_no_buffer_stays_if_it_is_longer_or_to_be_summed():
    tiling = Tiling.of_regions((4,), [(0, interval((4,), 0, 4)), (1, interval((4,), 0, 2))])
    assert unchanged_devices(tiling, tiling).tolist() == [0, 1]
    assert unchanged_devices(tiling, replace(tiling, room=5)).tolist() == []
    assert unchanged_devices(replace(tiling, partial=True), tiling).tolist() == []


def test_what_no_move_can_do_is_refused():
    whole, part = (Tiling.of_regions((4,), [(0, box((0,), (n,)))]) for n in (4, 3))
    with pytest.raises(LayoutError, match="lacks a part"):
        diff(part, whole)
    with pytest.raises(LayoutError, match=r"source shape \(4,\) is not the target shape \(5,\)"):
        diff(whole, Tiling.of_regions((5,), [(0, box((0,), (5,)))]))
    with pytest.raises(LayoutError, match="is partial"):
        diff(whole, replace(whole, partial=True))
