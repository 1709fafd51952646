"""A run of a plan in numpy: one buffer for each device and tensor.

Source buffers are cut from whole tensors, the copies of the plan and no others are made, and every target buffer is
compared with one cut from the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynajax.errors import CheckError
from dynajax.planner.plan import Move, Plan
from dynajax.types import Bools
from dynajax.vps.buffer import fill_buffer, view
from dynajax.vps.tiling import Tiling

DeviceBuffers = dict[int, NDArray[Any]]
_MARK = 0xA5
"""Byte of padding, which no copy may touch."""


def run_move(move: Move, source: Mapping[int, NDArray[Any]]) -> DeviceBuffers:
    """Make the copies of a move, in their order.

    Args:
        move: what to copy.
        source: flat source buffer of each device, by its number.

    Returns:
        Flat target buffer of each device, by its number; a device that keeps its buffer has the source buffer.
    """
    target: DeviceBuffers = {d: source[d] for d in move.kept.tolist()}
    dtype = next(iter(source.values())).dtype if source else np.dtype(np.int64)
    for d in np.setdiff1d(move.target.devices, move.kept).tolist():
        target[d] = _buffer(move.target, d, dtype)
    c, stage = move.copies, move.route.stage
    for k in np.lexsort((c.relayed, np.zeros(len(c.source)) if stage is None else stage)).tolist():
        extent = c.extent[k].tolist()
        out = view(target[int(c.target[k])], int(c.target_offset[k]), c.target_stride[k].tolist(), extent)
        buffers = target if c.relayed[k] else source
        piece = view(buffers[int(c.source[k])], int(c.source_offset[k]), c.source_stride[k].tolist(), extent)
        out[...] = out + piece if c.added[k] else piece
    return target


def device_buffer(whole: NDArray[Any], tiling: Tiling, device: int) -> NDArray[Any]:
    """The buffer of a device, cut from the whole tensor; padding is filled with ``_MARK``."""
    buffer = _buffer(tiling, device, whole.dtype)
    fill_buffer(buffer, whole, tiling.region_of(device))
    return buffer


def _parts(whole: NDArray[Any], tiling: Tiling) -> dict[int, NDArray[Any]]:
    """The tensor that each device's buffer is cut from: ``whole``, or of a partial source parts that add up to it."""
    devices = tiling.devices.tolist()
    if not tiling.partial:
        return dict.fromkeys(devices, whole)
    last = np.full(whole.shape, -1)
    for d in devices:
        last[_held(tiling, d)] = d
    left, parts = whole.copy(), {}
    for d in devices:
        parts[d] = np.where(last == d, left, (whole + d) % 7).astype(whole.dtype)
        left = np.where(_held(tiling, d), left - parts[d], left)
    return parts


def _held(tiling: Tiling, device: int) -> Bools:
    """True for the elements that a device holds."""
    mask, region = np.zeros(tiling.shape, bool), tiling.region_of(device)
    for lo, hi in zip(region.lo.tolist(), region.hi.tolist(), strict=True):
        mask[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] = True
    return mask


def _buffer(tiling: Tiling, device: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    size = tiling.region_of(device).volume if tiling.room is None else tiling.room
    return np.full(size * dtype.itemsize, _MARK, np.uint8).view(dtype)


def check_on_numpy(plan: Plan, tensors: Mapping[str, NDArray[Any]] | None = None) -> None:
    """Carry out the plan on numpy buffers and compare every target buffer with the one it should be.

    Args:
        plan: what to check; every buffer of every device is made, so keep it small.
        tensors: whole tensors by path, of whole numbers where the source is partial; default: distinct numbers.

    Raises:
        CheckError: naming the tensor and the device whose buffer is wrong.
        LayoutError: a layout is not sound.
    """
    for move in plan.moves:
        move.source.validate(move.tensor.path)
        move.target.validate(move.tensor.path)
        size = int(np.prod(move.tensor.shape, dtype=np.int64))
        whole = np.arange(size).reshape(move.tensor.shape) if tensors is None else tensors[move.tensor.path]
        before = {d: device_buffer(part, move.source, d) for d, part in _parts(whole, move.source).items()}
        after = run_move(move, before)
        for d in move.target.devices.tolist():
            if after[d].tobytes() != device_buffer(whole, move.target, d).tobytes():
                raise CheckError(f"{move.tensor.path}: the plan gives device {d} wrong bytes")
    if plan.bytes_moved != plan.bytes_lower_bound:
        raise CheckError(f"the plan moves {plan.bytes_moved} bytes and {plan.bytes_lower_bound} would do")
