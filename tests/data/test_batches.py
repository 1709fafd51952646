"""Batches of packed rows: what is in them, and that nothing but (documents, settings, n) decides it."""

import dataclasses
import hashlib
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.data import (
    Batch,
    Batches,
    MemoryDocuments,
    Overlong,
    folder_documents,
    pad_rows,
    stdlib_documents,
)
from dynajax.errors import DataError


def texts(lengths: list[int], seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length, dtype=np.uint8).tobytes() for length in lengths]


def some(**changes) -> Batches:
    kwargs = {"batch_size": 4, "seq_len": 16, "max_segments": 3, **changes}
    return Batches(MemoryDocuments.of(texts([5, 40, 1, 16, 9, 0, 17, 3, 2, 64, 7, 31])), **kwargs)


def assert_equal(left: Batch, right: Batch) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def stack(batches: list[Batch]) -> Batch:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def segments_of(batch: Batch) -> list[tuple[bytes, bytes, int]]:
    """(tokens, targets, targets that count) of every segment, after checking that rows are well-formed."""
    found = []
    for tokens, targets, weights, ids, positions in zip(*jax.tree.leaves(batch), strict=True):
        count = int(ids.max(initial=0))
        assert count <= batch.max_segments
        used = int((ids > 0).sum())
        assert (np.diff(ids[:used]) >= 0).all()
        assert set(ids[:used].tolist()) == set(range(1, count + 1))
        for padded in (tokens, targets, weights, ids, positions):
            assert not padded[used:].any()
        for number in range(1, count + 1):
            place = ids == number
            length, predicted = int(place.sum()), int(weights[place].sum())
            assert positions[place].tolist() == list(range(length))
            assert weights[place].tolist() == [1.0] * predicted + [0.0] * (length - predicted)
            assert not targets[place][predicted:].any()
            found.append((bytes(tokens[place].tolist()), bytes(targets[place][:predicted].tolist()), predicted))
    return found


def expected_segments(documents: list[bytes], seq_len: int, overlong: Overlong) -> list[tuple[bytes, bytes, int]]:
    expected = []
    for document in documents:
        text = document[:seq_len] if overlong is Overlong.TRUNCATE else document
        for start in range(0, len(text), seq_len):
            stop = min(start + seq_len, len(text))
            target = text[start + 1 : stop + 1]
            expected.append((text[start:stop], target, len(target)))
    return expected


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=15).map(lambda lengths: [*lengths, 2]),
    seq_len=st.integers(2, 24),
    max_segments=st.integers(1, 6),
    seed=st.integers(0, 5),
    overlong=st.sampled_from([Overlong.SPLIT, Overlong.TRUNCATE]),
)
def test_an_epoch_holds_every_piece_once_in_well_formed_rows(lengths, seq_len, max_segments, seed, overlong):
    documents = texts(lengths, seed)
    batches = Batches(MemoryDocuments.of(documents), 3, seq_len, seed, max_segments, overlong)
    expected = Counter(expected_segments(documents, seq_len, overlong))
    rows = batches.rows_per_epoch
    for epoch in range(2):
        batch = batches.take(epoch * rows, rows)
        assert Counter(segments_of(batch)) == expected
        assert batch.num_tokens == sum(len(tokens) * n for (tokens, _, _), n in expected.items())
        assert batch.num_targets == sum(predicted * n for (_, _, predicted), n in expected.items())
        assert batch.samples == batch.rows == rows


def test_shapes_and_dtypes():
    batch = some()[0]
    assert [leaf.shape for leaf in jax.tree.leaves(batch)] == [(4, 16)] * 5
    dtypes = {field.name: getattr(batch, field.name).dtype for field in dataclasses.fields(batch)[:5]}
    expected = {"tokens": "int32", "targets": "int32", "weights": "float32", "segment_ids": "int32"}
    assert dtypes == {**expected, "positions": "int32"}
    assert (batch.rows, batch.seq_len) == (4, 16)


def test_a_batch_depends_on_the_step_alone_and_not_on_what_was_read_before():
    first, steps = some(), list(range(40))
    expected = [first[step] for step in steps]
    random.Random(0).shuffle(steps)
    second = some()
    for step in steps:
        assert_equal(second[step], expected[step])


