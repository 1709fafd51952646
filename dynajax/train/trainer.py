"""The trainer: one step after another, and between two steps any change of strategy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import optax

from dynajax.bytesize import parse_bytes
from dynajax.data import DocumentSteps
from dynajax.engine.compiled import programs_compiled
from dynajax.engine.report import Stopwatch
from dynajax.errors import DynajaxError, SwitchError
from dynajax.meshes import Strategy
from dynajax.models import LlamaConfig
from dynajax.planner import Plan
from dynajax.train.balancing import Balancing
from dynajax.train.candidates import Asked
from dynajax.train.document_job import DocumentJob
from dynajax.train.job import DEFAULT_OPTIONS, Job, JobPlacement, StepOptions
from dynajax.train.prepare import CompileCache, Preparation, Switch, begin
from dynajax.train.record import StepReport, SwitchReport
from dynajax.train.row_job import RowJob, RowSource
from dynajax.train.state import TrainState
from dynajax.train.step import Outcome, TraceEvent


class Trainer:
    """Trains a model and changes its parallelism while it runs.

    Args:
        model: shape of the decoder, dense or a mixture of experts.
        optimizer: any optax optimizer.
        strategy: the first placement, such as ``"dp2.tp4"``, ``"pp2.cp2.tp2"`` or ``"tp4@4-7"``.
        data: global batches of rows (``dynajax.data.Batches``), or documents as they are
            (``dynajax.data.DocumentSteps``), which pipelines side by side share: ``"tp4|pp2.tp2"``, or ``"auto"``.
        devices: all that placements may use, numbered in this order; those of JAX's default backend if None.
        seed: of the parameters and of the run's random stream.
        budget: bytes that a device may hold above the larger of both states during a switch.
        deadline_s: seconds after which a step or a preparation is given up by name.
        balancing: how documents are shared out; each device holds the longest one if None.
        options: micro-batches, interleaved stages, precision and rematerialising of a step.

    Attributes:
        job: what is trained.
        placement: where the state lies.
        snapshot: where the state was last saved, for the message of a move that fails; set by whoever saves.
        trace: what happened when in the last step, where pipelines ran side by side.

    Example:
        >>> trainer = Trainer(preset("small"), optax.adam(1e-3), "dp2.tp4", batches)
        >>> trainer.step().loss
        >>> trainer.prepare("tp8")  # compiles in the background
        >>> trainer.step()
        >>> trainer.switch("tp8").compile_s
        0.0
    """

    def __init__(
        self,
        model: LlamaConfig,
        optimizer: optax.GradientTransformation,
        strategy: str | Strategy | Asked | JobPlacement,
        data: RowSource | DocumentSteps,
        *,
        devices: Sequence[jax.Device] | None = None,
        seed: int = 0,
        budget: int | str = "64MB",
        deadline_s: float = 600.0,
        options: StepOptions = DEFAULT_OPTIONS,
        balancing: Balancing | None = None,
    ) -> None:
        self.job = _job(model, optimizer, data, jax.devices() if devices is None else devices, options, balancing)
        self.placement = self.job.place(strategy)
        self.data, self.seed, self.deadline_s = data, seed, deadline_s
        self.snapshot: str | None = None
        self.trace: tuple[TraceEvent, ...] = ()
        self.compile_cache = CompileCache(self.job, parse_bytes(budget))

    @cached_property
    def state(self) -> TrainState:
        """The training state, complete and computed between any two calls; new when first asked for.

        Its arrays lie as ``job.layout(placement)`` says: padded, or with layers in the order of pipeline stages,
        where the strategy wants it. ``whole_state`` gives them as the tensors that they are.
        """
        return self.job.initial_state(self.placement, self.seed)

    def whole_state(self) -> TrainState:
        """The state as its tensors, each of its logical shape: the same whatever the strategy.

        For evaluation and export. The next step consumes arrays of it, as it does those of ``state``.
        """
        return self.job.to_plain(self.state, self.placement)

    @property
    def next_step(self) -> int:
        """Number of the step that comes next, from 0."""
        return int(self.state.step)

    def step(self) -> StepReport:
        """Take one optimizer step on the next global batch.

        Raises:
            DeadlineError: the step is not done in time; the state it consumed is gone.
        """
        step = self.compile_cache.steps.get(self.placement, self.deadline_s)
        start = time.perf_counter()
        number, batch = self.next_step, self.data.take(int(self.state.cursor), self.data.batch_size)
        outcome = step(self.state, batch, deadline_s=self.deadline_s)
        self.state, self.trace = outcome.state, outcome.trace
        seconds = time.perf_counter() - start
        return step_report(number, outcome, batch.num_targets, batch.samples, seconds)

    def plan(
        self, source: str | Strategy | Asked | JobPlacement, target: str | Strategy | Asked | JobPlacement
    ) -> Plan:
        """The plan of a move, kept for when it comes.

        Raises:
            StrategyError: a placement fits neither model nor devices.
            BudgetError: the budget cannot hold the move.
        """
        return self.compile_cache.plan(Switch(self.job.place(source), self.job.place(target)))

    def prepare(self, strategy: str | Strategy | Asked | JobPlacement) -> Preparation:
        """Begin to compile the step of ``strategy`` and to plan the move to it, in the background.

        Errors come with ``wait`` of what is returned, or with ``switch``.
        """
        return begin(self.compile_cache, Switch(self.placement, self.job.place(strategy)))

    def switch(self, strategy: str | Strategy | Asked | JobPlacement) -> SwitchReport:
        """Go on under ``strategy`` from the next step; what was prepared costs nothing now.

        Raises:
            SwitchError: the move failed; says whether the old state is still whole.
            DynajaxError: the switch was refused before anything moved: the old state is whole and in use.
        """
        watch, cache = Stopwatch(), self.compile_cache
        switch = Switch(self.placement, self.job.place(strategy))
        prepared, compiled = Preparation(cache, switch).done(), cache.steps.ready(switch.target)
        with watch.phase("plan"):
            cache.plan(switch)
        begin(cache, switch)
        with watch.compiling(programs_compiled):
            move = cache.moves.get(switch, self.deadline_s)
        if not compiled:
            with watch.phase("compile"):
                cache.steps.get(switch.target, self.deadline_s)
        try:
            state, report = move(self.state, snapshot=self.snapshot)
        except (DynajaxError, RuntimeError, MemoryError, OSError) as error:
            gone = _gone(self.state)
            if isinstance(error, DynajaxError) and not gone:
                raise
            raise SwitchError(f"the move from {switch} failed: {error}; {_left_of(gone, self.snapshot)}") from error
        self.state, self.placement = state, switch.target
        waited: dict[str, Any] = {f"{phase}_s": s + getattr(report, f"{phase}_s") for phase, s in watch.seconds.items()}
        return SwitchReport(
            **vars(report) | waited,
            step=self.next_step,
            source=str(switch.source),
            target=str(switch.target),
            pause_s=time.perf_counter() - watch.began,
            prepared=prepared,
        )


def _job(
    model: LlamaConfig,
    optimizer: optax.GradientTransformation,
    data: RowSource | DocumentSteps,
    devices: Sequence[jax.Device],
    options: StepOptions,
    balancing: Balancing | None,
) -> Job[Any]:
    """The kind of job that ``data`` calls for."""
    if isinstance(data, DocumentSteps):
        return DocumentJob.of(model, optimizer, data, devices, balancing or Balancing.holding(data.longest), options)
    return RowJob.of(model, optimizer, data, devices, options)


def step_report(number: int, outcome: Outcome, tokens: int, samples: int, seconds: float) -> StepReport:
    """The report of step ``number``."""
    shares = outcome.shares
    busy = sum(share.busy_s * share.devices for share in shares)
    idle = 1 - busy / (seconds * sum(share.devices for share in shares)) if shares else None
    return StepReport(number, outcome.loss, tokens, samples, outcome.strategy, seconds, shares, idle)


def _gone(state: TrainState) -> list[str]:
    return [jax.tree_util.keystr(p) for p, leaf in jax.tree_util.tree_leaves_with_path(state) if leaf.is_deleted()]


def _left_of(gone: list[str], snapshot: str | None) -> str:
    if not gone:
        return "the old state is whole and still in use"
    some = ", ".join(gone[:3])
    return f"{len(gone)} leaves of the old state are gone ({some}, ...): resume from {snapshot or 'a checkpoint'}"
