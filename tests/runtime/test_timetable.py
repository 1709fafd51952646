"""Layer orders and timetables by brute force: each layer once, each micro-batch through all layers in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynajax.errors import StrategyError
from dynajax.runtime import Timetable, layer_order

sizes = st.integers(1, 7)


@given(st.integers(1, 100), sizes, st.integers(1, 3))
def test_each_layer_is_on_one_stage_and_stages_take_turns_in_order(layers, pp, chunks):
    order = layer_order(layers, pp, chunks).reshape(pp, chunks, -1)
    in_turn = order.swapaxes(0, 1).reshape(-1)  # run 0 of every stage, run 1 of every stage, ...
    assert in_turn[in_turn >= 0].tolist() == list(range(layers))
    held = (order >= 0).sum(-1)
    assert held.max() - held.min() <= 1
    assert order.shape[-1] == held.max()


def test_LAYER_1_no_hop_drops_or_doubles_a_layer():
    for pp, chunks in [(1, 1), (3, 1), (4, 1), (2, 1), (1, 1), (2, 2), (3, 2), (1, 1)]:
        order = layer_order(10, pp, chunks)
        assert sorted(order[order >= 0]) == list(range(10)), (pp, chunks)
    assert (layer_order(94, 4).reshape(4, -1) >= 0).sum(1).tolist() == [23, 24, 23, 24]


@given(sizes, st.integers(1, 3), st.integers(1, 12))
def test_what_a_stage_hands_on_is_what_the_next_needs(pp, chunks, microbatches):
    table, passed = Timetable(pp, chunks, microbatches), {}
    handed = dict.fromkeys(range(pp))
    for tick in range(table.ticks):
        fresh = {}
        for stage in range(pp):
            work = table.work(tick, stage)
            if not work.counts:
                continue
            if stage or work.chunk:
                assert handed[(stage - 1) % pp] == (work.microbatch, work.chunk - (stage == 0))
            passed.setdefault(work.microbatch, []).append((work.chunk, stage))
            fresh[stage] = (work.microbatch, work.chunk)
        handed = dict.fromkeys(range(pp)) | fresh
    everything = [(chunk, stage) for chunk in range(chunks) for stage in range(pp)]
    assert passed == dict.fromkeys(range(microbatches), everything)
    assert any(table.work(table.ticks - 1, stage).counts for stage in range(pp))


@given(sizes, st.integers(1, 3), st.integers(1, 4))
def test_full_groups_leave_a_bubble_of_pp_minus_one_ticks(pp, chunks, groups):
    assert Timetable(pp, chunks, groups * pp).ticks == groups * pp * chunks + pp - 1
    assert Timetable(pp, 1, groups).ticks == pp - 1 + groups


def test_work_takes_arrays_too():
    table = Timetable(3, 2, 4)
    ticks, stages = np.indices((table.ticks, 3))
    at_once = table.work(ticks, stages)
    for tick, stage in np.ndindex(ticks.shape):
        assert table.work(tick, stage) == tuple(field[tick, stage] for field in at_once)


def test_sizes_below_one_are_refused():
    with pytest.raises(StrategyError, match="pp = 0"):
        layer_order(4, 0)
