"""Who computes which micro-batch when, in a planned iteration: as rows of events and as text."""

from __future__ import annotations

from collections.abc import Sequence

from dynajax.balance.iteration import IterationPlan
from dynajax.balance.simulate import Event, timeline


def rows(plan: IterationPlan) -> tuple[tuple[str, tuple[Event, ...]], ...]:
    """A name and the events of every pipeline stage of ``plan``, pipelines in order, stage 0 first."""
    named: list[tuple[str, tuple[Event, ...]]] = []
    for number, pipeline in enumerate(plan.pipelines):
        stages = pipeline.pipeline.size("pp")
        events = timeline([microbatch.ms for microbatch in pipeline.microbatches], stages)
        for stage in range(stages):
            suffix = f" stage {stage}" if stages > 1 else ""
            label = f"{number} {pipeline.pipeline}{suffix}"
            named.append((label, tuple(event for event in events if event.stage == stage)))
    return tuple(named)


def text(plan: IterationPlan, width: int = 60, most: int = 40) -> str:
    """A line for each pipeline stage, ``most`` at most: digits are forwards, ``=`` backwards, dots idle time."""
    lines = [(label, _bar(events, plan.ms, width)) for label, events in rows(plan)]
    widest = max(len(label) for label, _ in lines)
    shown = [f"{label:<{widest}} |{bar}|" for label, bar in lines[:most]]
    return "\n".join([*shown, f"… and {len(lines) - most} more"] if len(lines) > most else shown)


def _bar(events: Sequence[Event], until: float, width: int) -> str:
    """``until`` ms in ``width`` characters, each showing what runs in its middle."""
    drawn = ["·"] * width
    for event in events:
        first, last = (round(time / until * width) for time in (event.start, event.end))
        drawn[first:last] = ("=" if event.backward else str(event.microbatch % 10)) * (last - first)
    return "".join(drawn)
