"""Planning ahead: the plan of a later iteration is made while this one runs.

A worker (thread or process) fills a bounded queue of plans by the pure ``dynajax.balance``. A plan that is not ready in
time is not waited for: the last strategy is used again, its dispatch and packing are computed on the spot, and the
caller is told. All processes must run the same plan, so they
agree on whether it is ready (``agree``); each computes the same plans from the same lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

from numpy.typing import ArrayLike

from dynajax.balance.iteration import IterationPlan, Planner
from dynajax.errors import BalanceError


@dataclass(frozen=True)
class TakenPlan:
    """The plan of an iteration, as it was to be had.

    Attributes:
        plan: what to run.
        late: whether the planned one was not ready, and ``plan`` uses the last strategy instead.
        note: what happened, in words; empty if all went as planned.
    """

    plan: IterationPlan
    late: bool
    note: str


class PlanAhead:
    """Plans of consecutive iterations, up to ``depth`` of them ahead.

    Example:
        >>> with PlanAhead(planner, lengths_of, depth=2) as plans:
        ...     for iteration in range(100):
        ...         taken = plans.take(iteration)

    Args:
        planner: makes the plans.
        lengths_of: lengths of the sequences of an iteration; called in order, once each, ``depth`` ahead.
        iterations: how many there are; None if there is no end.
        depth: how many plans may be made or waiting.
        patience_s: seconds to wait for a plan that is not ready.
        agree: whether all processes have their plan, given whether this one has; by default there is
            one process. It is called once in every ``take`` but the first.
        executor: where to plan; a thread of its own if None. For a process, hand a
            ``ProcessPoolExecutor``; the planner travels with every plan.
    """

    def __init__(
        self,
        planner: Planner,
        lengths_of: Callable[[int], ArrayLike],
        *,
        iterations: int | None = None,
        depth: int = 2,
        patience_s: float = 0.0,
        agree: Callable[[bool], bool] = bool,
        executor: Executor | None = None,
    ) -> None:
        if depth < 1 or patience_s < 0:
            raise BalanceError(f"depth={depth}, patience_s={patience_s}: expected 1 or more, and 0 or more")
        self._planner, self._lengths_of, self._agree = planner, lengths_of, agree
        self._count, self._depth, self._patience_s = iterations, depth, patience_s
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="plan-ahead")
        self._owns_executor = executor is None
        self._queue: dict[int, tuple[ArrayLike, Future[IterationPlan]]] = {}
        self._next = 0
        self._last: int | None = None
        self._submit()

    def take(self, iteration: int) -> TakenPlan:
        """The plan of ``iteration``; they are taken in order, from 0.

        The first is waited for. So is one with a sequence that the last strategy does not hold.

        Raises:
            BalanceError: out of order, or no candidate holds the longest sequence.
        """
        if iteration not in self._queue or iteration != min(self._queue):
            raise BalanceError(
                f"iteration {iteration} was asked for, the next is {min(self._queue, default=self._next)}"
            )
        lengths, future = self._queue.pop(iteration)
        taken = self._first(future) if self._last is None else self._timely(lengths, future, self._last)
        self._last = taken.plan.candidate
        self._submit()
        return taken

    def close(self) -> None:
        """Drop what was not taken, and end the worker if it is this object's own."""
        for _, future in self._queue.values():
            future.cancel()
        self._queue.clear()
        if self._owns_executor:
            self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> PlanAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self) -> None:
        while len(self._queue) < self._depth and self._next != self._count:
            lengths = self._lengths_of(self._next)
            self._queue[self._next] = (lengths, self._executor.submit(self._planner.plan, lengths))
            self._next += 1

    def _first(self, future: Future[IterationPlan]) -> TakenPlan:
        return TakenPlan(future.result(), late=False, note="")

    def _timely(self, lengths: ArrayLike, future: Future[IterationPlan], last: int) -> TakenPlan:
        wait([future], self._patience_s)
        if self._agree(future.done()):
            return TakenPlan(future.result(), late=False, note="")
        try:
            plan = self._planner.plan(lengths, only=last)
        except BalanceError as error:
            return TakenPlan(
                future.result(), late=True, note=f"waited for the plan: the last strategy cannot do it ({error})"
            )
        future.cancel()
        return TakenPlan(plan, late=True, note=f"the plan was late: strategy {last} of the candidates was used again")
