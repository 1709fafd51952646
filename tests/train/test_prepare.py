"""Values made once, ahead or on demand: errors by name, failures made anew, nothing made twice."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynajax.errors import BudgetError, DeadlineError, SwitchError
from dynajax.train.prepare import FutureCache

WAIT_S = 60.0


@pytest.fixture
def workers():
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield pool


def test_each_value_is_made_once_and_away_from_the_caller(workers):
    made = []

    def make(key):
        made.append((key, threading.current_thread()))
        return key * 2

    shelf = FutureCache(make, "doubling {}", workers)
    shelf.ahead(3)
    assert [shelf.get(k, WAIT_S) for k in (3, 3, 4)] == [6, 6, 8]
    assert shelf.ready(3)
    assert not shelf.ready(5)
    assert [key for key, _ in made] == [3, 4]
    assert threading.current_thread() not in [thread for _, thread in made]


def test_what_failed_is_named_and_made_anew(workers):
    results = iter([ZeroDivisionError("no"), BudgetError("too small by 3 bytes"), 7])

    def make(key):
        result = next(results)
        if isinstance(result, ValueError | ArithmeticError):
            raise result
        return result

    shelf = FutureCache(make, "planning {}", workers)
    with pytest.raises(SwitchError, match="planning tp8 failed: ZeroDivisionError: no"):
        shelf.get("tp8", WAIT_S)
    assert not shelf.ready("tp8")
    with pytest.raises(BudgetError, match="too small by 3 bytes"):
        shelf.get("tp8", WAIT_S)
    assert shelf.get("tp8", WAIT_S) == 7


def test_the_deadline_is_named(workers):
    may_end = threading.Event()
    shelf = FutureCache(lambda _: may_end.wait(), "compiling the step of {}", workers)
    with pytest.raises(DeadlineError, match=r"compiling the step of tp8 is not done after 0.01 s"):
        shelf.get("tp8", 0.01)
    may_end.set()
    assert shelf.get("tp8", WAIT_S)
