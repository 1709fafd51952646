"""Native collectives: found where every device has a box for every other, and nowhere else."""

import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import PartitionSpec as P
from planner.exchanges.performed import (
    AMPLE,
    assert_copied,
    copies_between,
    exchanges,
    regular_pairs,
    sliced,
    there_are,
)

from dynajax.planner.exchanges.collective import by_collective
from dynajax.planner.exchanges.exchange import Collective
from dynajax.planner.exchanges.part import need, travels

DEVICES = {"x": 4}


def found(copies, whole, room=AMPLE):
    return by_collective(*sliced(copies, whole), room)


def parts_of(copies, whole, room=AMPLE):
    return there_are(found(copies, whole, room))


@pytest.mark.parametrize(
    ("shape", "before", "after", "source", "target"),
    [
        ((8, 8), P("x"), P(None, "x"), (1, 4), (4, 1)),
        ((8, 8), P(None, "x"), P("x"), (4, 1), (1, 4)),
        ((8, 8), P("x"), P(), None, (4, 1)),
        ((8, 8), P(None, "x"), P(), None, (1, 4)),
        ((4, 2, 8), P(None, None, "x"), P("x"), (4, 1, 1), (1, 1, 4)),
    ],
)
def test_a_balanced_group_is_one_collective(shape, before, after, source, target):
    copies, whole = copies_between(shape, (DEVICES, before), (DEVICES, after))
    (part,) = parts_of(copies, whole)
    collective = part.exchange.collective
    assert isinstance(collective, Collective)
    assert (collective.source and collective.source.counts, collective.target.counts) == (source, target)
    assert travels(part.exchange) == copies.volumes[copies.sent].sum()


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((8,), ({"x": 4}, P("x")), ({"x": 8}, P("x"))),  # not every device has something for every other
        ((8, 8), ({"x": 2}, P("x")), ({"x": 2}, P(None, "x"))),  # a pair: one message does
        ((8, 8), ({"x": 4}, P("x")), ({"x": 2, "y": 2}, P("x", "y"))),
    ],
)
def test_what_is_not_balanced_is_none(shape, before, after):
    assert found(*copies_between(shape, before, after)) is None


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(regular_pairs())
def test_parts_come_to_the_whole_and_fit_their_room(pair):
    for copies, whole in exchanges(pair):
        parts = found(copies, whole, 400) if len(set(copies.source.tolist())) >= 4 else None
        if parts is not None:
            assert_copied(copies, whole, parts)


def test_a_room_too_small_for_all_cuts_the_boxes():
    copies, whole = copies_between((64, 64), (DEVICES, P("x")), (DEVICES, P(None, "x")))
    (one,) = parts_of(copies, whole)
    room = need(one.exchange) // 3
    parts = parts_of(copies, whole, room)
    assert len(parts) == 4
    assert all(need(part.exchange) <= room for part in parts)
    assert [part.shifts for part in parts] == [(0,), (4,), (8,), (12,)]
    assert len({part.exchange for part in parts}) == 1
