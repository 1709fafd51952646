"""A mixture of experts in place of the MLP, and the losses that keep its router in order.

A router scores every expert for every token in float32, the best ``top_k`` are run, and their outputs are
added up with the scores as gates (Shazeer et al., 2017; Fedus et al., 2021; Qwen3, arXiv:2505.09388).

What the losses need is kept as sums over tokens. Sums of micro-batches and devices add up to those of the
global batch, so that the load-balance loss does not depend on how the batch was cut.

The choice of experts is not continuous. Where two scores agree to the last bits, another order of
summation may choose the other expert; this is the one place where a strategy can show in the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dynajax.models.config import LlamaConfig, MoeConfig
from dynajax.models.execution import Execution
from dynajax.models.experts import Choices, ExpertKernels
from dynajax.models.layers import HIDDEN, normal


class RouterStats(NamedTuple):
    """Sums over the tokens that are not padding; with a leading dim "layers" as they come from the model.

    Attributes:
        chosen: (experts,) how often each expert was chosen, dropped choices included.
        probability: (experts,) sums of the router's probabilities.
        z: sum of the squared log of the router's normaliser.
        tokens: number of tokens.
        dropped: choices beyond the capacity of their expert.
    """

    chosen: jax.Array
    probability: jax.Array
    z: jax.Array
    tokens: jax.Array
    dropped: jax.Array


def balance_loss(stats: RouterStats) -> jax.Array:
    """Load-balance loss of each layer, 1 where all experts are chosen equally often.

    Experts times the sum over experts of (share of the choices) times (mean probability), as in Fedus et
    al., 2021, equation 4, with all choices of a token counted. 0 without tokens.
    """
    choices = jnp.maximum(jnp.sum(stats.chosen, axis=-1, keepdims=True), 1.0)
    tokens = jnp.maximum(stats.tokens, 1.0)[..., None]
    return stats.chosen.shape[-1] * jnp.sum(stats.chosen / choices * (stats.probability / tokens), axis=-1)


def z_loss(stats: RouterStats) -> jax.Array:
    """Mean squared log normaliser of each layer's router (Zoph et al., ST-MoE, 2022, equation 5)."""
    return stats.z / jnp.maximum(stats.tokens, 1.0)


def router_loss(config: LlamaConfig, stats: RouterStats | None) -> jax.Array:
    """What to add to the mean token loss: both router losses with their weights, as means over layers.

    Args:
        config: shape of the model; 0 for a dense one.
        stats: summed over the whole global batch.
    """
    if not isinstance(config, MoeConfig) or stats is None:
        return jnp.zeros((), jnp.float32)
    return config.balance_weight * jnp.mean(balance_loss(stats)) + config.z_weight * jnp.mean(z_loss(stats))


def choose(config: MoeConfig, logits: jax.Array, counted: jax.Array) -> tuple[Choices, RouterStats]:
    """Turn the scores of a router into choices.

    Among the choices of one expert in a row, earlier tokens go first, so that no token is dropped for the
    sake of a later one.

    Args:
        config: shape of the model.
        logits: (batch, seq, experts) float32.
        counted: (batch, seq) bool, False for padding, which is sent to no expert.
    """
    batch, seq, count = logits.shape
    probabilities = jax.nn.softmax(logits, axis=-1)
    gates, experts = jax.lax.top_k(probabilities, config.top_k)
    if config.normalize_top_k:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    hit = (experts[..., None] == jnp.arange(count)) & counted[..., None, None]
    in_turn = hit.reshape(batch, seq * config.top_k, count).astype(jnp.int32)
    before = (jnp.cumsum(in_turn, axis=1) - in_turn).reshape(hit.shape)
    limit = config.capacity(seq)
    late = jnp.sum(jnp.where(hit, before, 0), axis=-1) >= (seq if limit is None else limit)
    gates = jnp.where(counted[..., None] & ~late, gates, 0.0)
    weight = counted.astype(jnp.float32)
    stats = RouterStats(
        chosen=jnp.sum(hit, axis=(0, 1, 2), dtype=jnp.float32),
        probability=jnp.einsum("bsx,bs->x", probabilities, weight, precision="highest"),
        z=jnp.sum(weight * jax.nn.logsumexp(logits, axis=-1) ** 2),
        tokens=jnp.sum(weight),
        dropped=jnp.sum(late & counted[..., None], dtype=jnp.float32),
    )
    return Choices(experts.astype(jnp.int32), gates), stats


class MoeMlp(nnx.Module):
    """Router and experts of all layers, stacked; called on one layer's slice."""

    def __init__(self, config: MoeConfig, rngs: nnx.Rngs):
        n, x, e, m = config.layers, config.experts, config.hidden, config.ffn
        # Each device scores all experts, so that the router's expert dim is never cut.
        # Scores start well apart: with a router near zero a change in the last bits would often choose another expert.
        self.router = normal(rngs, (n, e, x), ("layers", "embed", None), e**-0.5)
        self.up = normal(rngs, (n, x, e, m), ("layers", "expert", "embed", "mlp"), e**-0.5)
        self.down = normal(rngs, (n, x, m, e), ("layers", "expert", "mlp", "embed"), (m * 2 * n) ** -0.5)
        if config.gated:
            self.gate = normal(rngs, (n, x, e, m), ("layers", "expert", "embed", "mlp"), e**-0.5)
        self.config = config

    def __call__(self, x: jax.Array, segment_ids: jax.Array, run: Execution) -> tuple[jax.Array, RouterStats]:
        """Map ``x`` (batch, seq, embed) token by token; padding, segment 0, gives zeros."""
        logits = jnp.einsum("bse,ex->bsx", x.astype(jnp.float32), self.router[...], precision="highest")
        logits = run.constrain(logits, ("batch", "seq", None))
        choices, stats = choose(self.config, logits, segment_ids != 0)
        kernels = ExpertKernels(self.up[...], self.down[...], self.gate[...] if self.config.gated else None)
        return run.constrain(run.experts(x, choices, kernels, run), HIDDEN), stats
