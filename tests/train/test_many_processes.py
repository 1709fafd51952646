"""Steps on documents by pipelines in several processes, which are really started; see many_processes.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from started import run_processes
from train.many_processes import MODEL, STRATEGIES, documents, optimizer
from train.small_runs import Step, largest_difference, one_a_row, train_on_one_device

from dynajax.runtime.optimizer_layout import flatten

PROCESSES, DEVICES, WAIT_S = 3, 6, 30


@pytest.fixture(scope="module")
def reference() -> list[Step]:
    """Steps of one device."""
    steps = len(STRATEGIES)
    return train_on_one_device(MODEL, optimizer(), steps, one_a_row(documents(), steps))


@pytest.fixture(scope="module")
def said(reference: list[Step], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process says; each has compared its part of the parameters with the reference after every step."""
    folder = tmp_path_factory.mktemp("job")
    flat = {
        f"{number}{jax.tree_util.keystr(path)}": np.asarray(x)
        for number, step in enumerate(reference, start=1)
        for path, x in jax.tree_util.tree_leaves_with_path(flatten(step.params, DEVICES))
    }
    np.savez(folder / "reference.npz", **flat)  # pyright: ignore[reportArgumentType]
    outputs = run_processes(Path(__file__).with_name("many_processes.py"), PROCESSES, str(folder), wait_s=WAIT_S)
    return [json.loads(out.splitlines()[-1]) for out in outputs]


def test_losses_are_those_of_one_device_and_alike_everywhere(said: list[dict[str, Any]], reference: list[Step]) -> None:
    losses = [[step["loss"] for step in one["steps"]] for one in said]
    assert losses == [losses[0]] * PROCESSES
    assert largest_difference(losses[0], [step.loss for step in reference]) < 1e-5


def test_every_process_knows_what_all_pipelines_did(said: list[dict[str, Any]]) -> None:
    """Bytes are the lower bound, and seconds those of a process that has the pipeline."""
    for number, alike in enumerate(zip(*(one["steps"] for one in said), strict=True)):
        assert [step["strategy"] for step in alike] == [STRATEGIES[number]] * PROCESSES
        assert all(step["pipelines"] == alike[0]["pipelines"] for step in alike)
        assert sum(share["sequences"] for share in alike[0]["pipelines"]) == len(documents()[number].segments)
        for share, least in zip(alike[0]["pipelines"], alike[0]["least"], strict=True):
            work = share["sequences"] > 0
            assert [share["bytes_pulled"], share["bytes_pushed"]] == (least if work else [0, 0])
            assert (share["busy_s"] > 0) == work
    assert [share["sequences"] for share in said[0]["steps"][0]["pipelines"]] == [1, 0]


def test_all_pull_and_push_in_one_order_and_compute_what_they_have_devices_of(said: list[dict[str, Any]]) -> None:
    for number, alike in enumerate(zip(*(one["steps"] for one in said), strict=True)):
        orders = [[tuple(event) for event in step["order"]] for step in alike]
        links = [[event for event in order if event[0] in ("pull", "push")] for order in orders]
        assert links == [links[0]] * PROCESSES
        for rank, order in enumerate(orders):
            first = 0
            for pipeline, share in enumerate(alike[rank]["pipelines"]):
                here = first < 2 * rank + 2 and 2 * rank < first + share["devices"]
                first += share["devices"]
                assert (("compute", pipeline, None) in order) == (here and share["sequences"] > 0), (number, rank)
            rest = [k for k, (what, _, section) in enumerate(order) if (what, section) == ("dispatch", None)]
            assert bool(rest) == (number > 0)  # more than a pass of something in every process, but in the first step
            assert all(event[0] != "pull" for k in rest for event in order[k:])


def test_processes_that_plan_or_read_otherwise_are_told_before_anything_moves(said: list[dict[str, Any]]) -> None:
    for what in ("one plans otherwise", "one has other documents"):
        texts = {one[what] for one in said}
        assert len(texts) == 1
        assert texts.pop().startswith(
            "AgreementError: processes [0, 2] and processes [1] are about to take different steps"
        )


def test_all_use_the_last_strategy_where_one_is_late(said: list[dict[str, Any]]) -> None:
    for one in said:
        assert one["warnings"] == ["step 4: the plan was late: strategy 0 of the candidates was used again"]


def test_what_leaves_a_process_out_is_refused(said: list[dict[str, Any]]) -> None:
    for one in said:
        assert one["one left out"].startswith("StrategyError: tp2|cp2 has no device of the processes [2]")


def test_a_process_that_dies_in_a_step_is_an_error_in_all_others(said: list[dict[str, Any]]) -> None:
    for one in said[:-1]:
        assert one["one dies"].startswith("DeadlineError: another process of the ")
    assert "one dies" not in said[-1]
