"""Exchanges carried out with numpy, and the copies that they have to come to, one element at a time."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from planner.random_layouts import layout_pairs, mesh_tilings, summed_pairs

from dynajax.planner import build_plan
from dynajax.planner.exchanges.exchange import Exchange
from dynajax.planner.exchanges.groups import taken
from dynajax.planner.exchanges.slices import Slices
from dynajax.vps import Layout, Space, Tensor, mesh_tiling
from dynajax.vps.region import dense_strides

AMPLE = 2**60
DEVICES = 16


# Copies to exchange ---------------------------------------------------------------------------------------------------


def shard_shape(tiling):
    """The shape of the buffers that hold a tiling: that of its tiles if these are alike and lie there alone."""
    region, size = tiling.region, 0
    for k in range(region.count):
        last = region.offset[k] + np.sum((region.hi[k] - region.lo[k] - 1) * region.stride[k])
        size = max(size, int(last) + 1 if region.volumes[k] else 0)
    extent = region.hi - region.lo
    alone = len(np.unique(tiling.holder)) == region.count > 0 and (extent == extent[0]).all()
    if alone and not region.offset.any() and (region.stride == dense_strides(extent[0].tolist())).all():
        return tuple(extent[0].tolist())
    return (size,)


def exchanges(pair):
    """For each tensor of a pair of layouts its copies that read sources, and shards of the shapes that they lie in."""
    source, target = pair
    for move in build_plan(source, target, AMPLE).moves:
        copies = taken(move.copies, ~move.copies.relayed)
        if len(copies.source):
            route = move.route
            yield copies, Exchange(DEVICES, shard_shape(route.source), shard_shape(route.target), move.tensor.dtype)


@st.composite
def regular_pairs(draw, shapes=((8, 8), (16, 8), (4, 8, 2), (8,), (8, 1))):
    """One tensor on two meshes that divide it."""
    space = Space((Tensor("w", draw(st.sampled_from(shapes)), "float32", 4),))
    wanted = st.deferred(lambda: mesh_tilings(space.tensors[0].shape, 8)).filter(
        lambda tiling: len(shard_shape(tiling)) == len(tiling.shape)
    )
    return Layout(space, (draw(wanted),)), Layout(space, (draw(wanted),))


pairs = st.one_of(regular_pairs(), layout_pairs(), summed_pairs())


def copies_between(shape, before, after, dtype="float32"):
    """Copies of one tensor between meshes: ``{axis: size}`` and spec, on devices from 0 on."""
    space = Space((Tensor("w", shape, dtype, np.dtype(dtype).itemsize),))
    layouts = (
        Layout(space, (mesh_tiling(shape, mesh, spec, np.arange(int(np.prod(list(mesh.values()))))),))
        for mesh, spec in (before, after)
    )
    return next(exchanges(tuple(layouts)))


def sliced(copies, whole):
    """Copies, the slices of source and target shards that they are, and what the shards are; numbered from 0."""
    devices = int(max(copies.source.max(), copies.target.max())) + 1
    read = Slices.of(whole.source, copies.source_offset, copies.source_stride, copies.extent)
    filled = Slices.of(whole.target, copies.target_offset, copies.target_stride, copies.extent)
    assert read is not None
    assert filled is not None
    return copies, read, filled, replace(whole, devices=devices)


def there_are(parts):
    """The parts, of which there have to be some."""
    assert parts is not None
    return parts


# What they come to ----------------------------------------------------------------------------------------------------


def random_shards(shape, seed=0):
    """For each device a shard of numbers that no two orders of adding sum to the same, flat."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(-1, 1, (DEVICES, math.prod(shape))) * 2.0 ** rng.integers(0, 12, math.prod(shape))).astype(
        np.float32
    )


def copied(copies, sources, targets):
    """The targets with the copies made one element after the other, in the order of their rows."""
    made = targets.copy()
    for k in range(len(copies.source)):
        for index in np.ndindex(*copies.extent[k].tolist()):
            at = int(copies.source_offset[k] + (copies.source_stride[k] * index).sum())
            to = int(copies.target_offset[k] + (copies.target_stride[k] * index).sum())
            value = sources[copies.source[k], at]
            before = made[copies.target[k], to]
            made[copies.target[k], to] = before + value if copies.added[k] else value
    return made


