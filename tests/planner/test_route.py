"""Routes as copies between buffers, against indices worked out one by one."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.random_layouts import layout_pairs, summed_pairs, topologies

from dynajax.planner import build_plan
from dynajax.planner.route import RELAYED

AMPLE = 2**60
SETTINGS = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
pairs = st.one_of(layout_pairs(), summed_pairs())


def address(tiling, row, index):
    """Buffer element of an index inside a row of a tiling."""
    region = tiling.region
    steps = zip(index, region.lo[row].tolist(), region.stride[row].tolist(), strict=True)
    return int(region.offset[row]) + sum((i - a) * s for i, a, s in steps)


@SETTINGS
@given(pairs, topologies())
def test_copies_begin_and_step_where_the_tilings_say(pair, topology):
    for move in build_plan(pair[0], pair[1], AMPLE, topology=topology).moves:
        route, copies = move.route, move.copies
        for k in range(len(route.lo)):
            first, last = route.lo[k].tolist(), (route.hi[k] - 1).tolist()
            read = route.target if route.relayed[k] else route.source
            assert copies.source[k] == route.sender[k] == read.holder[route.source_row[k]]
            assert copies.target[k] == route.receiver[k] == route.target.holder[route.target_row[k]]
            extent = (copies.extent[k] - 1).tolist()
            for tiling, row, offset, stride in (
                (read, route.source_row[k], copies.source_offset[k], copies.source_stride[k]),
                (route.target, route.target_row[k], copies.target_offset[k], copies.target_stride[k]),
            ):
                assert offset == address(tiling, row, first)
                assert offset + sum(n * s for n, s in zip(extent, stride.tolist(), strict=True)) == address(
                    tiling, row, last
                )
            flat = np.ravel_multi_index(tuple(first), move.tensor.shape) if first else 0
            assert route.flat_index[k] == flat
            assert copies.sent[k] == route.sent[k] == (route.sender[k] != route.receiver[k])


@SETTINGS
@given(pairs, topologies())
def test_a_phase_reads_and_adds_only_what_earlier_ones_wrote(pair, topology):
    """Counted by going through the rows: a run of added rows is numbered from the row that is written."""
    for move in build_plan(pair[0], pair[1], AMPLE, topology=topology).moves:
        copies, expected = move.copies, []
        for added, relayed in zip(copies.added.tolist(), copies.relayed.tolist(), strict=True):
            expected.append(RELAYED if relayed else expected[-1] + 1 if added else 0)
        assert copies.phases.tolist() == expected


@SETTINGS
@given(pairs, pairs)
def test_keys_are_equal_for_routes_that_say_the_same(one, other):
    first, again, others = ([m.route for m in build_plan(pair[0], pair[1], AMPLE).moves] for pair in (one, one, other))
    assert [r.key for r in first] == [r.key for r in again]
    for a in first:
        for b in others:
            assert (a.key == b.key) == (written(a) == written(b))


def written(route):
    """All that a route says."""
    said: list[object] = []
    for tiling in (route.source, route.target):
        said += [tiling.shape, tiling.partial, tiling.room, tiling.padded, tiling.holder.tolist()]
        said += [getattr(tiling.region, f).tolist() for f in ("lo", "hi", "offset", "stride")]
    names = ("kept", "lo", "hi", "target_row", "source_row", "relayed", "added")
    return said + [getattr(route, name).tolist() for name in names]
