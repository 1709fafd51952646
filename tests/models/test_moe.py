import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import dense_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from numpy_decoder import cross_entropy, decode, moe, to_float64
from packing import pack

from dynajax.errors import ModelError
from dynajax.meshes import ACTIVATION_RULES, PARAMETER_RULES, Strategy, spec
from dynajax.models import (
    Choices,
    Execution,
    ExpertKernels,
    MoeConfig,
    RouterStats,
    balance_loss,
    count_parameters,
    forward,
    forward_with_stats,
    mean_loss,
    parameter_specs,
    preset,
    router_loss,
    sorted_experts,
    token_loss,
    z_loss,
)
from dynajax.models.moe import choose

TINY = MoeConfig(
    layers=2, hidden=12, ffn=10, heads=4, kv_heads=2, head_dim=6, vocab=19, experts=5, top_k=2, qk_norm=True
)
VARIANTS = {
    "dropless": TINY,
    "capacity": dataclasses.replace(TINY, capacity_factor=0.6),
    "ample": dataclasses.replace(TINY, capacity_factor=9.0),
    "one expert a token": dataclasses.replace(TINY, top_k=1, normalize_top_k=False, capacity_factor=1.0),
    "no gate": dataclasses.replace(TINY, gated=False, top_k=3),
}
WAYS = (sorted_experts, dense_experts)
ROWS, SEQ = 2, 16


def shaken(config, seed=0):
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        return np.float32(0.3 * rng.standard_normal(leaf.shape) + (path[-1].key == "scale"))

    return jax.tree.map_with_path(draw, parameter_specs(config))


def layer_of(config, params, layer, x, counted, experts):
    """One MoE layer as the model runs it, from its kernels."""
    p = jax.tree.map(lambda a: jnp.asarray(a[layer]), params["blocks"]["mlp"])
    choices, stats = choose(config, jnp.einsum("bse,ex->bsx", x, p["router"], precision="highest"), counted)
    return experts(x, choices, ExpertKernels(p["up"], p["down"], p.get("gate")), Execution()), stats


one_layer = jax.jit(layer_of, static_argnames=("config", "layer", "experts"))


