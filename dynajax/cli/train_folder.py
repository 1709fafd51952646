"""The folder of a run: its config, its events as they happen, and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from dynajax.cli.train_options import CHECKPOINTS, CONFIG, METRICS, saved_config
from dynajax.cli.train_setup import Setup
from dynajax.errors import RunError
from dynajax.train import Trainer, TrainState
from dynajax.train.checkpoint import Checkpoints
from dynajax.train.job import JobPlacement
from dynajax.train.record import Record, drop_since

VERIFIED = "verify.jsonl"


class RunFolder:
    """Where a run writes; a context manager. A run without ``--out`` has one that writes nothing.

    Args:
        setup: the run.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._path = None if setup.options.out is None else Path(setup.options.out)
        self._open = ExitStack()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def start(self, trainer: Trainer) -> TrainState:
        """Begin to write, and give the state of the first step.

        Raises:
            DynajaxError: the checkpoint to resume from does not fit, and nothing was written; or nothing can be.
        """
        resumed = self.first_state(trainer) if self._setup.options.resume else None
        self._begin()
        return self.first_state(trainer) if resumed is None else resumed

    def first_state(self, trainer: Trainer, placement: JobPlacement | None = None) -> TrainState:
        """The state of the first step, new or of the latest checkpoint, at ``placement`` or else the trainer's."""
        where: JobPlacement = trainer.placement if placement is None else placement
        if self._path is None or not self._setup.options.resume:
            return trainer.job.initial_state(where, trainer.seed)
        with Checkpoints(self._path / CHECKPOINTS) as checkpoints:
            return checkpoints.restore(trainer.job, where, self._setup.data)

    def _begin(self) -> None:
        if self._path is None:
            return
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            drop_since(self._path / METRICS, self._setup.begin)
            config = saved_config(self._setup.options, self._setup.schedule)
            (self._path / CONFIG).write_text(config, encoding="utf-8")
            self._record = self._open.enter_context(Record(self._path / METRICS))
            self._checkpoints = self._open.enter_context(Checkpoints(self._path / CHECKPOINTS))
        except OSError as error:
            raise RunError(f"cannot write to --out {self._path}: {error.strerror}; name another folder") from error

    def write(self, event: dict[str, Any]) -> None:
        """Append an event to the record."""
        if self._path is not None:
            self._record.write(event)

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint of the present state."""
        if self._path is not None:
            self._checkpoints.save(trainer.state, trainer.job, trainer.placement, self._setup.data)
            trainer.snapshot = str(self._path / CHECKPOINTS)

    def compared(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write the losses of the run and its twin, a step a line."""
        if self._path is not None:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self._path / VERIFIED).write_text(text, encoding="utf-8")
