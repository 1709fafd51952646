"""The run in numpy finds what is wrong with a plan."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from jax.sharding import PartitionSpec

from dynajax.errors import CheckError
from dynajax.planner import build_plan
from dynajax.planner.verification.numpy_run import check_on_numpy
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
AMPLE = 2**60
proof = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def test_a_copy_that_stops_too_soon_is_found():
    """The proof must be able to fail."""
    space = Space((Tensor("w", (8,), "float32", 4),))
    a, b = (Layout(space, (mesh_tiling((8,), {"x": 2}, P("x"), np.array(d)),)) for d in ([0, 1], [1, 0]))
    plan = build_plan(a, b, AMPLE)
    move = plan.moves[0]
    shorter = replace(move.route, hi=move.route.hi - [[1], [0]])
    with pytest.raises(CheckError, match=r"w: the plan gives device \d wrong bytes"):
        check_on_numpy(replace(plan, moves=(replace(move, route=shorter),)))
