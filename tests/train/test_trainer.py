"""Training that switches: losses as on one device in plain JAX, pauses that compile nothing, failures by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import optax
import pytest
from train.small_runs import MODEL, PLACEMENTS, ROWS, bits, data, largest_difference, reference_losses, trainer

from dynajax.data import Batch
from dynajax.engine import Compiled
from dynajax.errors import BudgetError, DeadlineError, StrategyError, SwitchError
from dynajax.train import Trainer
from dynajax.train.step import wait_ready


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX traces, lowers and compiles meanwhile, in any thread, by its own account."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_run_through_all_placements_loses_what_one_device_loses():
    wanted = reference_losses(2 * len(PLACEMENTS))
    assert wanted[-1] < 0.7 * wanted[0]
    running, losses = trainer(PLACEMENTS[0]), []
    for placement in PLACEMENTS:
        if placement != PLACEMENTS[0]:
            report = running.switch(placement)
            assert report.bytes_moved == report.bytes_lower_bound
            assert report.peak_extra_bytes <= report.budget_bytes
            assert (report.step, report.target) == (len(losses), placement)
        for _ in range(2):
            step = running.step()
            assert (step.step, step.strategy, step.samples) == (len(losses), placement, ROWS)
            losses.append(step.loss)
    assert largest_difference(losses, wanted) < 1e-5


def test_a_window_of_accumulated_gradients_survives_a_switch():
    """Switched in the middle of a window of 4: sums, counters and the rate of the schedule go on where they were."""
    rate = optax.linear_schedule(1e-2, 1e-3, 2)
    optimizer = optax.MultiSteps(optax.inject_hyperparams(optax.adam)(learning_rate=rate), 4).gradient_transformation()
    running = trainer("dp2.tp4", optimizer)
    losses = [running.step().loss for _ in range(6)]
    before = bits(running.state)
    running.switch("fsdp8")
    assert bits(running.state) == before
    state = running.state.opt_state
    assert (int(state.mini_step), int(state.gradient_step), int(running.state.step)) == (2, 1, 6)
    assert state.acc_grads["embed"]["tokens"].sharding.spec == running.state.params["embed"]["tokens"].sharding.spec
    losses += [running.step().loss for _ in range(4)]
    assert largest_difference(losses, reference_losses(10, optimizer)) < 1e-5


def test_a_prepared_switch_compiles_nothing_and_an_unprepared_one_says_so():
    running = trainer("dp2.tp4")
    running.step()
    running.prepare("fsdp8").wait()
    with compilations() as seen:
        report = running.switch("fsdp8")
        running.step()
    assert seen == []
    assert report.prepared
    assert report.compile_s == 0.0
    with compilations() as seen:
        report = running.switch("tp8")
        running.step()
    assert seen
    assert not report.prepared
    assert 0.0 < report.compile_s < report.pause_s
    with compilations() as seen:
        report = running.switch("fsdp8")
        running.step()
    assert seen == []
    assert not report.prepared  # the way back had not been asked for
    assert report.compile_s == 0.0


def test_training_goes_on_while_a_switch_is_prepared():
    running = trainer("dp2.tp4")
    wanted = reference_losses(3)
    preparation = running.prepare("tp8")
    losses = [running.step().loss, running.step().loss]
    preparation.wait()
    assert preparation.done()
    assert running.switch("tp8").prepared
    losses.append(running.step().loss)
    assert largest_difference(losses, wanted) < 1e-5


def test_a_mesh_that_the_caller_has_set_makes_no_difference():
    theirs = jax.make_mesh((16,), ("x",))
    with jax.set_mesh(theirs):
        running = trainer("dp2.tp4")
        losses = [running.step().loss]
        running.prepare("tp4@4-7").wait()
        assert running.switch("tp4@4-7").compile_s == 0.0
        losses.append(running.step().loss)
        assert jax.sharding.get_abstract_mesh() == theirs.abstract_mesh
    assert largest_difference(losses, reference_losses(2)) < 1e-5


class Silent:
    """Data whose last rows, or all rows, have nothing to learn from."""

    def __init__(self, heard: int) -> None:
        self.batch_size, self.heard, self.source = ROWS, heard, data()

    def take(self, sample: int, count: int) -> Batch:
        batch = self.source.take(sample, count)
        batch.weights[self.heard :] = 0
        return batch


def test_rows_without_targets_do_not_count_and_an_empty_batch_does_no_harm():
    losses = {}
    for placement in ("dp3@0-2", "dp1"):
        running = Trainer(MODEL, optax.sgd(0.1), placement, Silent(heard=2))
        losses[placement] = [running.step().loss for _ in range(3)]
    assert np.isfinite(losses["dp1"]).all()
    assert largest_difference(losses["dp3@0-2"], losses["dp1"]) < 1e-5
    nothing = Trainer(MODEL, optax.sgd(0.1), "dp1", Silent(heard=0))
    before = bits(nothing.state.params)
    step = nothing.step()
    assert (step.loss, step.tokens) == (0.0, 0)
    assert bits(nothing.state.params) == before


def test_a_refused_switch_leaves_training_as_it_was():
    running = trainer("dp2.tp4", budget=0)
    losses = [running.step().loss]
    with pytest.raises(StrategyError, match="pp = 3 leaves pipeline stages"):
        running.prepare("pp3")
    with pytest.raises(BudgetError, match="smallest budget"):
        running.prepare("fsdp8").wait()
    with pytest.raises(BudgetError, match="smallest budget"):
        running.switch("fsdp8")
    with pytest.raises(BudgetError, match="smallest budget"):
        running.plan("dp2.tp4", "fsdp8")
    losses += [running.step().loss]
    assert str(running.placement) == "dp2.tp4"
    assert largest_difference(losses, reference_losses(2)) < 1e-5


def test_a_move_that_fails_says_what_is_left(monkeypatch: pytest.MonkeyPatch):
    running = trainer("dp2.tp4")
    losses = [running.step().loss]

    def runs_out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError("no memory for the target")

    monkeypatch.setattr(Compiled, "__call__", runs_out_of_memory)
    with pytest.raises(SwitchError, match=r"from dp2.tp4 to fsdp8 failed: no memory .* the old state is whole"):
        running.switch("fsdp8")
    losses.append(running.step().loss)
    running.state.opt_state[1][0].mu["embed"]["tokens"].delete()
    with pytest.raises(SwitchError, match=r"1 leaves of the old state are gone \(.*mu.*tokens.*resume"):
        running.switch("fsdp8")
    assert largest_difference(losses, reference_losses(2)) < 1e-5


def test_waiting_ends_at_the_deadline_and_names_what_it_waited_for():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    may_end = threading.Event()

    def late(x: np.ndarray) -> np.ndarray:
        may_end.wait()
        return np.asarray(x)

    def waits(x: jax.Array) -> jax.Array:
        return jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    spread = jax.sharding.PartitionSpec("x")
    array = jax.jit(jax.shard_map(waits, mesh=mesh, in_specs=spread, out_specs=spread))(np.ones(2, np.float32))
    try:
        with pytest.raises(DeadlineError, match=r"step 3 is not done after 0.01 s; devices \[0, 1\] are late"):
            wait_ready({"loss": array}, "step 3", deadline_s=0.01)
    finally:
        may_end.set()
    wait_ready({"loss": array}, "step 3", deadline_s=60.0)
