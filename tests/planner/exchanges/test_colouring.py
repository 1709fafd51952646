"""Edge colouring: a proper colouring by as many colours as the largest degree, whatever the graph."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynajax.planner.exchanges.colouring import coloured

ends = st.tuples(st.integers(0, 9), st.integers(0, 9))


def degree(*sides):
    return max((int(np.bincount(side).max()) for side in sides if len(side)), default=0)


@given(st.lists(ends, max_size=60))
def test_rounds_are_as_many_as_the_busiest_device_has_messages(edges):
    sender, receiver = np.array(edges, np.int64).reshape(-1, 2).T
    colour = coloured(sender, receiver)
    for side in (sender, receiver):
        assert len(set(zip(side.tolist(), colour.tolist(), strict=True))) == len(edges)
    assert sorted(set(colour.tolist())) == list(range(degree(sender, receiver)))


def test_a_shift_is_one_round():
    devices = np.arange(1000)
    assert not coloured(devices, (devices + 7) % 1000).any()


def test_colours_that_must_change_places_do():
    """The third edge finds no colour free at both ends: taken greedily three would be needed."""
    colour = coloured(np.array([0, 1, 0]), np.array([0, 1, 1]))
    assert colour.max() == 1
    assert colour[0] != colour[2] != colour[1]
