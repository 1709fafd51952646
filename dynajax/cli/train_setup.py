"""Everything that can be wrong with a run, found before any work is done or any file is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from dynajax.arrays.dtypes import is_key
from dynajax.balance import load_profile
from dynajax.bytesize import format_bytes, parse_bytes
from dynajax.cli.train_options import CONFIG, METRICS, TrainOptions, resumed_step
from dynajax.data import VOCAB_SIZE, Batches, Documents, DocumentSteps, folder_documents, stdlib_documents
from dynajax.errors import RunError, StrategyError
from dynajax.meshes import Placement, Strategy
from dynajax.models import LlamaConfig, count_parameters, preset
from dynajax.train import StepOptions, Trainer
from dynajax.train.balancing import Balancing
from dynajax.train.candidates import Asked, Candidates, read_asked, takes_documents
from dynajax.train.fit import batch_shards, require_fit, similar, surprises
from dynajax.train.job import JobPlacement
from dynajax.train.optimizer import adamw
from dynajax.train.switch_schedule import ScheduledSwitch, SwitchSchedule, tour

_COPIES_OF_STATE = 3
"""The state, its gradients and updates, and the copy that a step may make of what it consumes."""


@dataclass(frozen=True)
class Setup:
    """A run that can start.

    Attributes:
        options: the flags.
        model: shape of the decoder.
        schedule: what runs when, from ``begin`` on.
        data: rows, or documents for pipelines side by side.
        begin: number of the first step.
    """

    options: TrainOptions
    model: LlamaConfig
    schedule: SwitchSchedule
    data: Batches | DocumentSteps
    begin: int

    @property
    def asked(self) -> list[Asked]:
        """All that the run goes through, in order."""
        return [self.schedule.first, *(switch.target for switch in self.schedule.switches)]

    def trainer(self, devices: Sequence[jax.Device]) -> Trainer:
        """A trainer that has no state yet, with every move of the schedule planned.

        Raises:
            BudgetError: the budget cannot hold a move.
            RunError: the emulated devices together cannot hold the state.
        """
        options = self.options
        made = Trainer(
            self.model,
            adamw(options.lr),
            str(self.schedule.first),
            self.data,
            devices=devices,
            seed=options.seed,
            budget=options.budget,
            options=step_options(options),
            balancing=balancing(options),
        )
        _require_memory(made, [made.job.place(asked) for asked in self.asked])
        for source, target in self.schedule.moves():
            made.plan(source, target)
        return made

    def notes(self) -> list[str]:
        """What may surprise about the run."""
        found = [f"{self.options.model}: {count_parameters(self.model):,} parameters"]
        if isinstance(self.data, Batches):
            found.append(self.data.summary())
        for asked in self.asked:
            if isinstance(asked, Placement):
                found += self._notes_on(asked)
        return found

    def _notes_on(self, placement: Placement) -> list[str]:
        found: list[str] = []
        if placement.num_devices < self.options.devices:
            found.append(f"{placement} runs on {placement.num_devices} of the {self.options.devices} devices")
        for pipeline in placement.strategy.pipelines:
            found += [f"{placement}: {line}" for line in surprises(self.model, Strategy((pipeline,)))]
        if isinstance(self.data, Batches):
            rows, shards = self.options.batch, batch_shards(placement.strategy)
            fillers = -rows % shards
            if fillers:
                found.append(
                    f"{placement} cuts {rows} rows in {shards} parts: {fillers} filler rows of weight 0 are added, "
                    f"none with --batch {rows + fillers}"
                )
        return found


def balancing(options: TrainOptions) -> Balancing:
    """How documents are shared out among pipelines side by side.

    Raises:
        BalanceError: the profile cannot be read.
    """
    profile = None if options.profile is None else load_profile(options.profile)
    return Balancing(options.seq_len, profile=profile)


def step_options(options: TrainOptions) -> StepOptions:
    """How a step runs.

    Raises:
        StrategyError: a number makes no sense.
    """
    return StepOptions(options.microbatches, options.chunks, jnp.dtype(options.dtype), options.remat)


def check(options: TrainOptions) -> Setup:
    """The run that ``options`` ask for.

    Raises:
        DynajaxError: it cannot work as asked; the message says what to change.
    """
    model = preset(options.model)
    begin = resumed_step(options)
    _require_numbers(options, begin)
    _require_folder(options)
    schedule = _schedule(options, model)
    schedule.require_within(begin, options.steps)
    asked = [schedule.first, *(switch.target for switch in schedule.switches)]
    by_documents = options.longest is not None or any(map(takes_documents, asked))
    for placement in (one for one in asked if isinstance(one, Placement)):
        parts = Candidates.one(placement).pipelines(0) if by_documents else (placement,)
        for part in parts:
            require_fit(model, part, options.devices)
    if model.vocab < VOCAB_SIZE:
        raise RunError(f"--model {options.model} has {model.vocab} tokens and text needs {VOCAB_SIZE}; take another")
    options = _of_documents(options) if by_documents else options
    data = _documents(options, model) if by_documents else _rows(options, model)
    return Setup(options, model, schedule, data, begin)


def _rows(options: TrainOptions, model: LlamaConfig) -> Batches:
    _require_positions("--seq-len", options.seq_len, options, model)
    return Batches(_texts(options), batch_size=options.batch, seq_len=options.seq_len, seed=options.seed)


def _of_documents(options: TrainOptions) -> TrainOptions:
    """``options`` with the sizes of documents and steps as numbers, so that a run that goes on has the same."""
    longest = 4 * options.seq_len if options.longest is None else options.longest
    return replace(options, longest=longest, tokens=options.tokens or options.batch * longest)


def _documents(options: TrainOptions, model: LlamaConfig) -> DocumentSteps:
    longest, tokens = options.longest or 0, options.tokens or 0
    if min(longest, tokens) < 1:
        raise RunError(f"--longest {longest} --tokens {tokens}: give 1 or more")
    _require_positions("--longest", longest, options, model)
    balancing(options)
    return DocumentSteps(_texts(options), token_budget=tokens, longest=longest, seed=options.seed)


def _texts(options: TrainOptions) -> Documents:
    return stdlib_documents() if options.data is None else folder_documents(options.data)


def _require_positions(flag: str, tokens: int, options: TrainOptions, model: LlamaConfig) -> None:
    if 0 < model.learned_positions < tokens:
        raise RunError(
            f"{flag} {tokens}: --model {options.model} has {model.learned_positions} positions; "
            f"take {flag} {model.learned_positions} or less"
        )


def _require_numbers(options: TrainOptions, begin: int) -> None:
    parse_bytes(options.budget)
    step_options(options)
    if options.devices < 1:
        raise RunError(f"--devices {options.devices}: give 1 or more")
    if options.steps <= begin:
        taken = f"; the run in {options.out} has taken {begin} steps" if begin else ""
        raise RunError(f"--steps {options.steps}{taken}: give {begin + 1} or more")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise RunError(f"--lr {options.lr}: give a rate above 0")
    if options.checkpoint_every < 0 or (options.checkpoint_every and options.out is None):
        raise RunError(f"--checkpoint-every {options.checkpoint_every}: give 0 or more, and a folder with --out DIR")


def _require_folder(options: TrainOptions) -> None:
    if options.out is None or options.resume:
        return
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise RunError(f"--out {out} is a file; name a folder")
    if any((out / name).exists() for name in (CONFIG, METRICS)):
        raise RunError(f"--out {out} holds another run; go on with it by --resume, or name another folder")


def _schedule(options: TrainOptions, model: LlamaConfig) -> SwitchSchedule:
    if options.strategy is None and not options.switch:
        return tour(model, options.devices, options.steps)
    if options.strategy is None:
        first = tour(model, options.devices, options.steps).first
    else:
        first = read_asked(options.strategy)
        if isinstance(first, Placement):
            _require_all_devices(options.strategy, first, options.devices)
    return SwitchSchedule(first, tuple(map(ScheduledSwitch.parse, options.switch)))


def _require_all_devices(text: str, first: Placement, devices: int) -> None:
    """A first strategy that leaves devices idle is more likely a slip than a wish, unless it names its devices."""
    used = first.num_devices
    if "@" in text or used == devices:
        return
    some = f", {text}@0-{used - 1} to leave some idle" if used < devices else ""
    others = f", or {' or '.join(map(str, similar(first.strategy, devices)))}" if first.strategy.is_homogeneous else ""
    raise StrategyError(
        f"--strategy {text} uses {used} devices and there are {devices}: take --devices {used}{others}{some}"
    )


def _require_memory(trainer: Trainer, placements: Sequence[JobPlacement]) -> None:
    """Emulated devices share one memory, and running out of it ends the process without a word."""
    if trainer.job.devices[0].platform != "cpu":
        return
    free = psutil.virtual_memory().available
    for placement in placements:
        needed = _COPIES_OF_STATE * sum(map(_held_bytes, jax.tree.leaves(trainer.job.abstract_state(placement))))
        if needed > free:
            raise RunError(
                f"{placement} needs about {format_bytes(needed)} on emulated devices and {format_bytes(free)} are "
                "free; take a smaller --model, or a strategy with fewer copies"
            )


def _held_bytes(leaf: Any) -> int:
    """Bytes of a leaf on all devices together, copies counted."""
    itemsize = 8 if is_key(leaf) else leaf.dtype.itemsize
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize * leaf.sharding.num_devices
