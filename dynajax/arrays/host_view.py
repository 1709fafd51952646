"""What lies in the buffer of one device, seen by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from dynajax.arrays.dtypes import is_packed

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


View = NDArray[Any]


class _Memory:
    """Bytes at an address, for numpy; keeps their owners alive."""

    def __init__(self, owners: Sequence[jax.Array], start: int, nbytes: int) -> None:
        self.owners = owners
        self.__array_interface__ = {"data": (start, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def bytes_of_each(pieces: Sequence[jax.Array], layout: tuple[int, ...] | None = None) -> list[View]:
    """The bytes of shards of one array, row-major: where they lie if that is the memory of the process.

    There ``np.asarray`` would do, but takes a hold on the buffer that outlives the view and keeps it from being freed
    or donated. Types below a byte are packed in the buffer, and shards whose dims lie in another order have to be
    turned.

    Args:
        pieces: single-device arrays.
        layout: order of their dims in memory; None if row-major.
    """
    if not pieces or pieces[0].size == 0:
        return [np.empty(0, np.uint8)] * len(pieces)
    like = pieces[0]
    if layout is not None or is_packed(like.dtype) or next(iter(like.devices())).platform != "cpu":
        return [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces]
    # Parts of one view of all that lies from the first to the last: views of their own take several times as long.
    nbytes, starts = like.nbytes, [piece.unsafe_buffer_pointer() for piece in pieces]
    first = min(starts)
    span = np.asarray(_Memory(pieces, first, max(starts) + nbytes - first))
    return [span[start - first : start - first + nbytes] for start in starts]


def word_of(itemsize: int) -> np.dtype[Any]:
    """A dtype to copy elements of so many bytes as."""
    return np.dtype(_WORDS.get(itemsize, f"V{itemsize}"))
