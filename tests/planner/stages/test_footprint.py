"""The bytes that a budget has to allow."""

import numpy as np
import pytest

from dynajax.planner.stages.footprint import Footprint


@pytest.mark.parametrize(
    ("source", "target", "peak", "given_up", "kept"),
    [
        ([8, 0], [0, 8], [8, 8], 0, 0),  # disjoint: nobody is above the larger of both
        ([8, 8], [8, 8], [12, 16], 8, 0),  # a whole copy beside the source
        ([4, 6], [6, 4], [11, 10], 5, 1),  # the worst device counts
        ([], [], [], 0, 0),
    ],
)
def test_bytes_above_the_base_are_those_of_the_worst_device(source, target, peak, given_up, kept):
    footprint = Footprint(*(np.array(n, np.int64) for n in (source, target, peak)))
    assert footprint.extra(donate=True) == given_up
    assert footprint.extra(donate=False) == kept
