"""Buffers of devices, cut from whole tensors."""

import numpy as np

from dynajax.vps.buffer import fill_buffer


def cut_buffer(tensor, region):
    """The flat buffer of a holder of ``region``; the region lies in it without padding."""
    buffer = np.zeros(region.volume, tensor.dtype)
    fill_buffer(buffer, tensor, region)
    return buffer


def addressed_buffer(tensor, region, size):
    """A buffer of ``size`` elements filled one by one at the addresses of the region; −1 where it has nothing."""
    buffer = np.full(size, -1)
    for k in range(region.count):
        for step in np.ndindex(*(region.hi[k] - region.lo[k]).tolist()):
            at = int(region.offset[k]) + sum(i * s for i, s in zip(step, region.stride[k].tolist(), strict=True))
            assert buffer[at] == -1
            buffer[at] = tensor[tuple(np.add(region.lo[k], np.array(step, np.int64)))]
    return buffer
