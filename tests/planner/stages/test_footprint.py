"""The bytes that a budget has to allow."""

import numpy as np
import pytest

from dynajax.planner.stages.footprint import Footprint


@pytest.mark.parametrize(
    ("source", "target", "peak", "stays", "extra"),
    [
        ([8, 0], [0, 8], [8, 8], [0, 0], 0),  # disjoint: nobody is above the larger of both
        ([8, 8], [8, 8], [12, 16], [0, 0], 8),  # a whole copy beside the source
        ([8, 8], [8, 8], [12, 16], [8, 8], 0),  # which is no more than it has to be where the source stays
        ([8, 8], [8, 8], [12, 16], [4, 4], 4),
        ([4, 6], [6, 4], [11, 10], [0, 0], 5),  # the worst device counts
        ([], [], [], [], 0),
    ],
)
def test_bytes_above_the_base_are_those_of_the_worst_device(source, target, peak, stays, extra):
    footprint = Footprint(*(np.array(n, np.int64) for n in (source, target, peak, stays)))
    assert footprint.extra == extra
