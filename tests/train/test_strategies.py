"""One step, and any switch, under strategies of every kind: as on one device that knows nothing of strategies."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train.small_runs import (
    Step,
    bits,
    closed_walk,
    data,
    largest_difference,
    placed,
    random_values,
    train_on_one_device,
)
from train.strategies import DENSE, DENSE_STRATEGIES, MOE, MOE_STRATEGIES, optimizer

from dynajax.engine import reshard
from dynajax.models import LlamaConfig
from dynajax.train import Trainer

ALL = [(DENSE, text) for text in DENSE_STRATEGIES] + [(MOE, text) for text in MOE_STRATEGIES]
PAIRS = 16
"""Switches of each model that training goes on after."""


@cache
def reference(model: LlamaConfig) -> list[Step]:
    return train_on_one_device(model, optimizer(), PAIRS + 1)


@cache
def running(model: LlamaConfig) -> Trainer:
    """Keeps what is compiled for one test for the next."""
    return Trainer(model, optimizer(), "dp1", data(), devices=jax.devices()[:16])


def numbers(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(("model", "strategy"), ALL)
def test_one_step_is_that_of_one_device(model: LlamaConfig, strategy: str):
    """From equal weights on the same global batch: the loss, and every updated parameter of its tensor's scale."""
    job, placement = running(model).job, running(model).job.place(strategy)
    start = numbers(running(model).state.params)
    step = reference(model)[0]
    state = placed(job, jax.tree.map(jnp.copy, running(model).state), placement)
    compiled = running(model).compile_cache.steps.get(placement, 600.0)
    outcome = compiled(state, data()[0], deadline_s=600.0)
    assert largest_difference([outcome.loss], [step.loss]) < 1e-5
    got = numbers(job.to_plain(outcome.state, placement).params)
    assert jax.tree.structure(got) == jax.tree.structure(step.params)
    for path, ours in jax.tree_util.tree_leaves_with_path(got):
        wanted, before = (_at(tree, path) for tree in (step.params, start))
        assert np.abs(ours - wanted).max() <= 1e-5 * np.abs(wanted).max(), jax.tree_util.keystr(path)
        assert np.abs(wanted - before).max() > 1e-4 * np.abs(wanted).max(), "the step must change what is compared"


def _at(tree: Any, path: Any) -> Any:
    for key in path:
        tree = tree[key.key]
    return tree


@pytest.mark.parametrize(
    ("model", "texts"), [(DENSE, DENSE_STRATEGIES), (MOE, [*dict.fromkeys(DENSE_STRATEGIES[::3] + MOE_STRATEGIES)])]
)
def test_every_ordered_pair_moves_the_state_bit_for_bit(model: LlamaConfig, texts: list[str]):
    job, layout, places = (
        running(model).job,
        running(model).compile_cache.layout,
        list(map(running(model).job.place, texts)),
    )
    values = random_values(job)
    wanted = [bits(placed(job, values, place)) for place in places]
    state, seen = placed(job, values, places[0]), set()
    for source, target in closed_walk(len(places)):
        here, there = layout(places[source]), layout(places[target])
        state, report = reshard(state, there, stored=here, budget="16KB", donate=True)
        assert bits(state) == wanted[target], (texts[source], texts[target])
        assert report.bytes_moved == report.bytes_lower_bound
        assert report.peak_extra_bytes <= report.budget_bytes
        seen.add((source, target))
    assert len(seen) == len(places) * (len(places) - 1)


@pytest.mark.parametrize(("model", "texts"), [(DENSE, DENSE_STRATEGIES), (MOE, MOE_STRATEGIES)])
def test_training_goes_on_after_any_switch(model: LlamaConfig, texts: list[str]):
    """A step, a switch, a step, ...: losses of the run that never switches."""
    trainer = Trainer(model, optimizer(), texts[0], data(), devices=jax.devices()[:16])
    trainer.compile_cache = running(model).compile_cache
    losses, seen = [trainer.step().loss], set()
    for number in np.random.default_rng(4).choice(len(texts) - 1, PAIRS):
        here = texts.index(str(trainer.placement))
        target = texts[(here + 1 + number) % len(texts)]
        trainer.switch(target)
        losses.append(trainer.step().loss)
        seen.add((here, target))
    assert len(seen) == PAIRS
    assert largest_difference(losses, [step.loss for step in reference(model)]) < 1e-5
    assert losses[-1] < losses[0] - 0.1
