"""A step on documents: plan, pull, compute on every pipeline, push, update.

Pipelines are dispatched without waiting for one another, the one that will take longest first, and each section of a
model as soon as its parameters are there: while it computes, the next section is pulled, then other pipelines' ones.
While pipelines still compute, gradients that are done are pushed, the last section's first. Who comes when follows from
the plan alone, never from who is ready first, so that all processes of a job would go through the same order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dynajax.balance import IterationPlan, PipelineFill, PlanAhead, Planner, short_text
from dynajax.data import DocumentBatch, DocumentSteps, Segment
from dynajax.meshes import Placement
from dynajax.runtime.flat import Span, add_section
from dynajax.runtime.gradients import zeros_of
from dynajax.runtime.pipelines import Passes, PipelineRunner
from dynajax.train.candidates import Candidates
from dynajax.train.record import PipelineShare
from dynajax.train.state import TrainState
from dynajax.train.step import Event, Outcome, apply_gradients, wait_ready

_log = logging.getLogger(__name__)
_PLANS_AHEAD = 2
_PATIENCE_S = 60.0


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
    zeros: jax.stages.Compiled
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
        place: the strategies and their devices.
        layout: how the state lies, before and after.
        data: the documents of later steps, for planning ahead.
        planner: chooses and fills.
        runners: of every pipeline of every strategy.
        flat: programs on the optimizer layout.
    """

    def __init__(
        self,
        place: Candidates,
        layout: TrainState,
        data: DocumentSteps,
        planner: Planner,
        runners: Mapping[Placement, PipelineRunner],
        flat: FlatPrograms,
    ) -> None:
        self.place, self.layout = place, layout
        self._plans, self._runners, self._flat = _Plans(planner, data), runners, flat

    def __call__(self, state: TrainState, batch: DocumentBatch, *, deadline_s: float) -> Outcome:
        """The state after one step on the documents of ``batch``, and the loss before it; consumes ``state``.

        Raises:
            DeadlineError: the step is not done in time.
            BalanceError: no strategy holds the longest document.
        """
        plan, log = self._plans.take(int(state.cursor)), _Log()
        scale = 1 / max(batch.num_targets, 1)
        passes = [
            _Pass(number, self._runners[where], fill, batch.segments)
            for number, (where, fill) in enumerate(
                zip(self.place.pipelines(plan.candidate), plan.pipelines, strict=True)
            )
        ]
        by_end = sorted((p for p in passes if p.fill.microbatches), key=lambda p: p.fill.ms)
        params, grads = self._flat.cast(state.params), self._flat.zeros()
        for one in reversed(by_end):
            one.start(params, scale, log)
        for one in by_end:
            for span, pushed in one.finish(deadline_s, log):
                grads = self._flat.add[span](grads, pushed)
        with log.event("update"):
            after = self._flat.update(state, grads)
            wait_ready(after, f"the update under {self.place}", deadline_s)
        loss = sum(one.loss for one in passes) * scale
        return Outcome(after, loss, short_text(plan.strategy), tuple(p.share for p in passes), tuple(log.events))


class _Plans:
    """The plan of each step, made while an earlier one runs; steps may be asked for from any number on."""

    def __init__(self, planner: Planner, data: DocumentSteps) -> None:
        self._planner, self._data = planner, data
        self._ahead: PlanAhead | None = None
        self._first = self._next = 0

    def take(self, step: int) -> IterationPlan:
        if self._ahead is None or step != self._next:
            if self._ahead is not None:
                self._ahead.close()
            self._ahead = PlanAhead(
                self._planner, lambda n: self._data.lengths(step + n), depth=_PLANS_AHEAD, patience_s=_PATIENCE_S
            )
            self._first = step
        self._next = step + 1
        taken = self._ahead.take(step - self._first)
        if taken.late:
            _log.warning("step %d: %s", step, taken.note)
        return taken.plan


class _Pass:
    """What one pipeline does in one step.

    Args:
        number: of the pipeline in its strategy.
        runner: what is compiled for it.
        fill: its micro-batches.
        segments: the documents of the step.
    """

    def __init__(self, number: int, runner: PipelineRunner, fill: PipelineFill, segments: Sequence[Segment]) -> None:
        self.number, self.fill, self.loss = number, fill, 0.0
        self._runner, self._segments = runner, segments
        self._passes: Passes | None = None
        self._watcher: threading.Thread | None = None
        self._began_s = self._ended_s = 0.0
        self._moved = [0, 0]

    def start(self, params: Any, scale: float, log: _Log) -> None:
        """Pull section by section, and dispatch all micro-batches."""
        rows = [(mb.padded, [self._segments[n] for n in mb.sequences]) for mb in self.fill.microbatches]
        passes = self._passes = self._runner.begin(rows, scale)
        for section in range(len(self._runner.sections)):
            with log.event("pull", self.number, section):
                pulled, report = self._runner.pull(params, section)
            self._moved[0] += report.bytes_moved
            with log.event("dispatch", self.number, section):
                self._began_s = self._began_s or log.now
                passes.run(pulled)
        self._watcher = threading.Thread(target=self._watch, args=(passes.sums, log), daemon=True)
        self._watcher.start()

    def finish(self, deadline_s: float, log: _Log) -> Iterator[tuple[Span, Any]]:
        """Wait for the gradients of one section after the other, the last first, and push them to the optimizer.

        Raises:
            DeadlineError: they are not there in time.
        """
        assert self._passes is not None
        assert self._watcher is not None
        sums, name = self._passes.sums, f"pipeline {self.number} ({self.fill.pipeline})"
        for number, section in reversed(list(enumerate(self._runner.sections))):
            wait_ready(section.own(sums, number), name, deadline_s)
            with log.event("push", self.number, number):
                pushed, report = self._runner.push(sums, number)
            self._moved[1] += report.bytes_moved
            yield section.span, pushed
        self.loss = float(sums["loss"])
        self._watcher.join()  # it waits for what is there by now
        self._passes = self._watcher = None

    def _watch(self, sums: Any, log: _Log) -> None:
        """Write down when all is computed: in a thread of its own, since pushes of other pipelines block."""
        with suppress(RuntimeError):  # raised where the sums are pushed
            jax.block_until_ready(sums)
        self._ended_s = log.now
        log.events.append(Event("compute", self.number, None, self._began_s, self._ended_s))

    @property
    def share(self) -> PipelineShare:
        """What the pipeline did."""
        fill = self.fill
        return PipelineShare(
            str(fill.pipeline),
            fill.pipeline.num_devices,
            sum(len(mb.sequences) for mb in fill.microbatches),
            sum(mb.tokens for mb in fill.microbatches),
            len(fill.microbatches),
            self._ended_s - self._began_s,
            *self._moved,
        )


class _Log:
    """The events of a step, in seconds since it began."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._zero = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._zero

    @contextmanager
    def event(self, what: str, pipeline: int | None = None, section: int | None = None) -> Iterator[None]:
        begin = self.now
        yield
        self.events.append(Event(what, pipeline, section, begin, self.now))
