"""Carry out a plan stage by stage: targets made, sources given up."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Self

import jax

from dynajax.engine import _jax_private as private
from dynajax.engine.report import Stopwatch
from dynajax.engine.transport import Transport
from dynajax.engine.tree import Held, Leaf
from dynajax.planner import Plan


def execute(
    plan: Plan,
    leaves: Sequence[Leaf],
    transport: Transport,
    watch: Stopwatch,
    *,
    share: bool,
    check: bool,
    snapshot: str | None = None,
) -> dict[int, jax.Array]:
    """Target arrays by leaf index.

    With ``plan.donate`` every source array is given up at the end of the last stage that reads it.

    Args:
        plan: what to do.
        leaves: one for each move of the plan.
        transport: what carries the bytes.
        watch: where the time goes.
        share: whether buffers that stay may be shared with the source, because it is given up now or later.
        check: compare every copied piece with its source.
        snapshot: what an error names to go on from.
    """
    moved: dict[int, jax.Array] = {}
    unread = Counter({source: source.tensors for leaf in leaves for source in leaf.sources})
    with _Remains(plan, snapshot) as remains, closing(private.Disowner()) as disowner:
        for stage in plan.stages:
            pairs = [(plan.moves[k], leaves[k]) for k in stage]
            made = transport.fill(pairs, share, check)
            moved |= made
            unread.subtract(source for _, leaf in pairs for source in leaf.sources)
            if plan.donate:
                with watch.phase("free"):
                    done = {source: None for _, leaf in pairs for source in leaf.sources if not unread[source]}
                    give_up(done, made.values(), disowner)
                    remains.stages_done += 1
        with watch.phase("move"):
            jax.block_until_ready(list(moved.values()))
    return moved


def give_up(sources: Iterable[Held], moved: Iterable[jax.Array], disowner: private.Disowner) -> None:
    """Delete source arrays, but for those that are targets themselves.

    Their buffers are let go, not destroyed: those that stay live on in the target, and those that an array outside
    the state shares live on there.
    """
    stay = {id(array) for array in moved}
    for source in sources:
        if isinstance(source.array, jax.Array) and id(source.array) not in stay:
            disowner.disown(private.physical(source.array))


def peak_extra(plan: Plan, overhead: int) -> int:
    """The most bytes that a place holds above its base, of which ``overhead`` beside the shards of what is copied."""
    if not any(len(move.route.lo) for move in plan.moves):
        overhead = 0
    return dataclasses.replace(plan.footprint, peak=plan.footprint.peak + overhead).extra(plan.donate)


class _Remains:
    """Notes on an error what is left of a source that is given up stage by stage."""

    def __init__(self, plan: Plan, snapshot: str | None) -> None:
        self._stages, self._snapshot = len(plan.stages), snapshot
        self.stages_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.stages_done:
            error.add_note(
                f"{self.stages_done} of {self._stages} stages were done and their part of the source is given up: "
                f"go on from {self._snapshot or 'a checkpoint'}; with commit='safe' the source would be whole"
            )