def assert_copied(copies, whole, parts):
    """Parts that are all of an exchange come to its copies."""
    sources = random_shards(whole.source)[: parts[0].exchange.devices]
    made = zeros = np.zeros((len(sources), math.prod(whole.target)), np.float32)
    for part in parts:
        made = performed(part, sources, made)
    np.testing.assert_array_equal(made, copied(copies, sources, zeros))


# Exchanges as programs read them --------------------------------------------------------------------------------------


def box_of(where, device, shifts):
    """The index of a slice in the shard of a device."""
    start = list(where.start[device])
    if where.along is not None:
        start[where.along[0]] += shifts[where.along[1]]
    return tuple(slice(a, a + n) for a, n in zip(start, where.size, strict=True))


def performed(part, sources, targets):
    """The targets after a part of an exchange; shards are flat, one row each device of the group."""
    exchange = part.exchange
    read = sources.reshape(-1, *exchange.source)
    filled = targets.copy().reshape(-1, *exchange.target)
    if exchange.collective is not None:
        _collect(part, read, filled)
    else:
        _send(part, read, filled)
    return filled.reshape(targets.shape)


def _send(part, read, filled):
    exchange, at = part.exchange, 0
    every = np.arange(exchange.devices)
    tables = part.tables(every) if part.tables else None
    parts = {}
    for message in exchange.messages:
        pairs = message.pairs or [(k, k) for k in message.receivers]
        for ends in zip(*pairs, strict=True):
            assert len(set(ends)) == len(ends), "a device sends, or receives, twice in a round"
        assert sorted(b for _, b in pairs) == list(message.receivers)
        came = [payload_of(exchange, message, tables, at, a, part.shifts, read) for a, _ in pairs]
        for (_, b), payload in zip(pairs, came, strict=True):
            place(exchange, message, tables, at, b, part.shifts, payload, filled, parts)
        at += message.chunks
    add_up(exchange, part.shifts, parts, filled)


def payload_of(exchange, message, tables, at, device, shifts, read):
    """Pieces of a message: its boxes, or its chunks."""
    if message.chunks:
        return read[device].reshape(-1, exchange.chunk)[tables[0][device, at : at + message.chunks]]
    return [read[device][box_of(cut.read, device, shifts)] for cut in message.boxes]


def place(exchange, message, tables, at, device, shifts, payload, filled, parts):
    """Put the pieces of a message in the shard of a device, or aside if they are parts of sums."""
    if message.chunks:
        shard = filled[device : device + 1].reshape(-1, exchange.chunk)
        for chunk, piece in zip(tables[1][device, at : at + message.chunks].tolist(), payload, strict=True):
            if chunk < len(shard):
                shard[chunk] = shard[chunk] + piece if message.added else piece
        return
    for cut, piece in zip(message.boxes, payload, strict=True):
        if cut.slot is None:
            filled[(device, *box_of(cut.filled, device, shifts))] = piece.reshape(cut.filled.size)
        else:
            assert (device, cut.slot[device]) not in parts
            parts[device, cut.slot[device]] = piece.reshape(cut.filled.size)


def add_up(exchange, shifts, parts, filled):
    """Write each sum of parts, added in the order of their slots."""
    for number, each in enumerate(exchange.sums):
        for device in each.receivers:
            total = parts[device, number * exchange.parts]
            for k in range(1, exchange.parts):
                total = total + parts[device, number * exchange.parts + k]
            filled[(device, *box_of(each.filled, device, shifts))] = total


def _collect(part, read, filled):
    """Every device gives each peer the box of its grid that is for that one."""
    exchange, collective = part.exchange, part.exchange.collective
    for a in range(exchange.devices):
        for b in range(exchange.devices):
            if collective.source is None:
                box = read[a]
            else:
                place = collective.source.order[a].index(b)
                box = read[a][grid_box(exchange.source, collective.source.counts, place)]
            into = filled[b][grid_box(exchange.target, collective.target.counts, collective.target.order[b].index(a))]
            index = [slice(None)] * box.ndim
            if collective.part is not None:
                dim, length = collective.part
                index[dim] = slice(part.shifts[0], part.shifts[0] + length)
            into[tuple(index)] = box[tuple(index)]


def grid_box(shape, counts, number):
    """The index of a box of a grid, counted row by row."""
    at = np.unravel_index(number, counts)
    sizes = [n // k for n, k in zip(shape, counts, strict=True)]
    return tuple(slice(int(k) * n, (int(k) + 1) * n) for k, n in zip(at, sizes, strict=True))
