"""Strategies of every kind for a dense model and a mixture of experts whose sizes few axes divide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train.small_runs import data

from dynajax import models
from dynajax.models import LlamaConfig, MoeConfig

DENSE = LlamaConfig(layers=3, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=4, vocab=257, tied=True)
MOE = MoeConfig(
    layers=3, hidden=12, ffn=10, heads=4, kv_heads=2, head_dim=4, vocab=257, experts=5, top_k=2, z_weight=0.1
)

DENSE_STRATEGIES = [
    *("dp8", "fsdp5", "tp2", "tp3", "pp2", "cp3"),  # every axis alone
    *("dp2.tp4@7-0", "fsdp2.tp3", "pp3.tp2", "pp2.cp2", "dp5.cp3", "tp7"),  # pairs, and kv_heads fewer than tp
    *("pp2.cp2.tp2", "dp2.fsdp2.pp2", "dp2.cp2.tp3"),  # triples
    *("cp2.tp4.pp2", "tp2.cp4"),  # 16 devices to 8
]
MOE_STRATEGIES = [
    *("ep2", "ep4", "dp2.ep4", "tp2.ep4", "pp2.ep2.dp2"),  # 5 experts over 2 and 4
    *("fsdp3.ep2", "cp2.ep2.tp2", "dp4.tp2/ep2.tp2", "tp3", "pp3.dp2"),
    *("dp4.tp4/ep8", "dp7"),
]


def optimizer() -> optax.GradientTransformation:
    """Clipped, with momentum and decay: every kind of state, and no division by roots of tiny sums."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.trace(0.9), optax.sgd(0.1))


def train_on_one_device(
    model: LlamaConfig, optimizer: optax.GradientTransformation, steps: int
) -> tuple[list[float], list[Any]]:
    """Losses of each step and parameters after it: plain JAX, no shardings, every expert run on every token."""
    batches, run = data(), models.Execution(experts=models.dense_experts)
    params = models.init(model, jax.random.split(jax.random.key(0))[0])
    opt_state, losses, after = optimizer.init(params), [], []

    def loss(params: Any, batch: Any) -> jax.Array:
        at = batch.tokens, batch.segment_ids, batch.positions
        logits, stats = models.forward_with_stats(model, params, *at, run)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
        return -(chosen * batch.weights).sum() / batch.weights.sum() + models.router_loss(model, stats)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for number in range(steps):
        params, opt_state, value = step(params, opt_state, jax.tree.map(jnp.asarray, batches[number]))
        losses.append(float(value))
        after.append(jax.tree.map(np.asarray, params))
    return losses, after
