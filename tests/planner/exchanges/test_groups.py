"""What groups do comes to the copies of the plan, in any room, and nothing more travels than has to."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from planner.exchanges.performed import (
    AMPLE,
    DEVICES,
    copied,
    copies_between,
    exchanges,
    pairs,
    performed,
    random_shards,
    regular_pairs,
)

from dynajax.planner import build_plan
from dynajax.planner.exchanges.exchange import Exchange
from dynajax.planner.exchanges.groups import groups_of, taken
from dynajax.planner.exchanges.part import need
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

SETTINGS = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
ONE_PROCESS = np.zeros(DEVICES, np.int64)


def made_by(groups, whole, sources):
    """The target shards that groups fill."""
    targets = np.zeros((DEVICES, int(np.prod(whole.target))), np.float32)
    for group in groups:
        assert group.devices.tolist() == sorted(set(group.devices.tolist()))
        for part in group.parts:
            assert part.exchange.devices == len(group.devices)
            targets[group.devices] = performed(part, sources[group.devices], targets[group.devices])
    return targets


@SETTINGS
@given(pairs, st.sampled_from([AMPLE, 512, 300, 1]), st.lists(st.integers(0, 2), min_size=DEVICES, max_size=DEVICES))
def test_groups_come_to_the_copies(pair, room, process):
    for copies, whole in exchanges(pair):
        sources = random_shards(whole.source)
        groups = groups_of(copies, whole, room, np.asarray(process))
        expected = copied(copies, sources, np.zeros((DEVICES, int(np.prod(whole.target))), np.float32))
        np.testing.assert_array_equal(made_by(groups, whole, sources), expected)


@SETTINGS
@given(pairs)
def test_at_most_a_tenth_more_travels_than_is_sent(pair):
    for copies, whole in exchanges(pair):
        sent = int(copies.volumes[copies.sent].sum())
        travels = sum(group.travels for group in groups_of(copies, whole, AMPLE, ONE_PROCESS))
        assert sent <= travels <= 1.1 * sent


@SETTINGS
@given(regular_pairs())
def test_just_what_is_sent_travels_between_meshes_that_divide_a_tensor(pair):
    for copies, whole in exchanges(pair):
        sent = int(copies.volumes[copies.sent].sum())
        assert sum(group.travels for group in groups_of(copies, whole, AMPLE, ONE_PROCESS)) == sent


@SETTINGS
@given(pairs, st.sampled_from([2**12, 2**10, 600]))
def test_programs_fit_the_room_that_no_cut_could_make_smaller(pair, room):
    """A message of one chunk, or parts of one sum, may need more; nothing else may."""
    for copies, whole in exchanges(pair):
        for group in groups_of(copies, whole, room, ONE_PROCESS):
            for part in group.parts:
                one = max((m.chunks for m in part.exchange.messages), default=0) <= 1
                assert need(part.exchange) <= room or one or part.exchange.sums


def test_rows_to_columns_are_one_all_to_all():
    copies, whole = copies_between((8, 8), ({"x": 8}, P("x")), ({"x": 8}, P(None, "x")))
    (group,) = groups_of(copies, whole, AMPLE, ONE_PROCESS)
    assert group.devices.tolist() == list(range(8))
    assert [part.exchange.messages for part in group.parts] == [()]
    collective = group.parts[0].exchange.collective
    assert collective is not None
    assert collective.source is not None
    assert (collective.source.counts, collective.target.counts) == ((1, 8), (8, 1))


def test_groups_that_do_alike_share_what_they_do():
    """Four halves of a mesh gather each for itself: programs are compiled for one exchange."""
    copies, whole = copies_between((8, 16), ({"dp": 4, "tp": 4}, P("dp", "tp")), ({"dp": 4, "tp": 4}, P("dp")))
    groups = groups_of(copies, whole, AMPLE, ONE_PROCESS)
    assert [g.devices.tolist() for g in groups] == [[4 * k + j for j in range(4)] for k in range(4)]
    assert len({part.exchange for g in groups for part in g.parts}) == 1
    collective = groups[0].parts[0].exchange.collective
    assert collective is not None
    assert collective.source is None


def test_small_components_of_one_process_share_programs_and_those_of_several_do_not():
    copies, whole = copies_between((8, 8), ({"dp": 4, "tp": 2}, P("dp", "tp")), ({"dp": 4, "tp": 2}, P("dp")))
    together = groups_of(copies, whole, AMPLE, ONE_PROCESS)
    assert [g.devices.tolist() for g in together] == [list(range(8))]
    apart = groups_of(copies, whole, AMPLE, np.arange(DEVICES))
    assert [g.devices.tolist() for g in apart] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len({part.exchange for g in apart for part in g.parts}) == 1


def test_many_components_that_are_not_alike_are_one_program():
    """A permutation of devices whose cycles are of ten lengths is one round."""
    space = Space((Tensor("w", (77,), "float32", 4),))
    cycles = np.split(np.arange(77), np.cumsum(np.arange(3, 12)))
    moved = np.concatenate([np.roll(cycle, 1) for cycle in cycles])
    source, target = (
        Layout(space, (mesh_tiling((77,), {"x": 77}, P("x"), devices),)) for devices in (np.arange(77), moved)
    )
    (route,) = build_plan(source, target, AMPLE).moves
    whole = Exchange(77, (1,), (1,), "float32")
    (group,) = groups_of(route.copies, whole, AMPLE, np.zeros(77, np.int64))
    assert group.devices.tolist() == list(range(77))
    (message,) = group.parts[0].exchange.messages
    assert len(message.pairs) == 77


def test_nothing_to_copy_takes_no_group():
    copies, whole = copies_between((8,), ({"x": 2}, P("x")), ({"x": 4}, P("x")))
    assert groups_of(taken(copies, np.zeros(0, np.int64)), whole, AMPLE, ONE_PROCESS) == []
