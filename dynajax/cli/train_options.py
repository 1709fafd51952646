"""The flags of ``dynajax train``, and what they default to when a run is resumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import tyro

from dynajax.errors import RunError
from dynajax.train.candidates import read_asked
from dynajax.train.checkpoint import latest_step
from dynajax.train.switch_schedule import ScheduledSwitch, SwitchSchedule

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
"""What lies in the folder of a run."""

_OF_ONE_CALL = ("out", "resume", "verify", "json")


@dataclass(frozen=True)
class TrainOptions:
    """Train a model on text and change its parallelism while it runs.

    Without flags: a small Llama on the source files of the Python standard library, on 8 devices
    (emulated on the CPU if there are no accelerators), with a tour of switches.
    """

    model: str = "small"
    """Preset that says the shape of the model."""
    strategy: str | None = None
    """First strategy, such as dp2.tp4, pp2.cp2.tp2 or tp4@4-7 (on devices 4 to 7). tp4|pp2.tp2 has unlike pipelines
    side by side, auto chooses pipelines for the documents of each step. With neither this nor --switch: a tour."""
    switch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """STEP:STRATEGY, such as 20:fsdp8: from step 20 on run fsdp8. May be given many times."""
    steps: int = 60
    """Optimizer steps of the whole run, those before a --resume included."""
    devices: int = 8
    """Devices to use; emulated on the CPU if there are not as many accelerators."""
    data: str | None = None
    """Folder of text files, one a document. Default: the Python standard library's own sources."""
    seq_len: int = 128
    """Tokens (bytes) of a row; with documents, how many of a row a device holds."""
    batch: int = 8
    """Rows of the global batch, whatever the strategy."""
    longest: int | None = None
    """Train on documents as they are, not on packed rows: most tokens of a document, longer ones are split. Pipelines
    side by side always do so, by default with 4 times --seq-len."""
    tokens: int | None = None
    """With documents: most tokens of a step. Default: --batch times --longest."""
    profile: str | None = None
    """With documents: file of measured times; without it they are guessed from the shape of the model."""
    microbatches: int | None = None
    """Parts of a batch that follow one another through a pipeline. Default: two a pipeline stage, if there are rows."""
    chunks: int = 1
    """Runs of layers that each pipeline stage has; more than 1 interleaves the stages."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matrix products; parameters and moments are float32."""
    remat: bool = False
    """Compute each layer again in the backward pass, for less memory."""
    budget: str = "64MB"
    """Memory that a device may use during a switch above the larger of its old and new state."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    seed: int = 0
    """Of the parameters and of the order of the data."""
    out: str | None = None
    """Folder for metrics.jsonl, config.json and checkpoints; nothing is written without it."""
    checkpoint_every: int = 0
    """Steps between checkpoints in --out; there is always one at the end."""
    resume: bool = False
    """Go on from the latest checkpoint in --out, on any --strategy; other flags default to those of that run."""
    verify: bool = False
    """Also train a twin that never switches, and compare the losses."""
    json: bool = False
    """Print one JSON object on standard output, and all else on standard error."""


def saved_config(options: TrainOptions, schedule: SwitchSchedule) -> str:
    """The text of ``config.json``: the flags of the run, with the schedule as it is followed."""
    switches = [str(switch) for switch in schedule.switches]
    flags = asdict(options) | {"strategy": str(schedule.first), "switch": switches}
    return json.dumps({name: value for name, value in flags.items() if name not in _OF_ONE_CALL}, indent=2) + "\n"


def continued(options: TrainOptions) -> TrainOptions:
    """What the run in ``options.out`` was given, from its latest checkpoint on; flags of one call are as by default.

    What is left of its schedule is followed, unless another strategy or other switches are asked for.

    Raises:
        RunError: there is no such run, or it has no checkpoint.
    """
    step, stored = resumed_step(options), _stored(options)
    schedule = SwitchSchedule(
        read_asked(stored.strategy or ""), tuple(map(ScheduledSwitch.parse, stored.switch))
    ).since(step)
    keeps = options.strategy is None and not options.switch
    return replace(
        stored,
        strategy=str(schedule.first),
        switch=tuple(map(str, schedule.switches)) if keeps else (),
    )


def resumed_step(options: TrainOptions) -> int:
    """Number of the first step of this call: 0, or that of the checkpoint to resume from.

    Raises:
        RunError: there is nothing to resume.
    """
    if not options.resume:
        return 0
    if options.out is None:
        raise RunError("--resume needs the folder of the run to resume: add --out DIR")
    step = latest_step(Path(options.out) / CHECKPOINTS)
    if step is None:
        raise RunError(f"--resume: {options.out} has no checkpoint; leave --resume out to start a run there")
    return step


def _stored(options: TrainOptions) -> TrainOptions:
    path = Path(str(options.out)) / CONFIG
    try:
        flags = json.loads(path.read_text(encoding="utf-8"))
        return TrainOptions(**flags | {"switch": tuple(flags["switch"])})
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        known = ", ".join(field.name for field in fields(TrainOptions))
        raise RunError(f"--resume: {path} is not the config of a run ({error}); it holds {known}") from None
