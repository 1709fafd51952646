"""What a switch needs, made ahead: the compiled step of the target and the plan of the move.

Compiling and planning touch no arrays, so they run in background threads while training goes on.
Each is made once for its key and kept: switching back compiles and plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dynajax.engine import plan_reshard, prepare_reshard
from dynajax.errors import DeadlineError, DynajaxError, SwitchError
from dynajax.planner import Plan
from dynajax.train.job import Job, Place
from dynajax.train.state import TrainState, abstract
from dynajax.train.step import Step

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Shelf(Generic[K, V]):
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
class PlaceChange:
    """From one place to another; the key of a plan."""

    source: Place
    target: Place

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


class Workshop:
    """Makes and keeps what a job needs to run at its places and to move between them.

    Attributes:
        steps: compiled steps by place.
        movers: by move, whether the engine has compiled what its plan needs.

    Args:
        job: what is trained.
        budget: bytes that a device may hold above the larger of both states during a move.
    """

    def __init__(self, job: Job[Any], budget: int) -> None:
        self._job, self._budget = job, budget
        self._layouts: dict[Place, TrainState] = {}
        self._plans: dict[PlaceChange, Plan] = {}
        workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="dynajax-prepare")
        self.steps = Shelf(self._compile_step, "compiling the step of {}", workers)
        self.movers = Shelf(self._compile_mover, "preparing the move from {}", workers)

    def layout(self, place: Place) -> TrainState:
        """How the state lies at ``place``, as ``Job.layout`` says."""
        if place not in self._layouts:
            self._layouts[place] = self._job.layout(place)
        return self._layouts[place]

    def plan(self, move: PlaceChange) -> Plan:
        """The plan of ``move``.

        Raises:
            BudgetError: the budget cannot hold it.
        """
        if move not in self._plans:
            source, target = self.layout(move.source), self.layout(move.target)
            state = abstract(self._job.shapes, source)
            self._plans[move] = plan_reshard(state, target, budget=self._budget, donate=True, stored=source)
        return self._plans[move]

    def _compile_step(self, place: Place) -> Step:
        return self._job.compile_step(place, self.layout(place))

    def _compile_mover(self, move: PlaceChange) -> None:
        source, target = self.layout(move.source), self.layout(move.target)
        prepare_reshard(abstract(self._job.shapes, source), target, plan=self.plan(move), stored=source)


@dataclass(frozen=True)
class Preparation:
    """A switch being prepared: ``move`` in the background of ``workshop``."""

    workshop: Workshop
    move: PlaceChange

    def done(self) -> bool:
        """True if the switch can be made at once."""
        return self.workshop.movers.ready(self.move) and self.workshop.steps.ready(self.move.target)

    def wait(self, deadline_s: float = 600.0) -> None:
        """Return when the switch is prepared.

        Raises:
            DeadlineError: it is not prepared in time.
            DynajaxError: it cannot be prepared; the message says why.
        """
        self.workshop.movers.get(self.move, deadline_s)
        self.workshop.steps.get(self.move.target, deadline_s)


def begin(workshop: Workshop, move: PlaceChange) -> Preparation:
    """Begin to prepare ``move``, as far as that was not done before."""
    workshop.movers.ahead(move)
    workshop.steps.ahead(move.target)
    return Preparation(workshop, move)
