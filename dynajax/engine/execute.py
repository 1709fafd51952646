"""Carry out a plan stage by stage: targets made, sources given up, bytes counted."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from dynajax.engine import _jax_private as private
from dynajax.engine.report import Stopwatch
from dynajax.engine.shared_memory import Transport
from dynajax.engine.tree import Leaf
from dynajax.planner import Move, Plan
from dynajax.vps.region import Ints


class Ledger:
    """Bytes alive on each place, and the most there were."""

    def __init__(self, plan: Plan) -> None:
        self._live = plan.footprint.source.copy()
        self._base = np.maximum(plan.footprint.source, plan.footprint.target)
        if not plan.donate:
            self._base = plan.footprint.source + plan.footprint.target
        self.peak_extra = 0

    def allocate(self, moves: Sequence[Move]) -> None:
        """Count the target buffers that a stage makes."""
        for move in moves:
            self._live += _new_bytes(move, move.target.elements(len(self._live)))
        self.peak_extra = max(self.peak_extra, int((self._live - self._base).max(initial=0)))

    def free(self, moves: Sequence[Move]) -> None:
        """Count the source buffers that a stage gives up."""
        for move in moves:
            self._live -= _new_bytes(move, move.source.elements(len(self._live)))


def _new_bytes(move: Move, elements: Ints) -> Ints:
    elements[move.kept] = 0
    return elements * move.tensor.itemsize


def execute(
    plan: Plan, leaves: Sequence[Leaf], transport: Transport, watch: Stopwatch, check: bool
) -> tuple[dict[int, jax.Array], int]:
    """Target arrays by leaf index, and the most bytes that a place held above its base.

    With ``plan.donate`` every source array is deleted at the end of its stage. Its buffers are let go, not destroyed:
    those that stay live on in the target, and those that an array outside the state shares live on there.
    """
    ledger = Ledger(plan)
    disowner = private.Disowner()
    moved: dict[int, jax.Array] = {}
    try:
        for stage in plan.stages:
            moves = [plan.moves[k] for k in stage]
            chosen = [leaves[k] for k in stage]
            ledger.allocate(moves)
            arrays = transport.run(list(zip(moves, chosen, strict=True)), plan.donate, check)
            moved |= {leaf.index: array for leaf, array in zip(chosen, arrays, strict=True)}
            if plan.donate:
                with watch.phase("free"):
                    for leaf, array in zip(chosen, arrays, strict=True):
                        if array is not leaf.array:
                            disowner.disown(private.physical(leaf.array))
                    ledger.free(moves)
    finally:
        disowner.close()
    return moved, ledger.peak_extra
