"""Planning ahead: the same plans in threads and processes, in order, with a bound, and what a late one leads to."""

import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from balance.price_lists import KINDS

from dynajax.balance.iteration import Planner
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy
from dynajax.train.plan_ahead import PlanAhead

PLANNER = Planner([Strategy.parse("tp8"), Strategy.parse("8*tp1"), Strategy.parse("4*tp2")], KINDS)


def lengths_of(iteration: int) -> list[int]:
    rng = np.random.default_rng(iteration)
    return rng.integers(1, [3_000, 30_000, 400][iteration % 3], 40).tolist()


class Held(Planner):
    """A planner whose full plans wait for a signal; plans of one candidate do not."""

    def __init__(self) -> None:
        super().__init__([c.strategy for c in PLANNER.candidates], KINDS)
        self.go = threading.Event()
        self.go.set()

    def plan(self, lengths, only=None):
        if only is None:
            assert self.go.wait(60)
        return super().plan(lengths, only)


def test_a_thread_makes_the_plans_that_would_be_made_at_once():
    with PlanAhead(PLANNER, lengths_of, iterations=7, patience_s=60) as plans:
        taken = [plans.take(iteration) for iteration in range(7)]
    assert [t.plan for t in taken] == [PLANNER.plan(lengths_of(i)) for i in range(7)]
    assert not any(t.late or t.note for t in taken)


def test_a_process_makes_the_same_plans():
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
        PlanAhead(PLANNER, lengths_of, iterations=3, patience_s=120, executor=pool) as plans,
    ):
        assert [plans.take(i).plan.digest for i in range(3)] == [PLANNER.plan(lengths_of(i)).digest for i in range(3)]


def test_at_most_depth_batches_are_asked_for_ahead():
    asked: list[int] = []

    def recorded(iteration: int) -> list[int]:
        asked.append(iteration)
        return lengths_of(iteration)

    with PlanAhead(PLANNER, recorded, depth=3, patience_s=60, iterations=5) as plans:
        assert asked == [0, 1, 2]
        plans.take(0)
        assert asked == [0, 1, 2, 3]
        for iteration in range(1, 5):
            plans.take(iteration)
    assert asked == [0, 1, 2, 3, 4]


def test_a_late_plan_is_replaced_by_one_of_the_last_strategy_and_says_so():
    planner = Held()
    with PlanAhead(planner, lambda i: lengths_of(3 * i), iterations=4, patience_s=60) as plans:
        first = plans.take(0)
        plans.take(1)
        planner.go.clear()
        plans.take(2)  # was asked for before, so it is ready
        plans._patience_s = 0.0
        late = plans.take(3)
        planner.go.set()
    assert not first.late
    assert late.late
    assert "late" in late.note
    assert late.plan == PLANNER.plan(lengths_of(9), only=late.plan.candidate)


def test_a_late_plan_is_waited_for_if_the_last_strategy_does_not_hold_the_sequences():
    planner = Held()
    batches = {0: [300] * 40, 1: [300] * 40, 2: [25_000, 300]}
    with PlanAhead(planner, batches.__getitem__, iterations=3, depth=1, patience_s=60) as plans:
        plans.take(0)
        planner.go.clear()
        threading.Timer(0.2, planner.go.set).start()
        plans._patience_s = 0.0
        plans.take(1)
        planner.go.clear()
        threading.Timer(0.2, planner.go.set).start()
        waited = plans.take(2)
    assert waited.plan == PLANNER.plan(batches[2])
    if waited.late:
        assert "waited" in waited.note


def test_all_processes_fall_back_if_one_is_late():
    """Two processes, of which one is slow: both run the same plan, that of the last strategy."""
    slow, quick = Held(), Held()
    ready: dict[str, list[bool]] = {"slow": [], "quick": []}
    both = threading.Barrier(2, timeout=60)

    def agree(name: str):
        def all_ready(mine: bool) -> bool:
            ready[name].append(mine)
            both.wait()
            together = all(flags[-1] for flags in ready.values())
            both.wait()
            return together

        return all_ready

    results: dict[str, list[str]] = {}

    def job(name: str, planner: Held) -> None:
        with PlanAhead(planner, lambda i: lengths_of(3 * i), iterations=4, depth=1, agree=agree(name)) as plans:
            taken = [plans.take(0)]
            for iteration in (1, 2, 3):
                plans._queue[iteration][1].exception() if planner is quick else None
                taken.append(plans.take(iteration))
                if planner is slow:
                    planner.go.clear()
                    threading.Timer(0.2, planner.go.set).start()
        results[name] = [t.plan.digest for t in taken]

    threads = [
        threading.Thread(target=job, args=(name, planner)) for name, planner in (("slow", slow), ("quick", quick))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results["slow"] == results["quick"]
    assert len(results["slow"]) == 4


def test_plans_are_taken_in_order():
    with PlanAhead(PLANNER, lengths_of, iterations=2, patience_s=60) as plans:
        with pytest.raises(BalanceError, match="iteration 1 was asked for, the next is 0"):
            plans.take(1)
        plans.take(0)
        plans.take(1)
        with pytest.raises(BalanceError, match="iteration 2 was asked for"):
            plans.take(2)


def test_the_workers_error_is_raised_where_the_plan_is_taken():
    with (
        PlanAhead(PLANNER, lambda _: [90_000], iterations=1) as plans,
        pytest.raises(BalanceError, match="roomiest candidate holds 30000"),
    ):
        plans.take(0)


def test_impossible_depth_is_refused():
    with pytest.raises(BalanceError, match="depth=0"):
        PlanAhead(PLANNER, lengths_of, depth=0)
