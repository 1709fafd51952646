"""What the programs of an exchange compute on one device: cut out, send, put in place.

Written once for both ways to run them: as one program over all devices of a group, or as one that cuts out over the
senders, one that sends over all, and one that puts in place over the receivers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynajax.arrays.spmd import AXIS
from dynajax.engine.xla.bitcast import from_wire, to_wire
from dynajax.planner.exchanges.exchange import Box, Collective, Exchange, Grid, Message, Shape, Slice
from dynajax.planner.exchanges.part import wire_dtype

Blocks = Sequence[jax.Array]


@dataclass(frozen=True)
class Given:
    """What a program is told besides shards.

    Attributes:
        shifts: where the parts of boxes begin, shape (kinds of boxes,); None if boxes are sent whole.
        read, filled: the chunks of the source, and of the target, that the messages of this device are made of in
            turn; None if messages are made of boxes.
    """

    shifts: jax.Array | None = None
    read: jax.Array | None = None
    filled: jax.Array | None = None


def exchanged(exchange: Exchange, sources: Blocks, targets: Blocks | None, given: Given) -> list[jax.Array]:
    """The target shards of some arrays alike, with all that is exchanged in its place, in what elements travel as.

    Args:
        exchange: what to do.
        sources: their source shards.
        targets: what is there so far, in what elements travel as; None to begin.
        given: see ``Given``.
    """
    if exchange.collective is not None:
        return _collected(exchange, exchange.collective, sources, targets, given)
    payloads = zip(exchange.messages, cut_out(exchange, sources, given), strict=True)
    return placed(exchange, [sent(*each) for each in payloads], targets, given, len(sources))


def cut_out(exchange: Exchange, sources: Blocks, given: Given) -> list[jax.Array]:
    """What this device has for each message: the boxes, or chunks, of one array after the other."""
    # Even a slice of small floats may change NaNs, so they become integers first.
    wires, at, made = [to_wire(x) for x in sources], 0, []
    for message in exchange.messages:
        if message.chunks:
            assert given.read is not None
            rows = given.read[at : at + message.chunks]
            pieces = [x.reshape(-1, exchange.chunk).at[rows].get(mode="promise_in_bounds") for x in wires]
            at += message.chunks
        else:
            pieces = [_cut(x, cut.read, given) for x in wires for cut in message.boxes]
        made.append(pieces[0] if len(pieces) == 1 else jnp.concatenate([p.reshape(-1) for p in pieces]))
    return made


def sent(message: Message, payload: jax.Array) -> jax.Array:
    """What this device receives of a message; what it has for it, if all of it stays."""
    if not message.pairs:
        return payload
    return jax.lax.ppermute(payload.reshape(payload.shape or 1), AXIS, message.pairs).reshape(payload.shape)


def placed(exchange: Exchange, payloads: Blocks, targets: Blocks | None, given: Given, count: int) -> list[jax.Array]:
    """The target shards of ``count`` arrays alike, with what this device received in its place; see ``exchanged``."""
    made: list[jax.Array] = []
    for k in range(count):
        mine = [payload.reshape(count, -1)[k] if count > 1 else payload for payload in payloads]
        made.append(_placed(exchange, mine, None if targets is None else targets[k], given))
    return made


def _placed(exchange: Exchange, payloads: Blocks, target: jax.Array | None, given: Given) -> jax.Array:
    """One target shard, in what elements travel as."""
    wire = wire_dtype(exchange.dtype)
    target = jnp.zeros(exchange.target, wire) if target is None else target
    parts = jnp.zeros((0,), wire)
    if exchange.sums:
        parts = jnp.zeros((len(exchange.sums) * exchange.parts, *exchange.sums[0].filled.size), wire)
    row = 0
    for message, payload in zip(exchange.messages, payloads, strict=True):
        if message.chunks:
            target = _scattered(exchange, message, payload, target, given, row)
            row += message.chunks
            continue
        here, ends = _is_one_of(message.receivers, exchange.devices), itertools.accumulate(map(_size, message.boxes))
        pieces = [payload] if len(message.boxes) == 1 else jnp.split(payload, list(ends)[:-1])
        for cut, piece in zip(message.boxes, pieces, strict=True):
            if cut.slot is None:
                target = _put(target, piece, cut.filled, here, given)
            else:
                slots = tuple((k, *[0] * len(cut.filled.size)) for k in cut.slot)
                parts = _put(parts, piece, Slice((1, *cut.filled.size), slots), here, given)
    for number, each in enumerate(exchange.sums):
        first = number * exchange.parts
        total = _summed([parts[k] for k in range(first, first + exchange.parts)], exchange.dtype)
        target = _put(target, total, each.filled, _is_one_of(each.receivers, exchange.devices), given)
    return target


def _size(cut: Box) -> int:
    return math.prod(cut.filled.size)


def _put(target: jax.Array, piece: jax.Array, where: Slice, here: jax.Array | None, given: Given) -> jax.Array:
    """A shard with a piece in its place, on the devices where ``here`` is true."""
    piece = piece.reshape(where.size)
    if where.size == target.shape:
        return piece if here is None else jnp.where(here, piece, target)
    start = _start(where, given)
    if here is not None:
        piece = jnp.where(here, piece, jax.lax.dynamic_slice(target, start, where.size))
    return jax.lax.dynamic_update_slice(target, piece, start)


def _scattered(
    exchange: Exchange, message: Message, payload: jax.Array, target: jax.Array, given: Given, first: int
) -> jax.Array:
    """A shard with chunks in their places, which are told from row ``first`` on; those without one are dropped."""
    assert given.filled is not None
    rows = given.filled[first : first + message.chunks]
    chunks, shard = payload.reshape(-1, exchange.chunk), target.reshape(-1, exchange.chunk)
    if message.added:
        chunks = _summed([shard.at[rows].get(mode="clip"), chunks], exchange.dtype)
    return shard.at[rows].set(chunks, mode="drop", unique_indices=True).reshape(target.shape)


def _summed(parts: Blocks, dtype: Any) -> jax.Array:
    """The sum of parts, one after the other, each sum rounded to the dtype."""
    total = from_wire(parts[0], dtype)
    for part in parts[1:]:
        # Without the barrier XLA may keep what small floats lose between two sums.
        total = jax.lax.optimization_barrier(total + from_wire(part, dtype))
    return to_wire(total)


def _cut(x: jax.Array, where: Slice, given: Given) -> jax.Array:
    if where.size == x.shape:
        return x
    start = _start(where, given)
    if all(isinstance(n, int) for n in start):
        return jax.lax.slice(x, start, [a + n for a, n in zip(start, where.size, strict=True)])
    return jax.lax.dynamic_slice(x, start, where.size)


def _start(where: Slice, given: Given) -> list[Any]:
    """Where a slice begins on this device: plain numbers, if they are the same on all."""
    columns = np.asarray(where.start, np.int32).T
    start: list[Any] = [int(c[0]) if (c == c[0]).all() else jnp.asarray(c)[_me()] for c in columns]
    if where.along is not None and given.shifts is not None:
        dim, which = where.along
        start[dim] = start[dim] + given.shifts[which]
    if all(isinstance(n, int) for n in start):
        return start
    return [jnp.asarray(n, jnp.int32) for n in start]


def _me() -> jax.Array:
    return jax.lax.axis_index(AXIS)


def _is_one_of(numbers: Shape, devices: int) -> jax.Array | None:
    """Whether this device is one of some; None if all are."""
    return None if len(numbers) == devices else jnp.asarray(np.isin(np.arange(devices), numbers))[_me()]


def _collected(
    exchange: Exchange, collective: Collective, sources: Blocks, targets: Blocks | None, given: Given
) -> list[jax.Array]:
    """See ``exchanged``, by a native collective: boxes by peer, exchanged, in their places."""
    made: list[jax.Array] = []
    for k, x in enumerate(map(to_wire, sources)):
        if collective.source is None:
            came = jax.lax.all_gather(_part(x[None], collective, given)[0], AXIS)
        else:
            boxes = _part(_boxes(x, collective.source.counts), collective, given)
            came = jax.lax.all_to_all(_ordered(boxes, _inverse(collective.source)), AXIS, 0, 0)
        came = _ordered(came, np.asarray(collective.target.order))
        made.append(_joined(came, exchange, collective, None if targets is None else targets[k], given))
    return made


def _boxes(x: jax.Array, counts: Shape) -> jax.Array:
    """The boxes of a grid, shape (boxes, *box)."""
    split = [n for size, count in zip(x.shape, counts, strict=True) for n in (count, size // count)]
    apart = x.reshape(split).transpose([*range(0, len(split), 2), *range(1, len(split), 2)])
    return apart.reshape(-1, *split[1::2])


def _part(boxes: jax.Array, collective: Collective, given: Given) -> jax.Array:
    """The part of boxes that is sent now."""
    if collective.part is None:
        return boxes
    assert given.shifts is not None
    dim, size = collective.part
    return jax.lax.dynamic_slice_in_dim(boxes, given.shifts[0], size, dim + 1)


def _joined(
    boxes: jax.Array, exchange: Exchange, collective: Collective, target: jax.Array | None, given: Given
) -> jax.Array:
    """A shard with the boxes of its grid, or this part of them, in their places; the inverse of ``_boxes``."""
    counts, rank = collective.target.counts, len(exchange.target)
    apart = boxes.reshape(*counts, *boxes.shape[1:]).transpose([d for k in range(rank) for d in (k, rank + k)])
    if collective.part is None:
        return apart.reshape(exchange.target)
    assert given.shifts is not None
    split = [n for size, count in zip(exchange.target, counts, strict=True) for n in (count, size // count)]
    whole = (jnp.zeros(exchange.target, boxes.dtype) if target is None else target).reshape(split)
    dim = 2 * collective.part[0] + 1
    return jax.lax.dynamic_update_slice_in_dim(whole, apart, given.shifts[0], dim).reshape(exchange.target)


def _inverse(grid: Grid) -> np.ndarray[Any, Any]:
    """Of each device, which box each peer is given."""
    return np.argsort(np.asarray(grid.order), axis=1)


def _ordered(boxes: jax.Array, order: np.ndarray[Any, Any]) -> jax.Array:
    """Boxes taken in the order of this device."""
    if (order == order[0]).all():
        return boxes if (order[0] == np.arange(len(order[0]))).all() else boxes[order[0]]
    return boxes[jnp.asarray(order, jnp.int32)[_me()]]
