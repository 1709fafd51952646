"""What a run leaves behind: its events as values, and as lines of JSON.

``metrics.jsonl`` holds one object a line, in the order in which things happened. A line is written
whole and flushed at once, so that a run which is stopped leaves every event that was finished.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dynajax.engine import Report


@dataclass(frozen=True)
class PipelineShare:
    """What one of several pipelines did in a step.

    Attributes:
        pipeline: its axes.
        devices: how many it has.
        sequences: documents it was given.
        tokens: their tokens.
        microbatches: rows they were packed in.
        busy_s: seconds from the dispatch of its first program until its last was done.
        bytes_pulled: parameters that were moved to its devices.
        bytes_pushed: gradients that were moved from them.
    """

    pipeline: str
    devices: int
    sequences: int
    tokens: int
    microbatches: int
    busy_s: float
    bytes_pulled: int
    bytes_pushed: int


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    Attributes:
        step: number of the step, from 0; the number of its global batch too.
        loss: mean loss over the weighted tokens of the global batch, before the update.
        tokens: tokens with a weight above zero.
        samples: rows of the global batch that hold such tokens.
        strategy: the placement under which it ran.
        step_s: seconds, from reading the batch until all of the new state is computed.
        pipelines: what each did, where several ran side by side.
        idle_share: share of all device time of the step in which a device had no program of its pipeline to run;
            None where there is one program for all.
    """

    step: int
    loss: float
    tokens: int
    samples: int
    strategy: str
    step_s: float
    pipelines: tuple[PipelineShare, ...] = ()
    idle_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class SwitchReport(Report):
    """One change of strategy, at the boundary before ``step``, and how the state was moved.

    ``plan_s``, ``group_s`` and ``compile_s`` also hold what had to be waited for because it was not prepared.

    Attributes:
        step: number of the first step under the new strategy.
        source: the placement before.
        target: the placement after.
        pause_s: seconds from the end of one step until the next may start.
        prepared: the step and the move were ready before the pause.
    """

    step: int
    source: str
    target: str
    pause_s: float
    prepared: bool


def as_event(report: StepReport | SwitchReport) -> dict[str, Any]:
    """The JSON object of a report; a switch goes ``from`` its source ``to`` its target."""
    if isinstance(report, StepReport):
        of_pipelines = () if report.pipelines else ("pipelines", "idle_share")
        return {"event": "step"} | {key: value for key, value in asdict(report).items() if key not in of_pipelines}
    names = {"source": "from", "target": "to"}
    return {"event": "switch"} | {names.get(key, key): value for key, value in asdict(report).items()}


def drop_since(path: Path, step: int) -> None:
    """Take out of a record what happened from ``step`` on: a run that goes on from there will do it again.

    A line that is not whole, as a killed run may leave, goes too.
    """
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except json.JSONDecodeError:
            continue
    whole = path.with_suffix(".tmp")
    whole.write_text("".join(kept), encoding="utf-8")
    whole.replace(path)


class Record:
    """A file of events, appended to; a context manager.

    Args:
        path: the file, made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, event: dict[str, Any]) -> None:
        """Append one event as one line."""
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
