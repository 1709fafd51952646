"""A step on documents: plan, pull, compute on every pipeline, push, update.

Pipelines are dispatched without waiting for one another, the one that will take longest first, and each section of a
model as soon as its parameters are there: while it computes, the next section is pulled, then other pipelines' ones.
While pipelines still compute, gradients that are done are pushed, the last section's first. Where links are programs
over all devices, not copies in one memory, each waits for what the devices have to do before it: then only the first
passes are dispatched before the last pull, and the first push comes after the last pass.

Who comes when follows from the plan alone, never from who is ready first, so that all processes of a job go through
the same order. They agree on documents and plan; each then pulls and pushes for all pipelines, and runs the programs of
those that it has devices of. What only these know, a loss and how long it took, they tell the others in the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dynajax.balance import IterationPlan, PipelinePlan, Planner, short_text
from dynajax.data import DocumentBatch, DocumentSteps, Segment
from dynajax.engine.targets import devices_named
from dynajax.meshes import Placement
from dynajax.processes.consensus import Consensus, Processes
from dynajax.runtime.gradients import zeros_of
from dynajax.runtime.optimizer_layout import Span, add_section
from dynajax.runtime.pipeline_runner import Passes, PipelineRunner
from dynajax.train.candidates import Candidates
from dynajax.train.plan_ahead import PlanAhead
from dynajax.train.record import PipelineShare
from dynajax.train.state import TrainState
from dynajax.train.step import Outcome, TraceEvent, apply_gradients, wait_ready
from dynajax.types import Floats

_log = logging.getLogger(__name__)
_PLANS_AHEAD = 2
_PATIENCE_S = 10.0
"""Less than a process waits for others in a collective: one whose plan is late has to say so in time."""
_STEPPING = "take different steps; give the same documents, strategies, costs and state to every process"


@dataclass(frozen=True, eq=False)
class FlatPrograms:
    """What is computed in the optimizer layout, each device on its own part.

    Attributes:
        cast: parameters as they are pulled.
        zeros: gradients before any pipeline has pushed.
        add: ``(gradients, pushed) -> gradients`` by the layers of the pushed section; consumes the first.
        update: ``(state, gradients) -> state``; consumes the state.
    """

    cast: jax.stages.Compiled
    zeros: Callable[[], Any]
    add: Mapping[Span, jax.stages.Compiled]
    update: jax.stages.Compiled

    @staticmethod
    def of(
        optimizer: optax.GradientTransformation, state: TrainState, dtype: Any, pushed: Mapping[Span, Any]
    ) -> FlatPrograms:
        """Compile them.

        Args:
            optimizer: treats each element alike.
            state: ``ShapeDtypeStruct`` leaves with shardings.
            dtype: of parameters when they are pulled.
            pushed: gradients of each section that pipelines may push, as ``ShapeDtypeStruct`` leaves.
        """
        shardings = jax.tree.map(lambda x: x.sharding, state)
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), state.params)

        cast = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(dtype), p), out_shardings=shardings.params)
        updated = jax.jit(partial(apply_gradients, optimizer, samples=1), out_shardings=shardings, donate_argnums=0)

        def adding(span: Span) -> Any:
            return jax.jit(partial(add_section, span), out_shardings=shardings.params, donate_argnums=0)

        return FlatPrograms(
            cast.lower(state.params).compile(),
            zeros_of(grads),
            {span: adding(span).lower(grads, section).compile() for span, section in pushed.items()},
            updated.lower(state, grads).compile(),
        )


class DocumentStep:
    """A step that is ready to run, whatever strategy its documents call for.

    Args:
        placement: the strategies and their devices.
        layout: how the state lies, before and after.
        data: the documents of later steps, for planning ahead.
        planner: chooses the strategy of a step and forms its micro-batches.
        runners: of every pipeline of every strategy.
        flat: programs on the optimizer layout.
    """

    def __init__(
        self,
        placement: Candidates,
        layout: TrainState,
        data: DocumentSteps,
        planner: Planner,
        runners: Mapping[Placement, PipelineRunner],
        flat: FlatPrograms,
    ) -> None:
        self.placement, self.layout = placement, layout
        self._processes = Processes.of(devices_named(layout))
        self._plans, self._runners, self._flat = _Plans(planner, data, self._processes), runners, flat

    def __call__(self, state: TrainState, batch: DocumentBatch, *, deadline_s: float) -> Outcome:
        """The state after one step on the documents of ``batch``, and the loss before it; consumes ``state``.

        Raises:
            DeadlineError: the step is not done in time, or another process did not come to it, or died.
            BalanceError: no strategy holds the longest document.
            AgreementError: processes were about to take different steps.
        """
        with self._processes.waiting("the step"):
            plan, passes = self._agreed(state, batch)
            log, scale = _Log(), 1 / max(batch.num_targets, 1)
            by_end = [passes[number] for number in _by_end(plan)]
            params, grads = self._flat.cast(state.params), self._flat.zeros()
            for one in reversed(by_end):
                one.start(params, scale, log)
            for one in reversed(by_end):
                one.go_on(log)
            for one in by_end:
                for span, pushed in one.finish(deadline_s, log):
                    grads = self._flat.add[span](grads, pushed)
            losses, busy = self._told([one.loss for one in passes], [one.busy_s for one in passes])
            with log.event("update"):
                after = self._flat.update(state, grads)
                wait_ready(after, f"the update under {self.placement}", deadline_s)
        shares = tuple(one.share(busy_s) for one, busy_s in zip(passes, busy.tolist(), strict=True))
        return Outcome(after, float(losses.sum() * scale), short_text(plan.strategy), shares, tuple(log.events))

    def _agreed(self, state: TrainState, batch: DocumentBatch) -> tuple[IterationPlan, list[_Pass]]:
        """The plan that all processes go by, and what its pipelines do."""
        with Consensus(self._processes, _STEPPING) as agreement:
            cursor = int(state.cursor)
            plan = self._plans.take(cursor)
            where = self.placement.pipelines(plan.candidate)
            agreement.on(lambda: (cursor, _texts(batch), where, plan.digest, _by_end(plan)))
        pipelines = enumerate(zip(where, plan.pipelines, strict=True))
        return plan, [_Pass(n, self._runners[placement], one, batch.segments) for n, (placement, one) in pipelines]

    def _told(self, *known: list[float]) -> Floats:
        """Rows of numbers, the same in all processes: each knows those of its pipelines, and has 0 for others."""
        bits = np.asarray(known, np.float64).view(np.uint64)
        told = self._processes.known_to_any(bits.ravel())
        return told.view(np.float64).reshape(bits.shape)


def _texts(batch: DocumentBatch) -> list[bytes]:
    return [segment.text.tobytes() for segment in batch.segments]


def _by_end(plan: IterationPlan) -> list[int]:
    """Numbers of the pipelines with work, in the order in which they are to end."""
    working = [number for number, pipeline in enumerate(plan.pipelines) if pipeline.microbatches]
    return sorted(working, key=lambda number: plan.pipelines[number].ms)


class _Plans:
    """The plan of each step, made while an earlier one runs; steps may be asked for from any number on."""

    def __init__(self, planner: Planner, data: DocumentSteps, processes: Processes) -> None:
        self._planner, self._data, self._processes = planner, data, processes
        self._ahead: PlanAhead | None = None
        self._first = self._next = 0

    def take(self, step: int) -> IterationPlan:
        if self._ahead is None or step != self._next:
            if self._ahead is not None:
                self._ahead.close()
            self._ahead = PlanAhead(
                self._planner,
                lambda n: self._data.lengths(step + n),
                depth=_PLANS_AHEAD,
                patience_s=_PATIENCE_S,
                agree=self._all_are,
            )
            self._first = step
        self._next = step + 1
        taken = self._ahead.take(step - self._first)
        if taken.late:
            _log.warning("step %d: %s", step, taken.note)
        return taken.plan

    def _all_are(self, ready: bool) -> bool:
        """Whether all processes have their plan."""
        return bool(self._processes.gather(np.asarray([ready], np.uint32)).all())


class _Pass:
    """What one pipeline does in one step, as far as it is here: without devices of it there is no loss, and no time.

    Args:
        number: of the pipeline in its strategy.
        runner: what is compiled for it.
        plan: its micro-batches.
        segments: the documents of the step.
    """

    def __init__(self, number: int, runner: PipelineRunner, plan: PipelinePlan, segments: Sequence[Segment]) -> None:
        self.number, self.plan, self.loss, self.busy_s = number, plan, 0.0, 0.0
        self._runner, self._segments = runner, segments
        self._passes: Passes | None = None
        self._watcher: threading.Thread | None = None
        self._began_s = 0.0
        self._moved = [0, 0]

    def start(self, params: Any, scale: float, log: _Log) -> None:
        """Pull section by section, and dispatch all micro-batches that do not keep other pipelines waiting."""
        rows = [(mb.padded, [self._segments[n] for n in mb.sequences]) for mb in self.plan.microbatches]
        passes = self._passes = self._runner.begin(rows, scale)
        for section in range(len(self._runner.sections)):
            with log.event("pull", self.number, section):
                pulled, report = self._runner.pull(params, section)
            self._moved[0] += report.bytes_moved
            with log.event("dispatch", self.number, section):
                self._began_s = self._began_s or log.now
                passes.run(pulled)
        self._watch_end(log)

    def go_on(self, log: _Log) -> None:
        """Dispatch the micro-batches that were held back until all pipelines have begun."""
        assert self._passes is not None
        if self._passes.left:
            with log.event("dispatch", self.number):
                self._passes.run_rest()
            self._watch_end(log)

    def finish(self, deadline_s: float, log: _Log) -> Iterator[tuple[Span, Any]]:
        """Wait for the gradients of one section after the other, the last first, and push them to the optimizer.

        Raises:
            DeadlineError: they are not there in time.
        """
        assert self._passes is not None
        sums, name = self._passes.sums, f"pipeline {self.number} ({self.plan.pipeline})"
        for number, section in reversed(list(enumerate(self._runner.sections))):
            wait_ready(section.own(sums, number), name, deadline_s)
            with log.event("push", self.number, number):
                pushed, report = self._runner.push(sums, number)
            self._moved[1] += report.bytes_moved
            yield section.span, pushed
        if self._watcher is not None:
            self.loss = float(sums["loss"])
            self._watcher.join()  # it waits for what is there by now
        self._passes = self._watcher = None

    def _watch_end(self, log: _Log) -> None:
        """Once all is dispatched, see when it is done."""
        assert self._passes is not None
        if self._runner.is_here and not self._passes.left:
            self._watcher = threading.Thread(target=self._watch, args=(self._passes.sums, log), daemon=True)
            self._watcher.start()

    def _watch(self, sums: Any, log: _Log) -> None:
        """Write down when all is computed: in a thread of its own, since pushes of other pipelines block."""
        with suppress(RuntimeError):  # raised where the sums are pushed
            jax.block_until_ready(sums)
        ended_s = log.now
        self.busy_s = ended_s - self._began_s
        log.events.append(TraceEvent("compute", self.number, None, self._began_s, ended_s))

    def share(self, busy_s: float) -> PipelineShare:
        """What the pipeline did; ``busy_s`` are those of the process that took longest."""
        plan = self.plan
        return PipelineShare(
            str(plan.pipeline),
            plan.pipeline.num_devices,
            sum(len(mb.sequences) for mb in plan.microbatches),
            sum(mb.tokens for mb in plan.microbatches),
            len(plan.microbatches),
            busy_s,
            *self._moved,
        )


class _Log:
    """The events of a step, in seconds since it began."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._zero = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._zero

    @contextmanager
    def event(self, what: str, pipeline: int | None = None, section: int | None = None) -> Iterator[None]:
        begin = self.now
        yield
        self.events.append(TraceEvent(what, pipeline, section, begin, self.now))
