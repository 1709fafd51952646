"""Attention that costs what the documents of a row cost, whole rows or rows that are cut along their tokens.

Where they are cut, each device keeps its queries; keys and values, with their segments and positions, travel round
the context axis, and the softmax is built up block by block (Liu, Zaharia and Abbeel, 2023; online softmax of
Milakov and Gimelshein, 2018). A whole row is a ring of one device. The mask needs nothing but segments and
positions, so packed documents and any order of the tokens come out exactly.

Within a device the work is cut in tiles of queries and keys, and a loop visits the pairs in which anything is
visible: their number is data. That is what makes packed rows cheap, and the zig-zag order pay under a causal mask.
The backward pass keeps the inputs, the output and a log-sum per query, and sends keys and values round once more
together with their gradients; no score is ever stored.

Letters: t tile of queries, u tile of keys, b rows of a tile, k kv_heads, g group, q queries, s keys, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dynajax.errors import LayoutError
from dynajax.models import Attention, attention_mask, packed_attention
from dynajax.runtime.ambient import ambient_mesh
from dynajax.runtime.rules import BATCH_AXES


@dataclass(frozen=True)
class AttentionTiles:
    """How the rows that a device holds are cut into tiles.

    Attributes:
        tokens: in a tile, at most; bounds the scores that exist at a time to tokens · tokens a head and row.
        one_row: whether each row has tiles of its own. Else a tile goes through all of them, and is visited if
            any has something to see.
    """

    tokens: int
    one_row: bool

    @staticmethod
    def of(mesh: Mesh) -> AttentionTiles:
        """What suits the devices: a CPU likes tiles that its caches hold, an accelerator few large products."""
        cpu = mesh.devices.flat[0].platform == "cpu"
        return AttentionTiles(64, one_row=True) if cpu else AttentionTiles(512, one_row=False)


_MASKED = -1e30
_EXACT: dict[str, Any] = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


class _Tokens(NamedTuple):
    """What the mask asks of tokens, each (tiles, b, tokens) int32."""

    segments: jax.Array
    positions: jax.Array


class _Keys(NamedTuple):
    """What travels: keys and values (tiles, b, kv_heads, tokens, head_dim), and their tokens."""

    k: jax.Array
    v: jax.Array
    tokens: _Tokens


class _Softmax(NamedTuple):
    """A softmax under way, float32: largest score and sum (t, b, k, g, q), weighted values (t, b, k, g, q, d)."""

    top: jax.Array
    total: jax.Array
    values: jax.Array


def ring_attention(mesh: Mesh, axis: str = "cp", tiles: AttentionTiles | None = None) -> Attention:
    """Attention over rows whose tokens are cut along ``axis``; takes the place of ``packed_attention``.

    Rows are cut along the batch axes of the mesh, heads may be cut along others; the compiler sees to those. It may
    be called inside a ``shard_map`` over ``mesh`` that is manual over other axes, such as a pipeline.

    Args:
        mesh: what the arrays are cut over.
        axis: the context axis.
        tiles: how a device cuts its work; None for what suits the devices.
    """
    size, copies = mesh.shape[axis], math.prod(mesh.shape[a] for a in BATCH_AXES)
    tiles = tiles or AttentionTiles.of(mesh)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        if q.shape[0] % copies or q.shape[1] % size:
            raise LayoutError(
                f"{q.shape[0]} rows of {q.shape[1]} tokens do not divide over {axis} = {size} and {copies} parts of a "
                f"batch; use pad_rows, and arrange the batch in an order of dynajax.runtime.order, which pads it"
            )
        if size == 1 and q.shape[1] <= tiles.tokens:
            return packed_attention(q, k, v, segment_ids, positions)
        rows = PartitionSpec(BATCH_AXES, axis)
        # Whether a value differs between devices is not tracked here: custom gradients cannot say it.
        ring: Any = jax.shard_map(
            partial(_tiled_ring, axis=axis, tiles=tiles),
            mesh=ambient_mesh(mesh),
            in_specs=(rows,) * 5,
            out_specs=rows,
            axis_names={axis, *BATCH_AXES},
            check_vma=False,
        )
        return ring(q, k, v, segment_ids, positions)

    return attention


def _tiled_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    *,
    axis: str,
    tiles: AttentionTiles,
) -> jax.Array:
    """One device's part: cut in tiles, run the ring, and put the tiles together again."""
    batch, seq, heads, head_dim = q.shape
    runs = 1 if lax.axis_size(axis) == 1 else 2  # of a zig-zag order: a tile across both would see more than it must
    count = -(-seq // (runs * tiles.tokens)) * runs
    cut = partial(_cut, lanes=batch if tiles.one_row else 1, tiles=count, tile=-(-seq // count))

    def cut_heads(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(cut(x), 2, -2)

    grouped = cut_heads(q.reshape(batch, seq, k.shape[2], heads // k.shape[2], head_dim))
    keys = _Keys(cut_heads(k), cut_heads(v), _Tokens(cut(segment_ids), cut(positions)))
    out = jnp.moveaxis(cast(jax.Array, _ring(axis, count, grouped, keys)), -2, 2)
    out = jnp.moveaxis(out.reshape(-1, count, *out.shape[1:]), 1, 2)
    return out.reshape(batch, -1, heads, head_dim)[:, :seq]


def _cut(x: jax.Array, lanes: int, tiles: int, tile: int) -> jax.Array:
    """(batch, seq, ...) as (lanes · tiles, b, tile, ...), with zeros (segment 0, seen by nothing) at the end."""
    x = jnp.pad(x, [(0, 0), (0, tiles * tile - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    x = jnp.moveaxis(x.reshape(lanes, -1, tiles, tile, *x.shape[2:]), 2, 1)
    return x.reshape(-1, *x.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(axis: str, tiles: int, q: jax.Array, keys: _Keys) -> jax.Array:
    """Queries (t, b, k, g, q, d) against the keys of the whole ring; the output has the shape and dtype of ``q``.

    Tiles see none but the ``tiles`` of their own rows.
    """
    return _forward(axis, tiles, q, keys)[0]


def _forward(axis: str, tiles: int, q: jax.Array, keys: _Keys) -> tuple[jax.Array, tuple[Any, ...]]:
    own, pairs = keys.tokens, _visible_pairs(axis, tiles, keys.tokens)
    lanes = jnp.zeros(q.shape[:-1], jnp.float32)
    start = _Softmax(lanes + _MASKED, lanes, jnp.zeros(q.shape, jnp.float32))

    def visit(keys: _Keys, state: _Softmax, t: jax.Array, u: jax.Array) -> _Softmax:
        scores, mask = _scores(q, own, keys, t, u)
        top = jnp.maximum(state.top[t], scores.max(-1))
        # Where nothing was visible yet, the largest score is _MASKED: only the mask keeps its weights at zero.
        weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
        old = jnp.exp(state.top[t] - top)
        values = jnp.einsum("bkgqs,bksd->bkgqd", weights.astype(keys.v.dtype), keys.v[u], **_EXACT)
        values += state.values[t] * old[..., None]
        fresh = _Softmax(top, state.total[t] * old + weights.sum(-1), values)
        return jax.tree.map(lambda whole, part: _put(whole, part, t), state, fresh)

    def hop(carry: tuple[_Keys, _Softmax], step: jax.Array) -> tuple[tuple[_Keys, _Softmax], None]:
        keys, state = carry
        onward = _send(axis, keys)  # needs nothing of this step, so that it can travel while the step is computed
        return (onward, pairs(step).each(partial(visit, keys), state)), None

    steps = lax.axis_size(axis)
    (last, state), _ = lax.scan(hop, (keys, start), jnp.arange(steps - 1))
    state = pairs(steps - 1).each(partial(visit, last), state)
    seen = state.total > 0
    out = (state.values / jnp.where(seen, state.total, 1.0)[..., None]).astype(q.dtype)
    log_sum = jnp.where(seen, state.top + jnp.log(jnp.where(seen, state.total, 1.0)), 0.0)
    return out, (q, keys, out, log_sum)


def _backward(axis: str, tiles: int, kept: tuple[Any, ...], d_out: jax.Array) -> tuple[jax.Array, _Keys]:
    q, keys, out, log_sum = kept
    own, pairs, scale = keys.tokens, _visible_pairs(axis, tiles, keys.tokens), q.shape[-1] ** -0.5
    d_out_32 = d_out.astype(jnp.float32)
    delta = (d_out_32 * out.astype(jnp.float32)).sum(-1)

    def visit(keys: _Keys, grads: tuple[jax.Array, ...], t: jax.Array, u: jax.Array) -> tuple[jax.Array, ...]:
        scores, mask = _scores(q, own, keys, t, u)
        weights = jnp.where(mask, jnp.exp(scores - log_sum[t][..., None]), 0.0)
        d_weights = jnp.einsum("bkgqd,bksd->bkgqs", d_out_32[t], keys.v[u].astype(jnp.float32), **_EXACT)
        d_scores = weights * (d_weights - delta[t][..., None]) * scale
        dq, dk, dv = grads
        dq_tile = jnp.einsum("bkgqs,bksd->bkgqd", d_scores, keys.k[u].astype(jnp.float32), **_EXACT)
        dk_tile = jnp.einsum("bkgqs,bkgqd->bksd", d_scores, q[t].astype(jnp.float32), **_EXACT)
        dv_tile = jnp.einsum("bkgqs,bkgqd->bksd", weights, d_out_32[t], **_EXACT)
        return _put(dq, dq[t] + dq_tile, t), _put(dk, dk[u] + dk_tile, u), _put(dv, dv[u] + dv_tile, u)

    def hop(carry: tuple[_Keys, tuple[jax.Array, ...]], step: jax.Array) -> tuple[Any, None]:
        keys, grads = carry
        onward = _send(axis, keys)
        dq, dk, dv = pairs(step).each(partial(visit, keys), grads)
        return (onward, (dq, *_send(axis, (dk, dv)))), None

    steps = lax.axis_size(axis)
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, keys.k, keys.v))
    (last, grads), _ = lax.scan(hop, (keys, zeros), jnp.arange(steps - 1))
    dq, dk, dv = pairs(steps - 1).each(partial(visit, last), grads)
    dk, dv = _send(axis, (dk, dv))  # the last hop brings the gradients of keys and values home
    no_tokens: Any = _Tokens(None, None)  # pyright: ignore[reportArgumentType]
    return dq.astype(q.dtype), _Keys(dk.astype(keys.k.dtype), dv.astype(keys.v.dtype), no_tokens)


_ring.defvjp(_forward, _backward)


def _scores(q: jax.Array, own: _Tokens, keys: _Keys, t: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores (b, k, g, q, s) of a tile of queries and one of keys, and its mask (b, 1, 1, q, s)."""
    scores = jnp.einsum("bkgqd,bksd->bkgqs", q[t], keys.k[u], **_EXACT) * q.shape[-1] ** -0.5
    there = keys.tokens
    mask = attention_mask(own.segments[t], there.segments[u], own.positions[t], there.positions[u])[:, None, None]
    return jnp.where(mask, scores, _MASKED), mask


def _put(whole: jax.Array, tile: jax.Array, index: jax.Array) -> jax.Array:
    """``whole`` with its tile number ``index`` replaced."""
    return lax.dynamic_update_index_in_dim(whole, tile, index, 0)


def _send(axis: str, x: Any) -> Any:
    """Every leaf to the next device of the ring."""
    size = lax.axis_size(axis)
    return x if size == 1 else lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


_State = Any


class _Pairs(NamedTuple):
    """The first ``count`` of the pairs (t, u) are those to visit."""

    t: jax.Array
    u: jax.Array
    count: jax.Array

    def each(self, visit: Callable[[_State, jax.Array, jax.Array], _State], state: _State) -> _State:
        """The state after all visits."""
        return lax.fori_loop(0, self.count, lambda n, state: visit(state, self.t[n], self.u[n]), state)


def _visible_pairs(axis: str, tiles: int, tokens: _Tokens) -> Callable[[int | jax.Array], _Pairs]:
    """For each hop, which of this device's tiles may see which tile of the keys that are here then.

    May: it compares the first and the last token of tiles, by segment and then position, and any row of a tile counts.
    The table is made once for all hops, so that devices which share a row agree without talking on each.
    """
    segments, positions = (x.reshape(-1, tiles, *x.shape[1:]) for x in tokens)  # (lanes, tiles, b, tokens)
    real, far = segments > 0, jnp.iinfo(jnp.int32).max
    low, high = jnp.where(real, segments, far).min(-1), jnp.where(real, segments, -1).max(-1)
    first = jnp.where(segments == low[..., None], positions, far).min(-1)
    last = jnp.where(segments == high[..., None], positions, -1).max(-1)
    there = lax.all_gather(jnp.stack([low, high, first]), axis, axis=1)
    k_low, k_high, k_first = there[:, :, :, None]  # (devices, lanes, 1, u, b)
    low, high, last = (x[:, :, None] for x in (low, high, last))
    sees = (low <= k_high) & ((k_low < high) | ((k_low == high) & (k_first <= last)))
    table = sees.any(-1)  # (devices, lanes, t, u)
    size, rank = lax.axis_size(axis), lax.axis_index(axis)

    def pairs(hop: int | jax.Array) -> _Pairs:
        visible = lax.dynamic_index_in_dim(table, (rank - hop) % size, 0, keepdims=False)
        lane, t, u = jnp.nonzero(visible, size=visible.size, fill_value=0)
        return _Pairs(lane * tiles + t, lane * tiles + u, visible.sum())

    return pairs
