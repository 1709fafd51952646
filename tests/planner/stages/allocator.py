"""Packed stages carried out by an allocator that knows pieces of memory and nothing of the planner's arithmetic."""

import numpy as np
from planner.random_layouts import held as mask

from dynajax.planner.verification.numpy_run import device_buffer


class Device:
    """Named blocks of memory, and the most bytes there ever were."""

    def __init__(self):
        self.blocks, self.peak, self.live = {}, 0, 0

    def allocate(self, name, values):
        assert name not in self.blocks
        self.blocks[name] = values
        self.live += values.nbytes
        self.peak = max(self.peak, self.live)

    def free(self, name):
        self.live -= self.blocks.pop(name).nbytes


def simulate(plan):
    """Run the stages: pack, free, exchange, allocate, unpack.

    Returns the devices, and the bytes that they hold at every moment, in order.
    """
    devices = [Device() for _ in range(plan.num_devices)]
    readers = {}
    for k, move in enumerate(plan.moves):
        whole = np.arange(int(np.prod(move.tensor.shape))).reshape(move.tensor.shape)
        whole = whole.astype(np.int32 if move.tensor.itemsize == 4 else np.int16)
        route = move.route
        boxes = {(d, tuple(lo), tuple(hi)) for d, lo, hi in source_cells(route)}
        for d, lo, hi in sorted(boxes):
            devices[d].allocate(("old", k, lo, hi), whole[box(lo, hi)].copy())
        for row in range(len(route.lo)):
            if not route.relayed[row]:
                readers.setdefault(piece(plan, k, row), set()).add(row)
    moments = [[device.live for device in devices]]
    if plan.donate:
        for d, device in enumerate(devices):
            for name in [n for n in device.blocks if (d, n) not in readers and d not in plan.moves[n[1]].kept]:
                device.free(name)
    moments.append([device.live for device in devices])
    for number in range(len(plan.stages)):
        for _ in run_stage(plan, devices, readers, number):
            moments.append([device.live for device in devices])
    return devices, moments


def source_cells(route):
    """What the devices hold, cut as the pieces are: the memory of a device is made of the pieces that are read."""
    shape = route.source.shape
    pieces = sorted({(tuple(a), tuple(b)) for a, b in zip(route.lo.tolist(), route.hi.tolist(), strict=True)})
    for d in route.source.devices.tolist():
        mask = np.zeros(shape, bool)
        region = route.source.region_of(d)
        for lo, hi in zip(region.lo, region.hi, strict=True):
            mask[box(lo, hi)] = True
        for lo, hi in pieces:
            if mask[box(lo, hi)].all():
                mask[box(lo, hi)] = False
                yield d, lo, hi
        for at in np.argwhere(mask):
            yield d, tuple(at.tolist()), tuple((at + 1).tolist())


def box(lo, hi):
    return tuple(slice(int(a), int(b)) for a, b in zip(lo, hi, strict=True))


def piece(plan, k, row):
    route = plan.moves[k].route
    return int(route.sender[row]), ("old", k, tuple(route.lo[row].tolist()), tuple(route.hi[row].tolist()))


def run_stage(plan, devices, readers, number):
    """Go through a stage, halting after each of its six moments."""
    rows = [
        (k, row)
        for k in plan.stages[number]
        for row in np.flatnonzero(plan.moves[k].route.stages_of_pieces() == number).tolist()
    ]
    sent = [(k, row) for k, row in rows if plan.moves[k].route.sent[row]]
    kept_here = [(k, row) for k, row in rows if not plan.moves[k].route.sent[row]]
    for k, row in sent:
        holder, name = piece(plan, k, row)
        route = plan.moves[k].route
        if route.relayed[row]:
            name = ("new", *name[1:])
        devices[holder].allocate(("send", k, row), devices[holder].blocks[name].copy())
    yield "packed"
    done(plan, devices, readers, sent)
    yield "freed"
    for k, row in sent:
        route = plan.moves[k].route
        buffer = devices[int(route.sender[row])].blocks["send", k, row]
        devices[int(route.receiver[row])].allocate(("receive", k, row), buffer.copy())
    yield "received"
    for k, row in sent:
        devices[int(plan.moves[k].route.sender[row])].free(("send", k, row))
    yield "send buffers freed"
    for k, row in rows:
        route = plan.moves[k].route
        holder, name = piece(plan, k, row)
        at = devices[int(route.receiver[row])]
        data = at.blocks["receive", k, row] if route.sent[row] else devices[holder].blocks[name]
        if route.added[row]:
            at.blocks["new", *name[1:]] += data
        else:
            at.allocate(("new", *name[1:]), data.copy())
    yield "filled"
    for k, row in sent:
        devices[int(plan.moves[k].route.receiver[row])].free(("receive", k, row))
    done(plan, devices, readers, kept_here)
    yield "receive buffers freed"


def done(plan, devices, readers, rows):
    """Readers that have read; a piece without further readers goes."""
    if not plan.donate:
        return
    for k, row in rows:
        if plan.moves[k].route.relayed[row]:
            continue
        holder, name = piece(plan, k, row)
        readers[holder, name].discard(row)
        if not readers[holder, name] and holder not in plan.moves[k].kept:
            devices[holder].free(name)


def assert_exact(plan, devices):
    """Every device has what it shall have, and with donation nothing else."""
    for k, move in enumerate(plan.moves):
        whole = np.arange(int(np.prod(move.tensor.shape))).reshape(move.tensor.shape)
        if move.source.partial:
            whole = whole * sum(mask(move.source, d).astype(int) for d in move.source.devices.tolist())
        for d in move.target.devices.tolist():
            flat = np.full(whole.shape, -1)
            for (kind, owner, lo, hi), block in devices[d].blocks.items():
                if owner == k and kind == ("old" if d in move.kept else "new"):
                    flat[box(lo, hi)] = block
            np.testing.assert_array_equal(device_buffer(flat, move.target, d), device_buffer(whole, move.target, d))
        for d in range(plan.num_devices):
            left = [n for n in devices[d].blocks if n[1] == k and n[0] not in ("old" if d in move.kept else "new",)]
            assert not plan.donate or not left
