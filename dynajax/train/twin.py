"""The twin of a run: the same data and the same start, and never a switch. What it loses is what the run must lose."""

from __future__ import annotations

from collections.abc import Iterator

from dynajax.train.job import JobPlacement
from dynajax.train.state import TrainState
from dynajax.train.trainer import Trainer


def unswitched_losses(trainer: Trainer, placement: JobPlacement, state: TrainState, steps: int) -> Iterator[float]:
    """The losses of the steps from ``state`` to ``steps``, all under ``placement``.

    Args:
        trainer: gives the job, the data and the compiled step; its own state is left alone.
        placement: where ``state`` lies.
        state: consumed.
        steps: number of the step to stop before.
    """
    compiled = trainer.compile_cache.steps.get(placement, trainer.deadline_s)
    for _ in range(int(state.step), steps):
        batch = trainer.data.take(int(state.cursor), trainer.data.batch_size)
        outcome = compiled(state, batch, deadline_s=trainer.deadline_s)
        state = outcome.state
        yield outcome.loss
