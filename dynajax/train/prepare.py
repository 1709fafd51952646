"""What a switch needs, made ahead: the compiled step of the target and the compiled move to it.

Compiling and planning touch no arrays, so they run in background threads while training goes on.
Each is made once for its key and kept: switching back compiles and plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dynajax.engine import Compiled, plan_reshard, prepare_reshard
from dynajax.errors import DeadlineError, DynajaxError, SwitchError
from dynajax.planner import Plan
from dynajax.train.job import Job, JobPlacement
from dynajax.train.state import TrainState, abstract_arrays
from dynajax.train.step import CompiledStep

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FutureCache(Generic[K, V]):
    """Values made once per key, ahead or when first asked for; what failed is made anew.

    Args:
        make: makes the value of a key.
        name: says in error texts what is being made, for example ``"compiling {}"``.
        workers: threads to make values in.
    """

    def __init__(self, make: Callable[[K], V], name: str, workers: ThreadPoolExecutor) -> None:
        self._make, self._name, self._workers = make, name, workers
        self._futures: dict[K, Future[V]] = {}

    def ahead(self, key: K) -> Future[V]:
        """Begin to make the value of ``key``, unless that was done before."""
        known = self._futures.get(key)
        if known is None or (known.done() and known.exception() is not None):
            self._futures[key] = known = self._workers.submit(self._make, key)
        return known

    def ready(self, key: K) -> bool:
        """True if ``get`` would return at once."""
        known = self._futures.get(key)
        return known is not None and known.done() and known.exception() is None

    def get(self, key: K, deadline_s: float) -> V:
        """The value of ``key``.

        Raises:
            DeadlineError: it is not there in time.
            SwitchError: making it failed; errors that are of dynajax already come as they are.
        """
        future, what = self.ahead(key), self._name.format(key)
        if not wait_for([future], timeout=deadline_s).done:
            raise DeadlineError(f"{what} is not done after {deadline_s:g} s; wait longer or give up on it")
        error = future.exception()
        if isinstance(error, DynajaxError):
            raise error
        if error is not None:
            raise SwitchError(f"{what} failed: {type(error).__name__}: {error}") from error
        return future.result()


@dataclass(frozen=True)
class Switch:
    """From one placement to another: the key of a plan."""

    source: JobPlacement
    target: JobPlacement

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


class CompileCache:
    """Makes and keeps what a job needs to run at its placements and to move between them.

    Attributes:
        steps: compiled steps by placement.
        moves: compiled moves by switch.

    Args:
        job: what is trained.
        budget: bytes that a device may hold above the larger of both states during a move.
    """

    def __init__(self, job: Job[Any], budget: int) -> None:
        self._job, self._budget = job, budget
        self._layouts: dict[JobPlacement, TrainState] = {}
        self._plans: dict[Switch, Plan] = {}
        workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="dynajax-prepare")
        self.steps = FutureCache(self._compile_step, "compiling the step of {}", workers)
        self.moves = FutureCache(self._compile_move, "preparing the move from {}", workers)

    def layout(self, placement: JobPlacement) -> TrainState:
        """How the state lies at ``placement``, as ``Job.layout`` says."""
        if placement not in self._layouts:
            self._layouts[placement] = self._job.layout(placement)
        return self._layouts[placement]

    def plan(self, switch: Switch) -> Plan:
        """The plan of ``switch``.

        Raises:
            BudgetError: the budget cannot hold it.
        """
        if switch not in self._plans:
            source, target = self.layout(switch.source), self.layout(switch.target)
            state = abstract_arrays(self._job.shapes, source)
            self._plans[switch] = plan_reshard(state, target, budget=self._budget, donate=True, stored=source)
        return self._plans[switch]

    def _compile_step(self, placement: JobPlacement) -> CompiledStep:
        return self._job.compile_step(placement, self.layout(placement))

    def _compile_move(self, switch: Switch) -> Compiled:
        source, target = self.layout(switch.source), self.layout(switch.target)
        return prepare_reshard(abstract_arrays(self._job.shapes, source), target, plan=self.plan(switch), stored=source)


@dataclass(frozen=True)
class Preparation:
    """A switch being prepared in the background of ``compile_cache``."""

    compile_cache: CompileCache
    switch: Switch

    def done(self) -> bool:
        """True if the switch can be made at once."""
        return self.compile_cache.moves.ready(self.switch) and self.compile_cache.steps.ready(self.switch.target)

    def wait(self, deadline_s: float = 600.0) -> None:
        """Return when the switch is prepared.

        Raises:
            DeadlineError: it is not prepared in time.
            DynajaxError: it cannot be prepared; the message says why.
        """
        self.compile_cache.moves.get(self.switch, deadline_s)
        self.compile_cache.steps.get(self.switch.target, deadline_s)


def begin(compile_cache: CompileCache, switch: Switch) -> Preparation:
    """Begin to prepare ``switch``, as far as that was not done before."""
    compile_cache.moves.ahead(switch)
    compile_cache.steps.ahead(switch.target)
    return Preparation(compile_cache, switch)
