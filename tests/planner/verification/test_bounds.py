"""Lower bounds against counts of single elements."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.element_counts import counted
from planner.random_layouts import layout_pairs, summed_pairs

from dynajax.planner.verification.bounds import least_between, least_sent

DEVICES = 16


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(layout_pairs(), summed_pairs()), st.lists(st.integers(0, 3), min_size=DEVICES, max_size=DEVICES))
def test_the_bounds_are_what_a_count_of_elements_gives(pair, nodes):
    source, target = pair
    node = np.array(nodes)
    sent = between = 0
    for tensor, before, after in zip(source.space, source.tilings, target.tilings, strict=True):
        sent += least_sent(before, after, node) * tensor.itemsize
        between += least_between(before, after, node) * tensor.itemsize
    assert (sent, between) == counted(source, target, node)
