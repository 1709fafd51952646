"""Buffers of devices, cut from whole tensors."""

import numpy as np

from dynajax.vps.buffer import fill_buffer


def cut_buffer(tensor, region):
    """The flat buffer of a holder of ``region``; the region lies in it without padding."""
    buffer = np.zeros(region.volume, tensor.dtype)
    fill_buffer(buffer, tensor, region)
    return buffer
