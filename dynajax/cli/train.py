"""``dynajax train``: train a model, change its parallelism on the way, and say what that cost."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynajax.cli.devices import described, use_devices
from dynajax.cli.display import Display
from dynajax.cli.stop import Stop
from dynajax.cli.train_folder import RunFolder
from dynajax.cli.train_options import TrainOptions, continued
from dynajax.cli.train_setup import Setup, check
from dynajax.errors import RunError
from dynajax.train import StepReport, SwitchReport, Trainer, TrainState
from dynajax.train.candidates import Candidates
from dynajax.train.document_job import DocumentJob
from dynajax.train.job import JobPlacement
from dynajax.train.record import as_event
from dynajax.train.switch_schedule import follow
from dynajax.train.twin import unswitched_losses


def defaults(options: TrainOptions) -> TrainOptions:
    """What flags default to: with ``--resume``, to what the run in ``--out`` had."""
    return continued(options) if options.resume else options


def run(options: TrainOptions) -> int:
    """Train as ``options`` say; the exit status.

    Raises:
        DynajaxError: it cannot work as asked; found before anything is trained or written.
    """
    setup = check(options)
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells of every file that it opens
    devices = use_devices(options.devices)
    trainer = setup.trainer(devices)
    display = Display(options.json)
    for note in [described(devices), *setup.notes()]:
        display.note(note)
    verified = None
    with RunFolder(setup) as folder:
        trainer.state = folder.start(trainer)
        twin = Twin.of(trainer, folder) if options.verify else None
        with Stop() as stop:
            steps, switches = _train(setup, trainer, folder, display, stop)
            folder.save(trainer)
        display.switches(switches)
        display.pipelines(steps)
        display.losses([step.loss for step in steps])
        if stop():
            display.note(f"stopped before step {trainer.next_step}" + (", go on with --resume" if options.out else ""))
        elif twin is not None:
            verified = _compare(setup, trainer, twin, steps, folder, display)
    if options.json:
        print(json.dumps(_summary(options, steps, switches, verified)))
    return 0 if stop.number is None else 128 + stop.number


@dataclass(frozen=True, eq=False)
class Twin:
    """Where the twin of a run starts: as the run does, or on documents under one pipeline.

    Attributes:
        placement: where it runs.
        state: of its first step.
    """

    placement: JobPlacement
    state: TrainState

    @staticmethod
    def of(trainer: Trainer, folder: RunFolder) -> Twin:
        """The twin of the run that ``trainer`` begins."""
        job, placement = trainer.job, trainer.placement
        if isinstance(job, DocumentJob) and isinstance(placement, Candidates):
            placement = job.alone(placement)
        return Twin(placement, folder.first_state(trainer, placement))


def _train(
    setup: Setup, trainer: Trainer, folder: RunFolder, display: Display, stop: Stop
) -> tuple[list[StepReport], list[SwitchReport]]:
    options, steps, switches = setup.options, [], []
    with display.progress("training", setup.begin, options.steps) as bar:
        for report in follow(trainer, setup.schedule.switches, options.steps, stop):
            if isinstance(report, SwitchReport):
                switches.append(report)
            else:
                steps.append(report)
                if not math.isfinite(report.loss):
                    raise RunError(f"the loss of step {report.step} is {report.loss}; take a lower --lr")
            folder.write(as_event(report))
            bar.happened(report)
            if options.checkpoint_every and trainer.next_step % options.checkpoint_every == 0:
                folder.save(trainer)
    return steps, switches


def _compare(
    setup: Setup,
    trainer: Trainer,
    twin: Twin,
    steps: Sequence[StepReport],
    folder: RunFolder,
    display: Display,
) -> float:
    """The largest relative difference between the losses of the run and of its unswitched twin."""
    lines: list[dict[str, Any]] = []
    with display.progress("unswitched twin", setup.begin, setup.begin + len(steps)) as bar:
        losses = unswitched_losses(trainer, twin.placement, twin.state, setup.begin + len(steps))
        for report, loss in zip(steps, losses, strict=True):
            difference = abs(report.loss - loss) / abs(loss)
            lines.append({"step": report.step, "loss": report.loss, "twin_loss": loss, "rel_diff": difference})
            bar.stepped(report.step, loss, str(twin.placement))
    folder.compared(lines)
    largest = max((line["rel_diff"] for line in lines), default=0.0)
    display.note(f"largest relative difference to the losses of the unswitched twin: {largest:.1e}")
    return largest


def _summary(
    options: TrainOptions, steps: Sequence[StepReport], switches: Sequence[SwitchReport], verified: float | None
) -> dict[str, Any]:
    return {
        "steps": len(steps),
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
        "samples": sum(step.samples for step in steps),
        "tokens": sum(step.tokens for step in steps),
        "switches": [as_event(switch) for switch in switches],
        "verify": None if verified is None else {"max_rel_loss_diff": verified},
        "out": options.out,
    }
