"""Moves between the devices of several processes, which are really started; see processes.py for what they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine.processes import WAIT_S
from started import run_processes

SCRIPT = Path(__file__).with_name("processes.py")
PROCESSES = 3
ONE_WAIT_S = 20


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    """What each process says of the moves."""
    return [json.loads(out.splitlines()[-1]) for out in run_processes(SCRIPT, PROCESSES, "moves", wait_s=ONE_WAIT_S)]


def test_every_move_between_processes_is_right(said: list[dict[str, Any]]) -> None:
    """The processes assert it; here is only asked that all went through all cases."""
    assert [list(lines) for lines in said] == [list(said[0])] * PROCESSES
    assert sum(found is None for found in said[0].values()) == 10


def test_what_one_process_does_otherwise_is_an_error_in_all(said: list[dict[str, Any]]) -> None:
    budget, commit, order, missing, deleted, stand_in, path = zip(*(s["disagreements"] for s in said), strict=True)
    for alike, groups in ((budget, ("[0, 1]", "[2]")), (commit, ("[0, 2]", "[1]")), (order, ("[0]", "[1, 2]"))):
        assert len(set(alike)) == 1
        assert alike[0].startswith("AgreementError: processes ")
        assert all(f"processes {group}" in alike[0] for group in groups)
    for told, rank, text in (
        (missing, 0, "the target tree does not fit the state; missing: ['b']"),
        (deleted, 1, "['b']: the array was deleted"),
        (stand_in, 0, "['a']: the leaf is a ShapeDtypeStruct without data"),
    ):
        for k, message in enumerate(told):
            assert message.startswith(f"TargetError: {'' if k == rank else f'process {rank}: '}{text}")
    assert len(set(path)) == 1
    assert path[0].startswith("TargetError: the devices are not all CPU devices of this process")


def test_a_repeated_move_that_one_process_planned_otherwise_is_an_error_in_all(said: list[dict[str, Any]]) -> None:
    texts = {text for one in said for text in one["repeats"]}
    assert len(texts) == 1
    assert texts.pop().startswith(
        "AgreementError: processes [0, 2] and processes [1] are about to make different moves"
    )


def test_what_changed_on_its_way_is_found_by_all(said: list[dict[str, Any]]) -> None:
    checked, safe, replicas = zip(*(s["changed_bytes"] for s in said), strict=True)
    assert len(set(checked)) == len(set(safe)) == len(set(replicas)) == 1
    assert checked[0] == safe[0]
    assert "that cpu:204" in checked[0]
    assert "replicas differ" in replicas[0]


def test_a_process_that_does_not_come_or_dies_is_an_error_after_the_deadline() -> None:
    present, absent = run_processes(SCRIPT, 2, "absences", wait_s=WAIT_S)
    assert "{" not in absent
    for message in json.loads(present.splitlines()[-1])["absences"]:
        assert message.startswith("DeadlineError: another process of the move did not come, or died")
