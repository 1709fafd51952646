"""What optimizers see of the way tensors are stored: found by trying them, however rarely or little they update."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest
from train.small_runs import data
from train.strategies import DENSE

from dynajax.errors import StrategyError
from dynajax.models import init
from dynajax.train import Trainer
from dynajax.train.elementwise import require_elementwise, sees_padding

SHAPES = jax.eval_shape(lambda: init(DENSE, jax.random.key(0)))
WARM_UP = optax.linear_schedule(0.0, 1e-3, 10_000)


def by_name(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "table" if "embed" in str(path) else "rest", params)


ALIKE = {
    "Adam": optax.adamw(WARM_UP),
    "clipped by all": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(WARM_UP, momentum=0.9)),
    "trust ratio of norms": optax.lamb(1e-3),
    "groups by name": optax.multi_transform({"table": optax.adam(1e-3), "rest": optax.lion(1e-3)}, by_name),
    "every fourth step": optax.MultiSteps(optax.adam(WARM_UP), 4),
    "hyperparameters in its state": optax.inject_hyperparams(optax.adamw)(learning_rate=WARM_UP),
    "never": optax.set_to_zero(),
}
COUNTS_ZEROS = {
    "Adafactor": optax.adafactor(1e-3),
    "Adafactor without scales": optax.adafactor(1e-3, multiply_by_parameter_scale=False),
    "Adafactor every fourth step": optax.MultiSteps(optax.adafactor(WARM_UP), 4),
    "clipped by means of tensors": optax.chain(optax.clip_by_block_rms(10.0), optax.sgd(WARM_UP)),
    "scaled by means of tensors": optax.chain(optax.scale_by_param_block_rms(), optax.sgd(WARM_UP)),
    "centred": optax.chain(optax.centralize(), optax.sgd(1.0)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(WARM_UP)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_padding_changes_nothing(name: str):
    assert not sees_padding(ALIKE[name], SHAPES)


@pytest.mark.parametrize("name", COUNTS_ZEROS)
def test_padding_would_be_counted(name: str):
    assert sees_padding(COUNTS_ZEROS[name], SHAPES)


def test_it_is_refused_where_a_strategy_pads_and_only_there():
    trainer = Trainer(DENSE, COUNTS_ZEROS["Adafactor"], "dp2", data(), devices=jax.devices()[:4])
    state = trainer.state
    for refused in (lambda: trainer.plan("dp2", "tp3"), lambda: trainer.switch("tp3")):
        with pytest.raises(StrategyError, match=r"tp3 pads heads, mlp, vocab with zeros.*takes means over dims"):
            refused()
    assert trainer.state is state
    assert trainer.plan("dp2", "dp4").bytes_moved > 0


@pytest.mark.parametrize("name", ["Adafactor every fourth step", "scaled by means of tensors", "centred"])
def test_flat_tensors_are_refused_however_small_or_late_the_first_updates_are(name: str):
    with pytest.raises(StrategyError, match="treats each element alike"):
        require_elementwise(COUNTS_ZEROS[name], SHAPES)
