import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_decoder import cross_entropy, decode
from packing import pack

from dynajax.errors import ModelError
from dynajax.models import (
    Execution,
    LlamaConfig,
    embed,
    forward,
    init,
    mean_loss,
    packed_attention,
    parameter_specs,
    preset,
    project,
    run_blocks,
    token_loss,
)

TINY = LlamaConfig(layers=2, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=19)
VARIANTS = {
    "gqa": TINY,
    "tied": dataclasses.replace(TINY, tied=True),
    "mha": dataclasses.replace(TINY, kv_heads=4),
    "one kv head": dataclasses.replace(TINY, kv_heads=1),
    "qk norm": dataclasses.replace(TINY, qk_norm=True, rope_theta=50.0),
    "gpt3": dataclasses.replace(TINY, gated=False, learned_positions=16, head_dim=5, tied=True),
    "deep": dataclasses.replace(TINY, layers=5, norm_eps=1e-2),
}
ROWS, SEQ = 2, 16


run = jax.jit(forward, static_argnames=("config", "attention", "constrain", "dtype", "remat"))


def shaken(config, seed=0):
    """Parameters of which none is special: the ones of fresh norms would hide a norm that is left out."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        return np.float32(0.3 * rng.standard_normal(leaf.shape) + (path[-1].key == "scale"))

    return jax.tree.map_with_path(draw, parameter_specs(config))


def draw_documents(rng, lengths, vocab=TINY.vocab):
    return [[rng.integers(0, vocab, length).tolist() for length in row] for row in lengths]


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_packed_forward_equals_each_document_alone_in_numpy(config):
    params = shaken(config)
    documents = draw_documents(np.random.default_rng(1), [(5, 1, 7), (9, 4)])
    logits = np.asarray(run(config, params, *pack(documents, ROWS, SEQ)))
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    for row, in_row in enumerate(documents):
        start = 0
        for document in in_row:
            expected = decode(config, params, document)
            np.testing.assert_allclose(logits[row, start : start + len(document)], expected, rtol=2e-5, atol=2e-5)
            start += len(document)


@pytest.mark.parametrize("name", ["gqa", "gpt3", "qk norm"])
def test_gradient_is_the_slope_of_the_numpy_loss(name):
    config = VARIANTS[name]
    params = shaken(config)
    documents = draw_documents(np.random.default_rng(2), [(6, 3), (4,)])
    tokens, segments, positions = pack(documents, ROWS, SEQ)
    targets = np.roll(tokens, -1, axis=1)
    weights = (segments != 0) & (np.roll(segments, -1, axis=1) == segments)

    def loss(params):
        return token_loss(forward(config, params, tokens, segments, positions), targets, weights)[0]

    def numpy_loss(params):
        ends = (d for row in documents for d in row)
        return sum(cross_entropy(decode(config, params, d)[:-1], np.array(d[1:])) for d in ends)

    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda a: rng.standard_normal(a.shape), params)
    slope = sum(
        np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (jax.jit(jax.grad(loss))(params), direction)), strict=True)
    )

    def moved(step):
        return jax.tree.map(lambda a, d: np.float64(a) + step * d, params, direction)

    expected = (numpy_loss(moved(1e-6)) - numpy_loss(moved(-1e-6))) / 2e-6
    np.testing.assert_allclose(slope, expected, rtol=2e-4)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(cuts=st.lists(st.integers(1, SEQ), max_size=5, unique=True), seed=st.integers(0, 9))
def test_a_document_does_not_feel_its_neighbours(cuts, seed):
    params = shaken(TINY)
    rng = np.random.default_rng(seed)
    ends = sorted(cuts) or [SEQ]
    lengths = np.diff([0, *ends]).tolist()
    documents = draw_documents(rng, [lengths, [SEQ]])
    kept = int(rng.integers(len(lengths)))
    others = draw_documents(rng, [lengths, [SEQ]])
    others[0][kept] = documents[0][kept]
    place = slice(sum(lengths[:kept]), sum(lengths[: kept + 1]))
    before = np.asarray(run(TINY, params, *pack(documents, ROWS, SEQ)))[0, place]
    after = np.asarray(run(TINY, params, *pack(others, ROWS, SEQ)))[0, place]
    np.testing.assert_array_equal(before, after)


def test_what_lies_on_padding_does_not_matter():
    params = shaken(TINY)
    tokens, segments, positions = pack([[[1, 2, 3]], [[4] * 5]], ROWS, SEQ)
    noisy = np.where(segments == 0, 7, tokens)
    one, other = run(TINY, params, tokens, segments, positions), run(TINY, params, noisy, segments, positions)
    np.testing.assert_array_equal(np.asarray(one)[segments != 0], np.asarray(other)[segments != 0])


def test_the_order_in_which_a_row_is_stored_does_not_matter():
    params = shaken(TINY)
    batch = pack(draw_documents(np.random.default_rng(4), [(5, 6), (10, 2)]), ROWS, SEQ)
    order = np.random.default_rng(5).permutation(SEQ)
    expected = np.asarray(run(TINY, params, *batch))[:, order]
    np.testing.assert_allclose(run(TINY, params, *(x[:, order] for x in batch)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_nothing_but_padding_gives_finite_logits_and_zero_gradients(remat):
    params = shaken(TINY)
    empty = pack([[], []], ROWS, SEQ)

    def loss(params):
        logits = forward(TINY, params, *empty, remat=remat)
        return mean_loss(*token_loss(logits, empty[0], empty[1])), logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert value == 0
    assert np.isfinite(logits).all()
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


def test_padding_beside_documents_gives_finite_gradients_even_where_padding_counts():
    params = shaken(TINY)
    batch = pack([[[1, 2, 3]], []], ROWS, SEQ)

    def loss(params):
        return token_loss(run(TINY, params, *batch), batch[0], np.ones((ROWS, SEQ)))[0]

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_the_scan_equals_the_layers_one_by_one():
    config = VARIANTS["deep"]
    params = shaken(config)
    documents = draw_documents(np.random.default_rng(6), [(8, 8), (3, 9)])
    tokens, segments, positions = map(jnp.asarray, pack(documents, ROWS, SEQ))
    execution = Execution()
    stage = jax.jit(lambda blocks, x: run_blocks(config, blocks, x, segments, positions, execution))
    x = embed(config, params["embed"], tokens, positions, execution)
    for lo, hi in ((0, 1), (1, 2), (2, 4), (4, 5)):
        x, _ = stage(jax.tree.map(lambda a, lo=lo, hi=hi: a[lo:hi], params["blocks"]), x)
    by_stage = project(config, params["head"], x, None, execution)
    np.testing.assert_allclose(by_stage, run(config, params, tokens, segments, positions), rtol=1e-5, atol=1e-5)


def test_shared_kv_heads_equal_repeated_ones():
    params = shaken(TINY)
    repeated = dict(params, blocks=dict(params["blocks"], attention=dict(params["blocks"]["attention"])))
    for name in "kv":
        repeated["blocks"]["attention"][name] = np.repeat(params["blocks"]["attention"][name], TINY.group, axis=2)
    batch = pack(draw_documents(np.random.default_rng(7), [(8, 8), (16,)]), ROWS, SEQ)
    np.testing.assert_allclose(run(VARIANTS["mha"], repeated, *batch), run(TINY, params, *batch), rtol=1e-5, atol=1e-5)


def test_a_tied_head_equals_an_untied_one_with_the_transposed_embedding():
    tied = VARIANTS["tied"]
    params = shaken(tied)
    untied = dict(params, head=dict(params["head"], kernel=params["embed"]["tokens"].T))
    batch = pack(draw_documents(np.random.default_rng(8), [(8, 8), (16,)]), ROWS, SEQ)
    np.testing.assert_allclose(run(TINY, untied, *batch), run(tied, params, *batch), rtol=1e-6, atol=1e-6)


def test_a_tied_head_without_the_embedding_is_refused():
    params = shaken(VARIANTS["tied"])
    with pytest.raises(ModelError, match="embed"):
        project(VARIANTS["tied"], params["head"], jnp.ones((1, 1, TINY.hidden)), None, Execution())


def test_remat_changes_no_gradient():
    params = shaken(TINY)
    batch = pack(draw_documents(np.random.default_rng(9), [(8, 8), (16,)]), ROWS, SEQ)

    def loss(params, remat):
        return token_loss(forward(TINY, params, *batch, remat=remat), batch[0], batch[1] != 0)[0]

    kept, again = (jax.jit(jax.grad(loss), static_argnums=1)(params, remat) for remat in (False, True))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert "remat" in str(jax.make_jaxpr(lambda p: loss(p, True))(params))


def test_bfloat16_is_near_and_keeps_float32_logits():
    params = shaken(TINY)
    batch = pack(draw_documents(np.random.default_rng(10), [(8, 8), (16,)]), ROWS, SEQ)
    exact, rough = run(TINY, params, *batch), run(TINY, params, *batch, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.float32
    assert 0 < np.abs(exact - rough).max() < 0.03 * np.abs(exact).max()


def test_an_id_or_a_position_outside_its_table_is_loud():
    params = shaken(VARIANTS["gpt3"])
    tokens, segments, positions = pack([[[1, 2]], [[3]]], ROWS, SEQ)
    for broken in ((tokens + TINY.vocab, segments, positions), (tokens, segments, positions + 16)):
        assert np.isnan(run(VARIANTS["gpt3"], params, *broken)).all()


def test_attention_and_constrain_are_the_callers():
    params = shaken(TINY)
    batch = pack(draw_documents(np.random.default_rng(11), [(8, 8), (16,)]), ROWS, SEQ)
    seen = set()

    def constrain(x, logical_axes):
        assert x.ndim == len(logical_axes)
        seen.add((x.shape, tuple(logical_axes)))
        return x

    def doubled(q, k, v, segment_ids, positions):
        return packed_attention(q, k, 2 * v, segment_ids, positions)

    out = forward(TINY, params, *batch, constrain=constrain, attention=doubled)
    attention = dict(params["blocks"]["attention"], o=2 * params["blocks"]["attention"]["o"])
    stronger = dict(params, blocks=dict(params["blocks"], attention=attention))
    np.testing.assert_allclose(out, run(TINY, stronger, *batch), rtol=1e-5, atol=1e-5)
    assert seen == {
        ((ROWS, SEQ, 12), ("batch", "seq", "embed")),
        ((ROWS, SEQ, 4, 6), ("batch", "seq", "heads", "head_dim")),
        ((ROWS, SEQ, 2, 6), ("batch", "seq", "kv_heads", "head_dim")),
        ((ROWS, SEQ, 20), ("batch", "seq", "mlp")),
        ((ROWS, SEQ, 19), ("batch", "seq", "vocab")),
    }


def test_a_fresh_model_guesses_nearly_uniformly():
    config = preset("tiny")
    tokens = np.arange(64, dtype=np.int32).reshape(1, 64)
    logits = run(config, init(config, jax.random.key(0)), tokens, np.ones_like(tokens), tokens)
    loss = mean_loss(*token_loss(logits, tokens, np.ones((1, 64))))
    assert abs(float(loss) - np.log(config.vocab)) < 0.3
