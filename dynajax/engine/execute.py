"""Carry out a plan stage by stage: targets made, sources given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from dynajax.engine import _jax_private as private
from dynajax.engine.bundles import Bundles
from dynajax.engine.places import Places
from dynajax.engine.report import Stopwatch
from dynajax.engine.shared_memory import Transport
from dynajax.engine.tree import Leaf
from dynajax.planner import Plan


def execute(
    plan: Plan, leaves: Sequence[Leaf], transport: Transport, watch: Stopwatch, places: Places, check: bool
) -> tuple[dict[int, jax.Array], int]:
    """Target arrays by leaf index, and the most bytes that a place held above its base.

    With ``plan.donate`` every source array is deleted at the end of the last stage that reads it. Its buffers are let
    go, not destroyed: those that stay live on in the target, and those that an array outside the state shares live on
    there.
    """
    bundles = Bundles(places, watch)
    disowner = private.Disowner()
    moved: dict[int, jax.Array] = {}
    unread = Counter({source: source.tensors for leaf in leaves for source in leaf.sources})
    try:
        for stage in plan.stages:
            pairs = [(plan.moves[k], leaves[k]) for k in stage]
            alone = [(move, leaf) for move, leaf in pairs if leaf.is_alone]
            arrays = transport.run(alone, plan.donate, check) if alone else []
            made = {leaf.index: array for (_, leaf), array in zip(alone, arrays, strict=True)}
            made |= bundles.run([(move, leaf) for move, leaf in pairs if not leaf.is_alone], check)
            moved |= made
            unread.subtract(source for _, leaf in pairs for source in leaf.sources)
            if plan.donate:
                with watch.phase("free"):
                    stay = {id(array) for array in made.values()}
                    for source in {source: None for _, leaf in pairs for source in leaf.sources}:
                        if not unread[source] and id(source.array) not in stay:
                            disowner.disown(private.physical(source.array))
    finally:
        disowner.close()
    return moved, plan.peak_extra_bytes
