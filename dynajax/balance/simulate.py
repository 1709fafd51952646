"""How long a pipeline takes over its micro-batches: event by event, and in the published closed form.

A micro-batch of time τ (forward and backward on one pipeline stage) runs forward for ``FORWARD``·τ and
backward for the rest. A pipeline stage does one thing at a time; a forward waits for the stage before,
a backward for the stage after. Sending is taken to overlap with work.

The published form charges every micro-batch at the price of the slowest, ``(pp − 1 + V)·max τ``. With
equal micro-batches both agree; with unequal ones the events tell the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FORWARD = 1 / 3
"""Share of a micro-batch's time that is the forward pass: a backward has twice the matrix products."""


@dataclass(frozen=True)
class StageTask:
    """A forward or backward of one micro-batch on one pipeline stage.

    Attributes:
        stage: pipeline stage, 0 first.
        microbatch: its number, in the order in which they enter.
        backward: False forward, True backward.
        start: ms since the start of the iteration.
        end: ms since the start of the iteration.
    """

    stage: int
    microbatch: int
    backward: bool
    start: float
    end: float


def published_ms(times: Sequence[float], pp: int) -> float:
    """``(pp − 1 + V)·max(times)``, 0 without micro-batches."""
    return (pp - 1 + len(times)) * max(times) if times else 0.0


def simulated_ms(times: Sequence[float], pp: int, record: Callable[[StageTask], None] | None = None) -> float:
    """Time until the last backward of one-forward-one-backward (1F1B), in ms.

    Stage s runs pp − s forwards ahead, then alternates, so it holds at most pp − s micro-batches.

    Args:
        times: ms of each micro-batch on one pipeline stage, in the order in which they enter.
        pp: pipeline stages.
        record: is handed every task, if given.
    """
    if pp == 1 and record is None:
        return float(sum(times))
    count = len(times)
    free = [0.0] * pp
    forwards = [[0.0] * pp for _ in times]
    for step in range(count + pp - 1 if count else 0):
        for stage in range(max(0, step - count + 1), min(pp, step + 1)):
            arrivals = forwards[step - stage]
            start = max(free[stage], arrivals[stage - 1]) if stage else free[0]
            arrivals[stage] = free[stage] = start + times[step - stage] * FORWARD
            if record:
                record(StageTask(stage, step - stage, False, start, free[stage]))
        if step >= pp - 1:
            _backward(step - pp + 1, times[step - pp + 1] * (1 - FORWARD), free, record)
    return max(free)


def timeline(times: Sequence[float], pp: int) -> tuple[StageTask, ...]:
    """The tasks of ``simulated_ms``, in the order of their start."""
    tasks: list[StageTask] = []
    simulated_ms(times, pp, tasks.append)
    return tuple(sorted(tasks, key=lambda task: (task.start, task.stage)))


def _backward(microbatch: int, time: float, free: list[float], record: Callable[[StageTask], None] | None) -> None:
    """Run one backward through all stages, the last first; ``free`` is when each can start."""
    arrived = 0.0
    for stage in reversed(range(len(free))):
        start = max(free[stage], arrived)
        arrived = free[stage] = start + time
        if record:
            record(StageTask(stage, microbatch, True, start, arrived))
