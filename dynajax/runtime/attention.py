"""Ring attention: exact attention over a row that is cut along its tokens.

Each device keeps its queries; keys and values, with their segments and positions, travel round the
context axis, and the softmax is built up block by block (Liu, Zaharia and Abbeel, 2023; online
softmax of Milakov and Gimelshein, 2018). The mask needs nothing but segments and positions, so packed
documents and any order of the tokens come out exactly.

Within a device the work is cut in tiles of queries and keys. A tile in which nothing is visible is
skipped: that is what makes the zig-zag order pay under a causal mask, and packed rows cheap. The
backward pass keeps the inputs, the output and a log-sum per query, and sends keys and values round
once more together with their gradients; no score is ever stored.

Letters: t tile of queries, u tile of keys, b batch, q queries, s keys, k kv_heads, g group, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dynajax.errors import LayoutError
from dynajax.models import Attention, attention_mask
from dynajax.runtime.ambient import ambient_mesh

BLOCK = 512
"""Tokens in a tile, at most."""

_MASKED = -1e30
_EXACT: dict[str, Any] = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


class _Tokens(NamedTuple):
    """What the mask asks of tokens, each (tiles, batch, tokens) int32."""

    segments: jax.Array
    positions: jax.Array


class _Keys(NamedTuple):
    """What travels: keys and values (tiles, batch, tokens, kv_heads, head_dim), and their tokens."""

    k: jax.Array
    v: jax.Array
    tokens: _Tokens


class _Softmax(NamedTuple):
    """A softmax under way, float32: largest score and sum (t, b, k, g, q), weighted values (t, b, q, k, g, d)."""

    top: jax.Array
    total: jax.Array
    values: jax.Array


def ring_attention(mesh: Mesh, axis: str = "cp", block: int = BLOCK) -> Attention:
    """Attention over rows whose tokens are cut along ``axis``; takes the place of ``packed_attention``.

    Batch and heads may be cut along other axes of the mesh; the compiler sees to them. It may be called
    inside a ``shard_map`` over ``mesh`` that is manual over other axes, such as a pipeline.

    Args:
        mesh: what the arrays are cut over.
        axis: the context axis.
        block: tokens in a tile, at most; bounds the scores that exist at a time to block · block a head.
    """
    size = dict(mesh.shape)[axis]

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        if q.shape[1] % size:
            raise LayoutError(
                f"a row of {q.shape[1]} tokens does not divide over {axis} = {size}; "
                f"arrange the batch in an order of dynajax.runtime.order first, which pads it"
            )
        rows = PartitionSpec(None, axis)
        body = partial(_tiled_ring, axis=axis, block=block)
        # Whether a value differs between devices is not tracked here: custom gradients cannot say it.
        ring: Any = jax.shard_map(
            body, mesh=ambient_mesh(mesh), in_specs=(rows,) * 5, out_specs=rows, axis_names={axis}, check_vma=False
        )
        return ring(q, k, v, segment_ids, positions)

    return attention


def _tiled_ring(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array, *, axis: str, block: int
) -> jax.Array:
    """One device's part: cut in tiles, run the ring, and put the tiles together again."""
    batch, seq, heads, head_dim = q.shape
    tiles = -(-seq // block)
    cut = partial(_cut, tiles=tiles, tile=-(-seq // tiles))
    grouped = cut(q.reshape(batch, seq, k.shape[2], heads // k.shape[2], head_dim))
    keys = _Keys(cut(k), cut(v), _Tokens(cut(segment_ids), cut(positions)))
    out = cast(jax.Array, _ring(axis, grouped, keys))
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, head_dim)[:, :seq]


def _cut(x: jax.Array, tiles: int, tile: int) -> jax.Array:
    """(batch, seq, ...) as (tiles, batch, tile, ...), with zeros (segment 0, seen by nothing) at the end."""
    x = jnp.pad(x, [(0, 0), (0, tiles * tile - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], tiles, tile, *x.shape[2:]), 1, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(axis: str, q: jax.Array, keys: _Keys) -> jax.Array:
    """Queries (t, b, q, k, g, d) against the keys of the whole ring; the output has the shape and dtype of ``q``."""
    return _forward(axis, q, keys)[0]


def _forward(axis: str, q: jax.Array, keys: _Keys) -> tuple[jax.Array, tuple[Any, ...]]:
    own, visible = keys.tokens, _visible_tiles(axis, keys.tokens)
    tiles, batch, tokens, kv_heads, group, _ = q.shape
    lanes = jnp.zeros((tiles, batch, kv_heads, group, tokens), jnp.float32)
    start = _Softmax(lanes + _MASKED, lanes, jnp.zeros(q.shape, jnp.float32))

    def visit(keys: _Keys, state: _Softmax, t: jax.Array, u: jax.Array) -> _Softmax:
        scores, mask = _scores(q, own, keys, t, u)
        top = jnp.maximum(state.top[t], scores.max(-1))
        # Where nothing was visible yet, the largest score is _MASKED: only the mask keeps its weights at zero.
        weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
        old = jnp.exp(state.top[t] - top)
        values = jnp.einsum("bkgqs,bskd->bqkgd", weights.astype(keys.v.dtype), keys.v[u], **_EXACT)
        values += state.values[t] * _by_query(old)
        fresh = _Softmax(top, state.total[t] * old + weights.sum(-1), values)
        return _put(state, fresh, t)

    def hop(carry: tuple[_Keys, _Softmax], step: jax.Array) -> tuple[tuple[_Keys, _Softmax], None]:
        keys, state = carry
        onward = _send(axis, keys)  # needs nothing of this step, so that it can travel while the step is computed
        return (onward, _each_tile(visible(step), partial(visit, keys), state)), None

    steps = lax.axis_size(axis)
    (last, state), _ = lax.scan(hop, (keys, start), jnp.arange(steps - 1))
    state = _each_tile(visible(jnp.int32(steps - 1)), partial(visit, last), state)
    seen = state.total > 0
    out = (state.values / _by_query(jnp.where(seen, state.total, 1.0))).astype(q.dtype)
    log_sum = jnp.where(seen, state.top + jnp.log(jnp.where(seen, state.total, 1.0)), 0.0)
    return out, (q, keys, out, log_sum)


def _backward(axis: str, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[jax.Array, _Keys]:
    q, keys, out, log_sum = kept
    own, visible, scale = keys.tokens, _visible_tiles(axis, keys.tokens), q.shape[-1] ** -0.5
    d_out_32 = d_out.astype(jnp.float32)
    delta = jnp.einsum("tbqkgd,tbqkgd->tbkgq", d_out_32, out.astype(jnp.float32), **_EXACT)

    def visit(keys: _Keys, grads: tuple[jax.Array, ...], t: jax.Array, u: jax.Array) -> tuple[jax.Array, ...]:
        scores, mask = _scores(q, own, keys, t, u)
        weights = jnp.where(mask, jnp.exp(scores - log_sum[t][..., None]), 0.0)
        d_weights = jnp.einsum("bqkgd,bskd->bkgqs", d_out_32[t], keys.v[u].astype(jnp.float32), **_EXACT)
        d_scores = weights * (d_weights - delta[t][..., None]) * scale
        dq, dk, dv = grads
        dq_tile = jnp.einsum("bkgqs,bskd->bqkgd", d_scores, keys.k[u].astype(jnp.float32), **_EXACT)
        dk_tile = jnp.einsum("bkgqs,bqkgd->bskd", d_scores, q[t].astype(jnp.float32), **_EXACT)
        dv_tile = jnp.einsum("bkgqs,bqkgd->bskd", weights, d_out_32[t], **_EXACT)
        return _put(dq, dq[t] + dq_tile, t), _put(dk, dk[u] + dk_tile, u), _put(dv, dv[u] + dv_tile, u)

    def hop(carry: tuple[_Keys, tuple[jax.Array, ...]], step: jax.Array) -> tuple[Any, None]:
        keys, grads = carry
        onward = _send(axis, keys)
        dq, dk, dv = _each_tile(visible(step), partial(visit, keys), grads)
        return (onward, (dq, *_send(axis, (dk, dv)))), None

    steps = lax.axis_size(axis)
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, keys.k, keys.v))
    (last, grads), _ = lax.scan(hop, (keys, zeros), jnp.arange(steps - 1))
    dq, dk, dv = _each_tile(visible(jnp.int32(steps - 1)), partial(visit, last), grads)
    dk, dv = _send(axis, (dk, dv))  # the last hop brings the gradients of keys and values home
    no_tokens: Any = _Tokens(None, None)  # pyright: ignore[reportArgumentType]
    return dq.astype(q.dtype), _Keys(dk.astype(keys.k.dtype), dv.astype(keys.v.dtype), no_tokens)


_ring.defvjp(_forward, _backward)


def _scores(q: jax.Array, own: _Tokens, keys: _Keys, t: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores (b, k, g, q, s) of a tile of queries and one of keys, and its mask (b, 1, 1, q, s)."""
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q[t], keys.k[u], **_EXACT) * q.shape[-1] ** -0.5
    there = keys.tokens
    mask = attention_mask(own.segments[t], there.segments[u], own.positions[t], there.positions[u])[:, None, None]
    return jnp.where(mask, scores, _MASKED), mask


def _by_query(x: jax.Array) -> jax.Array:
    """(..., k, g, q) as (..., q, k, g, 1), to scale values with."""
    return jnp.moveaxis(x, -1, -3)[..., None]


def _put(whole: Any, tile: Any, index: jax.Array) -> Any:
    """Every leaf of ``whole`` with its tile number ``index`` replaced."""
    return jax.tree.map(lambda x, part: lax.dynamic_update_index_in_dim(x, part, index, 0), whole, tile)


def _send(axis: str, x: Any) -> Any:
    """Every leaf to the next device of the ring."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


State = Any


def _each_tile(visible: jax.Array, visit: Callable[[State, jax.Array, jax.Array], State], state: State) -> State:
    """Visit the pairs (t, u) for which ``visible`` (t, u) is true."""
    pairs = jnp.moveaxis(jnp.indices(visible.shape), 0, -1).reshape(-1, 2)

    def step(state: State, pair: jax.Array) -> tuple[State, None]:
        t, u = pair
        return lax.cond(visible[t, u], lambda s: visit(s, t, u), lambda s: s, state), None

    return lax.scan(step, state, pairs)[0]


def _visible_tiles(axis: str, tokens: _Tokens) -> Callable[[jax.Array], jax.Array]:
    """For each hop, which of this device's tiles may see which tile of the keys that are here then.

    May: it compares the least and the largest segment and position of tiles, and any row of the batch counts.
    The table is made once for all hops, so that devices which share a row agree without talking on each.
    """
    segments, positions = tokens
    real, far = segments > 0, jnp.iinfo(jnp.int32).max
    low = [jnp.where(real, x, far).min(-1) for x in (segments, positions)]
    high = [jnp.where(real, x, -1).max(-1) for x in (segments, positions)]
    own = jnp.stack([*low, *high])  # (4, t, b)
    there = lax.all_gather(own, axis, axis=0)  # (devices, 4, u, b)
    seg_low, _, seg_high, pos_high = own[:, None, :, None]
    k_seg_low, k_pos_low, k_seg_high, _ = (there[:, i][:, None] for i in range(4))
    sees = (seg_low <= k_seg_high) & (k_seg_low <= seg_high) & (k_pos_low <= pos_high)
    table = sees.any(-1)  # (devices, t, u)
    size, rank = lax.axis_size(axis), lax.axis_index(axis)
    return lambda hop: lax.dynamic_index_in_dim(table, (rank - hop) % size, 0, keepdims=False)
