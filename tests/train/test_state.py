"""How each leaf of an optimizer state is stored, for the optimizers that people really compose."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dynajax.errors import StrategyError
from dynajax.runtime import Cut, CutLayers, Storage
from dynajax.runtime.storage import storage_of
from dynajax.train.state import initial_state, mirror_storage, state_storage, to_storage

PARAMS = {
    "embed": jnp.zeros((16, 8)),
    "layers": {"up": jnp.zeros((3, 8, 12)), "norm": jnp.zeros((3, 8))},
    "norm": jnp.zeros((8,)),
}
MESH = {"pp": 2, "fsdp": 3, "tp": 4}
RULES = {"vocab": Cut(("tp",)), "embed": Cut(("fsdp",)), "mlp": Cut(("tp",)), "layers": CutLayers("pp")}
AXES = {
    "embed": ("vocab", "embed"),
    "layers": {"up": ("layers", "embed", "mlp"), "norm": ("layers", "embed")},
    "norm": ("embed",),
}
STORED = jax.tree.map(lambda x, axes: storage_of(x.shape, axes, RULES, MESH), PARAMS, AXES)
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


def stored_of(optimizer, params=PARAMS, stored=STORED):
    shapes = jax.eval_shape(optimizer.init, params)
    return shapes, mirror_storage(shapes, stored)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_storage_as_optax_says(name):
    """optax knows by running ``init`` on a placeholder which subtrees are parameters; ours only reads paths."""
    optimizer = OPTIMIZERS[name]
    shapes, ours = stored_of(optimizer)
    theirs = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, stored: leaf if isinstance(leaf, optax.MaskedNode) else stored,
        shapes,
        STORED,
        transform_non_params=lambda leaf: Storage.whole(leaf.shape),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    assert jax.tree.structure(ours) == jax.tree.structure(shapes)
    assert ours == theirs


def test_masks_and_labels_given_as_functions():
    """Functions of the parameters cannot be run on a placeholder, so optax's own map fails here."""
    by_rank = optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    _, stored = stored_of(by_rank)
    assert stored.inner_state[0].mu["layers"] == STORED["layers"]
    assert isinstance(stored.inner_state[0].mu["norm"], optax.MaskedNode)
    grouped = optax.multi_transform({"slow": optax.sgd(0.1, 0.9), "fast": optax.adam(0.1)}, lambda _: LABELS)
    _, stored = stored_of(grouped)
    assert stored.inner_states["slow"].inner_state[0].trace["embed"] == STORED["embed"]
    assert stored.inner_states["fast"].inner_state[0].nu["layers"]["up"] == STORED["layers"]["up"]


def test_longest_path_wins():
    """``norm`` alone is a parameter too: the moment of ``layers/norm`` must not be stored like it."""
    _, stored = stored_of(optax.adam(1e-3))
    assert stored[0].mu["layers"]["norm"].shape == (4, 9)
    assert stored[0].count == Storage.whole(())


def test_factored_moments_lose_the_dim_that_is_summed_over():
    params = {"up": jnp.zeros((3, 252, 512)), "norm": jnp.zeros((8,))}
    stored = {
        "up": storage_of((3, 252, 512), ("layers", "embed", "mlp"), RULES, MESH),
        "norm": storage_of((8,), ("embed",), RULES, MESH),
    }
    shapes, found = stored_of(optax.adafactor(1e-3), params, stored)
    of_shape = {(leaf.shape, s.shape, s.spec) for leaf, s in zip(*map(jax.tree.leaves, (shapes, found)), strict=True)}
    assert ((3, 252), (4, 252), P("pp", "fsdp")) in of_shape
    assert ((3, 512), (4, 512), P("pp", "tp")) in of_shape
    assert ((8,), (9,), P("fsdp")) in of_shape
    assert ((1,), (1,), P(None)) in of_shape


def test_a_mean_over_a_padded_dim_is_refused():
    params = {"up": jnp.zeros((256, 512))}
    stored = {"up": storage_of((256, 512), ("embed", "mlp"), RULES, MESH)}
    with pytest.raises(StrategyError, match=r"v_col/up is a mean over a dim of 256, which fsdp would pad to 258"):
        stored_of(optax.adafactor(1e-3), params, stored)


def test_whole_state():
    optimizer = OPTIMIZERS["multi_steps"]
    state = initial_state(PARAMS, optimizer, jax.random.key(0))
    stored = state_storage(jax.eval_shape(lambda: state), STORED)
    assert stored.params == STORED
    assert stored.opt_state.acc_grads == STORED
    assert stored.step == stored.rng == stored.cursor == stored.opt_state.mini_step == Storage.whole(())
    laid = to_storage(stored, state)
    assert laid.rng is state.rng
    assert laid.params["layers"]["up"].shape == (4, 9, 12)
