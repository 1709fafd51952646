"""Loss and gradients under every kind of strategy against one device that knows nothing of strategies."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runtime.one_step import assert_as_on_one_device, initial, mean, mesh_of, on_one_device, placed, stored_batch
from runtime.packed_rows import assert_close, random_batch

from dynajax.errors import LayoutError, StrategyError
from dynajax.meshes import Strategy
from dynajax.models import LlamaConfig, MoeConfig, mean_loss
from dynajax.runtime import ShardedModel, contiguous, loss_and_metrics, zigzag

DOCUMENTS = ((5, 3, 6), (13,), (), (1, 1, 9))
SMALL = LlamaConfig(layers=4, hidden=16, ffn=24, heads=4, kv_heads=2, head_dim=4, vocab=40, tied=True)
UNEVEN = LlamaConfig(layers=3, hidden=16, ffn=25, heads=6, kv_heads=6, head_dim=4, vocab=37)
GPT = replace(UNEVEN, kv_heads=3, gated=False, learned_positions=16, qk_norm=True)
MOE = MoeConfig(
    layers=3, hidden=16, ffn=12, heads=4, kv_heads=2, head_dim=4, vocab=40, experts=5, top_k=2, z_weight=0.1
)
LIMITED = replace(MOE, capacity_factor=1.0)


@pytest.mark.parametrize(
    ("strategy", "length", "order"),
    [("cp2", 16, contiguous), ("cp3", 14, zigzag), ("cp4", 15, zigzag)],
)
def test_context_parallel(strategy, length, order):
    cp = Strategy.parse(strategy).size("cp")
    assert_as_on_one_device(SMALL, strategy, DOCUMENTS, length, order(length, cp))


@pytest.mark.parametrize(
    ("strategy", "layers", "microbatches", "chunks"),
    [("pp2", 4, 4, 1), ("pp3", 4, 2, 1), ("pp4", 10, 4, 1), ("pp2", 10, 4, 2), ("pp3", 4, 1, 2)],
)
def test_pipeline_parallel(strategy, layers, microbatches, chunks):
    config = replace(SMALL, layers=layers)
    assert_as_on_one_device(config, strategy, DOCUMENTS, 16, microbatches=microbatches, chunks=chunks)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("dp4", {"microbatches": 2}),
        ("fsdp2.tp2", {}),
        ("pp2.tp2.dp2", {"microbatches": 2}),
        ("fsdp2.pp2.tp2", {"microbatches": 2, "remat": True}),
        ("pp2.dp2.cp2.tp2", {"microbatches": 2, "chunks": 2}),
        ("dp2.fsdp2.cp2.tp2", {}),
    ],
)
def test_products_of_axes(strategy, options):
    assert_as_on_one_device(SMALL, strategy, DOCUMENTS, 16, **options)


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (UNEVEN, "tp4"),  # 6 heads, 25 mlp, 37 vocab over 4
        (UNEVEN, "fsdp3"),  # 16 embed over 3
        (UNEVEN, "fsdp3.tp5"),
        (UNEVEN, "pp2.tp2"),  # 37 vocab over tp and pp
        (GPT, "tp4"),  # 3 kv_heads whole on 4 ranks, 6 heads padded to 8
        (SMALL, "tp8"),  # 2 kv_heads whole on 8 ranks, 4 heads padded to 8
        (SMALL, "cp2.tp4"),
    ],
)
def test_dims_that_no_axis_divides(config, strategy):
    assert_as_on_one_device(config, strategy, DOCUMENTS, 16)


@pytest.mark.parametrize(
    ("config", "strategy", "options"),
    [
        (MOE, "dp2", {}),
        (MOE, "ep2", {}),
        (MOE, "ep4", {}),
        (MOE, "ep2.tp2", {}),
        (MOE, "fsdp3.ep2", {}),
        (MOE, "pp2.ep2.dp2", {"microbatches": 2}),
        (MOE, "cp2.ep2.tp2", {}),
        (MOE, "dp2.tp2/ep4", {}),
        (LIMITED, "cp3", {}),
        (LIMITED, "pp2.cp2.ep2", {"microbatches": 2}),
    ],
)
def test_mixtures_of_experts(config, strategy, options):
    assert_as_on_one_device(config, strategy, DOCUMENTS, 16, **options)


def test_experts_with_a_capacity_do_drop_here():
    batch = random_batch(DOCUMENTS, 16, LIMITED.vocab)
    model, mesh = ShardedModel(LIMITED, Strategy.parse("cp3")), mesh_of("cp3")
    order = model.token_order(16)
    args = placed(model, mesh, initial(LIMITED)), stored_batch(model, mesh, batch, order)
    *_, stats = jax.jit(lambda p, b: loss_and_metrics(model, mesh, p, b, order))(*args)
    assert stats is not None
    assert stats.dropped.shape == (LIMITED.layers,)
    assert np.all(stats.dropped > 0)
    assert np.all(stats.tokens == batch.num_tokens)


@pytest.mark.parametrize("strategy", ["dp4", "cp2"])
def test_EMPTY_1_rows_without_anything_to_learn_add_nothing(strategy):
    batch = random_batch(DOCUMENTS, 16, SMALL.vocab)
    model, mesh = ShardedModel(SMALL, Strategy.parse(strategy)), mesh_of(strategy)
    order, params = model.token_order(16), placed(model, mesh, initial(SMALL))
    step = jax.jit(jax.value_and_grad(mean(model, mesh, order)))
    masked = replace(batch, weights=batch.weights * np.array([1, 0, 1, 1], np.float32)[:, None])
    fewer = replace(masked, segment_ids=masked.segment_ids * np.array([1, 0, 1, 1], np.int32)[:, None])
    assert_close(*(step(params, stored_batch(model, mesh, b, order)) for b in (masked, fewer)))
    nothing = replace(batch, weights=np.zeros_like(batch.weights))
    loss, grads = step(params, stored_batch(model, mesh, nothing, order))
    assert loss == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


def losses_of(config, strategy, seq, **options):
    """Sum of losses as a function of a batch under a strategy."""
    model, mesh = ShardedModel(config, Strategy.parse(strategy), **options), mesh_of(strategy)
    order, params = model.token_order(seq), placed(model, mesh, initial(config))
    run = jax.jit(lambda p, b: loss_and_metrics(model, mesh, p, b, order)[0])
    return lambda batch: np.asarray(run(params, stored_batch(model, mesh, batch, order)))


@pytest.mark.parametrize(
    ("strategy", "config"), [("dp1", SMALL), ("tp2", SMALL), ("cp2", SMALL), ("pp2.cp2", SMALL), ("ep2.tp2", MOE)]
)
def test_PACK_1_and_3_a_document_is_on_its_own_in_a_row(strategy, config):
    packed, other = (random_batch(((5, 3),), 8, config.vocab, seed) for seed in (0, 1))
    first = np.arange(8) < 5
    second_only = replace(packed, weights=np.where(first, 0, packed.weights))
    losses = losses_of(config, strategy, 8)
    changed = replace(second_only, tokens=np.where(first, other.tokens, packed.tokens))
    assert np.any(changed.tokens != packed.tokens)
    assert losses(second_only) == losses(changed)
    alone = jax.tree.map(lambda x: np.pad(x[:, 5:], ((0, 0), (0, 5))), packed)
    assert_close(losses(second_only), losses(alone))


def test_GQA_1_two_kv_heads_over_more_ranks_give_one_attention():
    config = LlamaConfig(layers=1, hidden=16, ffn=16, heads=64, kv_heads=2, head_dim=4, vocab=16)
    batch = random_batch(((8,), (3, 5)), 8, config.vocab)
    whole = losses_of(config, "tp1", 8)(batch)
    for tp in (2, 4, 8):
        assert_close(losses_of(config, f"tp{tp}", 8)(batch), whole, rtol=1e-6)
    assert ShardedModel(config, Strategy.parse("tp2")).replicated == {}
    assert "2 kv_heads are fewer than tp = 8" in ShardedModel(config, Strategy.parse("tp8")).replicated["kv_heads"]


@pytest.mark.parametrize("strategy", ["pp2", "pp3"])
def test_TIED_1_one_table_is_read_at_both_ends_and_held_once(strategy):
    config = LlamaConfig(layers=6, hidden=8, ffn=16, heads=2, kv_heads=2, head_dim=4, vocab=32, tied=True)
    assert_as_on_one_device(config, strategy, DOCUMENTS, 16)
    model, mesh = ShardedModel(config, Strategy.parse(strategy)), mesh_of(strategy)
    params = placed(model, mesh, initial(config))
    assert list(params["head"]) == ["norm"]
    held = [shard.data.size for shard in params["embed"]["tokens"].addressable_shards]
    assert sum(held) == model.storage["embed"]["tokens"].shape[0] * 8
    assert len(set(held)) == 1


def test_steps_of_an_optimizer_keep_padding_zero_and_follow_one_device():
    model, mesh = ShardedModel(UNEVEN, Strategy.parse("fsdp3.tp4")), mesh_of("fsdp3.tp4")
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))
    batch, order = random_batch(DOCUMENTS, 16, UNEVEN.vocab), model.token_order(16)
    stored = stored_batch(model, mesh, batch, order)
    one = ShardedModel(UNEVEN, Strategy.parse("dp1"))

    def train(loss, params, batch):
        @jax.jit
        def step(params, state):
            updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        state = jax.jit(optimizer.init)(params)
        for _ in range(3):
            params, state = step(params, state)
        return params, state

    params, state = train(mean(model, mesh, order), placed(model, mesh, initial(UNEVEN)), stored)
    want, _ = train(mean(one, mesh_of("dp1"), order), initial(UNEVEN), batch)
    params, state = jax.tree.map(np.asarray, (params, state))
    logical = jax.tree.map(lambda storage, p: storage.to_logical(p), model.storage, params)
    assert_close(logical, want, rtol=1e-4)  # Adam divides by roots of small sums: errors grow in a step
    moments = state[1][0]
    for tree in (params, moments.mu, moments.nu):
        for storage, leaf in zip(jax.tree.leaves(model.storage), jax.tree.leaves(tree), strict=True):
            assert np.array_equal(storage.to_storage(storage.to_logical(leaf)), leaf)


def test_fsdp_holds_no_more_than_a_layer_whole():
    def bytes_needed(layers):
        config = LlamaConfig(layers=layers, hidden=64, ffn=128, heads=4, kv_heads=4, head_dim=16, vocab=16)
        model, mesh = ShardedModel(config, Strategy.parse("fsdp4")), mesh_of("fsdp4")
        order, batch = model.token_order(4), random_batch(((4,),) * 4, 4, 16)
        args = placed(model, mesh, initial(config)), stored_batch(model, mesh, batch, order)
        compiled = jax.jit(jax.grad(mean(model, mesh, order))).lower(*args).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    layer = (4 * 64 * 64 + 3 * 64 * 128) * 4
    assert bytes_needed(6) - bytes_needed(2) < 4 * layer / 2


def test_bfloat16_is_near_float32():
    loss, grads = on_one_device(MOE, DOCUMENTS, 16)
    model = ShardedModel(MOE, Strategy.parse("pp2.ep2.tp2"), microbatches=2, dtype=jnp.bfloat16)
    mesh, order = mesh_of("pp2.ep2.tp2"), model.token_order(16)
    batch = stored_batch(model, mesh, random_batch(DOCUMENTS, 16, MOE.vocab), order)
    got, got_grads = jax.jit(jax.value_and_grad(mean(model, mesh, order)))(placed(model, mesh, initial(MOE)), batch)
    assert abs(got - loss) < 2e-2 * loss
    assert abs(optax.tree.norm(got_grads) / optax.tree.norm(grads) - 1) < 0.1


def test_bad_input_is_refused_with_the_remedy():
    model, mesh = ShardedModel(SMALL, Strategy.parse("dp2.cp3"), microbatches=2), mesh_of("dp2.cp3")
    order, batch = model.token_order(16), random_batch(DOCUMENTS, 16, SMALL.vocab)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), model.storage)

    def run(params, batch):
        return jax.eval_shape(lambda p, b: loss_and_metrics(model, mesh, p, b, order), params, batch)

    with pytest.raises(LayoutError, match=r"3 rows do not divide .* use pad_rows\(batch, 4\)"):
        run(params, jax.tree.map(lambda x: x[:3], batch))
    with pytest.raises(LayoutError, match="rows of 16 tokens over cp = 3 are not in an order of 18 places"):
        run(params, batch)
    with pytest.raises(LayoutError, match="embed/tokens has shape"):
        run(params | {"embed": {"tokens": jnp.zeros((1, 1))}}, order.arrange(batch))
    with pytest.raises(StrategyError, match="the model is dense; drop the slash"):
        ShardedModel(SMALL, Strategy.parse("dp2/ep2"))
    with pytest.raises(StrategyError, match="0 micro-batches"):
        ShardedModel(SMALL, Strategy.parse("dp2"), microbatches=0)
    assert mean_loss(jnp.zeros(()), jnp.zeros(())) == 0
