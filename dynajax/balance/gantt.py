"""Who computes which micro-batch when, in a planned iteration: as rows of tasks and as text."""

from __future__ import annotations

from collections.abc import Sequence

from dynajax.balance.iteration import IterationPlan
from dynajax.balance.simulate import StageTask, timeline


def gantt_rows(plan: IterationPlan) -> tuple[tuple[str, tuple[StageTask, ...]], ...]:
    """A name and the tasks of every pipeline stage of ``plan``, pipelines in order, stage 0 first."""
    named: list[tuple[str, tuple[StageTask, ...]]] = []
    for number, pipeline in enumerate(plan.pipelines):
        stages = pipeline.pipeline.size("pp")
        tasks = timeline([microbatch.ms for microbatch in pipeline.microbatches], stages)
        for stage in range(stages):
            suffix = f" stage {stage}" if stages > 1 else ""
            label = f"{number} {pipeline.pipeline}{suffix}"
            named.append((label, tuple(task for task in tasks if task.stage == stage)))
    return tuple(named)


def gantt_text(plan: IterationPlan, width: int = 60, most: int = 40) -> str:
    """A line for each pipeline stage, ``most`` at most: digits are forwards, ``=`` backwards, dots idle time."""
    lines = [(label, _bar(tasks, plan.ms, width)) for label, tasks in gantt_rows(plan)]
    widest = max(len(label) for label, _ in lines)
    shown = [f"{label:<{widest}} |{bar}|" for label, bar in lines[:most]]
    return "\n".join([*shown, f"… and {len(lines) - most} more"] if len(lines) > most else shown)


def _bar(tasks: Sequence[StageTask], until: float, width: int) -> str:
    """``until`` ms in ``width`` characters, each showing what runs in its middle."""
    drawn = ["·"] * width
    for task in tasks:
        first, last = (round(time / until * width) for time in (task.start, task.end))
        drawn[first:last] = ("=" if task.backward else str(task.microbatch % 10)) * (last - first)
    return "".join(drawn)
