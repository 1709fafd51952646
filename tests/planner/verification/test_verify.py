"""Verification is a proof of every plan, and a run of the small ones."""

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dynajax.errors import CheckError
from dynajax.planner import build_plan, verify
from dynajax.planner.verification import verify as verifying
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec


def plan():
    """Rows of eight elements that change places: 16 elements before and after."""
    space = Space((Tensor("w", (8,), "float32", 4),))
    source, target = (Layout(space, (mesh_tiling((8,), {"x": 2}, P("x"), np.array(d)),)) for d in ([0, 1], [1, 0]))
    return build_plan(source, target, 2**60)


@pytest.mark.parametrize(("numpy_below", "runs"), [(16, 0), (17, 1)])
def test_only_small_plans_are_carried_out(numpy_below, runs, monkeypatch):
    ran = []
    monkeypatch.setattr(verifying, "check_on_numpy", ran.append)
    verify(plan(), numpy_below)
    assert len(ran) == runs


def test_a_large_plan_is_proved_all_the_same():
    right = plan()
    move = right.moves[0]
    wrong = replace(right, moves=(replace(move, route=replace(move.route, source_row=move.route.source_row[::-1])),))
    with pytest.raises(CheckError, match="outside of its box"):
        verify(wrong, numpy_below=0)
