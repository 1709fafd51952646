"""Rounds of chunks: the longest run that lies side by side at both ends, named in tables of each process."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.exchanges.performed import AMPLE, assert_copied, exchanges, pairs

from dynajax.errors import LayoutError
from dynajax.planner.exchanges.by_chunk import NOWHERE, by_chunk, longest_run
from dynajax.planner.exchanges.exchange import Exchange
from dynajax.planner.route import Copies

SETTINGS = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def found(copies, whole, room=AMPLE):
    devices = int(max(copies.source.max(), copies.target.max())) + 1
    return by_chunk(copies, replace(whole, devices=devices), room, 4)


@SETTINGS
@given(pairs, st.sampled_from([AMPLE, 700, 300]))
def test_chunks_come_to_the_copies(pair, room):
    for copies, whole in exchanges(pair):
        assert_copied(copies, whole, found(copies, whole, room))


@SETTINGS
@given(pairs)
def test_tables_of_some_devices_are_rows_of_those_of_all(pair):
    for copies, whole in exchanges(pair):
        for part in found(copies, whole):
            assert part.tables is not None
            every = np.arange(part.exchange.devices)
            for some in (every[::2], every[1::3], every[:0]):
                for mine, all_of_them in zip(part.tables(some), part.tables(every), strict=True):
                    np.testing.assert_array_equal(mine, all_of_them[some])


@SETTINGS
@given(pairs)
def test_a_run_lies_side_by_side_at_its_multiples_and_no_longer_one_does(pair):
    for copies, whole in exchanges(pair):
        sizes = int(np.prod(whole.source)), int(np.prod(whole.target))
        run = longest_run(copies, *sizes)
        assert _is_run(copies, sizes, run)
        assert not any(_is_run(copies, sizes, k * run) for k in (2, 3, 5, 7))


def _is_run(copies, sizes, run):
    """Whether every copy is made of runs at multiples of their length at both ends, counted element by element."""
    if any(size % run for size in sizes):
        return False
    for k in range(len(copies.source)):
        index = np.array(list(np.ndindex(*copies.extent[k].tolist())), np.int64)
        if len(index) % run:
            return False
        for offset, stride in (
            (copies.source_offset, copies.source_stride),
            (copies.target_offset, copies.target_stride),
        ):
            at = (offset[k] + index @ stride[k]).reshape(-1, run)
            if (at[:, 0] % run).any() or (at - at[:, :1] != np.arange(run)).any():
                return False
    return True


def test_a_shard_of_more_chunks_than_32_bits_count_is_refused():
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    none = np.zeros(1, bool)
    copies = Copies(zero, one, one[:, None], zero, one[:, None], 3 * one, one[:, None], none, none)
    with pytest.raises(LayoutError, match="moves in runs of 1 has more runs than 32 bits count"):
        by_chunk(copies, Exchange(2, (NOWHERE,), (8,), "float32"), AMPLE, 4)
