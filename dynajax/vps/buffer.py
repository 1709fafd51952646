"""Buffers seen through regions: strided views, and copies between a whole tensor and what a device holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynajax.vps.region import Region


def view(buffer: NDArray[Any], offset: int, stride: Sequence[int], extent: Sequence[int]) -> NDArray[Any]:
    """A box of a flat buffer as an array of shape ``extent``; offset and strides in elements; no copy.

    Raises:
        ValueError: the box lies outside the buffer.
    """
    size = buffer.itemsize
    return np.ndarray(tuple(extent), buffer.dtype, buffer, offset * size, tuple(s * size for s in stride))


def fill_buffer(buffer: NDArray[Any], tensor: NDArray[Any], region: Region) -> None:
    """Fill the buffer of a holder of ``region`` from the whole tensor; what no box covers stays as it is."""
    for k in range(region.count):
        index = tuple(slice(a, b) for a, b in zip(region.lo[k].tolist(), region.hi[k].tolist(), strict=True))
        extent = (region.hi[k] - region.lo[k]).tolist()
        view(buffer, int(region.offset[k]), region.stride[k].tolist(), extent)[...] = tensor[index]
