"""Checkpoints read under another placement: the same bits, tree and losses; what does not match is named."""

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from train.small_runs import (
    bits,
    data,
    job,
    largest_difference,
    placed,
    random_state,
    random_values,
    reference_losses,
    trainer,
)

from dynajax.errors import DataError, RunError
from dynajax.meshes import Placement
from dynajax.train.checkpoint import Checkpoints, latest_step

SOURCE, TARGET = Placement.parse("dp2.tp4"), Placement.parse("fsdp2.tp2@7-4")


def masked_and_grouped() -> optax.GradientTransformation:
    grouped = optax.multi_transform(
        {"slow": optax.sgd(1e-3, momentum=0.9), "fast": optax.adam(1e-3)},
        lambda params: jax.tree.map(lambda p: "fast" if p.ndim > 2 else "slow", params),
    )
    decay = optax.masked(optax.add_decayed_weights(0.1), lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    return optax.chain(optax.clip_by_global_norm(1.0), decay, grouped, optax.identity())


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "masked_and_grouped": masked_and_grouped(),
    "multi_steps": optax.MultiSteps(
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.0, 1e-3, 5)), 4
    ).gradient_transformation(),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_comes_back_on_another_placement(name, tmp_path):
    work = job(OPTIMIZERS[name])
    state = random_state(work, SOURCE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, work, SOURCE, data())
    assert latest_step(tmp_path) == int(state.step)
    with Checkpoints(tmp_path) as checkpoints:
        read = checkpoints.restore(work, TARGET, data())
    assert jax.tree.structure(read) == jax.tree.structure(state)
    assert bits(read) == bits(state)
    for leaf, stored in zip(jax.tree.leaves(read), jax.tree.leaves(work.layout(TARGET)), strict=True):
        assert leaf.sharding.is_equivalent_to(stored.sharding, leaf.ndim)


def test_empty_leaves_come_back(tmp_path):
    def init(params):
        del params
        return {"lora": jnp.zeros((0, 4)), "count": jnp.int32(0)}

    def update(updates, state, params=None):
        del params
        return updates, state

    work = job(optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.1)))
    state = random_state(work, SOURCE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, work, SOURCE, data())
        read = checkpoints.restore(work, TARGET, data())
    assert read.opt_state[0]["lora"].shape == (0, 4)
    assert bits(read) == bits(state)


@pytest.mark.parametrize(
    ("source", "target"), [("tp3.pp2", "fsdp5"), ("fsdp5", "tp3.pp2"), ("cp2.tp4", "pp2.tp3"), ("pp2.tp3", "dp8")]
)
def test_what_is_padded_is_written_whole(source, target, tmp_path):
    source, target = Placement.parse(source), Placement.parse(target)
    work = job(optax.adam(1e-3))
    values = random_values(work)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(placed(work, values, source), work, source, data())
        read = checkpoints.restore(work, target, data())
    assert bits(read) == bits(placed(work, values, target))
    written = ocp.StandardCheckpointer().restore(next(tmp_path.glob("*/state")).resolve())
    whole = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(values)}
    assert {name: leaf.shape for name, leaf in written.items() if ".params" in name} == {
        name: leaf.shape for name, leaf in whole.items() if ".params" in name
    }


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    first = trainer("dp2.tp4")
    losses = [first.step().loss for _ in range(3)]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first.state, first.job, first.placement, data())
    second = trainer("fsdp8")
    with Checkpoints(tmp_path) as checkpoints:
        second.state = checkpoints.restore(second.job, second.placement, data())
    steps = [second.step(), second.step()]
    assert [step.step for step in steps] == [3, 4]
    assert largest_difference(losses + [step.loss for step in steps], reference_losses(5)) < 1e-5


def test_what_does_not_match_is_named(tmp_path):
    work = job(optax.adam(1e-3))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(RunError, match="no checkpoint to resume from"):
            checkpoints.restore(work, SOURCE, data())
        checkpoints.save(random_state(work, SOURCE), work, SOURCE, data())
        with pytest.raises(RunError, match=r"has nothing at .*trace.* and this run needs float32"):
            checkpoints.restore(job(optax.sgd(1e-3, momentum=0.9)), SOURCE, data())
        with pytest.raises(DataError, match="give the same seed"):
            checkpoints.restore(work, SOURCE, data(seed=1))


def test_the_latest_checkpoints_are_kept(tmp_path):
    running = trainer("dp2.tp4")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for _ in range(3):
            running.step()
            checkpoints.save(running.state, running.job, running.placement, data())
            checkpoints.save(running.state, running.job, running.placement, data())  # once more does no harm
    assert latest_step(tmp_path) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
    assert latest_step(tmp_path / "nowhere") is None
