"""Verify a plan in both ways: by proof, and if it is small by a run in numpy."""

from __future__ import annotations

from dynajax.planner.plan import Plan
from dynajax.planner.verification.numpy_run import check_on_numpy
from dynajax.planner.verification.proof import prove


def verify(plan: Plan, numpy_below: int = 2**20) -> None:
    """Prove the plan, and if it is small carry it out in numpy too.

    Args:
        plan: what to verify.
        numpy_below: carry it out if source and target hold fewer elements than this, over all tensors and devices.

    Raises:
        CheckError: the plan is wrong; names the tensor and what is wrong.
        LayoutError: a layout does not cover a tensor exactly, or a device holds an element twice.
    """
    prove(plan)
    if sum(move.source.region.volume + move.target.region.volume for move in plan.moves) < numpy_below:
        check_on_numpy(plan)
