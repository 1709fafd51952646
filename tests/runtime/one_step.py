"""Loss and gradients of a global batch: on one device with the plain model, and under a strategy with the runtime."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from dense_experts import dense_experts
from jax.sharding import NamedSharding, PartitionSpec
from runtime.packed_rows import assert_close, random_batch

from dynajax.data import pad_rows
from dynajax.meshes import Strategy
from dynajax.models import (
    Execution,
    forward_with_stats,
    init,
    mean_loss,
    router_loss,
    token_loss,
)
from dynajax.runtime import ShardedModel, loss_and_metrics


def mesh_of(strategy):
    strategy = Strategy.parse(strategy)
    return strategy.mesh(jax.devices()[: strategy.num_devices])


@cache
def initial(config):
    """Parameters of a model, as numpy arrays."""
    return jax.tree.map(np.asarray, init(config, jax.random.key(0)))


@cache
def on_one_device(config, documents, seq):
    """Mean loss of a random batch with these documents, and its gradients."""
    batch = random_batch(documents, seq, config.vocab)

    def loss(params):
        run = Execution(experts=dense_experts)
        logits, stats = forward_with_stats(config, params, batch.tokens, batch.segment_ids, batch.positions, run)
        return mean_loss(*token_loss(logits, batch.targets, batch.weights)) + router_loss(config, stats)

    return jax.jit(jax.value_and_grad(loss))(initial(config))


def placed(model, mesh, params):
    """Parameters as they are stored, on the devices."""
    return jax.tree.map(
        lambda storage, leaf: jax.device_put(storage.to_storage(leaf), NamedSharding(mesh, storage.spec)),
        model.storage,
        params,
    )


def stored_batch(model, mesh, batch, order):
    """A batch padded and arranged as it should be, on the devices."""
    rows = NamedSharding(mesh, PartitionSpec(("dp", "fsdp", "ep"), "cp"))
    return jax.device_put(order.arrange(pad_rows(batch, model.row_multiple)), rows)


def mean(model, mesh, order) -> Any:
    """The mean loss as a function of stored parameters and stored batch."""

    def loss(params, batch):
        loss_sum, weight_sum, stats = loss_and_metrics(model, mesh, params, batch, order)
        return mean_loss(loss_sum, weight_sum) + router_loss(model.config, stats)

    return loss


def assert_as_on_one_device(config, strategy, documents, seq, order=None, rtol=1e-5, **options):
    """Loss, gradients and their norm are those of one device, and gradients of padding are zeros."""
    model, mesh = ShardedModel(config, Strategy.parse(strategy), **options), mesh_of(strategy)
    order = order or model.token_order(seq)
    batch = stored_batch(model, mesh, random_batch(documents, seq, config.vocab), order)
    params = placed(model, mesh, initial(config))
    layout = jax.tree.map(lambda leaf: leaf.sharding, params)
    step = jax.jit(jax.value_and_grad(mean(model, mesh, order)), out_shardings=(None, layout))
    loss, grads = step(params, batch)
    want_loss, want_grads = on_one_device(config, documents, seq)
    grads = jax.tree.map(np.asarray, grads)
    logical = jax.tree.map(lambda storage, g: storage.to_logical(g), model.storage, grads)
    assert_close((loss, logical), (want_loss, want_grads), rtol)
    assert_close(optax.tree.norm(grads), optax.tree.norm(want_grads), rtol)
    for storage, stored, grad in zip(*map(jax.tree.leaves, (model.storage, grads, logical)), strict=True):
        assert np.array_equal(storage.to_storage(grad), stored), "the gradient of padding is not zero"
