"""Rows of packed documents for the tests of the runtime, and how far two trees of numbers are apart."""

import jax
import numpy as np

from dynajax.data import Batch


def tokens_of(documents, seq):
    """``segment_ids`` and ``positions`` (rows, seq) of a list of document lengths for each row."""
    segments, positions = np.zeros((2, len(documents), seq), np.int32)
    for row, lengths in enumerate(documents):
        start = 0
        for number, length in enumerate(lengths, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    return segments, positions


def random_batch(documents, seq, vocab, seed=0):
    """A ``Batch`` with documents of random tokens; each token but a document's last predicts the next one."""
    segments, positions = tokens_of(documents, seq)
    tokens = np.random.default_rng(seed).integers(0, vocab, segments.shape, dtype=np.int32) * (segments > 0)
    inside = np.zeros(segments.shape, bool)
    inside[:, :-1] = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] > 0)
    targets = np.where(inside, np.roll(tokens, -1, 1), 0).astype(np.int32)
    return Batch(tokens, targets, inside.astype(np.float32), segments, positions, max(map(len, documents)))


def restored(order, rows):
    """Leaves (rows, stored_length, ...) that lie in ``order``, as (rows, length, ...) in the order of the tokens."""
    places = [order.index.tolist().index(token) for token in range(order.length)]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, places], rows)


def assert_close(got, want, rtol=1e-5):
    """Leaf by leaf: the largest difference is at most ``rtol`` of the largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, f"{jax.tree_util.keystr(path)}: {a.shape} and {b.shape}"
        gap, scale = np.abs(a - b).max(initial=0.0), np.abs(b).max(initial=0.0)
        assert gap <= rtol * scale + 1e-9, f"{jax.tree_util.keystr(path)}: {gap:.3g} apart at a scale of {scale:.3g}"