def drawn_layer(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((ROWS, SEQ, TINY.hidden)).astype(np.float32), rng.random((ROWS, SEQ)) < 0.8


@pytest.mark.parametrize("experts", WAYS)
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_layer_equals_a_loop_over_tokens(config, experts):
    params = shaken(config)
    x, counted = drawn_layer(1)
    out, stats = one_layer(config, params, 1, x, counted, experts)
    rows = [
        moe(config, to_float64(params)["blocks"]["mlp"], 1, *row)
        for row in zip(x.astype(np.float64), counted, strict=True)
    ]
    np.testing.assert_allclose(out, [y for y, _ in rows], rtol=1e-5, atol=1e-5)
    for name, value in stats._asdict().items():
        np.testing.assert_allclose(value, sum(sums[name] for _, sums in rows), rtol=1e-5, err_msg=name)
    if config is VARIANTS["capacity"]:
        assert stats.dropped > 0


@pytest.mark.parametrize("name", ["dropless", "capacity"])
def test_all_ways_have_the_same_gradients(name):
    config = VARIANTS[name]
    params = shaken(config)
    x, counted = drawn_layer(2)

    def loss(params, x, experts):
        out, stats = layer_of(config, params, 0, x, counted, experts)
        return jnp.sum(jnp.sin(out)) + router_loss(dataclasses.replace(config, z_weight=0.1), stats)

    slope = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    plain = slope(params, x, dense_experts)
    for a, b in zip(jax.tree.leaves(slope(params, x, sorted_experts)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@settings(max_examples=6)
@given(cut=st.integers(0, TINY.experts), seed=st.integers(0, 2**16))
@pytest.mark.parametrize("experts", WAYS)
def test_slices_of_the_experts_add_up_to_the_whole(experts, cut, seed):
    """What a device computes that holds some experts: choices of the others add nothing."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((ROWS, 4, 6)), jnp.float32)
    choices, _ = choose(TINY, jnp.asarray(rng.standard_normal((ROWS, 4, TINY.experts)), jnp.float32), x[..., 0] < 1)
    shapes = ((TINY.experts, 6, 3), (TINY.experts, 3, 6), (TINY.experts, 6, 3))
    kernels = ExpertKernels(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))

    def part(lo, hi):
        local = jax.tree.map(lambda a: a[lo:hi], kernels)
        return experts(x, choices._replace(experts=choices.experts - lo), local, Execution())

    parts = sum(part(lo, hi) for lo, hi in ((0, cut), (cut, TINY.experts)) if hi > lo)
    np.testing.assert_allclose(parts, part(0, TINY.experts), rtol=1e-4, atol=1e-5)


def test_later_tokens_take_no_place_from_earlier_ones():
    config = VARIANTS["capacity"]
    params = shaken(config)
    x, counted = drawn_layer(3)
    other = np.where(np.arange(SEQ)[:, None] < 9, x, 1 - x)
    one, two = (one_layer(config, params, 0, a, counted, sorted_experts)[0] for a in (x, other))
    np.testing.assert_array_equal(one[:, :9], two[:, :9])
    assert not np.array_equal(one[:, 9:], two[:, 9:])


def test_equal_scores_choose_the_first_experts():
    choices, _ = choose(TINY, jnp.zeros((1, 3, 5)), jnp.ones((1, 3), bool))
    np.testing.assert_array_equal(choices.experts, [[[0, 1]] * 3])
    np.testing.assert_allclose(choices.gates, 0.5)


run = jax.jit(forward, static_argnames=("config", "experts", "remat", "dtype"))


@pytest.mark.parametrize("experts", WAYS)
def test_packed_forward_equals_each_document_alone_in_numpy(experts):
    params = shaken(TINY)
    rng = np.random.default_rng(4)
    documents = [[rng.integers(0, 19, n).tolist() for n in row] for row in ((5, 1, 7), (9, 4))]
    logits = np.asarray(run(TINY, params, *pack(documents, ROWS, SEQ), experts=experts))
    assert np.isfinite(logits).all()
    for row, in_row in enumerate(documents):
        start = 0
        for document in in_row:
            expected = decode(TINY, params, document, lambda *args: moe(*args)[0])
            np.testing.assert_allclose(logits[row, start : start + len(document)], expected, rtol=5e-5, atol=5e-5)
            start += len(document)


def whole_loss(config, params, batch, targets, execution=None):
    tokens, segments, positions = batch
    logits, stats = forward_with_stats(config, params, tokens, segments, positions, execution)
    return mean_loss(*token_loss(logits, targets, segments != 0)) + router_loss(config, stats)


def test_gradient_with_router_losses_is_the_slope_of_the_numpy_loss():
    config = dataclasses.replace(TINY, balance_weight=0.7, z_weight=0.3)
    params = shaken(config)
    rng = np.random.default_rng(5)
    documents = [[rng.integers(0, 19, n).tolist() for n in row] for row in ((6, 3), (8,))]
    batch = pack(documents, ROWS, SEQ)
    targets = (batch[0] + 1) % 19

    def numpy_loss(params):
        sums = {}

        def feed_forward(config, p, layer, x):
            out, found = moe(config, p, layer, x)
            old = sums.setdefault(layer, dict.fromkeys(found, 0))
            sums[layer] = {name: old[name] + found[name] for name in found}
            return out

        flat = [np.array(d) for row in documents for d in row]
        loss = sum(cross_entropy(decode(config, params, d, feed_forward), (d + 1) % 19) for d in flat)
        loss /= sum(map(len, flat))
        for s in sums.values():
            share, mean = s["chosen"] / (s["tokens"] * config.top_k), s["probability"] / s["tokens"]
            loss += config.balance_weight * config.experts * (share @ mean) / config.layers
            loss += config.z_weight * s["z"] / s["tokens"] / config.layers
        return loss

    np.testing.assert_allclose(whole_loss(config, params, batch, targets), numpy_loss(params), rtol=1e-5)
    direction = jax.tree.map(lambda a: rng.standard_normal(a.shape), params)
    grads = jax.jit(jax.grad(lambda p: whole_loss(config, p, batch, targets)))(params)
    slope = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))

    def moved(step):
        return jax.tree.map(lambda a, d: np.float64(a) + step * d, params, direction)

    np.testing.assert_allclose(slope, (numpy_loss(moved(1e-6)) - numpy_loss(moved(-1e-6))) / 2e-6, rtol=2e-4)


def test_a_document_does_not_feel_its_neighbours():
    params = shaken(TINY)
    one = run(TINY, params, *pack([[[1, 2, 3, 4], [5, 6, 7]], [[8] * 9]], ROWS, SEQ))
    two = run(TINY, params, *pack([[[9, 9, 1, 1], [5, 6, 7]], [[2] * 9]], ROWS, SEQ))
    np.testing.assert_array_equal(one[0, 4:7], two[0, 4:7])


@pytest.mark.parametrize("name", ["dropless", "capacity"])
def test_nothing_but_padding_costs_nothing(name):
    params = shaken(VARIANTS[name])
    empty = pack([[], []], ROWS, SEQ)
    value, grads = jax.jit(jax.value_and_grad(lambda p: whole_loss(VARIANTS[name], p, empty, empty[0])))(params)
    assert value == 0
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


def test_remat_changes_nothing():
    params = shaken(TINY)
    batch = pack([[[1, 2, 3, 4], [5, 6, 7]], [[8] * 9]], ROWS, SEQ)
    np.testing.assert_allclose(run(TINY, params, *batch, remat=True), run(TINY, params, *batch), rtol=1e-6)


def test_bfloat16_routes_in_float32():
    params = shaken(TINY)
    batch = pack([[[1, 2, 3, 4], [5, 6, 7]], [[8] * 9]], ROWS, SEQ)
    logits = run(TINY, params, *batch, dtype=jnp.bfloat16)
    assert logits.dtype == jnp.float32
    assert np.isfinite(logits).all()
    choices, stats = choose(TINY, jnp.ones((1, 2, 5)), jnp.ones((1, 2), bool))
    assert choices.gates.dtype == stats.probability.dtype == jnp.float32


def stats_of(chosen, probability, tokens):
    return RouterStats(*(jnp.asarray(a, jnp.float32) for a in (chosen, probability, 0, tokens, 0)))


def test_balance_is_one_when_even_and_the_number_of_experts_at_worst():
    even = stats_of([4, 4, 4, 4], [2, 2, 2, 2], 8)
    worst = stats_of([8, 0, 0, 0], [8, 0, 0, 0], 8)
    assert balance_loss(even) == 1
    assert balance_loss(worst) == 4
    assert balance_loss(stats_of([0] * 4, [0] * 4, 0)) == 0
    assert z_loss(even._replace(z=jnp.float32(24))) == 3


def test_sums_of_micro_batches_give_the_loss_of_the_whole_batch():
    config = dataclasses.replace(TINY, balance_weight=0.7, z_weight=0.3)
    params = shaken(config)
    batch = pack([[[1, 2, 3, 4], [5, 6, 7]], [[8] * 9]], ROWS, SEQ)
    whole = forward_with_stats(config, params, *batch)[1]
    tokens, segments, positions = (np.split(a, ROWS) for a in batch)
    parts = [forward_with_stats(config, params, *row)[1] for row in zip(tokens, segments, positions, strict=True)]
    np.testing.assert_allclose(
        router_loss(config, jax.tree.map(jnp.add, *parts)), router_loss(config, whole), rtol=1e-6
    )
    assert router_loss(preset("tiny"), None) == 0


@pytest.mark.parametrize("experts", WAYS)
@pytest.mark.parametrize("strategy", ["tp2.ep4", "dp2.ep2.fsdp2"])
def test_sharded_loss_and_gradients_equal_those_of_one_device(experts, strategy):
    config = dataclasses.replace(preset("moe-tiny"), layers=2, hidden=16, ffn=8, vocab=32, head_dim=4)
    mesh = Strategy.parse(strategy).mesh(jax.devices()[:8])
    params = shaken(config)
    batch = pack([[[1, 2, 3, 4], [5, 6]], [[7] * 9], [[3, 1]], [[4, 4, 5]]] * 2, 8, SEQ)

    def constrain(x, logical_axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(logical_axes, ACTIVATION_RULES)))

    axes = jax.tree.map(lambda p: NamedSharding(mesh, spec(p.axes, PARAMETER_RULES)), parameter_specs(config))
    placed = jax.device_put(params, axes)
    rows = jax.device_put(batch, NamedSharding(mesh, spec(("batch", "seq"), ACTIVATION_RULES)))
    cut = Execution(constrain=constrain, experts=experts)
    sharded = jax.jit(jax.value_and_grad(lambda p, b: whole_loss(config, p, b, b[0], cut)))(placed, rows)
    alone = jax.jit(jax.value_and_grad(lambda p, b: whole_loss(config, p, b, b[0])))(params, batch)
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))


def test_shapes_of_the_experts():
    mlp = parameter_specs(preset("qwen3-235b-a22b"))["blocks"]["mlp"]
    assert mlp["gate"].shape == (94, 128, 4096, 1536)
    assert mlp["down"].axes == ("layers", "expert", "mlp", "embed")
    assert mlp["router"].axes == ("layers", "embed", None)
    assert count_parameters(preset("qwen3-235b-a22b")) == 235_093_634_560


def test_capacity_of_a_row():
    assert TINY.capacity(100) is None
    assert dataclasses.replace(TINY, capacity_factor=1.25).capacity(100) == 50
    assert dataclasses.replace(TINY, capacity_factor=1.01).capacity(7) == 3
    assert dataclasses.replace(TINY, capacity_factor=50.0).capacity(7) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [({"top_k": 6}, "at most 5"), ({"experts": 0}, "experts is 0"), ({"capacity_factor": 0.0}, "no room")],
)
def test_impossible_mixtures_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(TINY, **change)


def test_a_dropped_choice_has_no_gate_whatever_the_way():
    choices = Choices(jnp.array([[[0], [0]]]), jnp.array([[[1.0], [0.0]]]))
    kernels = ExpertKernels(jnp.ones((1, 2, 3)), jnp.ones((1, 3, 2)), None)
    for experts in WAYS:
        out = experts(jnp.ones((1, 2, 2)), choices, kernels, Execution())
        assert (np.asarray(out[0, 0]) != 0).all()
        assert (np.asarray(out[0, 1]) == 0).all()
