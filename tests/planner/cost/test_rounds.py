"""Rounds: one send and one receive a device, and no round more than the busiest device has messages."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.planner.cost.rounds import in_rounds


def require_rounds(sender, receiver, number):
    """Each device sends once and receives once in a round; rounds are as few as can be, and none is empty."""
    for end in (sender, receiver):
        assert len(set(zip(end.tolist(), number.tolist(), strict=True))) == len(number)
    most = max((np.bincount(end).max(initial=0) for end in (sender, receiver)), default=0)
    assert sorted(set(number.tolist())) == list(range(most))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 12, 31, 32, 33])
def test_everybody_meets_everybody_in_one_round_less_than_there_are_devices(n):
    sender, receiver = np.array(list(itertools.permutations(range(n), 2)), np.int64).T
    require_rounds(sender, receiver, in_rounds(sender, receiver, np.ones(len(sender))))


edges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 100)), max_size=60).map(
    lambda found: {(a, b): w for a, b, w in found if a != b}
)


@settings(max_examples=150)
@given(edges)
def test_any_traffic_takes_as_many_rounds_as_its_busiest_device_has_messages(found):
    sender, receiver = np.array(list(found), np.int64).reshape(-1, 2).T
    require_rounds(sender, receiver, in_rounds(sender, receiver, np.array(list(found.values()), np.int64)))


def test_messages_of_like_weight_share_a_round():
    sender, receiver = np.array([0, 2, 0, 2]), np.array([1, 3, 3, 1])
    assert in_rounds(sender, receiver, np.array([100, 90, 10, 9])).tolist() == [0, 0, 1, 1]


def test_a_ring_is_one_round():
    sender = np.arange(5)
    assert in_rounds(sender, (sender + 1) % 5, np.ones(5)).tolist() == [0] * 5
