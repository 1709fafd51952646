"""The parts of a decoder block, with the layers of the whole model stacked in each parameter.

A part is built once for all layers: its parameters have a leading dim "layers". It is called on
one layer at a time, after a scan has taken that layer's slice; then the leading dim is gone.

Letters in the products: b batch, s seq, e embed, h heads, k kv_heads, d head_dim, m mlp, v vocab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dynajax.errors import ModelError
from dynajax.models.config import LlamaConfig
from dynajax.models.execution import Execution
from dynajax.models.experts import activate

HIDDEN = ("batch", "seq", "embed")
EMBEDDING_STD = 0.02


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float) -> nnx.Param:
    """A float32 parameter drawn from a normal distribution, with its logical axes as metadata.

    The metadata key is our own: flax's sharding keys would place the array on a mesh while it is made.
    """
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), logical_axes=axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x`` over its root mean square along the last dim, computed in float32, in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root mean square norm with a scale (Zhang and Sennrich, 2019)."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str | None, ...], eps: float):
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32), logical_axes=axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norm ``x`` along its last dim."""
        return rms_norm(x, self.scale[...], self.eps)


Rotary = tuple[jax.Array, jax.Array]
"""Cosines and sines of the rotary angles, each (batch, seq, 1, head_dim // 2) float32."""


def rotary_table(config: LlamaConfig, positions: jax.Array) -> Rotary:
    """The angles ``position * theta ** (-2 i / head_dim)`` (Su et al., 2021)."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions.astype(jnp.float32)[:, :, None, None] * config.rope_theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotary: Rotary) -> jax.Array:
    """Turn each pair (i, i + head_dim / 2) of ``x`` (batch, seq, heads, head_dim) by its angle."""
    cos, sin = rotary
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Projections around the attention function; heads and head_dim stay apart in every kernel."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        n, e, d = config.layers, config.hidden, config.head_dim
        self.q = normal(rngs, (n, e, config.heads, d), ("layers", "embed", "heads", "head_dim"), e**-0.5)
        self.k = normal(rngs, (n, e, config.kv_heads, d), ("layers", "embed", "kv_heads", "head_dim"), e**-0.5)
        self.v = normal(rngs, (n, e, config.kv_heads, d), ("layers", "embed", "kv_heads", "head_dim"), e**-0.5)
        std = (config.heads * d * 2 * n) ** -0.5
        self.o = normal(rngs, (n, config.heads, d, e), ("layers", "heads", "head_dim", "embed"), std)
        if config.qk_norm:
            self.q_norm = RMSNorm((n, d), ("layers", "head_dim"), config.norm_eps)
            self.k_norm = RMSNorm((n, d), ("layers", "head_dim"), config.norm_eps)
        self.qk_norm = config.qk_norm

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array, positions: jax.Array, rotary: Rotary | None, run: Execution
    ) -> jax.Array:
        """Attend within each document of ``x`` (batch, seq, embed)."""
        q = run.constrain(run.einsum("bse,ehd->bshd", x, self.q[...]), ("batch", "seq", "heads", "head_dim"))
        k = run.constrain(run.einsum("bse,ekd->bskd", x, self.k[...]), ("batch", "seq", "kv_heads", "head_dim"))
        v = run.constrain(run.einsum("bse,ekd->bskd", x, self.v[...]), ("batch", "seq", "kv_heads", "head_dim"))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        out = run.attention(q, k, v, segment_ids, positions)
        out = run.constrain(out, ("batch", "seq", "heads", "head_dim"))
        return run.constrain(run.einsum("bshd,hde->bse", out, self.o[...]), HIDDEN)


class Mlp(nnx.Module):
    """SwiGLU (Shazeer, 2020), or GELU between two kernels where the config has no gate."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        n, e, m = config.layers, config.hidden, config.ffn
        self.up = normal(rngs, (n, e, m), ("layers", "embed", "mlp"), e**-0.5)
        self.down = normal(rngs, (n, m, e), ("layers", "mlp", "embed"), (m * 2 * n) ** -0.5)
        if config.gated:
            self.gate = normal(rngs, (n, e, m), ("layers", "embed", "mlp"), e**-0.5)
        self.gated = config.gated

    def __call__(self, x: jax.Array, run: Execution) -> jax.Array:
        """Map ``x`` (batch, seq, embed) token by token."""
        up = run.constrain(run.einsum("bse,em->bsm", x, self.up[...]), ("batch", "seq", "mlp"))
        gate = None
        if self.gated:
            gate = run.constrain(run.einsum("bse,em->bsm", x, self.gate[...]), ("batch", "seq", "mlp"))
        return run.constrain(run.einsum("bsm,me->bse", activate(up, gate), self.down[...]), HIDDEN)


class Embedding(nnx.Module):
    """From token ids to vectors, plus a learned table of positions where the config has one."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.tokens = normal(rngs, (config.vocab, config.hidden), ("vocab", "embed"), EMBEDDING_STD)
        if config.learned_positions:
            shape = (config.learned_positions, config.hidden)
            self.positions = normal(rngs, shape, (None, "embed"), EMBEDDING_STD)
        self.learned_positions = config.learned_positions

    def __call__(self, tokens: jax.Array, positions: jax.Array, run: Execution) -> jax.Array:
        """Embed (batch, seq) ids as (batch, seq, embed); an id or a position past its table gives NaN."""
        x = jnp.take(self.tokens[...], tokens, axis=0, mode="fill", fill_value=jnp.nan)
        if self.learned_positions:
            x = x + jnp.take(self.positions[...], positions, axis=0, mode="fill", fill_value=jnp.nan)
        return run.constrain(x.astype(run.dtype), HIDDEN)


class Head(nnx.Module):
    """Final norm and the projection to logits, with a kernel of its own unless it is tied."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.norm = RMSNorm((config.hidden,), ("embed",), config.norm_eps)
        if not config.tied:
            self.kernel = normal(rngs, (config.hidden, config.vocab), ("embed", "vocab"), EMBEDDING_STD)
        self.tied = config.tied

    def __call__(self, x: jax.Array, embedding: jax.Array | None, run: Execution) -> jax.Array:
        """Float32 logits (batch, seq, vocab) of ``x``; ``embedding`` (vocab, embed) is read if tied."""
        kernel = embedding if self.tied else self.kernel[...]
        if kernel is None:
            raise ModelError("a tied head got no embedding; pass params['embed'] along with params['head']")
        equation = "bse,ve->bsv" if self.tied else "bse,ev->bsv"
        logits = run.einsum(equation, self.norm(x), kernel, out_dtype=jnp.float32)
        return run.constrain(logits, ("batch", "seq", "vocab"))
