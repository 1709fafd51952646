"""Which spec each leaf of an optimizer state gets, for the optimizers that people really compose."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dynajax.train.state import initial_state, mirror_specs, state_specs

PARAMS = {
    "embed": jnp.zeros((16, 8)),
    "layers": {"up": jnp.zeros((3, 8, 12)), "norm": jnp.zeros((3, 8))},
    "norm": jnp.zeros((8,)),
}
SPECS = {
    "embed": P("tp", "fsdp"),
    "layers": {"up": P("pp", "fsdp", "tp"), "norm": P("pp", "fsdp")},
    "norm": P("fsdp"),
}
DECAYED = {"embed": True, "layers": {"up": True, "norm": False}, "norm": False}
LABELS = {"embed": "slow", "layers": {"up": "fast", "norm": "fast"}, "norm": "slow"}
SCHEDULE = optax.linear_schedule(0.0, 1e-3, 10)

OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, mask=DECAYED), optax.ema(0.9)),
    "masked": optax.masked(optax.adam(1e-3), DECAYED),
    "multi_transform": optax.multi_transform({"slow": optax.sgd(1e-3, momentum=0.9), "fast": optax.adam(1e-3)}, LABELS),
    "multi_steps": optax.MultiSteps(optax.adam(SCHEDULE), 4).gradient_transformation(),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "finite": optax.apply_if_finite(optax.lion(1e-3), 3),
    "nothing": optax.identity(),
}


def specs_of(optimizer, params=PARAMS, specs=SPECS):
    shapes = jax.eval_shape(optimizer.init, params)
    return shapes, mirror_specs(shapes, jax.eval_shape(lambda: params), specs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_specs_as_optax_says(name):
    """optax knows by running ``init`` on a placeholder which subtrees are parameters; ours only reads paths."""
    optimizer = OPTIMIZERS[name]
    shapes, ours = specs_of(optimizer)
    theirs = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, spec: leaf if isinstance(leaf, optax.MaskedNode) else spec,
        shapes,
        SPECS,
        transform_non_params=lambda _: P(),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    assert jax.tree.structure(ours, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(shapes)
    assert ours == theirs


def test_masks_and_labels_given_as_functions():
    """Functions of the parameters cannot be run on a placeholder, so optax's own map fails here."""
    by_rank = optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    _, specs = specs_of(by_rank)
    assert specs.inner_state[0].mu["layers"] == SPECS["layers"]
    assert isinstance(specs.inner_state[0].mu["norm"], optax.MaskedNode)
    grouped = optax.multi_transform({"slow": optax.sgd(0.1, 0.9), "fast": optax.adam(0.1)}, lambda _: LABELS)
    _, specs = specs_of(grouped)
    assert specs.inner_states["slow"].inner_state[0].trace["embed"] == SPECS["embed"]
    assert specs.inner_states["fast"].inner_state[0].nu["layers"]["up"] == SPECS["layers"]["up"]


def test_longest_path_wins():
    """``norm`` alone is a parameter too: the moment of ``layers/norm`` must not take its spec."""
    _, specs = specs_of(optax.adam(1e-3))
    assert specs[0].mu["layers"]["norm"] == P("pp", "fsdp")
    assert specs[0].count == P()


def test_factored_moments_lose_the_dim_that_is_summed_over():
    params = {"up": jnp.zeros((3, 256, 512)), "norm": jnp.zeros((8,))}
    specs = {"up": P("pp", "fsdp", "tp"), "norm": P("fsdp")}
    shapes, found = specs_of(optax.adafactor(1e-3), params, specs)
    shapes, found = jax.tree.leaves_with_path(shapes), jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, P))
    by_shape = {(leaf.shape, spec) for (_, leaf), spec in zip(shapes, found, strict=True)}
    assert ((3, 256), P("pp", "fsdp")) in by_shape
    assert ((3, 512), P("pp", "tp")) in by_shape
    assert ((8,), P("fsdp")) in by_shape
    assert ((1,), P()) in by_shape


def test_whole_state():
    optimizer = OPTIMIZERS["multi_steps"]
    shapes = jax.eval_shape(lambda: initial_state(PARAMS, optimizer, jax.random.key(0)))
    specs = state_specs(shapes, SPECS)
    assert specs.params == SPECS
    assert specs.opt_state.acc_grads == SPECS
    assert specs.step == specs.rng == specs.cursor == specs.opt_state.mini_step == P()
    assert shapes.rng.dtype == jax.random.key(0).dtype
