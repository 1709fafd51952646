"""Which strategy runs from which step, and the loop that follows it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dynajax.errors import RunError
from dynajax.meshes import Placement
from dynajax.models import LlamaConfig
from dynajax.train.candidates import Asked, read_asked
from dynajax.train.fit import fits_evenly
from dynajax.train.record import StepReport, SwitchReport
from dynajax.train.trainer import Trainer

_SWITCH = re.compile(r"\s*(\d+)\s*:(.+)")


@dataclass(frozen=True)
class ScheduledSwitch:
    """From ``step`` on, ``target`` runs; text form ``20:fsdp8``."""

    step: int
    target: Asked

    @staticmethod
    def parse(text: str) -> ScheduledSwitch:
        """Read the text form.

        Raises:
            RunError: it is not a step and a strategy.
            StrategyError: the strategy cannot be read.
        """
        match = _SWITCH.fullmatch(text)
        if match is None:
            raise RunError(f"switch {text!r} is not STEP:STRATEGY; write it like 20:fsdp8")
        return ScheduledSwitch(int(match[1]), read_asked(match[2]))

    def __str__(self) -> str:
        return f"{self.step}:{self.target}"


@dataclass(frozen=True)
class SwitchSchedule:
    """A first placement and switches in the order of their steps.

    Attributes:
        first: runs until the first switch.
        switches: ordered by step, no two at one step.
    """

    first: Asked
    switches: tuple[ScheduledSwitch, ...] = ()

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.switches, key=lambda s: s.step))
        for before, after in itertools.pairwise(ordered):
            if before.step == after.step:
                raise RunError(f"switches {before} and {after} are at one step; leave one of them out")
        object.__setattr__(self, "switches", ordered)

    def moves(self) -> list[tuple[Asked, Asked]]:
        """From where to where each switch goes."""
        placements = [self.first, *(s.target for s in self.switches)]
        return list(itertools.pairwise(placements))

    def since(self, step: int) -> SwitchSchedule:
        """What is left of the schedule once ``step`` steps are taken and their switches made."""
        done = [s for s in self.switches if s.step < step]
        return SwitchSchedule(done[-1].target if done else self.first, self.switches[len(done) :])

    def require_within(self, begin: int, end: int) -> None:
        """Refuse switches that would not happen in a run of the steps ``begin`` to ``end - 1``.

        Raises:
            RunError: a switch is out of range.
        """
        earliest = max(begin, 1)  # before step 0 there is nothing to switch from
        for switch in self.switches:
            if not earliest <= switch.step < end:
                raise RunError(
                    f"switch {switch} is out of range: the run takes steps {begin} to {end - 1}, "
                    f"so switch at a step from {earliest} to {end - 1}"
                )


def tour(model: LlamaConfig, num_devices: int, steps: int) -> SwitchSchedule:
    """A schedule that shows every kind of switch which the model and the devices allow, evenly over ``steps``.

    On 8 devices: dp2.tp4, fsdp8, pp2.cp2.tp2, tp4 on the first 4 devices, dp8 and dp2.tp4 again.
    """
    half, quarter = max(1, num_devices // 2), num_devices // 4
    mixed = {"pp": 2, "cp": 2, "tp": quarter} if num_devices % 4 == 0 else {"tp": num_devices}
    first = {"dp": num_devices // half, "tp": half}
    stops = [first, {"fsdp": num_devices}, mixed, {"tp": half}, {"dp": num_devices}, first]
    texts = (".".join(f"{axis}{n}" for axis, n in stop.items() if n > 1) or "dp1" for stop in stops)
    placements = [placement for placement in map(Placement.parse, texts) if fits_evenly(model, placement, num_devices)]
    placements = [placement for placement, _ in itertools.groupby(placements)][:steps]
    switches = [ScheduledSwitch(i * steps // len(placements), placement) for i, placement in enumerate(placements)]
    return SwitchSchedule(placements[0], tuple(switches[1:]))


def follow(
    trainer: Trainer, switches: Sequence[ScheduledSwitch], steps: int, stopped: Callable[[], bool] = lambda: False
) -> Iterator[StepReport | SwitchReport]:
    """Train until ``steps`` steps are taken, making each switch at its step.

    A switch is prepared as soon as the one before it is done, and waited for while the old strategy
    still could run: the pause of the switch itself holds no compiling.

    Args:
        trainer: at the placement before the first of ``switches``.
        switches: ordered, all later than the trainer's next step.
        steps: number of the step to stop before.
        stopped: asked between steps; True ends the run early.
    """
    left = list(switches)
    for _ in range(trainer.next_step, steps):
        if stopped():
            return
        if left and left[0].step == trainer.next_step:
            target = left.pop(0).target
            trainer.prepare(target).wait(trainer.deadline_s)
            yield trainer.switch(target)
        if left:
            trainer.prepare(left[0].target)
        yield trainer.step()
