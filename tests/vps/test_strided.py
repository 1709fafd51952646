"""Strided copies that become fewer still copy the same bytes, and each of their parts is of bounded size."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.vps.strided import StridedCopies, StridedCopy

WORD = np.dtype(np.uint16)


def _boxes(rows: list[tuple[int, int, tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]]]) -> StridedCopies:
    filled, read, extent, to, to_stride, origin, origin_stride = map(np.asarray, zip(*rows, strict=True))
    zero = np.zeros(len(rows), np.int64)
    return StridedCopies(np.stack([zero, zero, filled, read], 1), extent, to, to_stride, origin, origin_stride)


def _copied(boxes: StridedCopies, room: int, most: int = 1 << 30) -> list[Any]:
    """Two buffers filled from two others, each byte of which says where it is from."""
    rng = np.random.default_rng(0)
    buffers = [np.zeros(room, np.uint8) for _ in range(2)] + [rng.integers(0, 256, room, np.uint8) for _ in range(2)]
    for _, whole in boxes.listed(WORD, WORD):
        for box in whole.cut(most):
            to, source = box._replace(read=box.read + 2).views(buffers)
            np.copyto(to, source)
    return buffers[:2]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_cuts_of_a_matrix_over_any_ranks(data: Any) -> None:
    """From slabs of rows to slabs of columns: the pieces of each pair of shards, in any order, with replicas."""
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    height, width = rows * data.draw(st.integers(1, 3)), columns * data.draw(st.integers(1, 3))
    h, w = height // rows, width // columns
    pieces = []
    for r in range(rows):
        for c in range(columns):
            to, origin = 2 * (c * height * w + r * h * w), 2 * (r * h * width + c * w)
            pieces += [(k, 0, (h, w), to, (2 * w, 2), origin, (2 * width, 2)) for k in range(2)]
    boxes = _boxes(data.draw(st.permutations(pieces)))
    few = boxes.merged()
    room = 2 * height * width
    want, got = _copied(boxes, room), _copied(few, room)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(want, got, strict=True))
    assert all(a.any() for a in want)
    assert len(few.to) == 2  # the shards of each side lie at regular distances: one box a target buffer
    cut = _copied(few, room, most=8)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(want, cut, strict=True))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 30)), min_size=1, unique=True))
def test_boxes_anywhere_copy_the_same(at: list[tuple[int, int, int]]) -> None:
    """Rows of two elements that start anywhere, so that distances are regular by chance only."""
    at = list({(filled, k): (filled, read, k) for filled, read, k in at}.values())
    boxes = _boxes([(filled, read, (2,), 4 * k, (2,), 4 * (k * k % 31), (2,)) for filled, read, k in at])
    few = boxes.merged()
    assert len(few.to) <= len(at)
    assert few.extent.prod(axis=1).sum() == 2 * len(at)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(_copied(boxes, 124), _copied(few, 124), strict=True))


def test_parts_of_a_large_box_are_as_small_as_asked() -> None:
    box = StridedCopy(0, 0, np.dtype(np.float32), (3, 1000, 5), 0, (20_000, 20, 4), 0, (20_000, 20, 4), 0)
    parts = list(box.cut(4096))
    assert max(part.nbytes for part in parts) <= 4096 + 60
    assert sum(part.nbytes for part in parts) == box.nbytes == 60_000
    scalar = box._replace(extent=(), to_stride=(), origin_stride=())
    assert list(scalar.cut(1)) == [scalar]