def test_another_process_reads_the_same_batches():
    code = (
        "import hashlib; from dynajax.data import Batches, stdlib_documents\n"
        "b = Batches(stdlib_documents(), batch_size=4, seq_len=64, seed=3)\n"
        "print(hashlib.sha256(b[1234].tokens.tobytes() + b[7].targets.tobytes()).hexdigest(), b.digest, b.start())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = Batches(stdlib_documents(), batch_size=4, seq_len=64, seed=3)
    digest = hashlib.sha256(here[1234].tokens.tobytes() + here[7].targets.tobytes()).hexdigest()
    assert done.stdout.strip() == f"{digest} {here.digest} {here.start()}"


def test_stdlib_batches_are_full_and_finite():
    batches = Batches(stdlib_documents(), batch_size=8, seq_len=128)
    batch = batches[10_000]
    assert batches.fill > 0.99
    assert batch.num_tokens > 0.95 * batch.tokens.size
    assert np.isfinite(batch.weights).all()
    assert 0 <= batch.tokens.min() <= batch.tokens.max() < 256
    assert "documents" in batches.summary()


def order_of(batches: Batches, epoch: int) -> list[bytes]:
    rows = batches.rows_per_epoch
    return [row.tobytes() for row in batches.take(epoch * rows, rows).tokens]


def test_epochs_and_seeds_are_shuffled_apart():
    zero, one = some(seed=0, max_segments=1), some(seed=1, max_segments=1)  # one piece a row: seeds share the rows
    orders = [order_of(zero, 0), order_of(zero, 1), order_of(zero, 2), order_of(one, 0), order_of(one, 1)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(Counter(order) == Counter(orders[0]) for order in orders)


def test_a_batch_may_be_larger_than_an_epoch():
    batches = some(batch_size=100)
    rows = batches.rows_per_epoch
    assert rows < 50
    batch = batches[3]
    assert_equal(batch, stack([batches.take(300 + i, 1) for i in range(100)]))


def test_a_file_that_shrinks_during_the_run_is_named(tmp_path: Path):
    for name, text in zip("abcdef", texts([40] * 6), strict=True):
        (tmp_path / name).write_bytes(b"text" + text.replace(b"\0", b"0"))
    batches = Batches(folder_documents(tmp_path), batch_size=2, seq_len=64)
    (tmp_path / "d").write_bytes(b"short")
    with pytest.raises(DataError, match="changed during the run"):
        batches.take(0, batches.rows_per_epoch)


def test_one_shape_means_one_compile_and_the_segment_limit_is_part_of_its_key():
    traces = []

    @jax.jit
    def step(batch: Batch):
        traces.append(batch.max_segments)
        return batch.weights.sum()

    batches = some()
    for n in range(20):
        assert float(step(batches[n])) == batches[n].num_targets
    assert traces == [3]
    step(some(max_segments=2)[0])
    assert traces == [3, 2]


def test_a_cursor_names_the_corpus_and_the_order():
    batches = some()
    cursor = dataclasses.replace(batches.start(), step=2, sample=8)
    assert some(batch_size=7).resume(cursor) is cursor
    with pytest.raises(DataError, match="corpus"):
        Batches(MemoryDocuments.of(texts([5, 9])), 4, 16, 0, 3).resume(cursor)
    for changes in ({"seed": 1}, {"seq_len": 17}, {"max_segments": 4}, {"overlong": Overlong.TRUNCATE}):
        with pytest.raises(DataError, match="order"):
            some(**changes).resume(cursor)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: some(batch_size=0), "batch_size is 0"),
        (lambda: some(seq_len=0), "seq_len is 0"),
        (lambda: some(max_segments=0), "max_segments is 0"),
        (lambda: some(seed=-1), "seed -1"),
        (lambda: some(overlong=Overlong.ERROR), "document 1 has 40 tokens"),
        (lambda: Batches(MemoryDocuments.of(["a", "b", ""]), 1, 8), "no token to predict"),
        (lambda: some()[-1], "sample -4"),
        (lambda: some().take(0, 0), "0 rows"),
        (lambda: pad_rows(some()[0], 0), "multiple of 0"),
    ],
)
def test_bad_settings_are_refused_in_one_line(call, words: str):
    with pytest.raises(DataError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
