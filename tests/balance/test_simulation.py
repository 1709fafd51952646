"""The simulation of a pipeline against the closed form, an independent event queue, and what memory allows."""

import heapq
import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynajax.balance.pack import order
from dynajax.balance.simulate import FORWARD, published_ms, simulated_ms, timeline

TIMES = st.lists(st.floats(0.1, 100), min_size=1, max_size=9)
STAGES = st.integers(1, 6)


def event_queue_ms(times: list[float], pp: int) -> float:
    """Every stage has its list of tasks; a task starts when its stage is free and what it waits for is done."""
    count = len(times)
    tasks = {}
    for stage in range(pp):
        ahead = min(pp - stage, count)
        tasks[stage] = [("f", m) for m in range(ahead)]
        for m in range(count):
            tasks[stage] += [("b", m)] + ([("f", m + ahead)] if m + ahead < count else [])
    done, free, position, clock = {}, defaultdict(float), dict.fromkeys(range(pp), 0), [(0.0, 0)]
    while clock:
        now, _ = heapq.heappop(clock)
        for stage in range(pp):
            while position[stage] < 2 * count and free[stage] <= now:
                kind, m = tasks[stage][position[stage]]
                before = (kind, m, stage - 1) if kind == "f" else (kind, m, stage + 1)
                own = True if kind == "f" else done.get(("f", m, stage), 1e99) <= now
                first = stage == 0 if kind == "f" else stage == pp - 1
                if not own or not (first or done.get(before, 1e99) <= now):
                    break
                share = FORWARD if kind == "f" else 1 - FORWARD
                done[kind, m, stage] = free[stage] = now + times[m] * share
                position[stage] += 1
                heapq.heappush(clock, (free[stage], stage))
    assert all(at == 2 * count for at in position.values())
    return max(done.values())


@given(TIMES, STAGES)
def test_one_forward_one_backward_agrees_with_an_event_queue(times, pp):
    assert simulated_ms(times, pp) == pytest.approx(event_queue_ms(times, pp), rel=1e-9)


@given(st.floats(0.1, 50), st.integers(1, 12), STAGES)
def test_equal_micro_batches_take_the_published_time(time, count, pp):
    times = [time] * count
    assert simulated_ms(times, pp) == pytest.approx(published_ms(times, pp))


@given(TIMES, STAGES)
def test_unequal_micro_batches_take_between_their_work_and_the_published_time(times, pp):
    low = max(sum(times), pp * max(times))
    assert low * (1 - 1e-9) <= simulated_ms(times, pp) <= published_ms(times, pp) * (1 + 1e-9)


@given(TIMES, STAGES)
def test_timeline_holds_every_task_once_in_order_without_overlap(times, pp):
    tasks = timeline(times, pp)
    assert max(task.end for task in tasks) == pytest.approx(simulated_ms(times, pp))
    keys = [(e.stage, e.microbatch, e.backward) for e in tasks]
    assert len(set(keys)) == len(keys) == 2 * pp * len(times)
    for stage in range(pp):
        mine = [task for task in tasks if task.stage == stage]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))
        held = peak = 0
        for task in mine:  # MaxLen counts on at most pp - stage micro-batches
            held += -1 if task.backward else 1
            peak = max(peak, held)
        assert peak <= pp - stage


def test_no_micro_batches_take_no_time():
    assert simulated_ms([], 4) == published_ms([], 4) == 0


@given(st.lists(st.floats(1, 3), min_size=1, max_size=5), st.integers(2, 4))
def test_small_micro_batches_at_both_ends_are_near_the_best_order(times, pp):
    from itertools import permutations

    best = min(simulated_ms(p, pp) for p in permutations(times))
    assert simulated_ms([times[i] for i in order(times)], pp) <= 1.06 * best
