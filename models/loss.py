"""Next-token cross entropy as a sum and a weight, so that parts of a batch add up.

Sums over micro-batches, devices and pipelines are divided once, by the weight of the whole batch:
the loss then does not depend on how the batch was cut.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def token_loss(logits: ArrayLike, targets: ArrayLike, weights: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Weighted cross entropy.

    Args:
        logits: (..., vocab).
        targets: (...) int32, the id that should follow; anything where the weight is 0.
        weights: (...), 0 for places that do not count.

    Returns:
        The sum of ``weight * -log p(target)`` in nats and the sum of weights, float32 scalars.
    """
    logits, weights = jnp.asarray(logits, jnp.float32), jnp.asarray(weights, jnp.float32)
    # A comparison with an iota, not a gather: it stays local where the vocabulary is cut over devices.
    hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == jnp.asarray(targets)[..., None]
    target_logit = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - target_logit
    return jnp.sum(loss * weights), jnp.sum(weights)


def mean_loss(loss_sum: ArrayLike, weight_sum: ArrayLike) -> jax.Array:
    """``loss_sum / weight_sum``; 0, with zero gradients, where nothing counted."""
    counted = jnp.asarray(weight_sum) > 0
    return jnp.where(counted, loss_sum, 0.0) / jnp.where(counted, weight_sum, 1.0)
