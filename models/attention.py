"""Causal attention over packed documents, written plainly: the one to compare others with.

A row holds several documents end to end. A token sees the tokens of its own document at its own
position or before, and nothing else. What counts is the position, not the place in the row, so the
result does not depend on the order in which the tokens of a row are stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30


def attention_mask(
    q_segments: jax.Array, k_segments: jax.Array, q_positions: jax.Array, k_positions: jax.Array
) -> jax.Array:
    """Which query sees which key: the same non-zero segment, and not a later position.

    Args:
        q_segments: (batch, queries) int32, 0 for padding.
        k_segments: (batch, keys) int32.
        q_positions: (batch, queries) int32, restarting with each document.
        k_positions: (batch, keys) int32.

    Returns:
        (batch, queries, keys) bool.
    """
    same = (q_segments[:, :, None] == k_segments[:, None, :]) & (q_segments[:, :, None] != 0)
    return same & (k_positions[:, None, :] <= q_positions[:, :, None])


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array
) -> jax.Array:
    """Softmax attention with grouped key and value heads, scaled by ``head_dim ** -0.5``.

    Scores and softmax are float32. A token that sees nothing (padding) gets exact zeros, and its
    gradients are zeros.

    Args:
        q: (batch, seq, heads, head_dim).
        k: (batch, seq, kv_heads, head_dim); head h reads kv head ``h // (heads // kv_heads)``.
        v: as ``k``.
        segment_ids: (batch, seq) int32, 0 for padding.
        positions: (batch, seq) int32, restarting with each document.

    Returns:
        (batch, seq, heads, head_dim) in the dtype of ``q``.
    """
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, **exact) * head_dim**-0.5
    mask = attention_mask(segment_ids, segment_ids, positions, positions)[:, None, None]
    scores = jnp.where(mask, scores, _MASKED)
    # The largest score of a fully masked row is _MASKED itself: without the second mask its weights would be ones.
    weights = jnp.where(mask, jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights.astype(v.dtype), v, **exact)
    return out.reshape(q.shape).astype(q.dtype)
